"""Every way to be refused, over real TLS: within a second, and each in its own words."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trio
from attrs import evolve
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llmgw.link import ca, identity
from llmgw.link.authority import certificates, fingerprint, key_pem, new_key
from llmgw.link.client import connect
from llmgw.link.messages import Refused, Welcome
from llmgw.link.session import LinkRefused, PeerGone
from llmgw.settings.daemon import TlsFiles
from llmgw.store.identity import DenyRow, Event
from tests.link.samples import register
from tests.server.identity_rig import DOMAIN, Node, Plane, plane, until

NODE_1 = x509.UniformResourceIdentifier(identity.node_uri(DOMAIN, "n1"))
DAY_S = 86400.0


def forged(
    at: Plane, names: Sequence[x509.GeneralName] | None = (NODE_1,), usage: x509.ObjectIdentifier | None = ExtendedKeyUsageOID.CLIENT_AUTH
) -> TlsFiles:  # fmt: skip
    """A certificate that the CA would never issue."""
    issuer, key = ca.load(at.folder / "ca"), new_key()
    now = datetime.now(UTC)  # noqa: TID251
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "n1")]))
        .issuer_name(issuer.issuing.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    )
    if names is not None:
        made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if usage is not None:
        made = made.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    out = at.folder / f"forged-{random.getrandbits(40):x}"
    out.mkdir()
    (out / "key.pem").write_bytes(key_pem(key))
    (out / "key.pem").chmod(0o600)
    (out / "cert.pem").write_bytes(issuer.chain(made.sign(issuer.issuing.key, hashes.SHA256())))
    return TlsFiles(str(out / "cert.pem"), str(out / "key.pem"), str(at.folder / "server/ca.pem"))


async def refused(at: Plane, tls: TlsFiles, node: str = "n1") -> Refused:
    async def knock() -> None:
        async with connect(at.address, tls, DOMAIN) as session:
            await session.send(evolve(register(node), clock=time.time()))
            await session.receive()

    began = trio.current_time()
    with pytest.raises(LinkRefused) as told:
        await knock()
    assert trio.current_time() - began < 1
    said = told.value.refused
    leaf = identity.read(certificates(Path(tls.certificate).read_bytes(), "")[0])
    assert said.certificate == str(leaf)
    for part in (leaf.subject, f"serial {leaf.serial:x}", leaf.issuer, *leaf.names, "valid "):
        assert part in said.certificate
    assert said.wanted
    assert said.found
    assert said.remedy
    return said


def _expired(at: Plane) -> TlsFiles:
    return at.issue(days=1, now=time.time() - 3 * DAY_S)


def _early(at: Plane) -> TlsFiles:
    return at.issue(now=time.time() + 2 * DAY_S)


def _foreign(at: Plane) -> TlsFiles:
    ca.init(at.folder / "foreign", DOMAIN, time.time())
    made = ca.issue_node(at.folder / "foreign", "n1", at.folder / "stranger", 1, time.time())
    return evolve(made, ca=str(at.folder / "server/ca.pem"))


def _servers(at: Plane) -> TlsFiles:
    return TlsFiles(*(str(at.folder / "server" / name) for name in ("cert.pem", "key.pem", "ca.pem")))


CASES: dict[str, tuple[Callable[[Plane], TlsFiles], str, tuple[str, ...]]] = {
    "expired": (_expired, "validity", ("control plane's clock", "it expired 2 d 0 h ago", "llmgw ca issue --node n1")),
    "not yet valid": (_early, "validity", ("early: compare the clocks of the CA's machine",)),
    "no use": (lambda at: forged(at, usage=None), "usage", ("clientAuth", "no extended key usage")),
    "wrong use": (
        lambda at: forged(at, usage=ExtendedKeyUsageOID.CODE_SIGNING), "usage", ("a certificate for 1.3.6.1.5.5.7.3.3",)
    ),
    "a server's": (_servers, "usage", ("a control plane's certificate for serverAuth", "llmgw agent join")),
    "two names": (lambda at: forged(at, (NODE_1, x509.DNSName("n1"))), "identity", ("exactly one name", "DNS:n1")),
    "two of a kind": (
        lambda at: forged(at, (NODE_1, x509.UniformResourceIdentifier("spiffe://test.llmgw/llmgw/node/n2"))), "identity",
        ("exactly one name", "node/n1, URI:spiffe"),
    ),
    "a common name only": (lambda at: forged(at, None), "identity", ("the common name is not read",)),
    "another trust domain": (
        lambda at: forged(at, (x509.UniformResourceIdentifier("spiffe://other/llmgw/node/n1"),)), "identity",
        ("spiffe://test.llmgw/llmgw/node/ID", "spiffe://other/llmgw/node/n1"),
    ),
    "a control plane's name": (
        lambda at: forged(at, (x509.UniformResourceIdentifier("spiffe://test.llmgw/llmgw/server/n1"),)), "identity",
        ("llmgw/server/n1",),
    ),
    "another node": (lambda at: at.issue("n2"), "node id", ("set id: n2 in agent.yaml",)),
    "a foreign CA": (_foreign, "issuer", ("which is none of the pinned ones", "TLS alert 'unknown ca'", "pinned on this node")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
async def test_each_refusal_in_its_own_words(tmp_path: Path, case: str) -> None:
    make, claim, words = CASES[case]
    async with plane(tmp_path) as at:
        said = await refused(at, make(at))
        assert said.claim == claim
        for word in words:
            assert word in " ".join((said.wanted, said.found, said.remedy))


def test_no_two_of_them_say_the_same() -> None:
    assert len({(claim, words) for _, claim, words in CASES.values()}) == len(CASES)


async def test_a_foreign_ca_is_printed_beside_the_pinned_one_and_the_control_plane_logs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with plane(tmp_path) as at:
        tls = _foreign(at)
        said = await refused(at, tls)
        (pinned,) = certificates((tmp_path / "server/ca.pem").read_bytes(), "")
        issuing = certificates(Path(tls.certificate).read_bytes(), "")[1]
        assert fingerprint(issuing) in said.found
        assert fingerprint(pinned) in said.wanted
    logged = next(line for line in capsys.readouterr().out.splitlines() if "connection not served" in line)
    assert "unable to get local issuer certificate" in logged
    assert "remote=127.0.0.1:" in logged


@pytest.mark.parametrize("kind", ["node", "serial", "key", "the issuing CA's serial"])
async def test_who_is_denied_is_refused_and_let_in_again(tmp_path: Path, kind: str) -> None:
    async with plane(tmp_path) as at:
        tls = at.issue()
        leaf, issuing = (identity.read(c) for c in certificates(Path(tls.certificate).read_bytes(), ""))
        value = {"node": "n1", "serial": f"0x{leaf.serial:X}", "key": leaf.key}.get(kind, f"{issuing.serial:x}")
        kind = kind if kind in ("node", "key") else "serial"
        await at.identities.deny(kind, value, "the laptop was stolen", "test")
        said = await refused(at, tls)
        assert said.claim == "deny list"
        assert "denied: the laptop was stolen" in said.found
        assert said.remedy.startswith(f"if that is over: llmgw ctl deny lift {kind} ")
        await at.identities.lift(kind, value, "test")
        async with connect(at.address, tls, DOMAIN) as session:
            await session.send(register())
            assert isinstance(await session.receive(), Welcome)


async def test_who_is_not_on_the_allow_list(tmp_path: Path) -> None:
    async with plane(tmp_path, issuing=False, nodes=("n2",)) as at:
        said = await refused(at, at.issue("n1"))
        assert (said.claim, said.found) == ("allow-list", "n1")
        async with connect(at.address, at.issue("n2"), DOMAIN) as session:
            await session.send(register("n2"))
            assert isinstance(await session.receive(), Welcome)


@pytest.mark.parametrize(
    ("ahead_s", "claim", "said"),
    [
        (-3600.0, "validity", "this node's clock is 1 h 0 min ahead of the control plane's"),
        (-DAY_S, "validity", "this node's clock is 1 d 0 h ahead of the control plane's"),
        (DAY_S + 60, "validity", "this node's clock is 1 d 0 h behind the control plane's"),
    ],
)
async def test_a_control_planes_clock_that_is_off_is_named(
    tmp_path: Path, ahead_s: float, claim: str, said: str
) -> None:
    async with plane(tmp_path) as at:
        tls = at.issue()
        at.ahead_s = ahead_s
        told = await refused(at, tls)
        assert told.claim == claim
        assert said in told.found
        assert told.remedy.startswith("set the clocks right")
        assert said in told.remedy


async def test_an_hour_that_does_no_harm_is_let_pass(tmp_path: Path) -> None:
    async with plane(tmp_path) as at:
        tls = at.issue()
        at.ahead_s = 3600.0
        async with connect(at.address, tls, DOMAIN) as session:
            await session.send(evolve(register(), clock=time.time()))
            assert isinstance(await session.receive(), Welcome)


@pytest.mark.parametrize(
    ("ahead_s", "apart", "way"),
    [
        (-3600.0, r"5[45] min \d+ s too early", "behind"),
        (-DAY_S, r"23 h 5[45] min too early", "behind"),
        (31 * DAY_S, r"1 d 0 h too late", "ahead"),
    ],
)
async def test_a_nodes_own_clock_that_is_off_is_named(tmp_path: Path, ahead_s: float, apart: str, way: str) -> None:
    async with plane(tmp_path) as at:
        began = trio.current_time()
        with pytest.raises(PeerGone, match=f"this node's clock says .*: {apart}") as told:
            async with connect(at.address, at.issue(), DOMAIN, wall=lambda: time.time() + ahead_s):
                pass
        assert trio.current_time() - began < 1
        assert re.search(rf"compare this node's clock .* it may be .* {way}", told.value.remedy)


# Live sessions


async def test_a_denied_nodes_session_ends_within_a_second_with_a_refusal(tmp_path: Path) -> None:
    async with plane(tmp_path) as at, trio.open_nursery() as nursery:
        node = Node(at, await at.join(), tmp_path / "state")
        nursery.start_soon(node.link.run)
        await until(lambda: node.link.state.connected)
        began = time.monotonic()
        await at.identities.deny("node", "n1", "stolen", "test")
        await until(lambda: not node.link.state.connected)
        assert time.monotonic() - began < 1
        told = node.link.state.refused
        assert told is not None
        assert (told.claim, told.found) == ("deny list", "node n1, denied: stolen")
        assert not at.agents.connected("n1")
        await trio.sleep(0.3)
        refusals = [state for state in node.states if state.refused is not None]
        assert len(refusals) == 1, "once a change, not once a try"
        assert len(node.sessions) > 2, "and it goes on trying"
        await at.identities.lift("node", "n1", "test")
        await until(lambda: node.link.state.connected)
        nursery.cancel_scope.cancel()


async def test_what_another_control_plane_denies_holds_here_too(tmp_path: Path) -> None:
    async with plane(tmp_path) as at, trio.open_nursery() as nursery:
        node = Node(at, await at.join(), tmp_path / "state")
        nursery.start_soon(node.link.run)
        await until(lambda: node.link.state.connected)
        event = Event(0.0, "node.deny", "n1", "elsewhere", "")
        await at.store.identities.deny(DenyRow("node", "n1", "stolen", "elsewhere", 0.0), event)
        await until(lambda: node.link.state.refused is not None)
        nursery.cancel_scope.cancel()


async def test_a_control_plane_says_in_time_that_its_own_certificate_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with plane(tmp_path) as at:
        said = []
        for ahead_days in (20.0, 23.0, 23.5, 24.5):  # of 30
            at.ahead_s = ahead_days * DAY_S
            at.identities.wake()
            await trio.sleep(0.1)
            said.append(capsys.readouterr().out.count("our own certificate ends soon"))
        assert said == [0, 1, 0, 1], "once a day"


async def test_a_session_ends_with_its_certificate(tmp_path: Path) -> None:
    async with plane(tmp_path, issuing=False) as at, trio.open_nursery() as nursery:
        now = time.time()
        node = Node(at, at.issue(days=1, now=now - DAY_S + 3.0), tmp_path / "state")
        nursery.start_soon(node.link.run)
        await until(lambda: node.link.state.connected)
        await until(lambda: not node.link.state.connected)
        told = node.link.state.refused
        assert told is not None
        assert told.claim == "validity"
        assert 1.5 < time.time() - now < 4.5
        nursery.cancel_scope.cancel()


async def test_one_certificate_on_two_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second is refused and says who has it; the first is not disturbed, however often the second tries."""
    async with plane(tmp_path) as at, trio.open_nursery() as nursery:
        tls = await at.join()
        first = Node(at, tls, tmp_path / "first", boot_id="boot-one")
        nursery.start_soon(first.link.run)
        await until(lambda: first.link.state.connected)
        second = Node(at, tls, tmp_path / "second", boot_id="boot-two")
        nursery.start_soon(second.link.run)
        await until(lambda: len(second.sessions) >= 5)
        told = second.link.state.refused
        assert told is not None
        assert told.claim == "one agent a node"
        assert "connected from 127.0.0.1:" in told.found
        assert "(boot id boot-one); this one is on boot id boot-two" in told.found
        assert "llmgw ctl deny node n1" in told.remedy
        assert len(first.sessions) == 1, "no flapping"
        assert first.link.state.connected
        assert len(second.states) == 1
        at.identities.wake()  # events of refusals are written together
        with trio.fail_after(3):
            while "refused" not in (events := await at.events()):
                await trio.sleep(0.05)
        assert events.count("refused") == 1
        logged = [line for line in capsys.readouterr().out.splitlines() if "a second agent of one node" in line]
        assert len(logged) == 1, "at a change, not at every try"
        # A copy on the same machine, with a state folder of its own, is a second agent as well.
        third = Node(at, tls, tmp_path / "third", boot_id="boot-one")
        nursery.start_soon(third.link.run)
        await until(lambda: third.link.state.refused is not None)
        assert "with the state folder" in capsys.readouterr().out, "another one is news"
        assert first.link.state.connected
        nursery.cancel_scope.cancel()


