"""Whoever speaks to the link's port in another way than an agent, over real sockets, with a valid certificate or none."""

from __future__ import annotations

import ssl
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from attrs import evolve

from llmgw.errors import OperatorError, PeerError
from llmgw.link.client import connect
from llmgw.link.codec import encode
from llmgw.link.messages import AskBundle, Joined, RenewCertificate, Welcome
from llmgw.link.protocol import LinkProtocol, Role
from llmgw.link.session import LinkRefused
from llmgw.link.tls import JOIN_ALPN, server_context
from llmgw.settings.daemon import TlsFiles
from tests.link.samples import register
from tests.server.identity_rig import DOMAIN, Plane, plane


def context_of(tls: TlsFiles | None, alpn: Sequence[str] = ("h2",)) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if tls is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context


async def hears(at: Plane, context: ssl.SSLContext | None, said: bytes, until: bytes | None = None) -> bytes:
    """All that comes back, and how it ends; within five seconds."""
    heard = bytearray()
    transport = await trio.open_tcp_stream("127.0.0.1", at.address.port)
    stream: trio.abc.Stream = transport
    if context is not None:
        stream = trio.SSLStream(transport, context, server_hostname="localhost")
    async with transport:
        with trio.fail_after(5):
            try:
                await stream.send_all(said)
                while (until is None or until not in heard) and (piece := await stream.receive_some()):
                    heard += piece
            except trio.BrokenResourceError as broken:
                heard += f" broke: {broken.__cause__}".encode()
    return bytes(heard)


async def is_well(at: Plane, tls: TlsFiles) -> None:
    async with connect(at.address, tls, DOMAIN) as session:
        await session.send(register())
        assert isinstance(await session.receive(), Welcome)


def opening() -> bytes:
    """An agent's first bytes on the link."""
    return LinkProtocol(Role.AGENT, 0.0).data_to_send()


async def test_plain_http_is_hung_up_on_at_once(tmp_path: Path) -> None:
    async with plane(tmp_path) as at:
        tls = at.issue()
        for said in (
            b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
            opening(),
            b"SSH-2.0-x\r\n",
            b"\x16\x03\x01\xff\xff",
            b"\0" * 64,
        ):
            began = time.monotonic()
            heard = await hears(at, None, said)
            if said[:1] != b"\x16":
                assert time.monotonic() - began < 2
            assert b"HTTP" not in heard
            assert len(heard) < 100, "an alert, and nothing about us"
        await is_well(at, tls)


async def test_older_tls_is_refused_whatever_the_certificate(tmp_path: Path) -> None:
    async with plane(tmp_path) as at:
        tls = at.issue()
        for alpn in ("h2", JOIN_ALPN):
            context = context_of(tls, [alpn])
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            assert b"PROTOCOL_VERSION" in await hears(at, context, opening())
        await is_well(at, tls)


@pytest.mark.parametrize("alpn", [(), ("http/1.1",), ("h2c",), ("H2",), ("llmgw-join/2",)], ids=str)
async def test_another_protocol_is_not_the_link_whatever_the_certificate(tmp_path: Path, alpn: tuple[str, ...]) -> None:
    async with plane(tmp_path) as at:
        tls = at.issue()
        heard = await hears(at, context_of(tls, alpn), opening())
        assert not heard or heard.startswith(b" broke:")
        await is_well(at, tls)


@pytest.mark.parametrize("alpn", [("h2", JOIN_ALPN), (JOIN_ALPN, "h2")], ids=str)
async def test_who_offers_both_protocols_joins_and_is_never_on_the_link(tmp_path: Path, alpn: tuple[str, ...]) -> None:
    async with plane(tmp_path) as at:
        tls = at.issue()
        assert b"bundle" in await hears(at, context_of(None, alpn), encode(AskBundle()), b"bundle")
        for said in (opening(), encode(register()), encode(RenewCertificate("x"))):
            heard = await hears(at, context_of(tls, alpn), said)
            assert b"welcome" not in heard
        assert not at.agents.connected("n1")
        await is_well(at, tls)


async def test_a_session_of_tls_is_never_resumed(tmp_path: Path) -> None:
    async with plane(tmp_path) as at:
        tls = at.issue()
        context = context_of(tls)
        stream = trio.SSLStream(
            await trio.open_tcp_stream("127.0.0.1", at.address.port), context, server_hostname="localhost"
        )
        await stream.send_all(opening())
        await stream.receive_some()
        ticket = stream._ssl_object.session
        assert ticket is None or not ticket.has_ticket
        await trio.aclose_forcefully(stream)


