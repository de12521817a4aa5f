"""The control plane's end of a TLS connection, over the socket itself.

:class:`trio.SSLStream` takes all bytes through two memory buffers, which keep the size that they once had, and a lock
and several calls for each message. A control plane has a thousand connections open: here OpenSSL reads and writes the
socket, and gives its own buffers back when they are empty.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar

import trio

_READ_BYTES = 65536
_Kind = TypeVar("_Kind")


class TlsSocket(trio.abc.Stream):
    """A connection that was accepted. It takes over the transport's socket: close this stream, not the transport.

    One task may receive while another sends. A cancelled :meth:`send_all` leaves the stream fit for nothing but to be
    closed. Raises :class:`trio.BrokenResourceError` when the connection is gone already.
    """

    def __init__(self, transport: trio.SocketStream, context: ssl.SSLContext) -> None:
        plain = socket.socket(fileno=transport.socket.detach())
        try:
            plain.setblocking(False)
            self.tls = context.wrap_socket(
                plain, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=False
            )
        except OSError as cause:
            raise trio.BrokenResourceError from cause
        finally:
            plain.close()  # it has handed the socket on, unless that failed

    async def do_handshake(self) -> None:
        """Shake hands; what is wrong with the other end it has been told when this raises."""
        await self._done(self.tls.do_handshake)

    def selected_alpn_protocol(self) -> str | None:
        """The protocol that both ends speak."""
        return self.tls.selected_alpn_protocol()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """At least one byte, or none once the other end has said that no more come."""
        most = _READ_BYTES if max_bytes is None else max_bytes
        return await self._done(lambda: self.tls.recv(most))

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Hand everything to the kernel."""
        rest = memoryview(data)
        if not rest:
            await trio.lowlevel.checkpoint()
        while rest:
            rest = rest[await self._done(lambda rest=rest: self.tls.send(rest)) :]  # type: ignore[misc]

    def send_now(self, data: bytes) -> bool:
        """Hand everything to the kernel if it takes it at once; else :meth:`send_all` must be next, with the same."""
        try:
            return self.tls.send(data) == len(data)
        except (OSError, ValueError):
            return False  # what is wrong is seen there too

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until the kernel has room."""
        try:
            await trio.lowlevel.wait_writable(self.tls)
        except OSError as cause:
            raise trio.BrokenResourceError from cause

    async def _done(self, do: Callable[[], _Kind]) -> _Kind:
        """What ``do`` returns, once the socket lets it. Always a checkpoint."""
        await trio.lowlevel.checkpoint_if_cancelled()
        waited = False
        while True:
            if self.tls.fileno() == -1:
                raise trio.ClosedResourceError("the connection was closed")
            try:
                done = do()
            except ssl.SSLWantReadError:
                await trio.lowlevel.wait_readable(self.tls)
            except ssl.SSLWantWriteError:
                await trio.lowlevel.wait_writable(self.tls)
            except OSError as cause:
                raise trio.BrokenResourceError from cause
            else:
                if not waited:
                    await trio.lowlevel.cancel_shielded_checkpoint()
                return done
            waited = True

    async def see_alert_off(self) -> None:
        """After a handshake that failed: wait for the other end's close, so that ours does not overtake the alert."""
        await trio.lowlevel.checkpoint()
        with contextlib.suppress(OSError):
            self.tls.shutdown(socket.SHUT_WR)  # from here on it is a plain socket
            while True:
                try:
                    if not self.tls.recv(_READ_BYTES):
                        return
                except BlockingIOError:
                    await trio.lowlevel.wait_readable(self.tls)

    async def aclose(self) -> None:
        """Say that no more comes, as far as the kernel has room for that, and close."""
        try:
            if self.tls.fileno() != -1:
                with contextlib.suppress(OSError, ValueError):
                    self.tls.unwrap()
            await trio.lowlevel.checkpoint()
        finally:
            self.close()

    def close(self) -> None:
        """Close at once."""
        if self.tls.fileno() != -1:
            trio.lowlevel.notify_closing(self.tls)
            self.tls.close()