async def test_the_same_agent_takes_its_session_over_at_once(tmp_path: Path) -> None:
    """Killed and started again, its old connection still open at the control plane."""
    async with plane(tmp_path) as at, trio.open_nursery() as nursery:
        tls = await at.join()
        old = Node(at, tls, tmp_path / "state")
        nursery.start_soon(old.link.run)
        await until(lambda: old.link.state.connected)
        new = Node(at, tls, tmp_path / "state")
        began = time.monotonic()
        nursery.start_soon(new.link.run)
        await until(lambda: new.link.state.connected)
        assert time.monotonic() - began < 1
        nursery.cancel_scope.cancel()


async def test_a_session_that_is_taken_over_from_elsewhere_is_written_down(tmp_path: Path) -> None:
    async with plane(tmp_path) as at:
        at.identities.taken_over("n1", "10.0.0.1:5", "10.0.0.1:6")
        at.identities.taken_over("n1", "10.0.0.1:6", "10.0.0.9:5")
        at.identities.wake()
        with trio.fail_after(3):
            while not (events := await at.identities.events(9)):
                await trio.sleep(0.05)
        (event,) = events
        assert (event.kind, event.by) == ("taken-over", "10.0.0.9:5")
        assert "the session of 10.0.0.1:6" in event.detail


