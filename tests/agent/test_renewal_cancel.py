"""A renewal that is cut off at any point leaves a certificate and a key that belong together, the old ones or the new."""

from __future__ import annotations

import random
import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import trio.testing

from llmgw.agent.identity import NodeIdentity
from llmgw.link import ca
from llmgw.link.attend import attend
from llmgw.link.authority import pem, requested_key
from llmgw.link.messages import (
    CertificateIssued,
    IdentityHeld,
    Register,
    RenewalRefused,
    RenewCertificate,
    TrustBundle,
)
from llmgw.link.own import OwnFiles
from llmgw.link.protocol import Role
from llmgw.link.session import PeerGone, Session, open_session
from llmgw.link.tls import client_context
from tests.link.samples import TRUST_DOMAIN, WELCOME, register
from tests.sweep import sweep


def test_every_point_of_a_renewal(tmp_path: Path) -> None:
    now = time.time()
    ca.init(tmp_path / "ca", TRUST_DOMAIN, now - 86400)
    tls = ca.issue_node(tmp_path / "ca", "n1", tmp_path / "n1", 1, now - 0.9 * 86400)
    issuer = ca.load(tmp_path / "ca")
    other = ca.add_generation(tmp_path / "ca", now)
    bundle = (pem(issuer.root) + pem(other.root)).decode()
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    own = OwnFiles(tls, state)
    first = own.certificate().serial
    ends: set[tuple[bool, int]] = set()

    async def control_plane(session: Session, _: Register) -> None:
        await session.send(WELCOME)
        await session.send(TrustBundle(bundle, renewal=True))
        while True:
            message = await session.receive()
            if isinstance(message, RenewCertificate):
                leaf = issuer.node("n1", requested_key(message.request), 3600, time.time())
                await session.send(CertificateIssued(issuer.chain(leaf).decode(), bundle))
            if isinstance(message, IdentityHeld) and message.serial != f"{first:x}":
                return

    async def scenario() -> None:
        shutil.rmtree(state / "identity", ignore_errors=True)
        node = NodeIdentity("n1", TRUST_DOMAIN, own, time.time, random.Random(1))
        ours, theirs = trio.testing.memory_stream_pair()
        async with trio.open_nursery() as nursery:

            async def serve() -> None:
                await attend(theirs, control_plane, lambda _: None, peer="n1", remote="memory")

            nursery.start_soon(serve)
            async with open_session(ours, Role.AGENT, peer="server", remote="memory") as session:
                await session.send(register())
                assert await session.receive() == WELCOME
                node.connected()
                async with trio.open_nursery() as inner:
                    inner.start_soon(node.run, session)
                    try:
                        while True:
                            message = await session.receive()
                            assert isinstance(message, TrustBundle | CertificateIssued | RenewalRefused)
                            node.heard(message)
                    except PeerGone:
                        inner.cancel_scope.cancel()
            nursery.cancel_scope.cancel()

    async def after() -> None:
        client_context(own.files())  # a pair that does not belong together is refused
        ends.add((own.certificate().serial != first, len(own.cas())))
        left = {p.name for p in (state / "identity").iterdir()} - {"renewed.pem", "ca.pem", "installation"}
        assert not left
        await trio.lowlevel.checkpoint()

    points = sweep(scenario, after=after, real_clock=True)
    print(f"{len(points)} points")
    assert len(points) > 40
    assert {(False, 1), (False, 2), (True, 2)} <= ends, "both ends of both writes were seen"


async def test_a_bundle_that_shares_nothing_with_the_old_one_is_not_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would leave the node without any control plane that it believes."""
    now = time.time()
    for name in ("ca", "other"):
        ca.init(tmp_path / name, TRUST_DOMAIN, now)
    tls = ca.issue_node(tmp_path / "ca", "n1", tmp_path / "n1", 1, now)
    (tmp_path / "state").mkdir(mode=0o700)
    own = OwnFiles(tls, tmp_path / "state")
    node = NodeIdentity("n1", TRUST_DOMAIN, own, time.time, random.Random(1))
    alien = (tmp_path / "other/root.pem").read_text()
    both = alien + (tmp_path / "ca/root.pem").read_text()
    held: list[IdentityHeld] = []

    async def control_plane(session: Session, _: Register) -> None:
        for bundle in (alien, "no certificates", both):
            await session.send(TrustBundle(bundle, renewal=False))
        while True:
            message = await session.receive()
            if isinstance(message, IdentityHeld):
                held.append(message)

    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:

        async def serve() -> None:
            with suppress(PeerGone):
                await attend(theirs, control_plane, lambda _: None, peer="n1", remote="memory")

        nursery.start_soon(serve)
        async with open_session(ours, Role.AGENT, peer="server", remote="memory") as session:
            await session.send(register())
            node.connected()
            async with trio.open_nursery() as inner:
                inner.start_soon(node.run, session)
                for count in (1, 1, 2):
                    message = await session.receive()
                    assert isinstance(message, TrustBundle)
                    node.heard(message)
                    await trio.sleep(0.2)
                    assert len(own.cas()) == count
                inner.cancel_scope.cancel()
        nursery.cancel_scope.cancel()
    assert [len(message.cas) for message in held] == [2], "what is not taken is not said to be held"
    said = capsys.readouterr().out
    assert "holds none of the CAs that this node trusts" in said
    assert "holds no certificates in PEM form" in said
