"""The unix socket between the control plane and its router workers. Its folder is 0700: tables hold engines' keys.

A worker's listening socket travels over it too, so that it outlives whichever process made it.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from llmgw.errors import PeerError
from llmgw.router.wire import MAX_LINE_BYTES, FromWorker, ToWorker, decode, encode

_LONGEST_PATH = 100
"""``sun_path`` has 108 bytes (unix(7)); folders of tests and users are often longer than that."""


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name for this path that fits into a socket address, as long as the block lasts."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen(path: Path) -> trio.SocketListener:
    """Listen at ``path``, in place of whoever did before: the state folder's lock says that it is gone."""
    path.unlink(missing_ok=True)
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(path) as name:
            opened.bind(name)
        path.chmod(0o600)
        opened.listen(8)
    except OSError:
        opened.close()
        raise
    return trio.SocketListener(trio.socket.from_stdlib_socket(opened))


async def connect(path: Path) -> trio.SocketStream:
    """Connect to ``path``. Raises ``OSError``."""
    opened = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(path) as name:
            await opened.connect(name)
    except BaseException:
        opened.close()
        raise
    return trio.SocketStream(opened)


_RIGHTS_BYTES = socket.CMSG_SPACE(4 * array.array("i").itemsize)


class Channel:
    """Messages over a stream: a line each. ``came`` are sockets that came along; whoever takes them out owns them."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self._searched = 0
        self._turn = trio.Lock()
        self.came: list[socket.socket] = []

    async def send(self, message: FromWorker | ToWorker, along: socket.socket | None = None) -> None:
        """Write one message, and give a copy of a socket along with it.

        Raises ``trio.BrokenResourceError`` when the other end is gone.
        """
        line = encode(message)
        async with self._turn:
            if along is not None:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [along.fileno()]))]
                try:
                    sent = await self._stream.socket.sendmsg([line], rights)
                except OSError as failed:
                    raise trio.BrokenResourceError from failed
                line = line[sent:]
            await self._stream.send_all(line)

    async def _receive(self) -> bytes:
        data, rights, _flags, _address = await self._stream.socket.recvmsg(
            65536, _RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, content in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                self.came += [socket.socket(fileno=number) for number in numbers]
        return data

    async def receive(self) -> FromWorker | ToWorker | None:
        """The next message, or ``None`` when the other end is gone. Raises :class:`PeerError` for what is none."""
        while (end := self._buffer.find(b"\n", self._searched)) < 0:
            self._searched = len(self._buffer)
            if self._searched > MAX_LINE_BYTES:
                raise PeerError("router control", "a line is too long")
            try:
                data = await self._receive()
            except (OSError, trio.ClosedResourceError):
                return None
            if not data:
                return None
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return decode(line)

    async def aclose(self) -> None:
        """Close the connection, and what came over it and nobody took."""
        while self.came:
            self.came.pop().close()
        await trio.aclose_forcefully(self._stream)