async def test_when_the_first_is_gone_the_second_gets_in(tmp_path: Path) -> None:
    async with plane(tmp_path) as at, trio.open_nursery() as nursery:
        tls = await at.join()
        first, second = (Node(at, tls, tmp_path / name, boot_id=name) for name in ("one", "two"))
        async with trio.open_nursery() as alone:
            alone.start_soon(first.link.run)
            await until(lambda: first.link.state.connected)
            nursery.start_soon(second.link.run)
            await until(lambda: second.link.state.refused is not None)
            alone.cancel_scope.cancel()
        await until(lambda: second.link.state.connected)
        nursery.cancel_scope.cancel()


async def test_a_refusal_is_written_down_once_a_change_and_seldom_whatever_is_claimed(tmp_path: Path) -> None:
    async with plane(tmp_path) as at:

        def tries(node: str, certificate: str, remote: str = "10.0.0.1:1") -> None:
            at.identities.turned_away(remote, node, Refused("node id", node, node, certificate, ""))

        for port in range(3):
            tries("n1", "serial 1", f"10.0.0.1:{port}")
        for number in range(2, 20):
            tries(f"n{number}", "serial 1")
        tries("n1", "serial 2")
        tries("n1", "serial 2", "10.0.0.2:1")
        with trio.fail_after(20):
            while at.identities._events:
                await trio.sleep(0.05)
        told = [(event.node, event.by) for event in await at.identities.events(100) if event.kind == "refused"]
        first = [("n1", "10.0.0.1:0"), *((f"n{number}", "10.0.0.1:1") for number in range(2, 11))]
        others = [("n1", "10.0.0.1:1"), ("n1", "10.0.0.2:1")]
        assert sorted(told) == sorted([*first, *others]), "one certificate ten times, another, and from elsewhere"
