"""Where an agent goes, how long it waits, and when it leaves: control planes played on memory streams, virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
import trio.testing
from attrs import evolve

from llmgw.link.messages import (
    ForgetShard,
    Heartbeat,
    HeartbeatSeen,
    NotLeader,
    Register,
)
from llmgw.link.session import PeerGone, Session
from llmgw.settings.daemon import Address
from tests.agent.links import Play, Rig
from tests.link.samples import REFUSED, WELCOME

A, B, C = (Address(name, 8443) for name in ("a", "b", "c"))


async def lead(session: Session, _: Register) -> None:
    """A control plane that is the leader, and answers heartbeats."""
    await session.send(WELCOME)
    while True:
        message = await session.receive()
        if isinstance(message, Heartbeat):
            await session.send(HeartbeatSeen(message.sequence))


def follow(leader: Address | None) -> Play:
    """A control plane that is not the leader, and knows who is."""

    async def play(session: Session, _: Register) -> None:
        await session.send(NotLeader(leader))

    return play


async def within(seconds: float, done: Callable[[], bool]) -> None:
    with trio.fail_after(seconds):
        while not done():
            await trio.sleep(0.05)


async def test_control_planes_are_tried_in_turn(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig(nursery, A, B, C)
    rig.planes = {C: lead}
    nursery.start_soon(rig.link.run)
    await within(10, lambda: rig.link.state.connected)
    assert [where for _, where in rig.dialled] == [A, B, C]


async def test_the_leader_that_is_named_is_next_wherever_it_is(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """It need not be in agent.yaml: who names it has shown a certificate of our trust domain, and so must it."""
    rig = Rig(nursery, A, B)
    rig.planes = {A: follow(C), C: lead}
    nursery.start_soon(rig.link.run)
    await within(2, lambda: rig.link.state.connected)
    assert [where for _, where in rig.dialled] == [A, C]
    assert rig.link.state.control_plane == "c:8443"


async def test_a_leader_that_is_not_there_costs_one_try(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    rig = Rig(nursery, A, B)
    rig.planes = {A: follow(C), B: lead}
    nursery.start_soon(rig.link.run)
    await within(5, lambda: rig.link.state.connected)
    assert [where for _, where in rig.dialled] == [A, C, B]


async def test_a_leader_that_resigns_names_the_next_in_the_middle_of_a_session(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    rig = Rig(nursery, A)
    resign = trio.Event()

    async def resigns(session: Session, _: Register) -> None:
        await session.send(WELCOME)
        await resign.wait()
        await session.send(NotLeader(B))

    rig.planes = {A: resigns, B: lead}
    nursery.start_soon(rig.link.run)
    await within(5, lambda: rig.link.state.connected)
    resign.set()
    await within(5, lambda: rig.link.state.control_plane == "b:8443" and rig.link.state.connected)


async def test_two_that_name_each_other_are_asked_ever_less_often(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = Rig(nursery, A)
    rig.planes = {A: follow(B), B: follow(A)}
    nursery.start_soon(rig.link.run)
    await trio.sleep(600)
    assert len(rig.dialled) < 40
    assert "a:8443 does not lead the cluster" not in rig.link.state.reason
    assert "does not lead the cluster, " in rig.link.state.reason


async def test_only_a_welcome_sets_the_waits_back(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """A control plane that lets everybody in as far as Register and then refuses is not hammered."""
    rig = Rig(nursery, A)

    async def refuse(session: Session, _: Register) -> None:
        await session.refuse(REFUSED)

    rig.planes = {A: refuse}
    nursery.start_soon(rig.link.run)
    await trio.sleep(3600)
    waits = [b - a for (a, _), (b, _) in zip(rig.dialled, rig.dialled[1:], strict=False)]
    assert len(rig.dialled) < 170, "every half minute on average"
    assert max(waits) > 30
    rig.planes = {A: lead}
    await within(70, lambda: rig.link.state.connected)
    assert rig.backoff.next_s() <= 0.5


@pytest.mark.parametrize(("told_s", "least_s", "most_s"), [(7.0, 7.0, 67.0), (1e300, 60.0, 120.0), (-1e300, 0.0, 60.0)])
async def test_who_is_told_to_stay_away_stays_away_but_not_for_ever(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, told_s: float, least_s: float, most_s: float
) -> None:
    rig = Rig(nursery, A)

    async def refuse(session: Session, _: Register) -> None:
        await session.refuse(evolve(REFUSED, wait_s=told_s))

    rig.planes = {A: refuse}
    nursery.start_soon(rig.link.run)
    await trio.sleep(3600)
    waits = [b - a for (a, _), (b, _) in zip(rig.dialled, rig.dialled[1:], strict=False)]
    assert len(waits) > 20
    assert least_s <= min(waits)
    assert max(waits) <= most_s + 2


async def test_the_end_of_a_long_outage_is_noticed_at_once(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    rig = Rig(nursery, A)
    nursery.start_soon(rig.link.run)
    for seconds in (1, 5, 15, 40, 120, 3600):
        await trio.sleep(seconds)
        cut = trio.Event()

        async def lead_until_cut(session: Session, _: Register, cut: trio.Event = cut) -> None:
            await session.send(WELCOME)
            await cut.wait()

        rig.planes = {A: lead_until_cut}
        await within(2.1, lambda: rig.link.state.connected)
        rig.planes = {}
        cut.set()
        await within(1, lambda: not rig.link.state.connected)


async def test_a_control_plane_that_answers_pings_and_does_nothing_else_is_left(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    rig = Rig(nursery, A, B)
    stuck_at = 0.0

    async def gets_stuck(session: Session, _: Register) -> None:
        nonlocal stuck_at
        await session.send(evolve(WELCOME, heartbeat_s=2.0))
        for _ in range(5):
            message = await session.receive()
            assert isinstance(message, Heartbeat)
            await session.send(HeartbeatSeen(message.sequence))
        stuck_at = trio.current_time()
        await trio.sleep_forever()

    rig.planes = {A: gets_stuck, B: lead}
    nursery.start_soon(rig.link.run)
    await within(60, lambda: rig.link.state.control_plane == "b:8443")
    assert 15 <= trio.current_time() - stuck_at <= 30


async def test_one_of_an_older_version_that_never_answers_heartbeats_is_kept(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    rig = Rig(nursery, A)

    async def older(session: Session, _: Register) -> None:
        await session.send(WELCOME)
        while True:
            await session.receive()

    rig.planes = {A: older}
    nursery.start_soon(rig.link.run)
    await trio.sleep(600)
    assert rig.link.state.connected
    assert len(rig.dialled) == 1


async def test_commands_whose_results_nobody_reads_stop_coming(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    rig = Rig(nursery, A)
    sent = 0
    over = trio.Event()

    async def commands_only(session: Session, _: Register) -> None:
        nonlocal sent
        await session.send(WELCOME)
        try:
            while True:
                await session.send(ForgetShard(f"{sent} {'x' * 3000}", 1, "m-1.0", 1))
                sent += 1
        except PeerGone:
            over.set()
            raise

    rig.planes = {A: commands_only}
    nursery.start_soon(rig.link.run)
    with trio.fail_after(60):
        await over.wait()
    # What fits into the windows and buffers of both directions, the waiting commands and the waiting results.
    assert 1100 < sent < 2500
