"""Certificates renewed over the open link, what has expired, and CAs that follow one another: nobody is cut off."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest
import trio
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.agent.identity import NodeIdentity
from llmgw.errors import OperatorError
from llmgw.link import ca, identity, keyfile
from llmgw.link.authority import certificates, fingerprint, new_key, pem, request_for
from llmgw.link.client import connect
from llmgw.link.messages import CertificateIssued, RenewCertificate, TrustBundle, Welcome
from llmgw.link.own import OwnFiles
from llmgw.link.renewal import due_at, renew_at, retry_s
from llmgw.link.session import LinkRefused
from llmgw.server.roots import lacking, needing
from llmgw.settings.daemon import TlsFiles
from tests.link.samples import register
from tests.server.identity_rig import DOMAIN, Node, Plane, plane, until

DAY_S = 86400.0


def serial(node: Node) -> int:
    return node.own.certificate().serial


def test_when_a_certificate_is_renewed() -> None:
    assert renew_at(0, 100, 0.5) == pytest.approx(67)
    spread = [renew_at(0, 100, draw / 10) for draw in range(11)]
    assert min(spread) == pytest.approx(62)
    assert max(spread) == pytest.approx(72)
    assert due_at(0, 86400, 0.5, None) == renew_at(0, 86400, 0.5)
    assert due_at(0, 86400, 0.5, (1000, 60)) == 1030


@given(st.integers(0, 1000), st.floats(0, 1))
def test_a_try_that_failed_is_not_repeated_at_once_nor_given_up(failures: int, draw: float) -> None:
    assert 15 <= retry_s(failures, draw) <= 1800


async def test_it_is_renewed_over_the_open_link_and_the_next_handshake_uses_it(tmp_path: Path) -> None:
    async with plane(tmp_path) as at, trio.open_nursery() as nursery:
        node = Node(at, await at.join(), tmp_path / "state")
        first, key = serial(node), node.own.certificate().key
        nursery.start_soon(node.link.run)
        await until(lambda: node.link.state.connected)
        await trio.sleep(0.3)
        assert serial(node) == first, "not before it is time"
        node.ahead_s = at.ahead_s = 0.75 * DAY_S
        await until(lambda: serial(node) != first)
        renewed = node.own.certificate()
        assert renewed.key != key, "a new key"
        assert renewed.not_after > time.time() + 1.7 * DAY_S
        file = tmp_path / "state/identity/renewed.pem"
        assert file.stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "state/identity").stat().st_mode & 0o777 == 0o700
        await until(lambda: {h.serial for h in at.identities.held()} == {f"{renewed.serial:x}"})
        assert len(node.sessions) == 1, "no session ended for it"
        # Past the first certificate's end: the session goes on, since the node holds a younger one.
        at.ahead_s = node.ahead_s = 1.1 * DAY_S
        at.agents.look_again()
        await trio.sleep(0.1)
        assert node.link.state.connected
        assert len(node.sessions) == 1
        node.sessions[0].close("cut by the test")
        await until(lambda: len(node.sessions) == 2 and node.link.state.connected)
        assert "renewed" in await at.events()
        nursery.cancel_scope.cancel()


async def test_an_agent_that_is_killed_in_the_middle_of_a_renewal_has_lost_nothing(tmp_path: Path) -> None:
    """The control plane has issued; the agent never got it, or has not written it."""
    async with plane(tmp_path) as at:
        tls = await at.join()
        node = Node(at, tls, tmp_path / "state")
        before = serial(node)
        at.ahead_s = 10.0  # a node gets one certificate in five seconds
        async with connect(at.address, node.own.files(), DOMAIN) as session:
            await session.send(register())
            assert isinstance(await session.receive(), Welcome)
            await session.send(RenewCertificate(request_for(new_key())))
            answered = None
            while not isinstance(answered, CertificateIssued):
                answered = await session.receive()
        assert serial(node) == before
        half = tmp_path / "state/identity/.renewed.pem.x"
        half.write_text("half of one")  # what a crash in the middle of the write leaves
        again = Node(at, tls, tmp_path / "state")
        again.ahead_s = at.ahead_s = 0.75 * DAY_S
        async with trio.open_nursery() as nursery:
            nursery.start_soon(again.link.run)
            await until(lambda: serial(again) != before)
            assert again.link.state.connected
            nursery.cancel_scope.cancel()
        with trio.fail_after(2):
            async with connect(at.address, again.own.files(), DOMAIN, wall=again.clock) as session:
                await session.send(register())
                assert isinstance(await session.receive(), Welcome)


async def test_what_expired_may_be_renewed_for_a_week_and_do_nothing_else(tmp_path: Path) -> None:
    async with plane(tmp_path) as at, trio.open_nursery() as nursery:
        tls = at.issue(days=1, now=time.time() - 3 * DAY_S)
        with pytest.raises(LinkRefused, match="validity"):
            await welcomed(at, tls)
        node = Node(at, tls, tmp_path / "state")
        nursery.start_soon(node.link.run)
        await until(lambda: node.link.state.connected)
        assert node.own.certificate().not_after > time.time() + 0.9 * DAY_S
        assert "node.renew-expired" in await at.events()
        nursery.cancel_scope.cancel()


async def renewed(at: Plane, tls: TlsFiles) -> object:
    """What somebody gets who asks for nothing but a new certificate."""
    async with connect(at.address, tls, DOMAIN) as session:
        await session.send(RenewCertificate(request_for(new_key())))
        return await session.receive()


async def test_a_copy_of_an_old_key_does_not_make_itself_young(tmp_path: Path) -> None:
    async with plane(tmp_path) as at, trio.open_nursery() as nursery:
        valid = at.issue(days=1)
        with pytest.raises(LinkRefused, match="wanted a certificate that has expired"):
            await renewed(at, valid)
        old = at.issue(days=1, now=time.time() - 3 * DAY_S)
        node = Node(at, old, tmp_path / "state")
        nursery.start_soon(node.link.run)
        await until(lambda: node.link.state.connected)
        with pytest.raises(LinkRefused, match="that it is connected, with another one") as told:
            await renewed(at, old)
        assert "if this is no copy of yours: llmgw ctl deny serial" in told.value.refused.remedy
        nursery.cancel_scope.cancel()
    async with plane(tmp_path) as at:
        assert not at.agents.connected("n1")
        with pytest.raises(LinkRefused, match=f"that it showed serial {serial(node):x}"):
            await renewed(at, old)
        with pytest.raises(LinkRefused, match="wanted a certificate that has expired"):
            await renewed(at, node.own.files())


async def test_a_clock_that_is_ahead_keeps_nobody_from_connecting(tmp_path: Path) -> None:
    async with plane(tmp_path) as at, trio.open_nursery() as nursery:
        node = Node(at, await at.join(), tmp_path / "state")
        node.ahead_s = 2 * DAY_S
        nursery.start_soon(node.link.run)
        await until(lambda: node.link.state.connected)
        nursery.cancel_scope.cancel()


async def welcomed(at: Plane, tls: TlsFiles) -> None:
    async with connect(at.address, tls, DOMAIN) as session:
        await session.send(register())
        assert isinstance(await session.receive(), Welcome)


@pytest.mark.parametrize(
    ("issuing", "expired_days", "age_days", "said", "remedy"),
    [
        (True, 7.0, 9, "expired at most 7 days ago", "llmgw ctl token create --node n1"),
        (True, 0.0, 2, "a certificate that is valid", "llmgw ctl token create --node n1"),
        (False, 7.0, 2, "a certificate that is valid", "have one issued, as the first one was"),
    ],
)
async def test_what_may_not_be_renewed_is_told_so(
    tmp_path: Path, issuing: bool, expired_days: float, age_days: int, said: str, remedy: str
) -> None:
    async with plane(tmp_path, issuing=issuing, expired_days=expired_days) as at, trio.open_nursery() as nursery:
        node = Node(at, at.issue(days=1, now=time.time() - age_days * DAY_S), tmp_path / "state")
        nursery.start_soon(node.link.run)
        await until(lambda: node.link.state.refused is not None)
        told = node.link.state.refused
        assert told is not None
        assert told.claim == "validity"
        assert said in told.wanted
        assert remedy in told.remedy
        nursery.cancel_scope.cancel()


async def test_who_is_denied_renews_nothing_however_late(tmp_path: Path) -> None:
    async with plane(tmp_path) as at:
        await at.identities.deny("node", "n1", "stolen", "test")
        tls = at.issue(days=1, now=time.time() - 2 * DAY_S)
        with pytest.raises(LinkRefused, match="denied: stolen"):
            await renewed(at, tls)


async def test_a_denied_key_gets_no_certificate_and_a_renewal_washes_nothing_off(tmp_path: Path) -> None:
    async with plane(tmp_path) as at, trio.open_nursery() as nursery:
        node = Node(at, await at.join(), tmp_path / "state")
        old = node.own.certificate()
        nursery.start_soon(node.link.run)
        await until(lambda: node.link.state.connected)
        node.ahead_s = at.ahead_s = 0.75 * DAY_S
        await until(lambda: serial(node) != old.serial)
        await until(lambda: at.identities.held()[0].serial == f"{serial(node):x}")
        await at.identities.deny("key", old.key, "copied", "test")
        await until(lambda: node.link.state.refused is not None or len(node.sessions) > 1)
        assert "denied: copied" in node.states[1].reason
        # With the new one it gets in: that the old key was copied says nothing of the new one.
        await until(lambda: node.link.state.connected)
        nursery.cancel_scope.cancel()


async def test_without_an_issuing_key_renewal_is_off_and_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with plane(tmp_path, issuing=False) as at, trio.open_nursery() as nursery:
        node = Node(at, at.issue(days=1), tmp_path / "state")
        before = serial(node)
        nursery.start_soon(node.link.run)
        await until(lambda: node.link.state.connected)
        node.ahead_s = at.ahead_s = 0.75 * DAY_S
        await trio.sleep(0.3)
        assert serial(node) == before
        nursery.cancel_scope.cancel()
    said = capsys.readouterr().out
    assert "joining and renewal are off" in said
    assert "certificates are not renewed over the link" in said


async def test_a_node_is_not_given_one_certificate_after_the_other(tmp_path: Path) -> None:
    from llmgw.link.messages import RenewalRefused

    async with plane(tmp_path) as at:
        async with connect(at.address, await at.join(), DOMAIN) as session:
            await session.send(register())
            for _ in range(3):
                await session.send(RenewCertificate(request_for(new_key())))
            seen: list[type] = []
            while seen.count(RenewalRefused) < 3:  # it has joined a moment ago
                seen.append(type(await session.receive()))
            assert CertificateIssued not in seen
        expired = at.issue(days=1, now=time.time() - 3 * DAY_S, node="n2")
        assert isinstance(await renewed(at, expired), CertificateIssued)
        with pytest.raises(LinkRefused, match=r"refused because of the renewal: .* it was renewed a moment ago"):
            await renewed(at, expired)


async def test_of_many_requests_at_once_one_is_granted(tmp_path: Path) -> None:
    async with plane(tmp_path) as at:
        expired = at.issue(days=1, now=time.time() - 3 * DAY_S)
        outcomes: list[str] = []

        async def one() -> None:
            try:
                outcomes.append(type(await renewed(at, expired)).__name__)
            except LinkRefused as refused:
                outcomes.append(refused.refused.claim)

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(one)
        assert sorted(outcomes) == ["CertificateIssued", *["renewal"] * 5]


# One CA after the other


async def test_one_ca_follows_another_and_no_session_ends(tmp_path: Path) -> None:
    async with plane(tmp_path) as at, trio.open_nursery() as nursery:
        node = Node(at, await at.join(), tmp_path / "state")
        nursery.start_soon(node.link.run)
        await until(lambda: node.link.state.connected)
        old = ca.active(tmp_path / "ca")
        await _ca_acts(at, 2)

        new = ca.add_generation(tmp_path / "ca", time.time())
        assert ca.add_generation(tmp_path / "ca", time.time()) == new, "begun once"
        ca.add_to_bundle(tmp_path / "server/ca.pem", new.root)
        await until(lambda: [fingerprint(c) for c in node.own.cas()] == [old.sha256, new.sha256])
        await until(lambda: not lacking(new.sha256, at.identities.standings(), at.clock(), 0))
        assert [n.node for n in needing(old.sha256, at.identities.standings(), at.clock(), 0)] == ["n1"]

        at.ahead_s = node.ahead_s = 10.0  # a node gets one certificate in five seconds
        ca.activate(tmp_path / "ca", new.number)
        ca.reissue_server(tmp_path / "ca", tmp_path / "server/cert.pem", time.time())
        await until(lambda: at.identities.issuing_root == new.sha256 == at.identities.anchor)
        await until(lambda: "llmgw issuing CA test.llmgw 2" in node.own.certificate().issuer)
        await until(lambda: not needing(old.sha256, at.identities.standings(), at.clock(), 0))

        ca.remove_from_bundle(tmp_path / "server/ca.pem", old.sha256)
        await until(lambda: [fingerprint(c) for c in node.own.cas()] == [new.sha256])
        assert len(node.sessions) == 1
        assert node.link.state.connected
        node.sessions[0].close("cut by the test")
        await until(lambda: len(node.sessions) == 2 and node.link.state.connected)
        told = [
            ("ca.trust", old.sha256), ("ca.issue", old.sha256), ("ca.trust", new.sha256), ("ca.issue", new.sha256),
            ("ca.retire", old.sha256),
        ]  # fmt: skip
        assert await _ca_acts(at, len(told)) == told
        assert {row.by for row in await at.store.audit(100) if row.action.startswith("ca.")} == {"server localhost"}
        nursery.cancel_scope.cancel()
    third = ca.add_generation(tmp_path / "ca", time.time())
    ca.add_to_bundle(tmp_path / "server/ca.pem", third.root)
    async with plane(tmp_path) as at:  # what changed while it was down, and nothing twice
        assert await _ca_acts(at, len(told) + 1) == [*told, ("ca.trust", third.sha256)]


async def _ca_acts(at: Plane, count: int) -> list[tuple[str, str]]:
    with trio.fail_after(5):
        while len(acts := await at.store.identities.ca_acts()) < count:
            await trio.sleep(0.01)
    return [(act.kind, act.node) for act in acts]


async def test_a_certificate_that_was_not_issued_here_is_written_down(tmp_path: Path) -> None:
    """Whoever has the issuing key can make one for any node; it does not go unseen."""
    async with plane(tmp_path) as at:
        await welcomed(at, await at.join())
        forged = at.issue()
        await welcomed(at, forged)
        await welcomed(at, forged)
        at.identities.wake()
        with trio.fail_after(5):
            while "shown" not in await at.events():
                await trio.sleep(0.01)
        (event,) = [e for e in await at.identities.events(100) if e.kind == "shown"]
        assert (event.node, event.by.rpartition(":")[0]) == ("n1", "127.0.0.1")
        (leaf, *_) = certificates(Path(forged.certificate).read_bytes(), forged.certificate)
        assert identity.read(leaf).key in event.detail


async def test_whose_root_is_retired_is_refused_where_it_is_connected(tmp_path: Path) -> None:
    """By hand, without asking who needs it: the session ends with the reason, it does not linger."""
    async with plane(tmp_path, issuing=False) as at, trio.open_nursery() as nursery:
        node = Node(at, at.issue(), tmp_path / "state")
        nursery.start_soon(node.link.run)
        await until(lambda: node.link.state.connected)
        ca.init(tmp_path / "other", DOMAIN, time.time())
        ca.issue_server(tmp_path / "other", ("localhost",), tmp_path / "next", 1, time.time())
        for name in ("key.pem", "cert.pem", "ca.pem"):
            (tmp_path / "next" / name).replace(tmp_path / "server" / name)
        at.identities.wake()
        await until(lambda: len(node.states) > 1)  # the next try ends in the handshake, and says less
        assert node.states[1].refused is not None
        assert node.states[1].refused.claim == "issuer"
        assert "still trusted" in node.states[1].refused.wanted
        assert len(node.own.cas()) == 1, "a bundle that shares nothing with the old one is not taken"
        nursery.cancel_scope.cancel()


async def test_files_that_cannot_be_used_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with plane(tmp_path) as at:
        tls = await at.join()
        whole = (tmp_path / "server/cert.pem").read_bytes()
        (tmp_path / "server/cert.pem").write_bytes(whole[:500])
        at.identities.wake()
        await trio.sleep(0.3)
        await welcomed(at, tls)
        assert "what was read before stays in use" in capsys.readouterr().out
        keyfile.replace(tmp_path / "server/cert.pem", whole, 0o644)
        at.identities.wake()
        await trio.sleep(0.3)
        assert "certificates read again" in capsys.readouterr().out
        await welcomed(at, tls)


async def test_the_servers_certificate_is_read_again_without_a_restart(tmp_path: Path) -> None:
    async with plane(tmp_path) as at, trio.open_nursery() as nursery:
        node = Node(at, await at.join(), tmp_path / "state")
        nursery.start_soon(node.link.run)
        await until(lambda: node.link.state.connected)
        before = node.sessions[0].chain[0].serial
        ca.reissue_server(tmp_path / "ca", tmp_path / "server/cert.pem", time.time())
        await until(lambda: at.identities.own.serial != before)
        assert node.link.state.connected
        assert len(node.sessions) == 1
        node.sessions[0].close("cut by the test")
        await until(lambda: len(node.sessions) == 2 and node.link.state.connected)
        assert node.sessions[1].chain[0].serial == at.identities.own.serial
        nursery.cancel_scope.cancel()


async def test_a_bundle_comes_after_the_welcome_and_is_answered(tmp_path: Path) -> None:
    async with plane(tmp_path) as at:
        async with connect(at.address, at.issue(), DOMAIN) as session:
            await session.send(register())
            assert isinstance(await session.receive(), Welcome)
            bundle = await session.receive()
            assert isinstance(bundle, TrustBundle)
            assert (bundle.renewal, bundle.renew_within_s) == (True, None)
            assert bundle.certificates == (tmp_path / "server/ca.pem").read_text()


# The files of a node


def test_what_the_operator_puts_there_counts_again(tmp_path: Path) -> None:
    ca.init(tmp_path / "ca", DOMAIN, time.time())
    tls = ca.issue_node(tmp_path / "ca", "n1", tmp_path / "one", 1, time.time())
    (tmp_path / "state").mkdir(mode=0o700)
    own = OwnFiles(tls, tmp_path / "state")
    assert own.files() == tls
    issuer, key = ca.load(tmp_path / "ca"), new_key()
    leaf = issuer.node("n1", key.public_key(), 3600, time.time())
    own.renewed(issuer.chain(leaf).decode(), key)
    assert own.certificate() == identity.read(leaf)
    ca.init(tmp_path / "other", DOMAIN, time.time())
    both = (tmp_path / "ca/root.pem").read_text() + (tmp_path / "other/root.pem").read_text()
    assert own.trust(both)
    assert not own.trust(both)
    assert len(own.cas()) == 2
    again = ca.issue_node(tmp_path / "ca", "n1", tmp_path / "two", 1, time.time())
    for name in ("key.pem", "cert.pem"):
        (tmp_path / "two" / name).replace(tmp_path / "one" / name)
    assert own.files().certificate == tls.certificate
    assert len(own.cas()) == 2
    (tmp_path / "one/ca.pem").write_bytes(pem(issuer.root) + b"\n")
    assert own.files() == tls
    assert again.certificate != tls.certificate


def test_the_folder_of_an_identity_is_private(tmp_path: Path) -> None:
    ca.init(tmp_path / "ca", DOMAIN, time.time())
    tls = ca.issue_node(tmp_path / "ca", "n1", tmp_path / "one", 1, time.time())
    (tmp_path / "state").mkdir(mode=0o700)
    own = OwnFiles(tls, tmp_path / "state")
    assert own.installation() == own.installation()
    own.check()
    (tmp_path / "state/identity").chmod(0o755)
    with pytest.raises(OperatorError, match=r"identity: has mode 0755.*chmod 700"):
        NodeIdentity("n1", DOMAIN, own, time.time, random.Random(1))
    with pytest.raises(OperatorError, match=r"identity: has mode 0755.*chmod 700"):
        own.trust((tmp_path / "ca/root.pem").read_text() + certificates_of(tmp_path))


def test_an_agent_does_not_start_with_a_key_that_others_can_read(tmp_path: Path) -> None:
    ca.init(tmp_path / "ca", DOMAIN, time.time())
    tls = ca.issue_node(tmp_path / "ca", "n1", tmp_path / "one", 1, time.time())
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "link.pem").symlink_to(tls.key)
    Path(tls.key).chmod(0o640)
    for named in (tls, evolve(tls, key=str(tmp_path / "link.pem"))):
        with pytest.raises(OperatorError, match=r"has mode 0640.*chmod 600"):
            NodeIdentity("n1", DOMAIN, OwnFiles(named, tmp_path / "state"), time.time, random.Random(1))


async def test_a_key_that_is_opened_while_the_agent_runs_is_named_with_its_fix(tmp_path: Path) -> None:
    async with plane(tmp_path) as at, trio.open_nursery() as nursery:
        node = Node(at, at.issue(), tmp_path / "state")
        Path(node.own.files().key).chmod(0o644)
        nursery.start_soon(node.link.run)
        await until(lambda: bool(node.states))
        assert re.fullmatch(r"/\S+/key.pem has mode 0644, and 0600 is the widest that is safe", node.states[0].reason)
        assert node.states[0].remedy.startswith("run: chmod 600 /")
        Path(node.own.files().key).chmod(0o600)
        await until(lambda: node.link.state.connected)
        nursery.cancel_scope.cancel()


def test_a_disk_that_is_full_keeps_no_agent_from_starting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ca.init(tmp_path / "ca", DOMAIN, time.time())
    tls = ca.issue_node(tmp_path / "ca", "n1", tmp_path / "one", 1, time.time())
    node = NodeIdentity("n1", DOMAIN, OwnFiles(tls, tmp_path / "nowhere"), time.time, random.Random(1))
    assert node.installation == ""
    assert "cannot be told from a copy" in capsys.readouterr().out


def certificates_of(folder: Path) -> str:
    ca.init(folder / "more", DOMAIN, time.time())
    (root,) = certificates((folder / "more/root.pem").read_bytes(), "")
    return pem(root).decode()
