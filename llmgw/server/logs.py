"""Engines' logs over the link: who reads which, with a window that a slow reader cannot make anybody else feel."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable

import trio

from llmgw.link.messages import LogChunk, ServerMessage, StopTail, TailLog

WINDOW = 4
"""So many chunks may be under way to a reader; each has 16 KiB at most or little more."""

MOST_LINES = 10_000


class LogReader:
    """One reader's end. Used by one task; ``close`` it when nobody reads any more."""

    def __init__(self, first: TailLog, send: Callable[[ServerMessage], None], forget: Callable[[str], None]) -> None:
        self.tail = first.tail
        self._first = first
        self._send = send
        self._forget = forget
        self._put, self._take = trio.open_memory_channel[LogChunk](2 * WINDOW)
        self._over = False

    def begin(self) -> None:
        """Ask the agent."""
        self._send(self._first)

    def heard(self, chunk: LogChunk) -> None:
        """A chunk came. An agent that sends more than it was given credit for is cut off."""
        try:
            self._put.send_nowait(chunk)
        except (trio.WouldBlock, trio.ClosedResourceError, trio.BrokenResourceError):
            self.close()
        if chunk.ended:
            self.ended("")

    def ended(self, reason: str) -> None:
        """Nothing more will come."""
        if self._over:
            return
        self._over = True
        if reason:
            with contextlib.suppress(trio.WouldBlock, trio.BrokenResourceError):  # else the end is seen, and not why
                self._put.send_nowait(LogChunk(self.tail, ended=True, reason=reason))
        self._put.close()
        self._forget(self.tail)

    async def next(self, seconds: float) -> LogChunk | None:
        """The next chunk; ``None`` if there is none in this time. The last one has ``ended``."""
        found: LogChunk | None = None
        with trio.move_on_after(seconds):
            try:
                found = await self._take.receive()
            except trio.EndOfChannel:
                return LogChunk(self.tail, ended=True, reason="cut off: it was not read fast enough")
        if found is not None and not found.ended and not self._over:
            self._send(TailLog(self.tail, "", 0, 0, follow=False, credit=1))
        return found

    def close(self) -> None:
        """Nobody reads it any more."""
        if not self._over:
            self._over = True
            self._put.close()
            self._forget(self.tail)
            self._send(StopTail(self.tail))


class Readers:
    """The readers of one node's logs, over its session."""

    def __init__(self, send: Callable[[ServerMessage], None]) -> None:
        self._send = send
        self._readers: dict[str, LogReader] = {}

    def open(self, shard: str, generation: int, lines: int, *, follow: bool, previous: bool) -> LogReader:
        """Begin to read."""
        first = TailLog(secrets.token_hex(6), shard, generation, lines, follow, WINDOW, previous)
        reader = LogReader(first, self._send, self._forget)
        self._readers[reader.tail] = reader
        reader.begin()
        return reader

    def _forget(self, tail: str) -> None:
        self._readers.pop(tail, None)

    def heard(self, chunk: LogChunk) -> None:
        """The agent sent some."""
        reader = self._readers.get(chunk.tail)
        if reader is not None:
            reader.heard(chunk)

    def ended(self, reason: str) -> None:
        """Nothing more comes from this node."""
        for reader in list(self._readers.values()):
            reader.ended(reason)
