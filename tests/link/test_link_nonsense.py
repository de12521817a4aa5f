"""Messages that decode and make no sense: whoever gets them goes on, at both ends of the link."""

from __future__ import annotations

import random

import trio
import trio.testing
from attrs import evolve
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fakes.fleet.store import Disk, MemoryStore
from llmgw.errors import PeerError
from llmgw.link.attend import attend
from llmgw.link.codec import DOWN, UP, UnsendableError
from llmgw.link.messages import AgentMessage, Register, ServerMessage, Welcome
from llmgw.link.protocol import Role
from llmgw.link.session import Session, open_session
from llmgw.router.table import Table
from llmgw.server.agents import Agents
from llmgw.server.cluster import Cluster
from llmgw.server.reconcile import Reconciler
from llmgw.settings.daemon import Address
from llmgw.settings.document import Settings
from llmgw.telemetry.metrics import ControlPlaneMetrics
from tests.agent.links import Rig
from tests.link.samples import WELCOME, values
from tests.scheduler.clusters import model

few = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))


@few
@example(WELCOME, [])
@example(evolve(WELCOME, heartbeat_s=-1.0), [])
@example(evolve(WELCOME, heartbeat_s=0.0), [])
@given(values(Welcome), st.lists(st.one_of(*(values(k) for k in DOWN.values())), max_size=5))
def test_an_agent_goes_on_whatever_it_is_told(welcome: Welcome, said: list[ServerMessage]) -> None:
    async def play(session: Session, _: Register) -> None:
        nonlocal heard
        await session.send(evolve(welcome, protocol=WELCOME.protocol, epoch=5))
        for message in said:
            await session.send(message)
        with trio.move_on_after(5):
            while True:
                await session.receive()
                heard += 1

    async def agent() -> None:
        async with trio.open_nursery() as nursery:
            rig = Rig(nursery, Address("a", 1))
            rig.planes = {Address("a", 1): play}
            nursery.start_soon(rig.link.run)
            await trio.sleep(10)
            nursery.cancel_scope.cancel()

    heard = 0
    trio.run(agent, clock=trio.testing.MockClock(autojump_threshold=0))
    assert heard < 500


@few
@given(values(Register), st.lists(st.one_of(*(values(k) for k in UP.values())), max_size=5))
def test_a_control_plane_goes_on_whatever_it_is_told(register: Register, said: list[AgentMessage]) -> None:
    tables: list[Table] = []

    def clock() -> float:
        return 1e9 + trio.current_time()

    async def control_plane() -> None:
        cluster = Cluster(
            cluster="c", epoch=0, settings=Settings(models=(model(),)), nodes=(), replicas=(), next_serial=1,
            unplaced=(), started=0.0, woken=lambda: reconciler.wake(),
        )  # fmt: skip
        store = MemoryStore(Disk(), random.Random(1))
        agents = Agents(cluster, store, clock)  # type: ignore[arg-type]
        reconciler = Reconciler(cluster, store, agents, tables.append, clock, ControlPlaneMetrics(), 7)  # type: ignore[arg-type]
        ours, theirs = trio.testing.memory_stream_pair()
        failures: list[Exception] = []

        async def serve(session: Session, first: Register) -> None:
            try:
                await agents.serve(session, first)
            except PeerError:
                raise
            except Exception as failed:
                failures.append(failed)
                raise

        async def attended() -> None:
            try:
                await attend(theirs, serve, lambda _: None, peer="n1", remote="memory:1")
            except PeerError:
                return

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reconciler.run)
            nursery.start_soon(attended)
            try:
                async with open_session(ours, Role.AGENT, peer="s", remote="memory:1") as session:
                    await session.send(evolve(register, node="n1"))
                    for message in said:
                        await session.send(message)
                    with trio.move_on_after(20):
                        while True:
                            await session.receive()
            except (PeerError, UnsendableError):
                pass
            await trio.sleep(20)
            nursery.cancel_scope.cancel()
        assert not failures

    trio.run(control_plane, clock=trio.testing.MockClock(autojump_threshold=0))
