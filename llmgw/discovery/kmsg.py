"""Watching the kernel log for what happens to GPUs and RDMA ports."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from pathlib import Path

import trio

from llmgw.discovery.kmsg_text import KernelEvent, event_of, parse_record
from llmgw.telemetry.logging import logger

REPEAT_S = 10.0
"""The same event is told once in this time: a broken card says the same thing thousands of times a second."""

_READ_BYTES = 8 * 1024
"""More than the longest record: read() of /dev/kmsg fails when a record does not fit."""
_LINE_BYTES = 64 * 1024
_AT_ONCE = 100
_KEPT = 1024
_REMEDIES = {
    errno.EPERM: "give the agent CAP_SYSLOG, or set kernel.dmesg_restrict=0",
    errno.EACCES: "let the agent's user read it",
    errno.ENOENT: "in a container, pass the device in",
}


async def watch(path: Path, heard: Callable[[KernelEvent], None]) -> None:
    """Call ``heard`` with each event that is written from now on, until cancelled.

    Where the log cannot be read, or ends (which /dev/kmsg never does), it says so once and returns.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as failed:
        _give_up(path, failed)
        return
    try:
        await _follow(path, handle, _Repeats(heard))
    finally:
        os.close(handle)


def _give_up(path: Path, failed: OSError) -> None:
    logger("hardware").info(
        "the kernel log is not watched: faults are seen when the hardware is next read",
        path=str(path),
        reason=failed.strerror,
        remedy=_REMEDIES.get(failed.errno or 0),
    )


async def _follow(path: Path, handle: int, repeats: _Repeats) -> None:
    """Read record by record. A pipe, unlike /dev/kmsg, gives several at once or a part of one."""
    rest = b""
    seen = 0
    lost_until = -math.inf
    try:
        os.lseek(handle, 0, os.SEEK_END)
    except OSError as failed:
        if failed.errno not in (errno.ESPIPE, errno.EINVAL):
            _give_up(path, failed)
            return
    while True:
        messages: tuple[str, ...] = ()
        try:
            data = await _read(handle, repeats.due)
        except BrokenPipeError:
            # The kernel overwrote records before they were read; the next read goes on after them.
            if (now := trio.current_time()) >= lost_until:
                lost_until = now + REPEAT_S
                logger("hardware").warning("records of the kernel log were lost", path=str(path))
        except OSError as failed:
            _give_up(path, failed)
            return
        else:
            if data is None:
                repeats.tell_due()
                continue
            if not data:
                _give_up(path, OSError(0, "it ended, so it is no kernel log"))
                return
            done, _, rest = (rest + data).rpartition(b"\n")
            rest = rest[:_LINE_BYTES]
            messages = parse_record(done.decode(errors="replace"))
        for message in messages or ("",):
            if (event := event_of(message)) is not None:
                repeats.hear(event)
            seen += 1
            if seen % _AT_ONCE == 0:
                repeats.tell_due()
                await trio.lowlevel.checkpoint()


async def _read(handle: int, until: float) -> bytes | None:
    """What is there, or ``None`` once something comes or at that time."""
    try:
        return os.read(handle, _READ_BYTES)
    except BlockingIOError:
        with trio.move_on_at(until):
            await trio.lowlevel.wait_readable(handle)
        return None


class _Repeats:
    """Tells an event once in :data:`REPEAT_S`, and the newest of its repeats when that is over.

    Without the second, a port that goes down and comes up again at once would be taken for down.
    """

    def __init__(self, heard: Callable[[KernelEvent], None]) -> None:
        self._heard = heard
        self._until: dict[tuple[str, str, int | None], float] = {}
        self._held: dict[tuple[str, str, int | None], KernelEvent] = {}

    @property
    def due(self) -> float:
        """When the next repeat is to be told."""
        return min((self._until[key] for key in self._held), default=math.inf)

    def hear(self, event: KernelEvent) -> None:
        key = (event.kind, event.pci_address, event.code)
        if trio.current_time() < self._until.get(key, -math.inf):
            self._held[key] = event
            return
        self._held.pop(key, None)
        # In order of time, so that the first are those to forget.
        self._until.pop(key, None)
        self._until[key] = trio.current_time() + REPEAT_S
        while len(self._until) > _KEPT:
            oldest = next(iter(self._until))
            del self._until[oldest]
            self._held.pop(oldest, None)
        self._heard(event)

    def tell_due(self) -> None:
        now = trio.current_time()
        for event in [event for key, event in self._held.items() if now >= self._until[key]]:
            self.hear(event)
