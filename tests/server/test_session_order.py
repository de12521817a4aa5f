"""Who has a node's session next: a machine that was started again, and an agent that comes back again and again."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from fakes.proxy import Proxy
from llmgw.link.messages import Heartbeat
from llmgw.link.session import LinkRefused
from llmgw.server.admission import SESSION_EVERY_S, SESSIONS_AT_ONCE, Presence, Sessions, started_again
from tests.link.samples import register
from tests.server.identity_rig import Node, Plane, plane, until
from tests.server.test_agents import Service

# A machine that was started again


@asynccontextmanager
async def behind_a_proxy(at: Plane, folder: Path) -> AsyncIterator[tuple[Proxy, Node, trio.Nursery]]:
    """A node whose network can fail; other nodes of the same plane are not behind it."""
    async with trio.open_nursery() as nursery:
        direct = at.address
        proxy: Proxy = await nursery.start(Proxy(at.address).run)
        tls = await at.join()
        at.address = evolve(proxy.address, host="localhost")
        old = Node(at, tls, folder / "state", boot_id="before")
        at.address = direct
        nursery.start_soon(old.link.run)
        await until(lambda: old.link.state.connected)
        yield proxy, old, nursery
        nursery.cancel_scope.cancel()


async def test_a_machine_that_died_and_was_started_again_is_let_in_at_once(tmp_path: Path) -> None:
    async with plane(tmp_path) as at, behind_a_proxy(at, tmp_path) as (proxy, old, nursery):
        proxy.partition()
        new = Node(at, old.own.files(), tmp_path / "state", boot_id="after")
        began = trio.current_time()
        nursery.start_soon(new.link.run)
        await until(lambda: new.link.state.connected)
        assert 1.9 < trio.current_time() - began < 3, "not only when silence has lasted for 15 s"
        assert len(new.sessions) == 1, "its first try gets in"


async def test_nobody_is_pushed_out_by_a_copy_while_he_answers(tmp_path: Path) -> None:
    async with plane(tmp_path) as at, behind_a_proxy(at, tmp_path) as (_, first, nursery):
        copy = Node(at, first.own.files(), tmp_path / "state", boot_id="after")  # the state folder was copied too
        nursery.start_soon(copy.link.run)
        await until(lambda: len(copy.sessions) >= 30)
        assert copy.link.state.refused is not None
        assert copy.link.state.refused.claim == "one agent a node"
        assert first.link.state.connected
        assert len(first.sessions) == 1, "thirty copies in a second do not make it take the PINGs for a flood"


async def test_a_copy_with_its_own_state_folder_does_not_get_in_when_the_network_fails_for_a_moment(
    tmp_path: Path,
) -> None:
    async with plane(tmp_path) as at, behind_a_proxy(at, tmp_path) as (proxy, first, nursery):
        proxy.partition()
        copy = Node(at, first.own.files(), tmp_path / "elsewhere", boot_id="after")
        nursery.start_soon(copy.link.run)
        with trio.move_on_after(4):
            await until(lambda: copy.link.state.connected)
        assert not copy.link.state.connected
        proxy.heal()
        await first.sessions[0].send(Heartbeat(1))
        assert first.link.state.connected
        assert len(first.sessions) == 1


def test_which_agent_may_be_the_same_machine_after_a_boot() -> None:
    there = Presence("a:1", "before", "folder", 0.0)
    assert started_again(there, Presence("a:2", "after", "folder", 0.0))
    assert started_again(there, Presence("a:2", "after", "", 0.0)), "an agent that does not say"
    assert not started_again(there, Presence("a:2", "after", "other", 0.0))
    assert not started_again(there, Presence("a:2", "before", "other", 0.0)), "no boot lies between them"


# Again and again


async def try_once(service: Service) -> LinkRefused | None:
    try:
        async with service.agent():
            return None
    except LinkRefused as refused:
        return refused


async def test_who_comes_back_very_often_is_told_to_wait_and_when_to_come(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    service = Service(nursery)
    for _ in range(SESSIONS_AT_ONCE):
        assert await try_once(service) is None
    for _ in range(5):
        told = await try_once(service)
        assert told is not None
        assert told.refused.claim == "reconnects"
        assert "30 sessions of node n1 one after the other, then one in 2 s" in told.refused.wanted
        assert f"come back in {math.ceil(told.refused.wait_s)} s" in told.refused.remedy
        assert 1 < told.refused.wait_s <= SESSION_EVERY_S
    assert not service.cluster.linked("n1")
    assert capsys.readouterr().out.count("a node reconnects too often") == 1, "once, not at every try"
    assert told is not None
    await trio.sleep(told.refused.wait_s)
    assert await try_once(service) is None, "who waited as told is let in"
    assert (again := await try_once(service)) is not None
    assert again.refused.claim == "reconnects"


async def test_another_node_is_not_meant(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    service = Service(nursery)
    for _ in range(SESSIONS_AT_ONCE + 1):
        await try_once(service)
    async with service.agent(register("n2")):
        assert service.cluster.linked("n2")


@given(st.lists(st.floats(0, 10), max_size=300))
def test_in_any_time_a_node_begins_no_more_than_the_first_few_and_one_in_two_seconds(waits: list[float]) -> None:
    sessions, now, began = Sessions(5, 2.0), 0.0, []
    for wait in waits:
        now += wait
        if sessions.wait_s("n1", now) > 0:
            assert sessions.wait_s("n1", now) <= 2.0 + 1e-6, "nobody is sent away for long"
            continue
        sessions.began("n1", now)
        began.append(now)
    for first, at in enumerate(began):
        assert sum(at <= t for t in began[first:]) <= 6 + (now - at) / 2.0


@given(st.lists(st.floats(2.0, 100.0), min_size=1, max_size=200))
def test_a_link_that_fails_every_two_seconds_for_ever_keeps_nobody_out(lasts: list[float]) -> None:
    sessions, now = Sessions(), 0.0
    for last in lasts:
        assert sessions.wait_s("n1", now) == 0
        sessions.began("n1", now)
        now += last


def test_nothing_is_remembered_of_more_nodes_than_there_can_be() -> None:
    sessions = Sessions()
    for number in range(20_000):
        sessions.began(str(number), 0.0)
    assert len(sessions._paid_until) <= 8192
