"""Non-blocking sockets on Trio, without a stream wrapper: the kernel is asked first, Trio only when it would block."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections.abc import Callable

import trio

from llmgw.router.steps import Steps, arrival, own_task

READ_BYTES = 64 * 1024
UNSENT_BYTES = 64 * 1024
UNREAD_BYTES = 48 * 1024
"""What the kernel holds of an answer before the router looks at it, as setsockopt takes it: it may hold twice as much,
its own bookkeeping included (socket(7)). Left alone it grows to megabytes for a client that reads slowly."""

_EVENTS_A_TURN = 64
"""A worker that is busy goes on with what has come meanwhile, some two milliseconds long, before it gives the turn back
to Trio: a turn of Trio's loop costs as much as a piece or two of a stream."""

_RESET = struct.pack("ii", 1, 0)  # struct linger, socket(7)

_QUIET = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class Peer:
    """One connected socket. Closing it never blocks; a cancelled operation leaves it fit only for closing.

    Where it is watched, ``steps`` is the coroutine whose bytes these are now, ``gone`` is called when the other end
    leaves while nobody reads, and ``ended`` says that it has.
    """

    __slots__ = ("_address", "_much", "_ready", "_recv", "_send", "_waits", "ended", "gone", "sock", "steps", "watch")

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            # Without this a stream on a kept-alive connection stalls for some 40 ms.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._address: str | None = None
        self._recv = sock.recv
        self._send = sock.send
        self._much = self._ready = self._waits = False
        self.ended = False
        self.watch: Watch | None = None
        self.gone: Callable[[], None] | None = None
        self.steps: Steps | None = None

    @property
    def address(self) -> str:
        """Where the other end is, for people; empty when it was gone before anybody asked."""
        if self._address is None:
            try:
                name = self.sock.getpeername()
            except OSError:
                return ""
            self._address = str(name[0]) if isinstance(name, tuple) else ""
        return self._address

    async def receive(self) -> bytes:
        """Some bytes, or none at the end. Raises ``OSError``."""
        if self.steps is None:
            while True:
                await trio.lowlevel.wait_readable(self.sock)
                try:
                    return self._recv(READ_BYTES)
                except BlockingIOError:
                    continue
        while True:
            if not self._ready:
                self._waits = True
                try:
                    await arrival()
                finally:
                    self._waits = False
            elif self._much:
                await own_task()
                await trio.lowlevel.checkpoint()  # whoever sends faster than this reads keeps nobody waiting
            try:
                data = self._recv(READ_BYTES)
            except BlockingIOError:
                self._ready = False
                continue
            self._much = len(data) == READ_BYTES
            if not (self._much or self.ended):
                self._ready = False  # what comes after this is told again
            return data

    def silent(self) -> bool:
        """Whether the other end has neither left nor sent anything that nobody has read."""
        if self.ended:
            return False
        if self._ready:
            try:
                self._recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                self._ready = False
            except OSError:
                return False
            else:
                return False
        return True

    def told(self, events: int) -> None:
        """The watch saw something come, or an end."""
        self._ready = True
        if events & _GONE:
            self.ended = True
        if self._waits and self.steps is not None:
            self.steps.step()
        if self.ended and not self._waits and self.gone is not None:
            self.gone()

    def put(self, data: bytes | memoryview) -> bytes | memoryview:
        """Send what can be sent at once. Returns what is left for :meth:`send`. Raises ``OSError``."""
        try:
            sent = self._send(data)
        except BlockingIOError:
            return data
        return b"" if sent == len(data) else memoryview(data)[sent:]

    async def send_some(self, data: bytes | memoryview) -> bytes | memoryview:
        """Wait until something can be sent, and send it. Returns what is left. Raises ``OSError``."""
        if self.steps is not None:
            await own_task()
        await trio.lowlevel.wait_writable(self.sock)
        return self.put(data)

    async def send(self, data: bytes | memoryview) -> None:
        """All of the bytes. Raises ``OSError``. Yields to other tasks only when the peer is slow."""
        left = self.put(data)
        while left:
            left = await self.send_some(left)

    def finish(self) -> None:
        """Nothing more is sent; what the peer sends can still be read."""
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError as failed:
            if failed.errno != errno.ENOTCONN:
                raise

    def reset(self) -> None:
        """Let the other end see a failure when this is closed, and no end."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def abort(self) -> None:
        """Wake up whoever waits for this peer; for them it has ended."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError as failed:
            if failed.errno != errno.ENOTCONN:
                raise

    def close(self) -> None:
        """Close. Whoever still waits on it is woken with an error."""
        if self.watch is not None:
            self.watch.forget(self)
        trio.lowlevel.notify_closing(self.sock)
        self.sock.close()


