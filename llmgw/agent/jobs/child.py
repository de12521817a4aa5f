"""A job's process: started in a session of its own, listened to, and ended with everything that it started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import orjson
import trio
from attrs import frozen

from llmgw.agent.process import Handle, Known, start_time

_LINE_BYTES = 64 * 1024
_KILLED_S = 2.0

Heard = Callable[[dict[str, Any]], None]


@frozen
class Work:
    """What to run for a job. It says how it gets on with JSON objects on its standard output, one a line.

    ``grace_s`` is how long it may take to tidy up after SIGTERM when its job is cancelled.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    grace_s: float = 0.0


async def run(
    work: Work, log: Path, heard: Heard, started: Callable[[Known | None], None], grace_s: Callable[[], float]
) -> int:
    """Run it to its end and return its exit code, negative for a signal. ``log`` gets what it says on standard error.

    Cancelled, the whole group gets SIGTERM, ``grace_s`` (asked then) and SIGKILL. Its standard input is held open: it
    ends by itself when this process is gone (:mod:`llmgw.agent.jobs.lifeline`). Raises ``OSError``.
    """
    with log.open("ab") as errors:
        process = await trio.lowlevel.open_process(
            list(work.argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
            env=dict(work.env),
        )  # fmt: skip
    pidfd = os.pidfd_open(process.pid)
    try:
        start = start_time(process.pid)
        started(None if start is None else Known(process.pid, start))
        assert process.stdout is not None
        async with aclosing(_lines(process.stdout)) as lines:
            async for line in lines:
                try:
                    said = orjson.loads(line)
                except orjson.JSONDecodeError:
                    continue
                if isinstance(said, dict):
                    heard(said)
        await trio.lowlevel.wait_readable(pidfd)
    finally:
        wait_s = grace_s()
        with trio.move_on_after(wait_s + 2 * _KILLED_S, shield=True):
            await _end(process, pidfd, wait_s)
    return process.returncode if process.returncode is not None else -signal.SIGKILL


async def _end(process: trio.Process, pidfd: int, grace_s: float) -> None:
    """Leave nothing of the group behind. Until its leader is reaped, the group's number is nobody else's."""
    try:
        if grace_s > 0:
            _signal(process.pid, signal.SIGTERM)
            with trio.move_on_after(grace_s):
                await trio.lowlevel.wait_readable(pidfd)
        _signal(process.pid, signal.SIGKILL)
        with trio.move_on_after(_KILLED_S):
            await process.wait()
    finally:
        os.close(pidfd)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with trio.CancelScope(shield=True):  # closing a pipe waits for nobody
                    await trio.aclose_forcefully(stream)


def _signal(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


async def _lines(stream: trio.abc.ReceiveStream) -> AsyncGenerator[bytes, None]:
    """Whole lines; one that is too long is dropped."""
    buffer = bytearray()
    async for data in stream:
        buffer += data
        *whole, rest = buffer.split(b"\n")
        for line in whole:
            yield bytes(line)
        buffer = rest if len(rest) <= _LINE_BYTES else bytearray()


async def end_left(known: Known) -> None:
    """End the process of an agent that is gone, if it is still that very one, and its group with it."""
    handle = Handle.open(known)
    if handle is None:
        return
    try:
        _signal(known.pid, signal.SIGKILL)
        with trio.move_on_after(_KILLED_S):
            await handle.wait()
    finally:
        handle.close()
