"""The link over real TLS and sockets: who gets in, and what everybody else is told."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
from attrs import evolve
from cryptography.hazmat.primitives import serialization

from llmgw.errors import OperatorError
from llmgw.link.client import Backoff, connect
from llmgw.link.identity import read_chain
from llmgw.link.messages import PROTOCOL, Register, Welcome
from llmgw.link.server import serve
from llmgw.link.session import LinkRefused, PeerGone, Session
from llmgw.link.tls import TlsError, TlsStream, alert, client_context, handshake, server_context, verified_chain
from llmgw.settings.daemon import Address, LinkListener, TlsFiles
from tests.link.samples import DAY_S, TRUST_DOMAIN, WELCOME, Pki, register


class Listener:
    def __init__(self) -> None:
        self.address = Address("localhost", 0)
        self.served: list[str] = []


@asynccontextmanager
async def listening(pki: Pki, wall: Callable[[], float] = time.time) -> AsyncIterator[Listener]:
    made = Listener()

    async def handler(session: Session, first: Register) -> None:
        made.served.append(session.peer)
        await session.send(WELCOME)
        await session.receive()

    async with trio.open_nursery() as nursery:
        config = LinkListener(pki.server, Address("127.0.0.1", 0), trust_domain=TRUST_DOMAIN)
        (address,) = await nursery.start(partial(serve, config, handler, wall=wall, handshake_s=2.0))
        made.address = Address("localhost", address.port)
        yield made
        nursery.cancel_scope.cancel()


async def registered(made: Listener, tls: TlsFiles, first: Register | None = None) -> object:
    with trio.fail_after(5):
        async with connect(made.address, tls, TRUST_DOMAIN) as session:
            await session.send(first or register())
            return await session.receive()


async def test_a_node_of_the_cluster_is_welcomed(pki: Pki) -> None:
    async with listening(pki) as made:
        assert isinstance(await registered(made, pki.node()), Welcome)
        assert made.served == ["n1"]


async def refusal(
    pki: Pki, tls: TlsFiles, first: Register | None = None, wall: Callable[[], float] = time.time
) -> LinkRefused:
    async with listening(pki, wall) as made:
        began = trio.current_time()
        with pytest.raises(LinkRefused) as caught:
            await registered(made, tls, first)
        assert trio.current_time() - began < 1.5
        assert made.served == []
        assert isinstance(await registered(made, pki.node(now=wall())), Welcome), "others are served on"
    assert caught.value.remedy
    return caught.value


async def test_another_nodes_name(pki: Pki) -> None:
    told = (await refusal(pki, pki.node(), register("n2"))).refused
    assert (told.claim, told.wanted, told.found) == ("node id", "n1", "n2")
    assert "spiffe://test.llmgw/llmgw/node/n1" in told.certificate
    assert "set id: n1 in agent.yaml" in told.remedy


async def test_expired_and_not_yet_valid(pki: Pki) -> None:
    old = pki.node("n1", days=1, now=time.time() - 3 * DAY_S)
    told = (await refusal(pki, old)).refused
    assert told.claim == "validity"
    assert "llmgw ca issue --node n1" in told.remedy
    early = pki.node("n1", days=1, now=time.time() + 2 * DAY_S)
    told = (await refusal(pki, early)).refused
    assert told.claim == "validity"
    assert "compare the clocks" in told.remedy


async def test_a_foreign_ca_is_told_in_words(pki: Pki) -> None:
    told = (await refusal(pki, pki.node(authority="foreign"))).refused
    assert told.claim == "issuer"
    assert "TLS alert 'unknown ca'" in told.found
    assert "issuer CN=llmgw issuing CA" in told.found


async def test_a_servers_certificate_is_no_nodes(pki: Pki) -> None:
    told = await refusal(pki, pki.server)
    assert "clientAuth" in str(told) or "client use" in str(told)


async def test_a_protocol_that_is_too_far_away(pki: Pki) -> None:
    told = (await refusal(pki, pki.node(), register(protocol=PROTOCOL + 5))).refused
    assert (told.claim, told.remedy) == ("protocol version", "upgrade the control plane")


async def test_no_client_certificate(pki: Pki) -> None:
    import ssl

    async with listening(pki) as made:
        context = ssl.create_default_context(cafile=pki.server.ca)
        context.set_alpn_protocols(["h2"])
        stream = await trio.open_ssl_over_tcp_stream("localhost", made.address.port, ssl_context=context)

        async def talk() -> None:
            await stream.do_handshake()
            while await stream.receive_some():
                pass

        with trio.fail_after(3), pytest.raises(trio.BrokenResourceError) as caught:
            await talk()
        assert "CERTIFICATE_REQUIRED" in str(caught.value.__cause__)
        await trio.aclose_forcefully(stream)


async def test_an_agent_checks_the_control_plane_too(pki: Pki) -> None:
    async with listening(pki) as made:
        stranger = evolve(pki.node(), ca=str(pki.folder / "foreign/root.pem"))
        with pytest.raises(PeerGone, match="certificate is not acceptable"):
            await registered(made, stranger)
        with pytest.raises(PeerGone, match="shows a certificate without a name"):
            async with connect(made.address, pki.node(), "other.domain"):
                pass


async def test_nobody_there_and_somebody_who_speaks_something_else(pki: Pki) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(PeerGone, match=r"cannot be reached: .*connection refused"):
        async with connect(Address("127.0.0.1", port), pki.node(), TRUST_DOMAIN):
            pass
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def silent(stream: trio.SocketStream) -> None:
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, silent, [listener])
        there = Address("127.0.0.1", listener.socket.getsockname()[1])
        with pytest.raises(PeerGone, match=r"the TLS handshake was not done within 0\.3 s"):
            async with connect(there, pki.node(), TRUST_DOMAIN, handshake_s=0.3):
                pass
        nursery.cancel_scope.cancel()


async def test_a_client_that_says_nothing_keeps_nobody_out(pki: Pki) -> None:
    async with listening(pki) as made:
        idle = [await trio.open_tcp_stream("127.0.0.1", made.address.port) for _ in range(20)]
        assert isinstance(await registered(made, pki.node()), Welcome)
        for stream in idle:
            await stream.aclose()


async def test_files_that_cannot_be_used_are_named(pki: Pki, tmp_path: Path) -> None:
    (tmp_path / "open.pem").write_bytes(Path(pki.node().key).read_bytes())
    (tmp_path / "open.pem").chmod(0o644)
    (tmp_path / "junk.pem").write_text("junk")
    there = Address("127.0.0.1", 1)
    for change, said in (
        ({"key": str(tmp_path / "open.pem")}, "open.pem"),
        ({"key": pki.server.key}, "is not the key of the certificate"),
        ({"certificate": str(tmp_path / "none.pem")}, "none.pem"),
        ({"ca": str(tmp_path / "junk.pem")}, "no CA certificates"),
    ):
        with pytest.raises(OperatorError, match=said):
            async with connect(there, evolve(pki.node(), **change), TRUST_DOMAIN):
                pass


def test_backoff_is_jittered_bounded_and_reset() -> None:
    backoff = Backoff(random.Random(7))
    seen = [backoff.next_s() for _ in range(200)]
    assert all(0 <= s <= 60 for s in seen)
    assert seen[0] <= 0.5
    assert max(seen) > 30
    assert len({round(s, 6) for s in seen}) > 190
    backoff.reset()
    assert backoff.next_s() <= 0.5


def test_an_encrypted_key_is_refused_and_no_password_is_asked_for(pki: Pki, tmp_path: Path) -> None:
    plain = serialization.load_pem_private_key(Path(pki.node().key).read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        plain.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"pw")
        )
    )
    locked.chmod(0o600)
    with pytest.raises(OperatorError, match="unencrypted key in PEM form"):
        client_context(evolve(pki.node(), key=str(locked)))


async def test_the_alert_of_a_failed_handshake_reaches_the_other_end(pki: Pki) -> None:
    """Trio alone would close with the alert unsent, and the agent would see a connection that just ends."""
    ours, theirs = trio.testing.memory_stream_pair()
    server = trio.SSLStream(theirs, server_context(pki.server), server_side=True)
    agent = trio.SSLStream(ours, client_context(pki.node(authority="foreign")), server_hostname="localhost")

    async def refuse() -> None:
        with pytest.raises(TlsError, match="unable to get local issuer certificate"):
            await handshake(server, "agent", 5)  # type: ignore[arg-type]
        await trio.aclose_forcefully(server)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(refuse)
        await agent.do_handshake()
        with pytest.raises(trio.BrokenResourceError) as caught:
            await agent.receive_some()
        await trio.aclose_forcefully(agent)
    assert alert(caught.value) == "unknown ca"


async def test_the_verified_chain_has_the_issuers(pki: Pki) -> None:
    async with listening(pki) as made:
        stream: TlsStream = trio.SSLStream(
            await trio.open_tcp_stream("127.0.0.1", made.address.port),
            client_context(pki.node()),
            server_hostname="localhost",
        )
        async with stream.transport_stream:
            await handshake(stream, "control plane", 5)
            leaf, issuing, root = read_chain(verified_chain(stream))
    assert stream.version() == "TLSv1.3"
    assert "URI:spiffe://test.llmgw/llmgw/server/localhost" in leaf.names
    assert (leaf.issuer, issuing.issuer) == (issuing.subject, root.subject)


async def test_a_handshake_whose_time_is_over_before_it_begins_is_no_fault_of_ours(pki: Pki) -> None:
    """Its turn can come with the last of its time."""
    ours, _theirs = trio.testing.memory_stream_pair()
    stream = trio.SSLStream(ours, server_context(pki.server), server_side=True)
    with pytest.raises(TlsError, match=r"the TLS handshake was not done within 5 s"):
        await handshake(stream, "agent", 5, by=trio.current_time() - 0.1)  # type: ignore[arg-type]
