"""TLS records that hold nothing: OpenSSL reads on over KeyUpdates as long as there are any, and nothing limits them.

So its input comes in pieces, between which the others have their turn.
"""

from __future__ import annotations

import ctypes
import socket
import ssl
import sys
import time

import pytest
import trio

from llmgw.link.client import connect
from llmgw.link.session import PeerGone
from llmgw.link.tls import client_context, server_context
from llmgw.settings.daemon import Address
from tests.link.samples import TRUST_DOMAIN, Pki
from tests.link.test_link_server import listening

RECORDS = 40_000
_SSL_POINTER = 24  # of Python's object: the head, the socket, then OpenSSL's (Modules/_ssl.c)


def _library() -> ctypes.CDLL:
    import _ssl

    library = ctypes.CDLL(_ssl.__file__)
    try:
        library.SSL_key_update.argtypes = [ctypes.c_void_p, ctypes.c_int]
        library.SSL_do_handshake.argtypes = [ctypes.c_void_p]
    except AttributeError:
        pytest.skip("this Python's OpenSSL cannot be reached from here")
    return library


def _updates(
    plain: socket.socket, context: ssl.SSLContext, server_hostname: str | None = None, count: int = RECORDS
) -> bytes:
    """Shake hands; returns the KeyUpdates to send on this connection (RFC 8446, section 4.6.3)."""
    library = _library()
    there, here = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(there, here, server_side=server_hostname is None, server_hostname=server_hostname)
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            plain.sendall(here.read())
            there.write(plain.recv(65536))
    plain.sendall(here.read())
    pointer = ctypes.c_void_p.from_address(id(tls._sslobj) + _SSL_POINTER).value  # type: ignore[attr-defined]
    for _ in range(count):
        assert library.SSL_key_update(pointer, 0) == 1
        library.SSL_do_handshake(pointer)
    return here.read()


def _prepared(address: Address, context: ssl.SSLContext) -> tuple[socket.socket, bytes]:
    """A connection after its handshake, and what to send on it."""
    plain = socket.create_connection((address.host, address.port), 5)
    return plain, _updates(plain, context, "localhost")


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="reaches into CPython's ssl")
async def test_records_that_hold_nothing_leave_the_others_their_turn(pki: Pki) -> None:
    async with listening(pki) as address:
        plain, records = await trio.to_thread.run_sync(_prepared, address, client_context(pki.node()))
        assert len(records) > 20 * RECORDS
        longest = 0.0

        hung_up = False

        def send() -> None:
            nonlocal hung_up
            plain.settimeout(5)
            try:
                plain.sendall(records)
                while plain.recv(65536):
                    pass
                hung_up = True
            except ConnectionError:
                hung_up = True

        async def watch() -> None:
            nonlocal longest
            before = time.thread_time()  # of the loop: what other processes take is not counted
            while True:
                await trio.sleep(0.001)
                longest = max(longest, time.thread_time() - before)
                before = time.thread_time()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            with trio.move_on_after(5):
                await trio.to_thread.run_sync(send)
            await trio.sleep(0.5)
            nursery.cancel_scope.cancel()
        plain.close()
        assert hung_up
        assert longest < 0.2, f"nobody else had a turn for {longest:.2f} s"


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="reaches into CPython's ssl")
async def test_an_agent_reads_no_records_without_end_that_hold_nothing(pki: Pki) -> None:
    _library()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        plain: socket.socket | None = None

        def control_plane() -> None:
            nonlocal plain
            plain, _ = listener.accept()
            plain.settimeout(5)
            try:
                plain.sendall(_updates(plain, server_context(pki.server), count=15_000))
            except ConnectionError:
                return

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, control_plane)
            with pytest.raises(PeerGone, match="it sent records that hold nothing"):
                async with connect(Address("127.0.0.1", listener.getsockname()[1]), pki.node(), TRUST_DOMAIN):
                    pass
        assert plain is not None
        plain.close()
