"""Nodes that join, over real TLS: what a token is worth, and what somebody without a certificate can reach."""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import trio
from attrs import evolve
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from llmgw.errors import OperatorError, PeerError
from llmgw.link import ca, joining, tokens
from llmgw.link.authority import certificates, fingerprint, new_key, request_for
from llmgw.link.client import connect
from llmgw.link.codec import encode
from llmgw.link.identity import key_sha256, read
from llmgw.link.messages import Joined, Refused, Welcome
from llmgw.link.session import LinkRefused, PeerGone
from llmgw.link.tls import JOIN_ALPN
from llmgw.settings.daemon import Address
from tests.link.samples import register
from tests.server.identity_rig import DOMAIN, Plane, plane, until


async def ask(at: Plane, token: tokens.JoinToken, node: str = "", request: str | None = None) -> Joined:
    with trio.fail_after(1):
        asked = request_for(new_key()) if request is None else request
        return await joining.ask(at.address, token, asked, node, time.time())


async def refused(at: Plane, token: tokens.JoinToken, node: str = "", request: str | None = None) -> Refused:
    with pytest.raises(LinkRefused) as told:
        await ask(at, token, node, request)
    return told.value.refused


async def test_a_node_joins_and_is_let_in(tmp_path: Path) -> None:
    async with plane(tmp_path) as at:
        files = await at.join("gpu-1")
        async with connect(at.address, files, DOMAIN) as session:
            await session.send(register("gpu-1"))
            assert isinstance(await session.receive(), Welcome)
        (leaf, *_) = certificates(Path(files.certificate).read_bytes(), "")
        facts = read(leaf)
        assert facts.names == ("URI:spiffe://test.llmgw/llmgw/node/gpu-1",)
        assert facts.usages == ("clientAuth",)
        assert 23.9 * 3600 < facts.not_after - time.time() <= 24 * 3600
        events = await at.events()
        assert {"token.create", "token.use", "node.join"} <= set(events)
        stored = (tmp_path / "db").read_bytes() + (tmp_path / "db-wal").read_bytes()
        assert b"llmgw_join_" not in stored


async def test_only_the_digest_of_a_secret_is_stored(tmp_path: Path) -> None:
    async with plane(tmp_path) as at:
        token = await at.token()
        stored = (tmp_path / "db").read_bytes() + (tmp_path / "db-wal").read_bytes()
        assert token.digest.encode() in stored
        assert token.secret.encode() not in stored
        assert token.secret not in repr(token)


async def test_names_in_the_request_are_ignored(tmp_path: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.x509.oid import NameOID

    key = new_key()
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gpu-9")]))
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier("spiffe://test.llmgw/llmgw/node/gpu-9")]), False
        )
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
        .decode()
    )
    async with plane(tmp_path) as at:
        joined = await ask(at, await at.token("gpu-1"), request=request)
        facts = read(certificates(joined.certificate.encode(), "")[0])
        assert (joined.node, facts.names) == ("gpu-1", ("URI:spiffe://test.llmgw/llmgw/node/gpu-1",))
        assert facts.subject == "CN=gpu-1"
        assert joining.check_joined(joined, key_sha256(key.public_key()), "")


async def test_each_bad_token_has_its_own_answer(tmp_path: Path) -> None:
    async with plane(tmp_path) as at:
        good = await at.token()
        wrong = await refused(at, evolve(good, secret="A" * 43))
        assert "did not make" in wrong.found
        assert wrong == await refused(at, evolve(good, id="0" * 12)), "an id alone tells nothing"
        other = await refused(at, good, node="n2")
        assert other.found == "one for node n1, and a request to be n2"
        await ask(at, good)
        used = await refused(at, good)
        assert "was used at" in used.found
        assert "llmgw ctl deny node n1" in used.remedy
        revoked = await at.token()
        await at.identities.enrolment.revoke_token(revoked.id, "test")
        assert "was revoked" in (await refused(at, revoked)).found
        late = await at.token(ttl_s=20)
        at.ahead_s = 21
        assert "expired at" in (await refused(at, late)).found
        assert (await at.events()).count("join-refused") == 6


async def test_a_used_token_is_good_again_for_the_key_that_it_was_used_with(tmp_path: Path) -> None:
    async with plane(tmp_path) as at:
        token, request = await at.token(), request_for(new_key())
        first = await ask(at, token, request=request)
        told = await refused(at, token, request=request)
        assert (told.found, told.remedy) == ("one that was used a moment ago", "ask again in 5 s")
        assert (await at.events()).count("node.join") == 1, "nobody fills the audit with it"
        at.ahead_s = 6
        again = await ask(at, token, request=request)
        assert first.certificate != again.certificate
        assert "was used" in (await refused(at, token)).found


async def test_of_many_at_once_one_key_wins(tmp_path: Path) -> None:
    async with plane(tmp_path) as at:
        token = await at.token()
        won: list[Joined] = []

        async def one() -> None:
            try:
                won.append(await joining.ask(at.address, token, request_for(new_key()), "", time.time()))
            except LinkRefused as lost:
                assert "was used" in lost.refused.found

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(one)
        assert len(won) == 1


