"""Socket options that the link wants and Trio does not set."""

from __future__ import annotations

import contextlib
import socket

import trio

_EMPTY_BYTES = 256 * 1024
_PER_BYTE = 4
"""So many bytes on the wire a byte of content may cost: an empty frame (9 bytes) in a TLS record of its own
costs 3.4 (9 and 22)."""


class Metered(trio.abc.HalfCloseableStream):
    """A transport under TLS that ends when far more comes than what it holds.

    TLS has records that hold nothing, KeyUpdates above all (RFC 8446, section 4.6.3), and nothing in OpenSSL or Trio
    limits them: who sends them without end keeps a processor busy. Whoever reads the content says how much of it came.
    """

    def __init__(self, stream: trio.abc.HalfCloseableStream) -> None:
        self._stream = stream
        self._left = _EMPTY_BYTES

    def held(self, content: int) -> None:
        """So many bytes of content came."""
        self._left = min(_EMPTY_BYTES, self._left + _PER_BYTE * content)

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """As the stream's."""
        data = await self._stream.receive_some(max_bytes)
        self._left -= len(data)
        if self._left < 0:
            raise trio.BrokenResourceError from ConnectionAbortedError("it sent records that hold nothing")
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """As the stream's."""
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """As the stream's."""
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """As the stream's."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """As the stream's."""
        await self._stream.aclose()


def bound_unacknowledged(stream: trio.SocketStream, seconds: float) -> None:
    """Let the kernel give up on a peer that acknowledges nothing for this long (tcp(7), ``TCP_USER_TIMEOUT``).

    It covers what our own timers cannot: bytes that were handed to the kernel and wait for a peer whose window is
    shut. Trio has set ``TCP_NODELAY`` already.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        with contextlib.suppress(OSError):  # a socket that is no TCP socket, or is gone already
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


def why_unreached(failed: OSError) -> str:
    """Why nobody took a connection, in words: Trio tries every address of a name and groups what each answered."""
    each = failed.__cause__.exceptions if isinstance(failed.__cause__, BaseExceptionGroup) else (failed,)
    return ", ".join(dict.fromkeys(e.strerror or str(e) for e in each if isinstance(e, OSError))).lower()
