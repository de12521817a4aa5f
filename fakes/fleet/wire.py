"""A connection between an agent and a control plane: memory streams that can be slow, cut, or silently dead."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable

import trio
from trio.testing import MemoryReceiveStream, MemorySendStream

from llmgw.settings.daemon import Address


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
    """One connection of ``node`` with ``plane``; ``gone`` is called when both ends are closed."""

    def __init__(self, node: str, plane: Address, latency_s: float, gone: Callable[[Wire], None]) -> None:
        self.node = node
        self.plane = plane
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
        """Both ends see the connection end at once, and nothing more comes through; where it hangs nobody sees it."""
        self.is_cut = True
        for way in (self._up, self._down):
            if not way.dropped:
                way.end()

    def drop(self, *, up: bool, down: bool) -> None:
        """From now on what is sent in these directions vanishes."""
        self._up.dropped |= up
        self._down.dropped |= down


class Wires:
    """Every open connection, and what the network is like."""

    def __init__(self) -> None:
        self.open: list[Wire] = []
        self._blocked: Counter[str] = Counter()
        self._latency_s: dict[str, float] = {}

    def add(self, node: str, plane: Address) -> Wire:
        """A new connection."""
        wire = Wire(node, plane, self._latency_s.get(node, 0.0), self.open.remove)
        self.open.append(wire)
        return wire

    def of(self, node: str | None = None, plane: Address | None = None) -> list[Wire]:
        """The connections of a node, or with a control plane."""
        return [w for w in self.open if node in (None, w.node) and plane in (None, w.plane)]

    def cut(self, node: str | None = None, plane: Address | None = None) -> None:
        """Both ends see the end, as they do when a process dies."""
        for wire in self.of(node, plane):
            wire.cut()

    def silence(self, node: str, *, up: bool = True, down: bool = True) -> None:
        """Nothing comes through the present connections any more, and nobody is told."""
        for wire in self.of(node):
            wire.drop(up=up, down=down)

    def block(self, node: str) -> None:
        """Nothing comes through, nor can a new connection be made, until it is unblocked as often."""
        self._blocked[node] += 1
        self.silence(node)

    def unblock(self, node: str) -> None:
        """New connections can be made again."""
        self._blocked[node] -= 1

    def blocked(self, node: str) -> bool:
        """Whether the node cannot connect."""
        return self._blocked[node] > 0

    def slow(self, node: str, latency_s: float) -> None:
        """What the node sends and is sent takes this long from now on."""
        self._latency_s[node] = latency_s
        for wire in self.of(node):
            wire.latency_s = latency_s