async def test_whoever_gets_it_wrong_too_often_has_to_wait(tmp_path: Path) -> None:
    async with plane(tmp_path) as at:
        good = await at.token()
        for _ in range(10):
            await refused(at, evolve(good, secret="A" * 43))
        assert "too many attempts from 127.0.0.1" in (await refused(at, good)).found
        at.ahead_s = -3600.0  # a clock that is set back makes nobody wait for longer
        told = await refused(at, good)
        assert "too many attempts" in told.found
        assert 0 < int(re.fullmatch(r"try again in (\d+) s", told.remedy)[1]) <= 60  # type: ignore[index]


async def test_a_stranger_with_another_ca_never_sees_the_token(tmp_path: Path) -> None:
    seen = bytearray()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with plane(tmp_path / "a") as at, plane(tmp_path / "b") as stranger:
        token = await at.token()
        with pytest.raises(PeerGone, match="is not the one that the token is from"):
            await ask(stranger, token)

        # One that shows our CA, and cannot prove that it is below it.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "b/server/cert.pem", tmp_path / "b/server/key.pem")
        context.set_alpn_protocols([JOIN_ALPN])
        bundle = (tmp_path / "a/server/ca.pem").read_text()

        async def lie(transport: trio.SocketStream) -> None:
            from llmgw.link.messages import Bundle

            stream = trio.SSLStream(transport, context, server_side=True)
            try:
                await stream.do_handshake()
                seen.extend(await stream.receive_some())
                await stream.send_all(encode(Bundle(bundle)))
                seen.extend(await stream.receive_some())
            except trio.BrokenResourceError:
                pass
            await trio.aclose_forcefully(stream)

        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, lie, [listener])
            there = Address("localhost", listener.socket.getsockname()[1])
            with pytest.raises(PeerGone, match="certificate is not acceptable"):
                await joining.ask(there, token, request_for(new_key()), "", time.time())
            nursery.cancel_scope.cancel()
        assert b"ask-bundle" in seen
        assert token.secret.encode() not in seen


async def test_a_name_that_is_not_in_the_certificate_is_refused_by_the_node(tmp_path: Path) -> None:
    async with plane(tmp_path) as at:
        token = await at.token()
        ca.issue_server(tmp_path / "ca", ("elsewhere.example",), tmp_path / "elsewhere", 30, time.time())
        for name in ("key.pem", "cert.pem"):
            (tmp_path / "elsewhere" / name).replace(tmp_path / "server" / name)
        at.identities.wake()
        await until(lambda: "DNS:elsewhere.example" in at.identities.own.names)
        with pytest.raises(PeerGone, match=r"Hostname mismatch.*'localhost'") as told:
            await ask(at, token)
        assert "host name must be in the control plane's certificate" in told.value.remedy


async def test_a_control_plane_whose_clock_or_whose_nodes_clock_is_off_names_it(tmp_path: Path) -> None:
    async with plane(tmp_path) as at:
        token = await at.token()
        with pytest.raises(PeerGone, match=r"not valid before .* too early"):
            await joining.ask(at.address, token, request_for(new_key()), "", time.time() - 86400)
        with pytest.raises(PeerGone, match=r"expired at .* too late"):
            await joining.ask(at.address, token, request_for(new_key()), "", time.time() + 40 * 86400)


