"""Everything that a run is made of, and the invariants that are watched while it goes on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping

import trio
from attrs import evolve

from llmgw.link.patience import LinkLimits
from llmgw.link.session import Unreached
from llmgw.scheduler.state import Replica
from llmgw.settings.catalog import Model
from llmgw.settings.daemon import Address
from llmgw.settings.document import Liveness, NodeRules, Settings

from .engines import Engine, Fate, make_fate
from .kit import Kit
from .node import Node
from .plan import Plan
from .plane import Plane
from .store import Disk
from .trace import Trace
from .watch import Watch
from .wire import Wires

_START = 1_700_000_000.0
_CONNECT_S = 5.0
_ADDRESSES = (Address("cp-a", 7443), Address("cp-b", 7443))


class World:
    """A fleet, its control planes, its network and its store. ``well`` says that the time of faults is over."""

    engines: trio.Nursery
    daemons: trio.Nursery

    def __init__(self, plan: Plan, kit: Kit, trace: Trace, root: trio.CancelScope) -> None:
        self.plan = plan
        self.kit = kit
        self.trace = trace
        self.draw = random.Random(f"run {plan.seed}")
        self.disk = Disk()
        self.wires = Wires()
        self.addresses = _ADDRESSES
        self.planes: list[Plane] = []
        self.change_planes = trio.Lock()
        self.well = False
        self.failure: tuple[str, str] | None = None
        self.launches = 0
        self._root = root
        beat = plan.heartbeat_s
        self.tick_s = beat
        self.limits = LinkLimits(ping_s=1.2 * beat, silence_s=3 * beat)
        liveness = Liveness(beat, 3 * beat, 10 * beat, brake_window_s=10 * beat)
        self.settings = Settings(models=plan.models, liveness=liveness, nodes=plan.rules, quotas=plan.quotas)
        self.nodes = {node.id: Node(node, self, at) for at, node in enumerate(plan.nodes)}
        self.traffic = kit.traffic(self)
        self.watch = Watch(self)
        self.disk.watched = self.watch.passed

    def clock(self) -> float:
        """Epoch seconds, as all good clocks show them."""
        return _START + trio.current_time()

    def fail(self, invariant: str, what: str) -> None:
        """An invariant does not hold; the run is over."""
        if self.failure is None:
            self.failure = (invariant, what)
            self.trace.say(f"FAILED {invariant}: {what}")
            self._root.cancel()

    # Engines

    def fate(self) -> Fate:
        """How the next engine will go."""
        return make_fate(self.draw, well=self.well)

    def peers(self, engine: Engine) -> list[Engine]:
        """The other ranks of the same start of the same replica."""
        mine = engine.command
        return [
            e
            for node in self.nodes.values()
            for e in node.engines
            if e is not engine and (e.command.replica, e.command.generation) == (mine.replica, mine.generation)
        ]

    def alive(self) -> list[Engine]:
        """Every engine that runs anywhere."""
        return [engine for node in self.nodes.values() for engine in node.engines]

    def launched(self, node: Node, engine: Engine) -> None:
        """An engine starts: no other may run for the same slot, or on the same memory."""
        self.launches += 1
        command = engine.command
        node.say(f"engine {engine.pid} of {engine.key} starts on {', '.join(engine.uuids)}")
        for other in self.alive():
            if other.command.shard == command.shard:
                self.fail("one live shard", f"{node.id} starts {engine.key} while {other.key} lives on {other.node}")
        truth = node.truth()
        mine = [d for uuid in engine.uuids if (d := truth.by_uuid(uuid)) is not None]
        for other in node.engines:
            theirs = [d for uuid in other.uuids if (d := truth.by_uuid(uuid)) is not None]
            for device in mine:
                if any(device.uuid == d.uuid or device.shares_memory(d) for d in theirs):
                    self.fail("one live shard", f"{node.id} starts {engine.key} on {device.label} of {other.key}")

    # The network

    async def connect(self, node: Node, address: Address) -> trio.abc.Stream:
        """What dialling gives, TLS left out. Raises :class:`Unreached`."""
        thing = f"control plane at {address}"
        await trio.lowlevel.checkpoint()
        if self.wires.blocked(node.id):
            await trio.sleep(_CONNECT_S)
            raise Unreached(thing, f"no connection within {_CONNECT_S:g} s")
        plane = next((p for p in self.planes if p.address == address and p.listens), None)
        if plane is None:
            raise Unreached(thing, "cannot be reached: connection refused")
        wire = self.wires.add(node.id, address)
        plane.accept(wire.server_end, node.id)
        return self.kit.agent_end(wire)

    # Control planes

    def start_plane(self, address: Address) -> Plane:
        """A control plane begins its life."""
        self.planes = [p for p in self.planes if not p.over]
        plane = Plane(self, address)
        self.planes.append(plane)
        self.daemons.start_soon(plane.run)
        return plane

    def edit(
        self,
        models: tuple[Model, ...] | None = None,
        nodes: Mapping[str, NodeRules] | None = None,
        quotas: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        """The operator writes other settings, and every control plane reads them."""
        before = self.settings
        self.watch.edited(before)
        self.settings = evolve(
            before,
            models=before.models if models is None else models,
            nodes=before.nodes if nodes is None else nodes,
            quotas=before.quotas if quotas is None else quotas,
        )
        for plane in self.planes:
            plane.use_settings(self.settings)

    def devices_of(self, rows: Iterable[Replica]) -> Counter[str]:
        """The device classes that rows have, by the machines themselves."""
        made: Counter[str] = Counter()
        for row in rows:
            for shard in row.shards:
                there = {d.uuid: d.device_class for d in self.nodes[shard.node].hardware.devices}
                made.update(there[uuid] for uuid in shard.uuids if uuid in there)
        return made
