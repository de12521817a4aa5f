"""A stop works wherever it comes: cancelled at every point of connecting, shaking hands, serving and closing."""

from __future__ import annotations

import random
from contextlib import suppress
from functools import partial

import pytest
import trio
import trio.testing

from fakes.fleet.store import Disk, MemoryStore
from llmgw.errors import PeerError
from llmgw.link.attend import attend
from llmgw.link.client import connect
from llmgw.link.crowd import Crowd
from llmgw.link.messages import ForgetShard, Heartbeat, NotUnderstood, Register
from llmgw.link.patience import LinkLimits
from llmgw.link.protocol import Ended, LinkProtocol, Role
from llmgw.link.server import serve
from llmgw.link.session import PeerGone, Session, open_session, turn_away
from llmgw.link.tls import TlsError, client_context, handshake, server_context
from llmgw.server.agents import Agents
from llmgw.server.cluster import Cluster
from llmgw.settings.daemon import Address, LinkListener
from llmgw.settings.document import Liveness, Settings
from tests.agent.links import Rig
from tests.link.samples import REFUSED, TRUST_DOMAIN, WELCOME, Pki, register
from tests.sweep import sweep

LARGE = NotUnderstood("x" * 90_000)
"""More than what a small window lets through, so that both ends wait for each other in the middle of it."""

NARROW = LinkLimits(window_bytes=65_535, unsent_bytes=10_000)


async def talk(session: Session, _: Register) -> None:
    await session.send(WELCOME)
    assert await session.receive() == LARGE
    await session.send(LARGE)
    with suppress(PeerGone):
        await session.receive()


async def ask(session: Session) -> None:
    await session.send(register())
    assert await session.receive() == WELCOME
    await session.send(LARGE)
    assert await session.receive() == LARGE
    await session.send(Heartbeat(1))


def test_every_point_of_a_life_with_tls(pki: Pki) -> None:
    """Memory streams: the whole of it, TLS included, on a virtual clock."""
    ours_tls, theirs_tls = client_context(pki.node()), server_context(pki.server)

    async def scenario() -> None:
        ours, theirs = trio.testing.memory_stream_pair()

        async def control_plane() -> None:
            stream = trio.SSLStream(theirs, theirs_tls, server_side=True)
            try:
                await handshake(stream, "agent", 5)  # type: ignore[arg-type]
                await attend(stream, talk, lambda _: None, peer="n1", remote="memory", limits=NARROW)
            except PeerError:
                await trio.aclose_forcefully(stream)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(control_plane)
            stream = trio.SSLStream(ours, ours_tls, server_hostname="localhost")
            await handshake(stream, "control plane", 5)  # type: ignore[arg-type]
            async with open_session(stream, Role.AGENT, peer="s", remote="memory", limits=NARROW) as session:
                await ask(session)

    points = sweep(scenario)
    tasks = {p.site.split()[0] for p in points}
    assert len(points) > 150
    assert len(tasks) > 1, "tasks of both ends and of the session were stopped"


async def rejected(stream: trio.abc.Stream) -> None:
    async with open_session(stream, Role.AGENT, peer="s", remote="memory") as session:
        await session.send(register())
        await session.receive()


def test_every_point_of_a_refusal() -> None:
    async def scenario() -> None:
        ours, theirs = trio.testing.memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(attend, theirs, talk, lambda _: REFUSED, peer="n1", remote="memory"))
            with pytest.raises(PeerError, match="wanted n1"):
                await rejected(ours)

    assert len(sweep(scenario)) > 50