async def speak(at: Plane, data: bytes, alpn: str = JOIN_ALPN) -> bytes:
    """What the control plane says to somebody without a certificate who says this."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([alpn])
    said = bytearray()
    stream = trio.SSLStream(
        await trio.open_tcp_stream("127.0.0.1", at.address.port), context, server_hostname="localhost"
    )
    async with stream.transport_stream:
        try:
            await stream.send_all(data)
            while piece := await stream.receive_some():
                said += piece
        except trio.BrokenResourceError as broken:
            said += str(broken.__cause__).encode()
    return bytes(said)


async def test_what_is_no_request_gets_no_answer(tmp_path: Path) -> None:
    async with plane(tmp_path) as at:
        for junk in (
            encode(register()),
            b"\x00\x00\x40\x01" + b"x" * 100,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\xff" * 50,
        ):
            with trio.fail_after(3):
                said = await speak(at, junk)
            assert b"welcome" not in said
            assert b"bundle" not in said
        assert isinstance(await ask(at, await at.token()), Joined), "and everybody else is served"


async def test_without_a_certificate_nobody_reaches_the_link(tmp_path: Path) -> None:
    async with plane(tmp_path) as at:
        with trio.fail_after(3):
            said = await speak(at, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", alpn="h2")
        assert b"CERTIFICATE_REQUIRED" in said


async def test_one_address_does_not_keep_the_others_from_joining(tmp_path: Path) -> None:
    async with plane(tmp_path) as at:
        slow: list[trio.SSLStream[trio.SocketStream]] = []

        async def held(source: str) -> None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_alpn_protocols([JOIN_ALPN])
            transport = await trio.open_tcp_stream("127.0.0.1", at.address.port, local_address=source)
            slow.append(trio.SSLStream(transport, context, server_hostname="localhost"))
            await slow[-1].do_handshake()

        for _ in range(joining.AT_ONCE_ADDRESS):
            await held("127.0.0.2")
        with pytest.raises(trio.BrokenResourceError):
            await held("127.0.0.2")
        assert isinstance(await ask(at, await at.token()), Joined)
        for stream in slow:
            await trio.aclose_forcefully(stream)
        with trio.fail_after(2):
            while True:
                try:
                    await held("127.0.0.2")
                    break
                except trio.BrokenResourceError:
                    await trio.sleep(0.01)
        await trio.aclose_forcefully(slow[-1])


async def test_where_nothing_is_issued_nothing_joins(tmp_path: Path) -> None:
    async with plane(tmp_path) as at:
        token = await at.token()
    async with plane(tmp_path, issuing=False) as at:
        with pytest.raises(PeerGone) as told:
            await ask(at, token)
        assert "set link.issuing in server.yaml" in told.value.remedy
        assert "nothing join" in told.value.reason
        with pytest.raises(OperatorError, match="is not set"):
            await at.identities.enrolment.create_token("n1", 60, "test")


async def test_nobody_joins_as_a_node_that_is_denied_or_not_listed(tmp_path: Path) -> None:
    async with plane(tmp_path, nodes=("n1", "n2")) as at:
        token = await at.token("n1")
        await at.identities.deny("node", "n1", "stolen", "test")
        assert "is denied: stolen" in (await refused(at, token)).found
        with pytest.raises(OperatorError, match="is denied: stolen"):
            await at.token("n1")
        with pytest.raises(OperatorError, match=r"not among link\.nodes"):
            await at.token("n3")


@pytest.mark.parametrize(("node", "ttl_s"), [("a/b", 60.0), ("", 60.0), ("n1", 1.0), ("n1", 8 * 86400.0)])
async def test_tokens_that_are_not_made(tmp_path: Path, node: str, ttl_s: float) -> None:
    async with plane(tmp_path) as at:
        with pytest.raises(OperatorError):
            await at.token(node, ttl_s)


def forged_request() -> str:
    """A request for somebody else's key: its signature is by another one."""
    import base64
    import textwrap

    key = new_key().public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    theirs = new_key()
    whole = base64.b64decode("".join(request_for(theirs).splitlines()[1:-1]))
    own = theirs.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert own in whole
    text = base64.b64encode(whole.replace(own, key)).decode()
    return "\n".join(
        ("-----BEGIN CERTIFICATE REQUEST-----", *textwrap.wrap(text, 64), "-----END CERTIFICATE REQUEST-----\n")
    )


async def test_requests_that_are_not_granted(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec

    async with plane(tmp_path) as at:
        whole = request_for(new_key())
        for request, why in (
            ("", "cannot be read"),
            (whole[:200], "cannot be read"),
            ("x" * 9000, "8192"),
            (request_for(ec.generate_private_key(ec.SECP384R1())), "P-256"),
            (forged_request(), "is not signed by the key that it is for"),
        ):
            assert why in (await refused(at, await at.token(), request=request)).found


def test_a_certificate_that_was_not_asked_for_is_not_taken(tmp_path: Path) -> None:
    ca.init(tmp_path / "ca", DOMAIN, time.time())
    ca.init(tmp_path / "other", DOMAIN, time.time())
    issuer, other = ca.load(tmp_path / "ca"), ca.load(tmp_path / "other")
    key = new_key()
    sha256 = key_sha256(key.public_key())
    from llmgw.link.authority import pem

    def joined(node: str = "n1", by: object = issuer, key: object = key) -> Joined:
        leaf = by.node(node, key.public_key(), 3600, time.time())  # type: ignore[attr-defined]
        return Joined("n1", DOMAIN, by.chain(leaf).decode(), pem(issuer.root).decode())  # type: ignore[attr-defined]

    check: Callable[[Joined], object] = partial(joining.check_joined, key_sha256=sha256, node="n1")
    assert check(joined())
    for wrong, why in (
        (joined("n2"), "has the names"),
        (joined(by=other), "no CA in the bundle"),
        (joined(key=new_key()), "another key"),
    ):
        with pytest.raises(PeerError, match=why):
            check(wrong)
    with pytest.raises(PeerError, match="is for node n1"):
        joining.check_joined(joined(), sha256, "n2")
    assert fingerprint(issuer.root) != fingerprint(other.root)


async def test_a_control_plane_that_is_not_there_is_told_from_one_that_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    token = tokens.new("0" * 64)
    with pytest.raises(PeerGone, match=r"cannot be reached: .*connection refused"):
        await joining.ask(Address("localhost", port), token, request_for(new_key()), "", time.time())
