"""Watching the kernel log for what happens to GPUs and RDMA ports."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import trio

from llmgw.discovery.kmsg_text import KernelEvent, event_of, message_of
from llmgw.telemetry.logging import logger

REPEAT_S = 10.0
"""The same event is told once in this time: a broken card says the same thing thousands of times a second."""

_RECORD_BYTES = 64 * 1024
_AT_ONCE = 100


async def watch(path: Path, heard: Callable[[KernelEvent], None]) -> None:
    """Call ``heard`` with each event that is written from now on, until cancelled.

    Where the log may not be read (a container, ``kernel.dmesg_restrict``) it says so once and returns.
    """
    log = logger("hardware")
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as failed:
        log.info(
            "the kernel log is not watched",
            path=str(path),
            reason=failed.strerror,
            remedy="let the agent read it (CAP_SYSLOG)",
        )
        return
    try:
        try:
            os.lseek(handle, 0, os.SEEK_END)
        except OSError as failed:
            if failed.errno != errno.ESPIPE:
                raise
        await _follow(handle, _once_in(REPEAT_S, heard))
    except OSError as failed:
        log.warning("the kernel log is not watched any more", path=str(path), reason=failed.strerror)
    finally:
        os.close(handle)


def _once_in(period_s: float, heard: Callable[[KernelEvent], None]) -> Callable[[KernelEvent], None]:
    last: dict[tuple[str, str, int | None], float] = {}

    def tell(event: KernelEvent) -> None:
        key, now = (event.kind, event.pci_address, event.code), trio.current_time()
        if now - last.get(key, -period_s) >= period_s:
            last[key] = now
            heard(event)

    return tell


async def _follow(handle: int, tell: Callable[[KernelEvent], None]) -> None:
    """Read record by record. A pipe, unlike /dev/kmsg, gives several at once or a part of one."""
    rest = b""
    read = 0
    while True:
        try:
            data = os.read(handle, _RECORD_BYTES)
        except BlockingIOError:
            await trio.lowlevel.wait_readable(handle)
            continue
        except BrokenPipeError:
            continue  # records were overwritten before they were read; the next one follows
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        rest = rest[:_RECORD_BYTES]
        for line in lines:
            if not line.startswith(b" ") and (event := event_of(message_of(line.decode(errors="replace")))) is not None:
                tell(event)
        read += 1
        if read % _AT_ONCE == 0:
            await trio.lowlevel.checkpoint()
