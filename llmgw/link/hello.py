"""What a TLS client asks for, read before the handshake: the protocols in its ClientHello.

The listener has two faces. Agents show a certificate, and TLS itself keeps out whoever has none; who joins has none
yet. Which of the two a client wants is in its first record, so that it is answered by the one context or the other
and the link's code never sees a peer without a certificate.
"""

from __future__ import annotations

import contextlib
import socket

import trio

_RECORD_HEAD = 5
_MOST_RECORD = 16384
_HANDSHAKE, _CLIENT_HELLO, _ALPN = 22, 1, 16


async def offered_protocols(sock: trio.socket.SocketType) -> tuple[bytes, ...]:
    """The ALPN protocols that a client offers; none if it does not speak TLS, or too oddly. Takes nothing off.

    Waits for the whole first record; bound it. The bytes stay in the socket for the handshake.
    """
    need = _RECORD_HEAD
    seen = -1
    try:
        while True:
            data = await sock.recv(need, socket.MSG_PEEK)
            if len(data) >= need:
                if need > _RECORD_HEAD:
                    return protocols(data)
                length = int.from_bytes(data[3:5], "big")
                if data[0] != _HANDSHAKE or not 4 <= length <= _MOST_RECORD:
                    return ()
                need = _RECORD_HEAD + length
                continue
            if len(data) <= seen:
                return ()  # the client has finished before its record did
            seen = len(data)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, need)  # woken once all of it is there
            await trio.lowlevel.wait_readable(sock)
    except OSError:
        return ()
    finally:
        with contextlib.suppress(OSError):  # it is gone
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


def protocols(record: bytes) -> tuple[bytes, ...]:
    """The ALPN names in a TLS record that holds a whole ClientHello (RFC 8446, 4.1.2; RFC 7301, 3.1). Pure.

    None for anything else, however broken.
    """
    try:
        return _protocols(_Reader(record[_RECORD_HEAD:]))
    except _Short:
        return ()


class _Short(Exception):
    """The bytes end before what they announce."""


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        if len(self._data) - self._at < count:
            raise _Short
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def block(self, size: int) -> _Reader:
        """Bytes behind their own length."""
        return _Reader(self.take(self.number(size)))

    def __bool__(self) -> bool:
        return self._at < len(self._data)


def _protocols(handshake: _Reader) -> tuple[bytes, ...]:
    if handshake.number(1) != _CLIENT_HELLO:
        return ()
    hello = handshake.block(3)
    hello.take(2 + 32)  # version, random
    hello.block(1)  # session id
    hello.block(2)  # cipher suites
    hello.block(1)  # compression
    if not hello:
        return ()
    extensions = hello.block(2)
    while extensions:
        kind, body = extensions.number(2), extensions.block(2)
        if kind == _ALPN:
            names, found = body.block(2), []
            while names:
                found.append(names.take(names.number(1)))
            return tuple(found)
    return ()
