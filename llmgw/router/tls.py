"""TLS on the router's own port: a non-blocking socket of the kernel's with OpenSSL on top, without a stream wrapper."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from pathlib import Path

import trio

from llmgw.errors import OperatorError
from llmgw.link import keyfile
from llmgw.router.sockets import READ_BYTES, Peer
from llmgw.router.steps import own_task
from llmgw.settings.daemon import RouterTls
from llmgw.telemetry.logging import logger

HANDSHAKE_S = 5.0
_LOOK_EVERY_S = 2.0

_log = logger("router")


def context_of(files: RouterTls) -> ssl.SSLContext:
    """What clients are met with: TLS 1.2 or later, HTTP/1.1. Blocking.

    Raises :class:`OperatorError` naming the file at fault.
    """
    certificate, key = Path(files.certificate), Path(files.key)
    keyfile.read(certificate)  # OpenSSL's errors do not say which file
    keyfile.check_private(key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as cause:
        if cause.reason == "KEY_VALUES_MISMATCH":
            reason = f"is not the key of the certificate in {files.certificate}"
            raise OperatorError(files.key, reason, "name the two files that were issued together") from cause
        reason = f"and {files.key} are no certificate and unencrypted key in PEM form ({cause.reason or cause})"
        raise OperatorError(files.certificate, reason) from cause
    return context


class Identity:
    """The certificate in use. It is read again when its files change; connections that are open go on."""

    def __init__(self, files: RouterTls) -> None:
        self._files = files
        self._seen = _state_of(files)
        self._context = context_of(files)
        self._turn = trio.Lock()

    def peer(self, sock: socket.socket) -> TlsPeer:
        """A connection, before its handshake. Raises ``OSError`` when the client has left already."""
        # It is this context's for good: a new certificate holds for the connections after it.
        wrapped = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return TlsPeer(wrapped, self._turn)

    async def follow(self) -> None:
        """Read the files again when they change, until cancelled. Files that are wrong are reported, and not used."""
        while True:
            await trio.sleep(_LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Read the files again if they changed."""
        seen = await trio.to_thread.run_sync(_state_of, self._files)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._context = await trio.to_thread.run_sync(context_of, self._files)
        except OperatorError as wrong:
            _log.error("certificate refused; the old one stays", error=str(wrong))
        else:
            _log.info("certificate in use", certificate=self._files.certificate)


def _state_of(files: RouterTls) -> tuple[object, ...]:
    found: list[object] = []
    for name in (files.certificate, files.key):
        try:
            there = os.stat(name)
        except OSError:
            found.append(None)
        else:
            found.append((there.st_ino, there.st_mtime_ns, there.st_size, there.st_mode))
    return tuple(found)


class TlsPeer(Peer):
    """One connection with TLS. Every failure of TLS is an ``OSError``."""

    __slots__ = ("_reset", "_tls", "_turn")

    def __init__(self, sock: ssl.SSLSocket, turn: trio.Lock) -> None:
        super().__init__(sock)
        self._tls = sock
        self._turn = turn
        self._reset = False

    async def handshake(self) -> None:
        """Shake hands. Raises ``OSError``. The caller bounds it.

        A step takes up to a millisecond, so they are taken in turn, one in each round of the loop: a thousand clients
        that come at once hold nobody up. What is waited for is never waited for with the turn in hand.
        """
        while True:
            try:
                async with self._turn:
                    self._tls.do_handshake()
                return
            except ssl.SSLWantReadError:
                await trio.lowlevel.wait_readable(self._tls)
            except ssl.SSLWantWriteError:
                await trio.lowlevel.wait_writable(self._tls)

    async def receive(self) -> bytes:
        """Some bytes, or none at the end. Raises ``OSError``."""
        # What OpenSSL has decrypted already, the kernel knows nothing of.
        await own_task()
        if not self._tls.pending():
            await trio.lowlevel.wait_readable(self._tls)
        while True:
            try:
                return self._recv(READ_BYTES)
            except ssl.SSLWantReadError:
                await trio.lowlevel.wait_readable(self._tls)
            except ssl.SSLWantWriteError:
                await trio.lowlevel.wait_writable(self._tls)

    def put(self, data: bytes | memoryview) -> bytes | memoryview:
        """Send what can be sent at once. Returns what is left for :meth:`send`. Raises ``OSError``."""
        try:
            sent = self._send(data)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return data
        return b"" if sent == len(data) else memoryview(data)[sent:]

    async def send_some(self, data: bytes | memoryview) -> bytes | memoryview:
        """Wait until something can be sent, and send it. Returns what is left. Raises ``OSError``."""
        await own_task()
        try:
            return memoryview(data)[self._send(data) :]
        except ssl.SSLWantWriteError:
            await trio.lowlevel.wait_writable(self._tls)
        except ssl.SSLWantReadError:
            await trio.lowlevel.wait_readable(self._tls)
        return data

    def finish(self) -> None:
        """The peer knows by the answer's length that it is over: after its own end TLS can not read on."""

    def reset(self) -> None:
        """Let the other end see a failure when this is closed, and no end."""
        super().reset()
        self._reset = True

    def close(self) -> None:
        """Close, with TLS's own end where it can still be sent: without it a client may take the answer for cut."""
        if not self._reset:
            with contextlib.suppress(OSError, ValueError):
                self._tls.unwrap()
        super().close()