async def test_a_nodes_certificate_serves_nobody(tmp_path: Path) -> None:
    """A node that listens in the control plane's place is turned down by every other agent, before they say anything."""
    async with plane(tmp_path) as at:
        thief, honest = at.issue("n1"), at.issue("n2")
        context, said = server_context(thief), bytearray()
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

        async def pose(transport: trio.SocketStream) -> None:
            stream = trio.SSLStream(transport, context, server_side=True)
            try:
                while piece := await stream.receive_some():
                    said.extend(piece)
            except trio.BrokenResourceError:
                pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, pose, [listener])
            there = evolve(at.address, port=listener.socket.getsockname()[1])
            with pytest.raises(PeerError, match="certificate is not acceptable"):
                async with connect(there, honest, DOMAIN):
                    pass
            nursery.cancel_scope.cancel()
        assert not said


DEEP = b"[" * 24_000 + b"]" * 23_000


@pytest.mark.parametrize(
    "payload",
    [
        b'{"type": "register", "node": "n1", "inventory": ' + DEEP + b"}",
        b'{"type": ' + DEEP + b"}",
        b"{" * 100_001,
        b'{"type": "heartbeat", "sequence": 1e999}',
        b'{"type": "heartbeat", "sequence": NaN}',
        b'{"type": "heartbeat", "sequence": ' + b"9" * 5000 + b"}",
        b'{"type": "heartbeat", "type": "register", "sequence": 1}',
        b'\xef\xbb\xbf{"type": "heartbeat", "sequence": 1}',
        b'{"type": "heartbeat", "sequence": 1}{}',
        b'{"type": "\\ud800"}',
        b"\xff\xfe",
        b"",
        b"null",
    ],
    ids=lambda p: repr(p[:34]),
)
async def test_odd_json_as_the_first_message_ends_one_connection_with_its_reason(
    tmp_path: Path, payload: bytes
) -> None:
    async with plane(tmp_path) as at:
        tls = at.issue()
        protocol = LinkProtocol(Role.AGENT, 0.0)
        stream = trio.SSLStream(
            await trio.open_tcp_stream("127.0.0.1", at.address.port), context_of(tls), server_hostname="localhost"
        )
        with trio.fail_after(5):
            await stream.send_all(protocol.data_to_send())
            while not protocol.opened:
                protocol.receive(bytes(await stream.receive_some()), 0.0)
            protocol._pending += len(payload).to_bytes(4, "big") + payload
            while protocol.ended is None:
                await stream.send_all(protocol.data_to_send())
                protocol.receive(bytes(await stream.receive_some()) or b"", 0.0)
        assert "closed by the other end: " in protocol.ended.reason or "refused" in protocol.ended.reason
        assert protocol.ended.reason.isprintable()
        await trio.aclose_forcefully(stream)
        assert not at.agents.connected("n1")
        await is_well(at, tls)


async def test_of_two_fields_of_one_name_the_last_counts_for_checking_and_for_acting(tmp_path: Path) -> None:
    """One parser reads it, so that nobody is checked as one node and served as another."""
    async with plane(tmp_path) as at:
        tls = at.issue("n1")
        whole = encode(register("n2"))[4:]
        for doubled, fine in (
            (whole[:-1] + b',"node":"n1"}', True),
            (encode(register("n1"))[4:-1] + b',"node":"n2"}', False),
        ):
            protocol = LinkProtocol(Role.AGENT, 0.0)
            stream = trio.SSLStream(
                await trio.open_tcp_stream("127.0.0.1", at.address.port), context_of(tls), server_hostname="localhost"
            )
            answers: list[type] = []
            with trio.fail_after(5):
                await stream.send_all(protocol.data_to_send())
                while not protocol.opened:
                    protocol.receive(bytes(await stream.receive_some()), 0.0)
                protocol._pending += len(doubled).to_bytes(4, "big") + doubled
                await stream.send_all(protocol.data_to_send())
                while not answers and protocol.ended is None:
                    protocol.receive(bytes(await stream.receive_some()), 0.0)
                    answers += [type(m) for m in iter(protocol.take, None)]
            assert (Welcome in answers) is fine
            assert not at.cluster.linked("n2")
            await trio.aclose_forcefully(stream)


async def test_a_token_is_good_neither_for_another_node_nor_with_a_letter_changed(tmp_path: Path) -> None:
    from llmgw.link import joining
    from llmgw.link.authority import new_key, request_for

    async with plane(tmp_path) as at:
        token = await at.token("n1")
        for wrong in (
            evolve(token, secret=token.secret[:-1] + ("A" if token.secret[-1] != "A" else "B")),
            evolve(token, id="0" * len(token.id)),
        ):
            with pytest.raises((LinkRefused, OperatorError)):
                await joining.ask(at.address, wrong, request_for(new_key()), "n1", time.time())
        with pytest.raises(LinkRefused):
            await joining.ask(at.address, token, request_for(new_key()), "n2", time.time())
        joined = await joining.ask(at.address, token, request_for(new_key()), "n1", time.time())
        assert isinstance(joined, Joined), "and none of the tries used it up"
