"""The reconcile core through any story: nodes come, go and degrade, shards fail in every state, settings change.

The world obeys commands late and in part, as the real one does; whatever happened, it comes to rest at what is wanted.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

from attrs import evolve
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llmgw.hardware.inventory import Device, Fault, MigInstance
from llmgw.scheduler.decide import decide
from llmgw.scheduler.explain import DecisionKind, DrainCommand, Outcome, StartCommand, StopCommand
from llmgw.scheduler.orders import Drained, Order, OrderKind
from llmgw.scheduler.scale import Demand, scaled
from llmgw.scheduler.state import ClusterState, Goal, Node, NodeState, Replica, ShardReport, ShardState
from llmgw.settings.catalog import Model, PlacementRules, Scaling, Update
from tests.scheduler.clusters import CLUSTER, NOW, device, fabric, node, profile, report, wide

SLICE = "a100-80g-mig-3g.40gb"
FAULT = Fault("ecc-uncorrected", "has 2 uncorrected ECC errors")
NEXT = {ShardState.STARTING: ShardState.LOADING, ShardState.LOADING: ShardState.READY}
NAMES = ("n0", "n1", "n2", "n3")


def _mig(number: int, card: int, instance: int) -> Device:
    made = device(number, SLICE)
    return evolve(
        made, number=1000 + 100 * card + number, uuid=f"MIG-{card}-{instance}",
        mig=MigInstance(card=card, profile="3g.40gb", gpu_instance=instance, compute_instance=0, index=number),
    )  # fmt: skip


def _cards(name: str) -> tuple[Device, ...]:
    kind = "l40s-45g" if name == "n3" else "h100-80g"
    return tuple(evolve(device(n, kind), uuid=f"GPU-{name}-{n}") for n in range(4))


PROFILES = (
    profile("one"),
    profile("pair", 2),
    profile("all", 4),
    profile("either", 1, ("l40s-45g", "h100-80g")),
    profile("slice", 1, (SLICE,)),
    wide(2, 2),
)


def _devices(state: ClusterState, row: Replica) -> list[Device]:
    nodes = [(state.node(s.node), s.devices) for s in row.shards]
    return [d for here, devices in nodes if here is not None for n in devices
            if (d := here.inventory.device(n)) is not None]  # fmt: skip


def _serves(state: ClusterState, row: Replica) -> bool:
    said = [state.report(s, row.generation) for s in row.shards]
    alive = [r for r in said if r is not None and not r.state.ended and r.state is not ShardState.STOPPING]
    return bool(said) and alive == said and alive[0].state is ShardState.READY


def _on_lost(state: ClusterState, row: Replica) -> bool:
    return any((here := state.node(s.node)) is None or here.state is NodeState.LOST for s in row.shards)


@st.composite
def catalog(draw: st.DrawFn) -> tuple[Model, ...]:
    made = []
    for name in draw(st.lists(st.sampled_from(("a", "b", "c")), unique=True, max_size=3)):
        some = draw(st.lists(st.sampled_from(PROFILES), unique_by=lambda p: p.name, min_size=1, max_size=2))
        context = draw(st.sampled_from((None, 4096)))
        made.append(
            Model(
                name,
                tuple(evolve(p, context_length=context) for p in some),
                draw(st.integers(0, 3)),
                placement=PlacementRules(per_node=draw(st.sampled_from((None, None, 1)))),
                priority=draw(st.sampled_from((0, 0, 5))),
                group=draw(st.sampled_from(("", "g"))),
                min_run_s=30.0,
                update=draw(st.sampled_from(Update)),
                scaling=draw(st.sampled_from((None, None, Scaling(0, 2, 10, idle_s=60, down_s=30, cooldown_s=20)))),
            )
        )
    return tuple(made)


class Reconciled(RuleBasedStateMachine):
    """One control plane over four nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.state = ClusterState(CLUSTER, (), (), (), 1)
        self.sent: list[StartCommand | DrainCommand | StopCommand] = []
        self.outcome: Outcome | None = None

    @initialize(models=catalog())
    def begin(self, models: tuple[Model, ...]) -> None:
        domains = {"n0": ((0, 1, 2, 3),), "n1": ((0, 1), (2, 3))}
        self.state = evolve(
            self.state,
            models=models,
            quotas={"g": {"h100-80g": 6, SLICE: 1}},
            nodes=tuple(
                node(name, _cards(name), domains=domains.get(name, ()), fabrics=(fabric(),) if name != "n3" else ())
                for name in NAMES
            ),
        )

    def _change(self, name: str, **more: object) -> None:
        nodes = tuple(evolve(n, **more) if n.id == name else n for n in self.state.nodes)
        self.state = evolve(self.state, nodes=nodes)

    def _node(self, name: str) -> Node:
        found = self.state.node(name)
        assert found is not None
        return found

    def _says(self, name: str, told: ShardReport) -> None:
        others = [r for r in self._node(name).reports if (r.shard, r.generation) != (told.shard, told.generation)]
        self._change(name, reports=(*others, told))

    # What the world does.

    @rule(seconds=st.sampled_from((1.0, 5.0, 60.0, 700.0)))
    def time_goes_on(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=st.sampled_from(NAMES), state=st.sampled_from(NodeState))
    def a_node_comes_or_goes(self, name: str, state: NodeState) -> None:
        heard = self.now if state is NodeState.CONNECTED else self.now - 100
        self._change(name, state=state, since=self.now, heard=heard)

    @rule(name=st.sampled_from(NAMES), which=st.integers(0, 3), broken=st.booleans())
    def a_device_breaks_or_is_repaired(self, name: str, which: int, broken: bool) -> None:
        inventory = self._node(name).inventory
        if which < len(inventory.devices):
            devices = list(inventory.devices)
            devices[which] = evolve(devices[which], faults=(FAULT,) if broken else ())
            self._change(name, inventory=evolve(inventory, devices=tuple(devices)))

    @rule(broken=st.booleans())
    def a_fabric_breaks_or_is_repaired(self, broken: bool) -> None:
        inventory = self._node("n1").inventory
        self._change("n1", inventory=evolve(inventory, fabrics=(fabric(fault="is down" if broken else ""),)))

    @rule(instances=st.lists(st.integers(1, 4), unique=True, max_size=2))
    def a_card_is_carved(self, instances: list[int]) -> None:
        inventory = self._node("n2").inventory
        kept = tuple(d for d in _cards("n2") if d.number < 3)
        slices = tuple(_mig(n, 3, instance) for n, instance in enumerate(sorted(instances)))
        whole = tuple(d for d in _cards("n2") if d.number == 3) if not instances else ()
        self._change("n2", inventory=evolve(inventory, devices=(*kept, *whole, *slices)))

    @rule(models=catalog())
    def settings_change(self, models: tuple[Model, ...]) -> None:
        self.state = evolve(self.state, models=models)

    @rule(name=st.sampled_from(("a", "b", "c")), running=st.integers(0, 40), waiting=st.integers(0, 3))
    def requests_come(self, name: str, running: int, waiting: int) -> None:
        demand = Demand(running, waiting, asked=self.now if running + waiting else self.now - 1000)
        self.state = evolve(self.state, demands={**self.state.demands, name: demand})

    @rule(name=st.sampled_from(NAMES), force=st.sampled_from((None, None, False, False, True)))
    def a_node_is_drained_or_not(self, name: str, force: bool | None) -> None:
        self._change(name, drained=None if force is None else Drained("an operator", self.now, force=force))

    @rule(which=st.integers(0, 9), kind=st.sampled_from(OrderKind), old=st.booleans())
    def a_replica_is_to_be_restarted_or_stopped(self, which: int, kind: OrderKind, old: bool) -> None:
        if self.state.replicas:
            row = self.state.replicas[which % len(self.state.replicas)]
            order = Order(row.id, kind, row.generation - old, "an operator", self.now)
            self.state = evolve(self.state, orders={**self.state.orders, row.id: order})

    def _alive(self, name: str) -> list[ShardReport]:
        return [r for r in self._node(name).reports if not r.state.ended]

    @rule(name=st.sampled_from(NAMES), data=st.data(), final=st.booleans())
    def an_engine_ends(self, name: str, data: st.DataObject, final: bool) -> None:
        if alive := self._alive(name):
            told = data.draw(st.sampled_from(alive))
            self._says(name, evolve(told, state=ShardState.FAILED, reason="exit code 1", final=final))

    @rule(name=st.sampled_from(NAMES))
    def engines_get_on(self, name: str) -> None:
        for told in self._alive(name):
            if told.state in NEXT:
                self._says(name, evolve(told, state=NEXT[told.state], since=self.now))
            elif told.state is ShardState.STOPPING:
                self._says(name, evolve(told, state=ShardState.STOPPED))

    @rule(part=st.integers(1, 10))
    def some_commands_arrive(self, part: int) -> None:
        for command in self.sent[:part]:
            self._obey(command)
        self.sent = self.sent[part:]

    def _obey(self, command: StartCommand | DrainCommand | StopCommand) -> None:
        match command:
            case StartCommand(replica=replica, assignment=place):
                known = any((r.shard, r.generation) == (place.shard, replica.generation)
                            for r in self._node(place.node).reports)  # fmt: skip
                if not known:
                    made = report(replica, ShardState.STARTING, rank=place.rank)
                    told = evolve(made, devices=place.devices, uuids=place.uuids)
                    held = {u for r in self._alive(place.node) for u in r.uuids}
                    if held & set(place.uuids):
                        told = evolve(told, state=ShardState.FAILED, reason="refused by the agent: is held")
                    self._says(place.node, told)
            case DrainCommand(node=name, shard=shard, generation=generation):
                for told in self._alive(name):
                    if (told.shard, told.generation, told.state) == (shard, generation, ShardState.READY):
                        self._says(name, evolve(told, state=ShardState.DRAINING))
            case StopCommand(node=name, shard=shard, generation=generation):
                for told in self._alive(name):
                    if (told.shard, told.generation) == (shard, generation):
                        self._says(name, evolve(told, state=ShardState.STOPPING))

    # What the control plane does.

    @rule()
    def a_pass(self) -> None:
        before = self.state
        outcome = self.outcome = decide(before, self.now)
        self._check(before, outcome)
        known = [c for c in outcome.commands if c not in self.sent]
        self.sent += known
        wanted = {(s.shard, r.generation) for r in outcome.replicas for s in r.shards}
        nodes = tuple(
            evolve(n, reports=tuple(r for r in n.reports if not r.state.ended or (r.shard, r.generation) in wanted))
            if n.state is NodeState.CONNECTED
            else n
            for n in before.nodes
        )
        self.state = evolve(
            before,
            nodes=nodes,
            replicas=outcome.replicas,
            next_serial=outcome.next_serial,
            scales=outcome.scales,
            unplaced_since={u.model: u.since for u in outcome.unplaced},
            in_flight={s.shard: 0 for r in outcome.replicas for s in r.shards},
            orders={name: o for name, o in before.orders.items() if o not in outcome.over},
        )

    def _check(self, before: ClusterState, outcome: Outcome) -> None:
        ids = {r.id for r in before.replicas}
        for new in (r for r in outcome.replicas if r.id not in ids and r.shards):
            self._well_placed(before, new)
            self._within_bounds(before, outcome, new)
        for of in scaled(before.models, outcome.scales):
            self._no_more_stopped_than_allowed(before, outcome, of)
            for missing in (u for u in outcome.unplaced if u.model == of.name):
                said = {(n, c.profile) for c in missing.candidates for n in c.node.split("+") if c.refusals}
                assert said == {(n.id, p.name) for n in before.nodes for p in of.profiles}
        shuffled = list(before.nodes), list(before.replicas)
        for some in shuffled:
            random.Random(len(some)).shuffle(some)
        assert decide(evolve(before, nodes=tuple(shuffled[0]), replicas=tuple(shuffled[1])), self.now) == outcome

    def _within_bounds(self, before: ClusterState, outcome: Outcome, new: Replica) -> None:
        """What was just placed is not too much on its nodes, nor for its group."""
        of = next(m for m in before.models if m.name == new.model)
        for shard in new.shards:
            here = [r for r in outcome.replicas if r.model == of.name and any(s.node == shard.node for s in r.shards)]
            assert len(here) <= (of.placement.per_node or len(here))
        if of.group:
            group = {m.name for m in before.models if m.group == of.group}
            given = [d.device_class for r in outcome.replicas if r.model in group and r.superseded_by is None
                     and r.goal is Goal.RUN for d in _devices(before, r)]  # fmt: skip
            for name in {d.device_class for d in _devices(before, new)}:
                assert given.count(name) <= before.quotas[of.group].get(name, 99)

    def _well_placed(self, before: ClusterState, new: Replica) -> None:
        """Of one class, on nodes that are there, in one NVLink domain or on one fabric that works."""
        classes = set()
        for shard in new.shards:
            here = before.node(shard.node)
            assert here is not None
            assert here.state is NodeState.CONNECTED
            assert here.drained is None
            found = [here.inventory.device(n) for n in shard.devices]
            assert all(d is not None and not d.faults for d in found)
            classes |= {d.device_class for d in found if d is not None}
            domains = here.inventory.nvlink_domains
            if new.profile.tp > 1 and any(len(d) >= len(shard.devices) for d in domains):
                assert any(set(shard.devices) <= set(d) for d in domains)
            if new.fabric is not None:
                assert any(f.label == new.fabric and not f.faults for f in here.inventory.fabrics)
        assert len(classes) == 1

    def _no_more_stopped_than_allowed(self, before: ClusterState, outcome: Outcome, of: Model) -> None:
        """An update takes one replica away at a time, and what serves only while all the others do."""
        told = [d.replica for d in outcome.decisions if d.model == of.name and d.kind is DecisionKind.DRAIN
                and d.reason.startswith("profile ")]  # fmt: skip
        assert len(told) <= 1
        rows = [r for r in outcome.replicas if r.model == of.name]
        if any(r.id in told and _serves(before, r) for r in rows):
            assert all(r.shards and _serves(before, r) for r in rows
                       if r.goal is Goal.RUN and r.superseded_by is None and not _on_lost(before, r))  # fmt: skip

    @invariant()
    def nothing_is_given_out_twice(self) -> None:
        holders: dict[str, str] = {}
        for row in self.state.replicas:
            for shard in row.shards:
                for uuid in shard.uuids:
                    assert holders.setdefault(uuid, shard.shard) == shard.shard, f"{uuid} twice"

    @invariant()
    def nothing_runs_on_a_device_of_another(self) -> None:
        for here in self.state.nodes:
            held = [u for r in here.reports if not r.state.ended for u in r.uuids]
            assert len(held) == len(set(held))

    @rule()
    def passes_come_to_rest(self) -> None:
        """With nothing new seen: an update of three that never started takes each of them away and places it anew."""
        for _ in range(24):
            self.a_pass()
            assert self.outcome is not None
            if all(d.kind is DecisionKind.REAP for d in self.outcome.decisions):
                break
        rest = decide(self.state, self.now)
        assert [d for d in rest.decisions if d.kind is not DecisionKind.REAP] == []
        assert rest.replicas == self.state.replicas

    def teardown(self) -> None:
        """Everything is repaired and obeyed from here on: it comes to rest, with all that can have a place ready."""
        for name in self._names():
            here = self._node(name)
            sound = tuple(evolve(d, faults=()) for d in here.inventory.devices)
            sound_fabrics = tuple(evolve(f, faults=()) for f in here.inventory.fabrics)
            self._change(
                name, state=NodeState.CONNECTED, heard=self.now,
                inventory=evolve(here.inventory, devices=sound, fabrics=sound_fabrics),
            )  # fmt: skip
        for step in itertools.count():
            self.a_pass()
            assert self.outcome is not None
            if step > 45 and not self.outcome.commands and not self.outcome.decisions:
                break
            assert step < 400, f"it never comes to rest: {self.outcome.decisions} {self.outcome.commands}"
            self.some_commands_arrive(len(self.sent))
            for name in self._names():
                self.engines_get_on(name)
            # What can never run is tried again after half an hour, so it goes on for longer than that.
            self.now += 60.0
        self._all_is_there()

    def _names(self) -> Iterable[str]:
        return [n.id for n in self.state.nodes]

    def _all_is_there(self) -> None:
        assert self.outcome is not None
        for of in scaled(self.state.models, self.outcome.scales):
            rows = [r for r in self.state.replicas if r.model == of.name]
            assert all(r.goal is Goal.RUN and not r.superseded_by for r in rows)
            short = next((u for u in self.outcome.unplaced if u.model == of.name), None)
            housed = [r for r in rows if r.shards]
            assert len(housed) == (of.replicas if short is None else short.running)
            assert len(rows) <= of.replicas
            for row in housed:
                said = [self.state.report(s, row.generation) for s in row.shards]
                assert all(r is not None and r.state is ShardState.READY for r in said), row.id
            for drained in (n for row in housed for s in row.shards for n in (self._node(s.node),) if n.drained):
                assert short is not None, f"{drained.id} could be left"
                assert drained.drained is not None
                assert not drained.drained.force
        assert not self.state.orders
        live = {r.replica for n in self.state.nodes for r in n.reports if not r.state.ended}
        assert live == {r.id for r in self.state.replicas if r.shards}


TestReconciled = Reconciled.TestCase
# Without shrinking: a story of this length takes minutes to shorten; a failing one is replayed by its seed.
TestReconciled.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, phases=(Phase.reuse, Phase.generate)
)
