"""The unix socket between the control plane and its router worker. Its folder is 0700: tables hold engines' keys."""

from __future__ import annotations

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


class Channel:
    """Messages over a stream: a line each."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self._searched = 0

    async def send(self, message: FromWorker | ToWorker) -> None:
        """Write one message. Raises ``trio.BrokenResourceError`` when the other end is gone."""
        await self._stream.send_all(encode(message))

    async def receive(self) -> FromWorker | ToWorker | None:
        """The next message, or ``None`` when the other end is gone. Raises :class:`PeerError` for what is none."""
        while (end := self._buffer.find(b"\n", self._searched)) < 0:
            self._searched = len(self._buffer)
            if self._searched > MAX_LINE_BYTES:
                raise PeerError("router control", "a line is too long")
            try:
                data = await self._stream.receive_some(65536)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return None
            if not data:
                return None
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return decode(line)

    async def aclose(self) -> None:
        """Close the connection."""
        await trio.aclose_forcefully(self._stream)
