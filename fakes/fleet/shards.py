"""What :class:`llmgw.agent.shards.Shards` is to the link, over simulated engines and the real state machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import trio
from attrs import define

from llmgw.agent.events import (
    Action,
    DrainAsked,
    Ended,
    KeepStacks,
    Kill,
    Observation,
    Probed,
    Progressed,
    StacksKept,
    StopAsked,
    Terminate,
    Tick,
    Worked,
)
from llmgw.agent.lifecycle import step
from llmgw.agent.shard import Shard, adopted, begin
from llmgw.errors import OperatorError
from llmgw.hardware.inventory import Device, Inventory
from llmgw.link.messages import StartShard
from llmgw.scheduler.state import Exit, ShardReport, ShardState
from llmgw.settings.daemon import Address

from .engines import Engine, Phase

if TYPE_CHECKING:
    from .node import Node

_FIRST_PORT = 20000
_EARLY_S = 0.001
_HANG_LOOK_S = 60.0


@define(eq=False)
class Record:
    """A launch record on the node's disk. ``engine`` stands for what the shim wrote down: none before the spawn."""

    command: StartShard
    devices: tuple[int, ...]
    uuids: tuple[str, ...]
    port: int
    rendezvous: Address | None
    started: float
    state: ShardState
    since: float
    boot: int
    engine: Engine | None = None
    stuck: bool = False
    """Its shim does not end, so that it cannot be forgotten."""


class Supervisor:
    """One start of one shard, watched. Cancelled, it lets go of the engine."""

    def __init__(self, record: Record, shard: Shard, node: Node, changed: Callable[[ShardReport], None]) -> None:
        self.record = record
        self.shard = shard
        self._node = node
        self._changed = changed
        self._stacks_wanted = False

    def report(self) -> ShardReport:
        """What goes up to the control plane."""
        record, shard, command = self.record, self.shard, self.record.command
        serving = command.rank == 0 and shard.state in (ShardState.READY, ShardState.DRAINING)
        found = shard.diagnosis
        return ShardReport(
            shard=command.shard,
            replica=command.replica,
            generation=command.generation,
            model=command.model,
            rank=command.rank,
            cluster=command.cluster,
            profile_digest=command.profile_digest,
            devices=record.devices,
            uuids=record.uuids,
            state=shard.state,
            reason=shard.reason,
            next=shard.next,
            since=shard.since,
            pid=None if shard.state.ended or record.engine is None else record.engine.pid,
            endpoint=f"http://{self._node.address}:{record.port}" if serving else None,
            api_key="sk-sim" if serving else None,
            rendezvous=record.rendezvous if command.rank == 0 else None,
            progress=shard.progress,
            exit=shard.exit,
            remedy=found.remedy if found is not None else "",
            final=found is not None and found.final,
        )

    def launch(self) -> None:
        """It is."""

    def drain(self, reason: str) -> None:
        """The router sends nothing new here."""
        self._node.obey()
        self.observe(DrainAsked(reason))
        self._stir()

    def stop(self, reason: str, grace_s: float) -> None:
        """End the engine."""
        self._node.obey()
        self.observe(StopAsked(reason, grace_s))
        self._stir()

    def _stir(self) -> None:
        """There may be another deadline to wait for."""
        if self.record.engine is not None:
            self.record.engine.stir()

    async def run(self) -> None:
        """Watch until the shard has ended: at every change of the engine, and when a deadline is due."""
        engine = self.record.engine
        assert engine is not None
        while True:
            changed, jumped = engine.changed, self._node.clock_changed
            if engine.exit is not None:
                # Its devices are read again before its end is told: who is placed next must find them free.
                await self._node.moment()
                self._node.read_hardware()
            self.look()
            if self.shard.state.ended:
                return
            if self._stacks_wanted:
                self._stacks_wanted = False
                await self._node.moment()
                self.observe(StacksKept())
                continue
            due = float("inf")
            if self.shard.deadline is not None:
                due = trio.current_time() + max(0.0, self.shard.deadline - self._node.clock()) + _EARLY_S
            if engine.hung:
                due = min(due, trio.current_time() + _HANG_LOOK_S)
            with trio.move_on_at(due):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_first, changed, nursery.cancel_scope)
                    nursery.start_soon(_first, jumped, nursery.cancel_scope)

    def look(self) -> None:
        """Feed the state machine what there is to be seen."""
        engine = self.record.engine
        assert engine is not None
        if engine.exit is not None:
            self.observe(Ended(engine.exit, diagnosis=engine.diagnosis))
            return
        rank = self.record.command.rank
        if engine.phase is Phase.LOADING:
            self.observe(Progressed("loading weights", engine.progress))
        elif engine.phase is Phase.LOADED:
            self.observe(Progressed("loaded", 1.0, rank > 0))
        elif engine.phase is Phase.SERVING and self.shard.state is not ShardState.STOPPING:
            self.observe(Probed(True, True, ""))
            self.observe(Worked(1, 1.0) if engine.hung else Worked(0, 1.0))
        self.observe(Tick())

    def observe(self, observation: Observation) -> None:
        """As the real supervisor does."""
        before = self.shard
        command = self.record.command
        now = self._node.clock()
        self.shard, actions = step(before, observation, command.model, command.profile.limits, now)
        for action in actions:
            self._act(action)
        if self.shard == before:
            return
        if self.shard.state is not before.state:
            self.record.state, self.record.since = self.shard.state, self.shard.since
        self._changed(self.report())

    def _act(self, action: Action) -> None:
        engine = self.record.engine
        if engine is None:
            return
        match action:
            case KeepStacks():
                self._stacks_wanted = True
            case Terminate():
                engine.terminate()
            case Kill():
                engine.kill()