async def dial(host: str, port: int, timeout_s: float) -> Peer:
    """Connect to an engine. Raises ``OSError``, a time-out included."""
    with trio.move_on_after(timeout_s):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            if not _is_address(host):
                addresses = await trio.socket.getaddrinfo(host, port, family=0, type=socket.SOCK_STREAM)
                sock.close()
                sock = socket.socket(addresses[0][0], socket.SOCK_STREAM)
                sock.setblocking(False)
                target: tuple[object, ...] = addresses[0][4]
            else:
                target = (host, port)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNREAD_BYTES)
            failed = sock.connect_ex(target)
            if failed == errno.EINPROGRESS:
                await trio.lowlevel.wait_writable(sock)
                failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                raise OSError(failed, os.strerror(failed))
            return Peer(sock)
        except BaseException:
            trio.lowlevel.notify_closing(sock)
            sock.close()
            raise
    raise TimeoutError(errno.ETIMEDOUT, f"no connection within {timeout_s:g} s")


def _is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return True
    return False


class Ticker:
    """The time of the last sweep. Deadlines are counted from it: they are looked at in sweeps only."""

    __slots__ = ("now",)

    def __init__(self, now: float) -> None:
        self.now = now


class Watch:
    """Sees what happens to sockets: one epoll for all, in which each stays for as long as it is open.

    Whoever waits for bytes is stepped here when they come, and clients that go away while nobody reads from them are
    noticed, both without a cost per request in the kernel or in Trio. A client that closes only its
    sending side counts as gone: no client library of this API does that, and to the kernel it looks like leaving.
    Engines whose answers are passed on without any coroutine in between have a callback for as long as that lasts.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._peers: dict[int, Peer] = {}
        self._ready: dict[int, Callable[[], None]] = {}

    def watch(self, peer: Peer, gone: Callable[[], None] | None = None) -> None:
        """Tell the peer what happens to its socket, until it is closed. Raises ``OSError``."""
        number = peer.sock.fileno()
        self._epoll.register(number, _QUIET)
        peer.watch, peer.gone = self, gone
        self._peers[number] = peer

    def forget(self, peer: Peer) -> None:
        """Stop watching; before the socket is closed, since its number is used again."""
        number = peer.sock.fileno()
        peer.watch = peer.gone = None
        if self._peers.pop(number, None) is not None:
            self._epoll.unregister(number)

    def relay(self, sock: socket.socket, ready: Callable[[], None]) -> None:
        """Call ``ready`` whenever there is something to read, or an end, until :meth:`rest`. It must not raise."""
        number = sock.fileno()
        if number in self._peers:
            self._epoll.modify(number, select.EPOLLIN)
        else:
            self._epoll.register(number, select.EPOLLIN)
        self._ready[number] = ready

    def rest(self, sock: socket.socket) -> None:
        """No more of this socket; before it is closed."""
        number = sock.fileno()
        if self._ready.pop(number, None) is not None:
            if number in self._peers:
                self._epoll.modify(number, _QUIET)
            else:
                self._epoll.unregister(number)

    async def run(self) -> None:
        """Watch until cancelled."""
        poll, get_ready, get_peer = self._epoll.poll, self._ready.get, self._peers.get
        while True:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            handled = 0
            while handled < _EVENTS_A_TURN and (found := poll(0, 1024)):
                for number, events in found:
                    if (ready := get_ready(number)) is not None:
                        ready()
                    elif (peer := get_peer(number)) is not None:
                        peer.told(events)
                handled += len(found)

    def close(self) -> None:
        """Give the epoll back."""
        self._epoll.close()
