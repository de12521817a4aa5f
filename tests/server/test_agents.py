"""Sessions of agents that live long, read nothing, or say nothing."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import trio
import trio.testing

from fakes.fleet.store import Disk, MemoryStore
from llmgw.link.attend import attend
from llmgw.link.messages import DrainShard, Heartbeat, HeartbeatSeen, NotUnderstood, Register, Welcome
from llmgw.link.protocol import Role
from llmgw.link.session import PeerGone, Session, open_session
from llmgw.server.agents import Agents
from llmgw.server.cluster import Cluster
from llmgw.settings.document import Settings
from tests.link.samples import register


class Service:
    """The control plane's service for agents, on memory streams."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.cluster = Cluster(
            cluster="c", epoch=1, settings=Settings(models=()), nodes=(), replicas=(), next_serial=1, unplaced=(),
            started=0.0, woken=lambda: None,
        )  # fmt: skip
        store = MemoryStore(Disk(), random.Random(1))
        self.agents = Agents(self.cluster, store, trio.current_time)  # type: ignore[arg-type]

    @asynccontextmanager
    async def agent(self, first: Register | None = None) -> AsyncIterator[Session]:
        ours, theirs = trio.testing.memory_stream_pair()

        async def serve() -> None:
            with suppress(PeerGone):
                await attend(theirs, self.agents.serve, lambda _: None, peer="n1", remote="memory")

        self._nursery.start_soon(serve)
        async with open_session(ours, Role.AGENT, peer="server", remote="memory") as session:
            await session.send(first or register())
            assert isinstance(await session.receive(), Welcome)
            yield session


def command(name: str) -> DrainShard:
    return DrainShard(name, 1, "m-1.0", 1, "because")


async def received(session: Session) -> list[str]:
    """The commands that come until none does for a while."""
    found: list[str] = []
    while True:
        with trio.move_on_after(1) as waited:
            message = await session.receive()
            if isinstance(message, DrainShard):
                found.append(message.command)
        if waited.cancelled_caught:
            return found


async def test_a_long_session_forgets_the_commands_that_are_asked_for_no_more(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    service = Service(nursery)
    async with service.agent() as session:
        service.agents.dispatch("n1", [command("old"), command("wanted")])
        for number in range(30):
            # A pass asks for what it wants as long as that is not done: such a command is not sent again.
            service.agents.dispatch("n1", [command("wanted"), *(command(f"{number}-{n}") for n in range(100))])
            assert len(await received(session)) == (102 if number == 0 else 100)
            await session.send(Heartbeat(number))
        assert len(service.agents._sessions["n1"].sent) <= 1000
        service.agents.dispatch("n1", [command("wanted"), command("old")])
        assert await received(session) == ["old"], "it would be done only once by the agent all the same"


async def test_commands_do_not_pile_up_for_an_agent_that_does_not_read(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    service = Service(nursery)
    async with service.agent() as session:
        for number in range(50):
            service.agents.dispatch("n1", [command(f"{number}-{n} {'x' * 2000}") for n in range(100)])
            await trio.sleep(0.01)
        assert len(service.agents._sessions["n1"].queue) <= 200
        came = len(await received(session))
        assert 200 < came < 800, "what was in windows, buffers and the queue"
        service.agents.dispatch("n1", [command(f"49-99 {'x' * 2000}")])
        assert len(await received(session)) == 1, "a later pass sends what it still wants"


async def test_an_agent_that_answers_pings_and_does_nothing_else_has_no_session(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    service = Service(nursery)
    async with service.agent() as session:
        began = trio.current_time()
        with trio.fail_after(100), pytest.raises(PeerGone, match="no message came for 25 s"):
            await session.receive()
        assert 25 <= trio.current_time() - began <= 30
    assert not service.cluster.linked("n1")


async def test_one_that_beats_is_kept(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    service = Service(nursery)
    async with service.agent() as session:
        for number in range(100):
            await trio.sleep(5)
            await session.send(Heartbeat(number))
        assert service.cluster.linked("n1")


async def test_what_an_agent_makes_up_fills_no_log(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    service = Service(nursery)
    async with service.agent() as session:
        for minute, lines in ((0, 1000), (1, 1000)):
            for number in range(1200):
                await session.send(NotUnderstood(f"{minute}-{number}"))
            await session.send(Heartbeat(minute))
            assert isinstance(await session.receive(), HeartbeatSeen)
            assert capsys.readouterr().out.count("agent does not understand a message") == lines
            for _ in range(5):
                await trio.sleep(13)
                await session.send(Heartbeat(2))
                await session.receive()