async def _first(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


class Shards:
    """The shards of one life of an agent; the records that they stand on outlive it."""

    def __init__(self, node: Node, changed: Callable[[ShardReport], None]) -> None:
        self._node = node
        self._changed = changed
        self._known: dict[tuple[str, int], Supervisor] = {}
        self._nursery: trio.Nursery | None = None

    def reports(self) -> tuple[ShardReport, ...]:
        """What to say of every shard, by name."""
        return tuple(s.report() for _, s in sorted(self._known.items()))

    def find(self, shard: str, generation: int) -> Supervisor | None:
        """This start of this shard."""
        return self._known.get((shard, generation))

    def alive(self) -> list[Supervisor]:
        """Those whose engine has not ended."""
        return [s for s in self._known.values() if not s.shard.state.ended]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own every supervisor until cancelled. Started once everything that was left behind is adopted."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                for key, record in sorted(self._node.records.items()):
                    await trio.lowlevel.checkpoint()
                    self._take_over(key, record, nursery)
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._nursery = None

    def _take_over(self, key: tuple[str, int], record: Record, nursery: trio.Nursery) -> None:
        now, command, engine = self._node.clock(), record.command, record.engine
        if engine is None:
            del self._node.records[key]  # a launch that never came about
            return
        if engine.alive:
            limits = command.profile.limits
            shard = adopted(record.state, command.model, limits, now, record.since, command.rank)
            supervisor = self._known[key] = Supervisor(record, shard, self._node, self._changed)
            nursery.start_soon(supervisor.run)
            return
        exit_ = engine.exit or Exit()
        if record.state in (ShardState.STOPPED, ShardState.STOPPING):
            shard = Shard(ShardState.STOPPED, record.since, "stopped before this agent started", "", exit=exit_)
        else:
            reason = "the machine was restarted" if record.boot != self._node.boot else "ended while no agent ran"
            shard = Shard(ShardState.FAILED, now, reason, "", exit=exit_, diagnosis=engine.diagnosis)
        self._known[key] = Supervisor(record, shard, self._node, self._changed)

    async def start(self, command: StartShard, inventory: Inventory) -> None:
        """Launch an engine. Raises :class:`OperatorError`."""
        await trio.lowlevel.checkpoint()
        node = self._node
        node.obey()
        if self._nursery is None:
            raise OperatorError(command.shard, "the agent is stopping")
        if command.profile.engine not in node.installed:
            raise OperatorError(f"engine {command.profile.engine.value}", f"is not installed on {node.id}")
        devices = self._devices(command, inventory)
        self._refuse_held(devices, inventory)
        port = self._port(None)
        rendezvous = command.rendezvous
        if command.profile.nodes > 1:
            found = next((f for f in inventory.fabrics if f.label == command.fabric), None)
            if found is None or found.faults:
                raise OperatorError(f"fabric {command.fabric}", "is not there, or is down")
            if command.rank == 0:
                rendezvous = Address(node.address, self._port(port))
        now = node.clock()
        key = (command.shard, command.generation)
        uuids = tuple(d.uuid for d in devices)
        numbers = tuple(d.number for d in devices)
        record = Record(command, numbers, uuids, port, rendezvous, now, ShardState.STARTING, now, node.boot)
        shard = begin(command.model, command.profile.limits, now, command.rank)
        supervisor = self._known[key] = Supervisor(record, shard, node, self._changed)
        try:
            await node.moment()
        except trio.Cancelled:
            del self._known[key]  # nothing was written yet: from there on a launch runs to its end
            raise
        node.records[key] = record
        await self._moment()
        record.engine = node.launch(command, port, rendezvous, uuids)
        await self._moment()
        self._changed(supervisor.report())
        if self._nursery is not None:
            self._nursery.start_soon(supervisor.run)

    async def _moment(self) -> None:
        """Time in which a launch cannot be cancelled; only the end of the whole process interrupts it."""
        with trio.CancelScope(shield=True):
            await self._node.moment()
        if self._node.killed:
            await trio.sleep_forever()

    def _devices(self, command: StartShard, inventory: Inventory) -> tuple[Device, ...]:
        devices = []
        for position, number in enumerate(command.devices):
            uuid = command.uuids[position] if len(command.uuids) == len(command.devices) else None
            device = inventory.device(number) if uuid is None else inventory.by_uuid(uuid)
            if device is None:
                raise OperatorError(f"device {uuid or number}", f"is not on {self._node.id}")
            devices.append(device)
        return tuple(devices)

    def _refuse_held(self, devices: tuple[Device, ...], inventory: Inventory) -> None:
        for other in self.alive():
            theirs = [d for uuid in other.record.uuids if (d := inventory.by_uuid(uuid)) is not None]
            for device in devices:
                if device.uuid in other.record.uuids or any(device.shares_memory(held) for held in theirs):
                    raise OperatorError(device.label, f"is held by shard {other.record.command.shard}")

    def _port(self, besides: int | None) -> int:
        """The lowest port that no shard of ours has and nothing else on the node listens on."""
        alive = self.alive()
        taken = {s.record.port for s in alive} | {besides} | self._node.ports()
        taken |= {s.record.rendezvous.port for s in alive if s.record.rendezvous is not None}
        return next(p for p in range(_FIRST_PORT, _FIRST_PORT + 1000) if p not in taken)

    async def forget(self, shard: str, generation: int) -> None:
        """Drop an ended shard's record. Raises :class:`OperatorError` while it has not ended."""
        await trio.lowlevel.checkpoint()
        self._node.obey()
        supervisor = self._known.get((shard, generation))
        if supervisor is None:
            return
        if not supervisor.shard.state.ended:
            raise OperatorError(f"shard {shard}", f"is {supervisor.shard.state.value}", "stop it first")
        await self._node.moment()
        if supervisor.record.stuck:
            await trio.sleep(5)
            raise OperatorError(f"shard {shard}", "its shim has not ended", "look for the process that holds `lock`")
        self._node.records.pop((shard, generation), None)
        self._known.pop((shard, generation), None)
