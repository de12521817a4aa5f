"""Nodes are told of their settings, at most once a second, and what they say of them is remembered and shown."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import trio
import trio.testing
from attrs import evolve

from llmgw.link.attend import attend
from llmgw.link.messages import (
    PROTOCOL,
    HeartbeatSeen,
    LookForWeights,
    NotUnderstood,
    Register,
    SettingsApplied,
    SettingsChanged,
    Welcome,
)
from llmgw.link.protocol import Role
from llmgw.link.session import PeerGone, Session, open_session
from llmgw.server.node_settings import NodeSettingsBook, applied, registered
from llmgw.settings.agent_part import NOTHING_SAID, SettingsHeld, SettingsSaid, SettingsState, held
from llmgw.settings.document import Settings
from llmgw.settings.load import load_settings
from llmgw.store.api import NodeRow
from llmgw.store.opening import sqlite_store
from llmgw.store.rows import from_text, to_text
from tests.scheduler.clusters import node
from tests.server.test_control import Plane

S = SettingsState


def of(text: str) -> Settings:
    return load_settings(f"agents: {{{text}}}")


@asynccontextmanager
async def joined(plane: Plane, name: str = "n1", settings: int = 0) -> AsyncIterator[tuple[Session, Welcome]]:
    """An agent that runs on this revision."""
    ours, theirs = trio.testing.memory_stream_pair()

    async def serve() -> None:
        with suppress(PeerGone):
            await attend(theirs, plane.agents.serve, lambda _: None, peer=name, remote="memory")

    plane.nursery.start_soon(serve)
    async with open_session(ours, Role.AGENT, peer="server", remote="memory") as session:
        here = node(name).inventory
        await session.send(Register(PROTOCOL, name, "1", "boot", "10.0.0.1", here, (), (), 0, settings=settings))
        welcome = await session.receive()
        assert isinstance(welcome, Welcome)
        yield session, welcome


async def next_change(session: Session, within_s: float = 30.0) -> SettingsChanged | None:
    with trio.move_on_after(within_s):
        while True:
            message = await session.receive()
            if isinstance(message, SettingsChanged):
                return message
            assert isinstance(message, HeartbeatSeen | LookForWeights), message
    return None


def shown(plane: Plane, name: str = "n1") -> SettingsHeld:
    (found,) = (n for n in plane.cluster.state(plane.clock()).nodes if n.id == name)
    return found.settings


async def until_shown(plane: Plane, state: SettingsState) -> SettingsHeld:
    with trio.fail_after(30):
        while shown(plane).state is not state:
            await trio.sleep(0.1)
    return shown(plane)


@pytest.fixture
async def plane(tmp_path, autojump_clock, nursery) -> AsyncIterator[Plane]:
    autojump_clock.autojump_threshold = 0.001
    async with sqlite_store(tmp_path / "db") as store:
        made = Plane(store, Settings(), await store.cluster(), await store.new_epoch(), nursery)
        nursery.start_soon(made.reconciler.run)
        yield made
        nursery.cancel_scope.cancel()


async def test_a_node_gets_its_own_settings_and_says_so(plane: Plane, autojump_clock: trio.testing.MockClock) -> None:
    plane.cluster.use_settings(of("default: {ports: 20000-20010}, nodes: {n1: {log: {level: debug}}}"), 4)
    async with joined(plane, settings=3) as (session, welcome), joined(plane, "n2", 3) as (_, other):
        assert welcome.settings is not None
        assert other.settings is not None
        assert welcome.settings.text == '{"log":{"level":"debug"},"ports":"20000-20010"}'
        assert other.settings.text == '{"ports":"20000-20010"}'
        assert welcome.settings.revision == 4
        assert shown(plane) == SettingsHeld(S.PENDING, 4, 3)
        await session.send(SettingsApplied(4, welcome.settings.digest))
        assert await until_shown(plane, S.APPLIED) == SettingsHeld(S.APPLIED, 4, 4)


async def test_changes_are_told_once_a_second_and_only_to_whom_they_concern(
    plane: Plane, autojump_clock: trio.testing.MockClock
) -> None:
    async with joined(plane) as (session, _), joined(plane, "n2") as (other, _):
        said: list[tuple[float, SettingsChanged]] = []

        async def listen() -> None:
            while True:
                if (message := await next_change(session)) is not None:
                    said.append((trio.current_time(), message))

        async with trio.open_nursery() as listening:
            listening.start_soon(listen)
            began = trio.current_time()
            for number in range(50):
                plane.cluster.use_settings(of(f"nodes: {{n1: {{ports: 20000-{20001 + number}}}}}"), 2 + number)
                await trio.sleep(0.1)
            with trio.fail_after(60):
                while not said or said[-1][1].settings.revision < 51:
                    await trio.sleep(0.1)
            # The store works in a thread meanwhile, for which this clock does not wait: they may come late.
            assert 2 <= len(said) <= said[-1][0] - began + 1, "fifty changes"
            assert said[0][0] - began >= 0.99, "the Welcome was the first"
            last = said[-1][1].settings
            assert (last.revision, last.text) == (51, '{"ports":"20000-20050"}')
            assert await next_change(other, 1) is None, "nothing of its own has changed"
            plane.cluster.use_settings(of("nodes: {n1: {ports: 20000-20050}, n2: {}}"), 60)
            await trio.sleep(3)
            assert said[-1][1].settings == last, "the same settings of a later revision are no change"
            listening.cancel_scope.cancel()


async def test_what_a_node_refused_is_shown_with_the_reason(
    plane: Plane, autojump_clock: trio.testing.MockClock
) -> None:
    async with joined(plane) as (session, welcome):
        assert welcome.settings is not None
        await session.send(SettingsApplied(welcome.settings.revision, welcome.settings.digest))
        await until_shown(plane, S.APPLIED)
        plane.cluster.use_settings(of("default: {discovery: {root: /gone}}"), 5)
        change = await next_change(session)
        assert change is not None
        await session.send(SettingsApplied(5, change.settings.digest, "discovery.root: /gone is not a folder"))
        found = await until_shown(plane, S.REFUSED)
        assert found == SettingsHeld(S.REFUSED, 5, 0, "discovery.root: /gone is not a folder")
        plane.cluster.use_settings(of("default: {discovery: {root: /there}}"), 6)
        assert shown(plane).state is S.PENDING, "others are not refused yet"
    row = plane.cluster.row("n1")
    assert row is not None
    again = next(r for r in await plane.store.nodes() if r.id == "n1")
    assert again.settings == row.settings != NOTHING_SAID, "it is remembered over a restart"


async def test_an_agent_that_knows_no_settings_is_named(plane: Plane, autojump_clock: trio.testing.MockClock) -> None:
    plane.cluster.use_settings(of("default: {ports: 20000-20010}"), 4)
    async with joined(plane) as (session, _):
        assert await next_change(session) is not None
        await session.send(NotUnderstood("settings-changed"))
        found = await until_shown(plane, S.IGNORED)
        assert "upgrade it" in found.reason
    plane.cluster.use_settings(Settings(), 5)
    async with joined(plane) as (session, _):
        assert await next_change(session, 5) is None, "where there are none it is not asked"


def test_what_is_said_and_what_it_comes_to() -> None:
    book, later = (
        NodeSettingsBook(of("default: {ports: 1024-1030}"), 2),
        NodeSettingsBook(of("default: {ports: 1024-1031}"), 3),
    )
    two, three = book.of("n1"), later.of("n1")
    said = applied(NOTHING_SAID, SettingsApplied(2, two.digest))
    assert held(two, said) == SettingsHeld(S.APPLIED, 2, 2)
    assert held(evolve(two, revision=9), said) == SettingsHeld(S.APPLIED, 9, 9), "equal settings of another revision"
    refused = applied(said, SettingsApplied(3, three.digest, "no"))
    assert held(three, refused) == SettingsHeld(S.REFUSED, 3, 2, "no")
    assert held(two, refused).state is S.APPLIED, "what it is on, it is on"
    assert registered(refused, 2) == refused, "the agent was started again on the same"
    assert registered(refused, 0) == SettingsSaid(0, "", three.digest, "no")
    assert held(three, applied(refused, SettingsApplied(3, three.digest))) == SettingsHeld(S.APPLIED, 3, 3)


def test_a_row_of_before_there_were_settings_is_read() -> None:
    here = node("n1")
    row = NodeRow("n1", "a", "1", here.inventory, (), (), 0.0, settings=SettingsSaid(3, "d"))
    written = json.loads(to_text(row))
    assert from_text(json.dumps(written), NodeRow) == row
    del written["settings"]
    assert from_text(json.dumps(written), NodeRow).settings == NOTHING_SAID
