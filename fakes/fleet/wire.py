"""A connection between an agent and a control plane: memory streams that can be slow, cut, or silently dead."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import trio
from trio.testing import MemoryReceiveStream, MemorySendStream


class _OneWay:
    """One direction. ``dropped``: what is sent vanishes, and so does the end of the stream."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.dropped = False
        self._is_closed = False
        self.send = MemorySendStream(send_all_hook=self._carry, close_hook=self._closed)
        self.receive = MemoryReceiveStream()

    async def _carry(self) -> None:
        data = self.send.get_data_nowait()
        self._check_whole()
        if self._wire.latency_s:
            await trio.sleep(self._wire.latency_s)
            self._check_whole()
        if self.dropped:
            return
        try:
            self.receive.put_data(data)
        except trio.ClosedResourceError:
            raise trio.BrokenResourceError from None

    def _check_whole(self) -> None:
        if self._wire.is_cut:
            raise trio.BrokenResourceError

    def _closed(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if not self.dropped:
            self.end()
        self._wire.one_end_closed()

    def end(self) -> None:
        """The receiver sees the end of the stream."""
        with contextlib.suppress(trio.ClosedResourceError):
            self.receive.put_eof()


class Wire:
    """One connection of ``node``; ``gone`` is called when both ends are closed."""

    def __init__(self, node: str, latency_s: float, gone: Callable[[Wire], None]) -> None:
        self.node = node
        self.latency_s = latency_s
        self.is_cut = False
        self._gone = gone
        self._open_ends = 2
        self._up, self._down = _OneWay(self), _OneWay(self)
        self.agent_end: trio.abc.Stream = trio.StapledStream(self._up.send, self._down.receive)
        self.server_end: trio.abc.Stream = trio.StapledStream(self._down.send, self._up.receive)

    def one_end_closed(self) -> None:
        """A send stream was closed (each end has one)."""
        self._open_ends -= 1
        if not self._open_ends:
            self._gone(self)

    def cut(self) -> None:
        """Both ends see the connection end at once, and nothing more comes through."""
        self.is_cut = True
        self._up.end()
        self._down.end()

    def drop(self, *, up: bool, down: bool) -> None:
        """From now on what is sent in these directions vanishes."""
        self._up.dropped |= up
        self._down.dropped |= down