def test_every_point_of_a_handshake_that_fails(pki: Pki) -> None:
    """A foreign CA: the control plane's alert is flushed, and the agent hears it in place of its first bytes."""
    ours_tls, theirs_tls = client_context(pki.node(authority="foreign")), server_context(pki.server)

    async def scenario() -> None:
        ours, theirs = trio.testing.memory_stream_pair()

        async def control_plane() -> None:
            stream = trio.SSLStream(theirs, theirs_tls, server_side=True)
            with pytest.raises(TlsError, match="its certificate is not acceptable"):
                await handshake(stream, "agent", 5)  # type: ignore[arg-type]
            await trio.aclose_forcefully(stream)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(control_plane)
            stream = trio.SSLStream(ours, ours_tls, server_hostname="localhost")
            await handshake(stream, "control plane", 5)  # type: ignore[arg-type]
            with pytest.raises(PeerGone, match="unknown ca"):
                await rejected(stream)

    assert len(sweep(scenario)) > 50


def test_every_point_of_being_turned_away() -> None:
    async def scenario() -> None:
        ours, theirs = trio.testing.memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(turn_away, theirs, "this address has too many")
            with pytest.raises(PeerGone, match="this address has too many"):
                await rejected(ours)

    assert len(sweep(scenario)) > 20


def test_every_point_of_waiting_for_a_place() -> None:
    """Nobody who is stopped keeps a place, wherever it was."""

    async def scenario() -> None:
        crowd = Crowd(1)

        async def comes(number: int) -> None:
            async with crowd.one_more(f"10.0.0.1:{number}") as place:
                assert place is not None
                with place.scope:
                    await trio.sleep(2)

        try:
            async with trio.open_nursery() as nursery:
                for number in range(3):
                    nursery.start_soon(comes, number)
        finally:
            assert not len(crowd)

    assert len(sweep(scenario)) > 10


async def life_over_sockets(pki: Pki) -> None:
    async with trio.open_nursery() as nursery:
        config = LinkListener(pki.server, Address("127.0.0.1", 0), trust_domain=TRUST_DOMAIN)
        (address,) = await nursery.start(partial(serve, config, talk, limits=NARROW))
        async with connect(address, pki.node(), TRUST_DOMAIN, limits=NARROW) as session:
            await ask(session)
        nursery.cancel_scope.cancel()


def test_points_of_a_life_over_sockets(pki: Pki) -> None:
    """Real TLS over real sockets, both daemons' own code from dial and accept to close."""

    points = sweep(partial(life_over_sockets, pki), stride=5, real_clock=True)
    assert len(points) > 30


@pytest.mark.soak
def test_every_point_of_a_life_over_sockets(pki: Pki) -> None:
    points = sweep(partial(life_over_sockets, pki), real_clock=True)
    print(f"\n{len(points)} points over sockets, {max(p.took_s for p in points):.2f} s at most")
    assert len(points) > 150


def test_every_point_of_both_daemons_ends_of_the_link() -> None:
    """The agent's own loop and the control plane's own service: dial, register, beats, a command, an end, and again."""
    settings = Settings(models=(), liveness=Liveness(heartbeat_s=0.5))

    async def scenario() -> None:
        store = MemoryStore(Disk(), random.Random(1))
        cluster = Cluster(
            cluster="c", epoch=1, settings=settings, nodes=(), replicas=(), next_serial=1, unplaced=(),
            started=0.0, woken=lambda: None,
        )  # fmt: skip
        agents = Agents(cluster, store, trio.current_time)  # type: ignore[arg-type]
        over = trio.Event()

        async def serve_once(session: Session, first: Register) -> None:
            with trio.move_on_after(1.2):
                await agents.serve(session, first)
            over.set()

        async with trio.open_nursery() as nursery:
            rig = Rig(nursery, Address("a", 1))
            rig.planes = {Address("a", 1): serve_once}
            nursery.start_soon(rig.link.run)
            while not cluster.linked("n1"):
                await trio.sleep(0.1)
            agents.dispatch("n1", [ForgetShard("f", 1, "m-1.0", 1)])
            await over.wait()
            while not rig.link.state.connected:
                await trio.sleep(0.1)
            nursery.cancel_scope.cancel()

    points = sweep(scenario)
    tasks = {p.site.split()[0] for p in points}
    assert len(points) > 200
    assert len(tasks) > 4, tasks


