"""Sessions over memory streams: messages, back-pressure, ends, and a cancel at every point of all of it."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio
import trio.testing

from llmgw.link.attend import attend
from llmgw.link.messages import DrainShard, Heartbeat, Refused, Register, ShardStatus, Welcome
from llmgw.link.patience import LinkLimits
from llmgw.link.protocol import LinkProtocol, Role
from llmgw.link.session import LinkRefused, PeerGone, Session, open_session
from tests.link.samples import REFUSED, WELCOME, register, report
from tests.sweep import sweep


async def both_ends(limits: LinkLimits = LinkLimits(), *, refused: Refused | None = None) -> None:
    """A whole life: registration, welcome, messages both ways, an end."""
    ours, theirs = trio.testing.memory_stream_pair()

    async def handler(session: Session, first: Register) -> None:
        assert first == register()
        await session.send(WELCOME)
        for n in range(3):
            assert await session.receive() == Heartbeat(n)
            await session.send(DrainShard(str(n), 1, "m-1.0", 1, "r"))
        with suppress(PeerGone):
            await session.receive()

    async def serve() -> None:
        with suppress(PeerGone):
            await attend(theirs, handler, lambda _: refused, peer="n1", remote="memory", limits=limits)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        async with open_session(ours, Role.AGENT, peer="s", remote="memory", limits=limits) as session:
            await session.send(register())
            assert isinstance(await session.receive(), Welcome)
            for n in range(3):
                await session.send(Heartbeat(n))
                assert await session.receive() == DrainShard(str(n), 1, "m-1.0", 1, "r")


async def test_a_life(autojump_clock: trio.testing.MockClock) -> None:
    await both_ends()


async def test_a_refusal_reaches_the_agent_whole(autojump_clock: trio.testing.MockClock) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(LinkRefused, match="wanted n1, found n2")):
        await both_ends(refused=REFUSED)


def test_cancelled_anywhere_it_ends_within_a_second_and_leaves_nothing() -> None:
    points = sweep(both_ends)
    assert len(points) > 50
    assert max(p.took_s for p in points) <= 1.0


async def test_a_peer_that_reads_nothing_stops_the_sender_and_not_the_end(
    autojump_clock: trio.testing.MockClock,
) -> None:
    limits = LinkLimits(send_s=3.0, silence_s=1000.0, ping_s=900.0, open_s=100)
    ours, theirs = trio.testing.lockstep_stream_pair()
    async with trio.open_nursery() as nursery:

        async def deaf() -> None:
            with suppress(PeerGone):
                async with open_session(theirs, Role.SERVER, peer="n1", remote="m", limits=limits) as session:
                    await session.receive()
                    await trio.sleep(500)

        nursery.start_soon(deaf)
        async with open_session(ours, Role.AGENT, peer="s", remote="m", limits=limits) as session:
            await session.send(register())
            began = trio.current_time()

            async def flood() -> None:
                for _ in range(100_000):
                    await session.send(ShardStatus(report()))

            with pytest.raises(PeerGone, match="took nothing for 3 s"):
                await flood()
            assert 3.0 <= trio.current_time() - began < 4.0
            began = trio.current_time()
        assert trio.current_time() - began <= 1.0
        nursery.cancel_scope.cancel()


async def test_a_silent_peer_is_noticed(autojump_clock: trio.testing.MockClock) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    limits = LinkLimits(ping_s=5, silence_s=15)

    async def half_open() -> None:
        with suppress(PeerGone):
            async with open_session(theirs, Role.SERVER, peer="n1", remote="m", limits=limits) as session:
                await session.receive()
                # What either end sends from here on gets nowhere, as when a cable is pulled.
                theirs.send_stream.send_all_hook = ours.send_stream.send_all_hook = trio.sleep_forever
                with pytest.raises(PeerGone, match="15 s"):
                    await session.receive()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(half_open)
        async with open_session(ours, Role.AGENT, peer="s", remote="m", limits=limits) as session:
            await session.send(register())
            began = trio.current_time()
            with pytest.raises(PeerGone, match="15 s"):
                await session.receive()
            assert trio.current_time() - began <= 30


async def test_whoever_waits_wakes_up_when_the_session_is_closed(autojump_clock: trio.testing.MockClock) -> None:
    ours, theirs = trio.testing.memory_stream_pair()

    async def serve() -> None:
        with suppress(PeerGone):
            async with open_session(theirs, Role.SERVER, peer="n1", remote="m") as session:
                await session.receive()
                await session.receive()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        async with open_session(ours, Role.AGENT, peer="s", remote="m") as agent:
            await agent.send(register())

            async def close_soon() -> None:
                await trio.sleep(1)
                agent.close("enough")

            nursery.start_soon(close_soon)
            with pytest.raises(PeerGone, match="enough"):
                await agent.receive()
            with pytest.raises(PeerGone):
                await agent.send(Heartbeat(1))


async def test_whether_a_peer_is_there_is_asked_once_however_many_want_to_know(
    autojump_clock: trio.testing.MockClock,
) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:

        async def agent() -> None:
            async with open_session(theirs, Role.AGENT, peer="s", remote="memory") as session:
                await session.send(register())
                with suppress(PeerGone):
                    await session.receive()

        nursery.start_soon(agent)
        async with open_session(ours, Role.SERVER, peer="n1", remote="memory") as session:
            await session.receive()
            said: list[bool] = []

            async def ask() -> None:
                said.append(await session.answers(2.0))

            async with trio.open_nursery() as asked:
                for _ in range(200):
                    asked.start_soon(ask)
            assert said == [True] * 200
            began = trio.current_time()
            while trio.current_time() < began + 3:
                assert await session.answers(2.0)
                await trio.sleep(0.01)
            assert session._protocol.ended is None, "the agent does not take it for a flood of PINGs"


async def test_who_is_let_wait_for_what_it_costs_counts_as_there(autojump_clock: trio.testing.MockClock) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        agent = LinkProtocol(Role.AGENT, 0.0)
        await theirs.send_all(agent.data_to_send())
        async with open_session(ours, Role.SERVER, peer="n1", remote="memory") as session:
            while not agent.opened:
                agent.receive(bytes(await theirs.receive_some()), 0.0)
            agent.send(register(), 0.0)
            await theirs.send_all(agent.data_to_send())
            await session.receive()  # and nothing more is heard from this agent
            assert not await session.answers(2.0)
            nursery.start_soon(session._charge, 1.0)  # so much was spent that nothing is read for 5 s
            await trio.testing.wait_all_tasks_blocked()
            assert await session.answers(2.0)
            await trio.sleep(5)
            assert not await session.answers(2.0)
