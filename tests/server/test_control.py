"""The control plane's loop with real sessions over memory streams, a virtual clock, and an agent that we play."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import trio
import trio.testing
from attrs import evolve

from llmgw.errors import OperatorError
from llmgw.hardware.delta import diff
from llmgw.hardware.inventory import Fault, Inventory
from llmgw.link.attend import attend
from llmgw.link.messages import (
    PROTOCOL,
    CommandResult,
    ForgetShard,
    HardwareChanged,
    Heartbeat,
    HeartbeatSeen,
    LookForWeights,
    Register,
    ShardStatus,
    StartShard,
    StopShard,
    WeightsFound,
    Welcome,
)
from llmgw.link.protocol import Role
from llmgw.link.session import PeerGone, Session, open_session
from llmgw.router.table import Table
from llmgw.scheduler.state import NodeState, Replica, ShardReport, ShardState
from llmgw.server.agents import Agents
from llmgw.server.cluster import Cluster
from llmgw.server.reconcile import Reconciler
from llmgw.settings.catalog import EngineKind
from llmgw.settings.document import Settings
from llmgw.settings.weight_facts import WeightFacts
from llmgw.store.api import NodeRow, PassRecord, Store
from llmgw.store.opening import sqlite_store
from llmgw.telemetry.metrics import ControlPlaneMetrics
from tests.scheduler.clusters import model, node

Clock = Callable[[], float]


class Plane:
    """A control plane without sockets; ``tables`` is what the router was pushed."""

    def __init__(self, store: Store, settings: Settings, cluster_id: str, epoch: int, nursery: trio.Nursery) -> None:
        self.tables: list[Table] = []
        self.store = store
        self.nursery = nursery
        self.clock: Clock = lambda: 1_000_000.0 + trio.current_time()
        self.cluster = Cluster(
            cluster=cluster_id, epoch=epoch, settings=settings, nodes=(), replicas=(), next_serial=1, unplaced=(),
            started=self.clock(), woken=lambda: self.reconciler.wake(),
        )  # fmt: skip
        self.agents = Agents(self.cluster, store, self.clock)
        self.metrics = ControlPlaneMetrics()
        self.reconciler = Reconciler(self.cluster, store, self.agents, self.tables.append, self.clock, self.metrics, 7)

    @asynccontextmanager
    async def agent(
        self, name: str = "n1", shards: tuple[ShardReport, ...] = (), weights: WeightsFound | None = None
    ) -> AsyncIterator[Session]:
        ours, theirs = trio.testing.memory_stream_pair()

        async def serve() -> None:
            with suppress(PeerGone):
                await attend(theirs, self.agents.serve, lambda _: None, peer=name, remote="memory")

        self.nursery.start_soon(serve)
        async with open_session(ours, Role.AGENT, peer="server", remote="memory") as session:
            here = node(name)
            await session.send(
                Register(
                    PROTOCOL, name, "1", "boot", "10.0.0.1", here.inventory, (EngineKind.VLLM,), shards, 0, weights
                )
            )
            welcome = await session.receive()
            assert isinstance(welcome, Welcome)
            assert welcome.cluster == self.cluster.id
            yield session


@pytest.fixture
async def plane(tmp_path, autojump_clock, nursery) -> AsyncIterator[Plane]:
    # The store's thread needs real time, which must not look like idleness. Tests name the clock as well: that is what
    # makes their run use it.
    autojump_clock.autojump_threshold = 0.001
    async with sqlite_store(tmp_path / "db") as store:
        made = Plane(store, Settings(models=(model(),)), await store.cluster(), await store.new_epoch(), nursery)
        nursery.start_soon(made.reconciler.run)
        yield made
        nursery.cancel_scope.cancel()


def report(command: StartShard, state: ShardState) -> ShardReport:
    return ShardReport(
        shard=command.shard, replica=command.replica, generation=command.generation, model=command.model, rank=0,
        cluster=command.cluster, profile_digest=command.profile_digest, devices=command.devices, state=state,
        reason="because", next="", since=0.0, pid=42, endpoint="http://10.0.0.1:20000", api_key="sk-x",
    )  # fmt: skip


async def heard(session: Session) -> object:
    """The next message that is no answer to a heartbeat."""
    while isinstance(message := await session.receive(), HeartbeatSeen):
        pass
    return message


async def expect(session: Session, kind: type) -> object:
    with trio.fail_after(60):
        message = await heard(session)
    assert isinstance(message, kind), message
    return message


async def test_a_crowd_does_not_get_a_pass_each(plane: Plane, autojump_clock: trio.testing.MockClock) -> None:
    def passes() -> float:
        value = plane.metrics.registry.get_sample_value("llmgw_reconcile_pass_seconds_count")
        assert value is not None
        return value

    async with plane.agent():
        await until(lambda: plane.cluster.linked("n1"))
        await trio.sleep(1)  # its own passes are over
        for number in range(2, 400):
            plane.cluster._rows[f"n{number}"] = evolve(plane.cluster._rows["n1"], id=f"n{number}")
        plane.reconciler.wake()
        await trio.sleep(0.001)
        before, began = passes(), trio.current_time()
        while trio.current_time() < began + 0.4:
            plane.reconciler.wake()
            await trio.sleep(0.001)
        assert 8 <= passes() - before <= 11  # 40 ms after each


async def test_hardware_changes_build_on_each_other(plane: Plane, autojump_clock: trio.testing.MockClock) -> None:
    def held() -> Inventory:
        return plane.cluster.state(0).nodes[0].inventory

    async with plane.agent() as session:
        before = held()
        broken = evolve(
            before, devices=(evolve(before.devices[0], faults=(Fault("failed", "x"),)), *before.devices[1:])
        )
        for sequence, old, new in ((1, before, broken), (2, broken, before)):
            delta = diff(old, new)
            assert delta is not None
            await session.send(HardwareChanged(sequence, delta))
            await until(lambda new=new: held() == new)  # type: ignore[misc]
        delta = diff(before, broken)
        assert delta is not None
        await session.send(HardwareChanged(7, delta))
        # One that does not follow ends the session: the next registration says everything anew.
        await until(lambda: not plane.cluster.linked("n1"))
        assert held() == before


async def until(done: Callable[[], bool], seconds: float = 60) -> None:
    with trio.fail_after(seconds):
        while not done():
            await trio.sleep(2)


async def test_from_registration_to_a_route(plane: Plane, autojump_clock: trio.testing.MockClock) -> None:
    async with plane.agent() as session:
        start = await expect(session, StartShard)
        assert isinstance(start, StartShard)
        assert (start.command, start.devices, start.epoch) == ("m-1.0#1:start", (0,), plane.cluster.epoch)
        for beat in range(3):
            await trio.sleep(5)
            await session.send(Heartbeat(beat))
        with trio.move_on_after(1) as waited:
            await heard(session)
        assert waited.cancelled_caught, "the same command is not sent twice on one session"
        await session.send(CommandResult(start.command, True))
        for state in (ShardState.STARTING, ShardState.LOADING, ShardState.READY):
            await session.send(ShardStatus(report(start, state)))
        await until(lambda: bool(plane.tables and plane.tables[-1].routes[0].endpoints))
        (endpoint,) = plane.tables[-1].routes[0].endpoints
        assert (endpoint.id, endpoint.host, endpoint.port, endpoint.api_key) == ("m-1.0", "10.0.0.1", 20000, "sk-x")
        assert b'llmgw_shards{state="ready"} 1.0' in plane.metrics.render()


async def test_a_refused_start_is_a_failure_with_its_reason_and_tried_again(
    plane: Plane, autojump_clock: trio.testing.MockClock
) -> None:
    async with plane.agent() as session:
        start = await expect(session, StartShard)
        assert isinstance(start, StartShard)
        await session.send(CommandResult(start.command, False, "no port is free", "widen ports"))
        await until(lambda: plane.cluster.replicas[0].generation == 2)
        assert "refused by the agent: no port is free. widen ports" in plane.cluster.replicas[0].reason
        forget = await expect(session, ForgetShard)
        assert isinstance(forget, ForgetShard)
        again = await expect(session, StartShard)
        assert isinstance(again, StartShard)
        assert (forget.generation, again.generation) == (1, 2)
        await session.send(CommandResult(forget.command, False, "its shim has not ended"))
        for beat in range(9):
            await trio.sleep(5)
            await session.send(Heartbeat(beat))
        with trio.move_on_after(5) as waited:
            await heard(session)
        assert waited.cancelled_caught, "what cannot be forgotten yet is not asked again in every pass"
        for beat in range(9, 13):
            await session.send(Heartbeat(beat))
            await trio.sleep(5)
        assert await expect(session, ForgetShard) == forget
        await session.send(CommandResult(forget.command, True))
        await until(lambda: not any(r.generation == 1 for r in _reports(plane)))


def _reports(plane: Plane) -> tuple[ShardReport, ...]:
    row = plane.cluster.row("n1")
    return () if row is None else row.reports


async def test_silence_and_return(plane: Plane, autojump_clock: trio.testing.MockClock) -> None:
    seen: list[NodeState] = []

    def state() -> NodeState:
        found = plane.cluster.state(plane.clock()).node("n1")
        assert found is not None
        if not seen or seen[-1] is not found.state:
            seen.append(found.state)
        return found.state

    async with plane.agent() as session:
        start = await expect(session, StartShard)
        assert isinstance(start, StartShard)
        ready = report(start, ShardState.READY)
        await session.send(ShardStatus(ready))
        for n in range(4):
            await trio.sleep(5)
            await session.send(Heartbeat(n))
            await trio.sleep(0.1)
            assert state() is NodeState.CONNECTED
    await until(lambda: state() is NodeState.LOST, 100)
    await until(lambda: bool(plane.cluster.unplaced))
    assert plane.cluster.unplaced[0].candidates[0].refusals[0].reason == "n1 is lost: its agent is not heard"
    assert plane.tables[-1].routes[0].endpoints, "its engine may well serve"
    async with plane.agent(shards=(ready,)) as session:
        await until(lambda: state() is NodeState.CONNECTED and not plane.cluster.unplaced)
        (replica,) = plane.cluster.replicas
        assert (replica.id, replica.generation) == ("m-1", 1)
        with trio.move_on_after(8) as waited:
            await heard(session)
        assert waited.cancelled_caught, "nothing is asked of an engine that is as it should be"
    assert seen == [NodeState.CONNECTED, NodeState.UNREACHABLE, NodeState.LOST, NodeState.CONNECTED]


async def test_new_settings_are_followed(plane: Plane, autojump_clock: trio.testing.MockClock) -> None:
    async with plane.agent() as session:
        start = await expect(session, StartShard)
        assert isinstance(start, StartShard)
        await session.send(ShardStatus(report(start, ShardState.READY)))
        await until(lambda: bool(plane.tables and plane.tables[-1].routes[0].endpoints))
        plane.cluster.use_settings(Settings(models=(model(replicas=0),)))
        plane.cluster.in_flight = {"m-1.0": 0}
        await expect(session, object)  # told to drain
        stop = await expect(session, StopShard)
        assert isinstance(stop, StopShard)
        await session.send(ShardStatus(evolve(report(start, ShardState.STOPPED), reason="stopped")))
        await until(lambda: plane.cluster.replicas == ())
        await expect(session, ForgetShard)


async def test_the_same_node_again_takes_the_place_of_its_older_session(
    plane: Plane, autojump_clock: trio.testing.MockClock
) -> None:
    async with plane.agent() as old:
        await expect(old, StartShard)
        async with plane.agent() as new:
            with pytest.raises(PeerGone, match=r"ended|cut|closed"):
                await old.receive()
            await expect(new, StartShard)
            assert plane.cluster.linked("n1")


NOTHING = WeightsFound((), ())
LARGE = WeightFacts("/w", 200 * 2**30, "model.safetensors.index.json")


@asynccontextmanager
async def beating(session: Session) -> AsyncIterator[None]:
    """Heartbeats, so that no wait makes the node look dead."""

    async def beat() -> None:
        for number in itertools.count():
            await session.send(Heartbeat(number))
            await trio.sleep(2)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(beat)
        yield
        nursery.cancel_scope.cancel()


async def test_weights_are_asked_for_before_anything_is_placed(
    plane: Plane, autojump_clock: trio.testing.MockClock
) -> None:
    async with plane.agent(weights=NOTHING) as session, beating(session):
        asked = await expect(session, LookForWeights)
        assert asked == LookForWeights(("/w",))
        await until(lambda: "how large /w is, is not known yet: n1 may have it" in plane.cluster.unplaced[0].reason)
        await session.send(WeightsFound(("/w",), (LARGE,)))
        await until(lambda: "memory" in plane.cluster.unplaced[0].reason)
        (candidate,) = plane.cluster.unplaced[0].candidates
        assert candidate.refusals[0].reason.startswith(
            "needs 202.5 GiB on each device: weights 200.0 (200.0 GiB by model"
        )
        # Another copy of the same files is fetched over it.
        await session.send(WeightsFound(("/w",), (evolve(LARGE, weights_bytes=2**30),)))
        await expect(session, StartShard)
    # A node that comes back has looked already, and what it said is remembered.
    async with plane.agent(weights=NOTHING) as session, beating(session):
        await expect(session, LookForWeights)
        (facts,) = plane.cluster.state(plane.clock()).nodes[0].weights
        assert facts.weights_bytes == 2**30


async def test_a_node_that_does_not_answer_is_waited_for_a_while(
    plane: Plane, autojump_clock: trio.testing.MockClock
) -> None:
    async with plane.agent(weights=NOTHING) as session, beating(session):
        await expect(session, LookForWeights)
        began = trio.current_time()  # and its time began with the registration, a little before that
        await expect(session, StartShard)
        assert 8 < trio.current_time() - began < 40


async def test_new_settings_ask_for_new_weights(plane: Plane, autojump_clock: trio.testing.MockClock) -> None:
    async with plane.agent(weights=WeightsFound(("/w",), ())) as session, beating(session):
        await expect(session, LookForWeights)
        await expect(session, StartShard)  # it had looked at these
        other = evolve(model("other"), profiles=(evolve(model().profiles[0], weights="/v"),))
        plane.cluster.use_settings(Settings(models=(model(), other)))
        assert await expect(session, LookForWeights) == LookForWeights(("/w", "/v"))
        assert len(plane.cluster.replicas) == 1
        await session.send(WeightsFound(("/w", "/v"), ()))
        started = await expect(session, StartShard)
        assert isinstance(started, StartShard)
        assert started.model == "other"


async def test_what_ran_is_remembered(plane: Plane, autojump_clock: trio.testing.MockClock) -> None:
    async with plane.agent() as session:
        start = await expect(session, StartShard)
        assert isinstance(start, StartShard)
        await session.send(ShardStatus(evolve(report(start, ShardState.LOADING), load_mib=(70_000,))))
        await session.send(ShardStatus(evolve(report(start, ShardState.READY), load_mib=(70_000,))))
        await until(lambda: bool(plane.cluster.state(0).learned))
        (known,) = plane.cluster.state(0).learned
        assert (known.digest, known.device_class, known.held_mib) == (start.profile_digest, "h100-80g", 70_000)
        more = evolve(report(start, ShardState.READY), load_mib=(70_000,), serving_mib=(74_000,))
        await session.send(ShardStatus(more))
        await until(lambda: plane.cluster.state(0).learned[0].held_mib == 74_000)
        await session.send(ShardStatus(evolve(more, serving_mib=(74_001,), reason="again")))
        await until(lambda: plane.cluster.state(0).nodes[0].reports[-1].reason == "again")
        (known,) = plane.cluster.state(0).learned
        assert known.held_mib == 74_000, "not worth a line on the disk"
        assert await plane.store.learned() == (known,)


class FullDisk:
    """A store that fails until it is told not to."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.full = True

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    async def save_pass(self, record: PassRecord) -> int:
        if self.full:
            raise OperatorError("db", "the disk is full", "free some space")
        return await self._store.save_pass(record)

    async def save_node(self, row: NodeRow) -> None:
        if self.full:
            raise OperatorError("db", "the disk is full", "free some space")
        await self._store.save_node(row)


async def test_nothing_is_carried_out_that_was_not_written_down(tmp_path, autojump_clock, nursery) -> None:
    autojump_clock.autojump_threshold = 0.001
    async with sqlite_store(tmp_path / "db") as store:
        full = FullDisk(store)
        plane = Plane(full, Settings(models=(model(),)), await store.cluster(), await store.new_epoch(), nursery)  # type: ignore[arg-type]
        nursery.start_soon(plane.reconciler.run)
        async with plane.agent() as session:
            with trio.move_on_after(20) as waited:
                await heard(session)
            assert waited.cancelled_caught
            rows: tuple[Replica, ...] = plane.cluster.replicas
            assert rows == ()
            await session.send(Heartbeat(1))
            full.full = False
            await expect(session, StartShard)
        nursery.cancel_scope.cancel()