def test_a_stop_while_the_other_end_does_nothing_at_all() -> None:
    """Half-open from the start: what is sent is swallowed, nothing ever comes back."""

    async def scenario() -> None:
        ours, theirs = trio.testing.memory_stream_pair()

        async def swallow() -> None:
            while await theirs.receive_some():
                pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(swallow)
            with pytest.raises(PeerGone, match=r"no HTTP/2 connection was set up within 5 s"):
                async with open_session(ours, Role.AGENT, peer="s", remote="memory"):
                    raise AssertionError("it never opens")
            nursery.cancel_scope.cancel()

    assert len(sweep(scenario)) > 10


class ByHand:
    """A control plane played by hand on a stream that holds nothing: what is not read here is not written there."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.protocol = LinkProtocol(Role.SERVER, 0)

    async def open(self) -> None:
        await self.stream.send_all(self.protocol.data_to_send())
        while not self.protocol.opened:
            self.protocol.receive(bytes(await self.stream.receive_some()), 0)
        await self.stream.send_all(self.protocol.data_to_send())


@pytest.mark.parametrize("how", ["ends", "is cancelled", "fails"])
async def test_the_end_is_bounded_against_a_peer_that_reads_nothing(
    how: str, autojump_clock: trio.testing.MockClock
) -> None:
    ours, theirs = trio.testing.lockstep_stream_pair()
    peer = ByHand(theirs)
    stopped_at = 0.0

    async def session_that_stops() -> None:
        nonlocal stopped_at
        async with open_session(ours, Role.AGENT, peer="s", remote="memory") as session:
            await session.send(LARGE)
            await trio.sleep(1)
            stopped_at = trio.current_time()
            if how == "fails":
                raise ZeroDivisionError
            if how == "is cancelled":
                scope.cancel()
                await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.open)
        with trio.CancelScope() as scope:
            if how == "fails":
                with pytest.raises(ZeroDivisionError):  # as itself, in no group
                    await session_that_stops()
            else:
                await session_that_stops()
    assert 0 < stopped_at <= trio.current_time() <= stopped_at + 0.6


async def test_nothing_follows_a_write_that_was_cut(autojump_clock: trio.testing.MockClock) -> None:
    ours, theirs = trio.testing.lockstep_stream_pair()
    peer = ByHand(theirs)
    rest = b""

    async def read_a_little_then_all() -> None:
        nonlocal rest
        await peer.open()
        await theirs.receive_some(100)
        await trio.sleep(2)
        while data := await theirs.receive_some():
            rest += data

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_a_little_then_all)
        with trio.move_on_after(1):
            async with open_session(ours, Role.AGENT, peer="s", remote="memory") as session:
                await session.send(LARGE)
                await trio.sleep_forever()
    assert b"the agent ended the session" not in rest, (
        "a goodbye in the middle of a frame would be read as something else"
    )


async def test_the_stream_is_closed_at_the_end(autojump_clock: trio.testing.MockClock) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    peer = ByHand(theirs)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.open)
        async with open_session(ours, Role.AGENT, peer="s", remote="memory") as session:
            await session.send(register())
    with trio.fail_after(1):
        while data := await theirs.receive_some():
            peer.protocol.receive(bytes(data), 0)
    assert peer.protocol.take() == register(), "what was sent before the end arrived"
    assert peer.protocol.ended == Ended("closed by the other end: the agent ended the session")


async def test_what_the_peer_said_last_tells_more_than_a_broken_pipe(autojump_clock: trio.testing.MockClock) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    peer = ByHand(theirs)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.open)
        async with open_session(ours, Role.AGENT, peer="s", remote="memory") as session:
            await trio.testing.wait_all_tasks_blocked()
            theirs.receive_stream.close()  # type: ignore[attr-defined]
            await session.send(register())
            await trio.sleep(0.1)
            peer.protocol.close("this node is on the deny list")
            await theirs.send_all(peer.protocol.data_to_send())
            with pytest.raises(PeerGone, match="closed by the other end: this node is on the deny list"):
                await session.receive()
