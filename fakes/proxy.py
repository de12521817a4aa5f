"""A TCP proxy that fails as networks do: it holds, drops, delays, half-closes and cuts what goes through it.

    async with trio.open_nursery() as nursery:
        proxy = await nursery.start(Proxy(Address("127.0.0.1", 8443)).run)
        proxy.partition()   # nothing comes through, nobody is told, nobody new gets in
        proxy.heal()

What is held is not lost, as with TCP: it arrives after the healing, if either end still wants it. ``in_thread`` runs
one beside a test without Trio.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

import trio

from llmgw.settings.daemon import Address

_Answer = TypeVar("_Answer")
_CHUNK = 65536
_ABORT = struct.pack("ii", 1, 0)  # SO_LINGER of no time: closing sends a reset


class _Way:
    """One direction of one connection."""

    def __init__(self, proxy: Proxy, source: trio.SocketStream, target: trio.SocketStream) -> None:
        self._proxy = proxy
        self.source = source
        self.target = target
        self.dropped = False
        self.ended = trio.Event()

    async def run(self) -> None:
        """Carry bytes until the source ends or ``ended`` is set; then tell the target."""
        with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._carry, nursery.cancel_scope)
                await self.ended.wait()
                nursery.cancel_scope.cancel(reason="half closed")
        with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            await self.target.send_eof()

    async def _carry(self, scope: trio.CancelScope) -> None:
        with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await self.source.receive_some(_CHUNK):
                if self._proxy.delay_s:
                    await trio.sleep(self._proxy.delay_s)
                await self._proxy.flowing.wait()
                if not self.dropped:
                    await self.target.send_all(data)
                    self._proxy.carried += len(data)
        await self._proxy.flowing.wait()  # nor does the end come through a partition
        scope.cancel(reason="ended")


class Proxy:
    """Listens on a port of its own and passes on to ``target``. ``delay_s`` holds up every piece, in seconds."""

    def __init__(self, target: Address) -> None:
        self.target = target
        self.address = Address("", 0)
        self.delay_s = 0.0
        self.carried = 0
        self.flowing = trio.Event()
        self.flowing.set()
        self._open: list[tuple[_Way, _Way]] = []
        self._listening = trio.Event()
        self._listening.set()
        self._closing = trio.CancelScope()

    async def run(self, *, task_status: trio.TaskStatus[Proxy] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; started with itself."""
        async with trio.open_nursery() as connections:
            first = True
            while True:
                await self._listening.wait()
                listeners = await trio.open_tcp_listeners(self.address.port, host="127.0.0.1")
                self.address = Address("127.0.0.1", listeners[0].socket.getsockname()[1])
                if first:
                    task_status.started(self)
                    first = False
                with trio.CancelScope() as self._closing:
                    # Its own connections outlive it.
                    await trio.serve_listeners(self._connect, listeners, handler_nursery=connections)

    async def _connect(self, agent: trio.SocketStream) -> None:
        async with agent:
            try:
                server = await trio.open_tcp_stream(self.target.host, self.target.port)
            except OSError:
                _reset(agent)
                return
            async with server:
                ways = (_Way(self, agent, server), _Way(self, server, agent))
                self._open.append(ways)
                try:
                    async with trio.open_nursery() as nursery:
                        for way in ways:
                            nursery.start_soon(way.run)
                finally:
                    self._open.remove(ways)

    def hold(self) -> None:
        """Nothing comes through any more; nothing is lost yet."""
        if self.flowing.is_set():
            self.flowing = trio.Event()

    def refuse(self) -> None:
        """Nobody new gets in."""
        self._listening = trio.Event()
        self._closing.cancel(reason="partition")

    def partition(self) -> None:
        """Nothing comes through, nobody is told, and nobody new gets in."""
        self.hold()
        self.refuse()

    def heal(self) -> None:
        """All is well again, and what was held arrives."""
        self.flowing.set()
        self._listening.set()

    def drop(self, *, up: bool = False, down: bool = False) -> None:
        """What is sent in these directions of the open connections vanishes for good."""
        for to_server, to_agent in self._open:
            to_server.dropped |= up
            to_agent.dropped |= down

    def half_close(self, *, up: bool = False, down: bool = False) -> None:
        """The receivers in these directions see the end; the other direction goes on."""
        for to_server, to_agent in self._open:
            if up:
                to_server.ended.set()
            if down:
                to_agent.ended.set()

    def cut(self) -> None:
        """Both ends of every connection see a reset."""
        for way, _ in self._open:
            for stream in (way.source, way.target):
                _reset(stream)
            way.ended.set()

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._open)


def _reset(stream: trio.SocketStream) -> None:
    with suppress(OSError):
        stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
    stream.socket.close()


class ProxyThread:
    """A proxy in a thread of its own: each call is carried out before it returns."""

    def __init__(self, proxy: Proxy, token: trio.lowlevel.TrioToken) -> None:
        self._proxy = proxy
        self._token = token

    @property
    def address(self) -> Address:
        """Where it listens."""
        return self._proxy.address

    def do(self, what: Callable[[Proxy], _Answer]) -> _Answer:
        """``do(Proxy.partition)``, for instance."""
        return trio.from_thread.run_sync(what, self._proxy, trio_token=self._token)


@contextmanager
def in_thread(target: Address) -> Iterator[ProxyThread]:
    """A running proxy to ``target``."""
    started = threading.Event()
    made: list[ProxyThread] = []
    scope = trio.CancelScope()

    async def main() -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                proxy: Proxy = await nursery.start(Proxy(target).run)
                made.append(ProxyThread(proxy, trio.lowlevel.current_trio_token()))
                started.set()

    thread = threading.Thread(target=partial(trio.run, main), name="proxy", daemon=True)
    thread.start()
    if not started.wait(10):
        raise RuntimeError("the proxy does not start")
    try:
        yield made[0]
    finally:
        made[0].do(lambda _: scope.cancel(reason="test over"))
        thread.join(10)
