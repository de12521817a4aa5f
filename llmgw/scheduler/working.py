"""The rows as they become during one pass, with what is asked of them over and over. Lives only inside ``decide``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import cached_property

from attrs import evolve

from llmgw.scheduler.brake import brake
from llmgw.scheduler.explain import Command, Decision, DecisionKind, Unplaced
from llmgw.scheduler.fleet import Fleet
from llmgw.scheduler.memory import Sizes
from llmgw.scheduler.orders import Order
from llmgw.scheduler.place import Placement
from llmgw.scheduler.state import Assignment, ClusterState, Goal, Node, NodeState, Replica, ShardState, placed_on
from llmgw.settings.catalog import Model, Profile


class Working:
    """One pass at work: rows by id, decisions and commands so far, and what is free by now."""

    def __init__(self, state: ClusterState, now: float) -> None:
        self.state = state
        self.now = now
        self.serial = state.next_serial
        self.decisions: list[Decision] = []
        self.commands: list[Command] = []
        self.unplaced: list[Unplaced] = []
        self.wake: list[float] = []
        self.brake = brake(state.nodes, state.liveness, state.brake_released)
        self.rows: dict[str, Replica] = {}
        self.given_up: set[str] = set()
        self._of_model: dict[str, dict[str, None]] = {}
        self.models = {m.name: m for m in state.models}
        self._groups = {m.name: m.group for m in state.models if m.group in state.quotas}
        self._here: dict[str, Counter[str]] = {}
        self._used: dict[str, Counter[str]] = {}
        self._fleet: Fleet | None = None
        # In this order once and for all: later rows have higher serials.
        for row in sorted(state.replicas, key=lambda r: (serial(r), r.id)):
            self.put(row)

    def put(self, row: Replica) -> None:
        """The row is like this from now on."""
        if (before := self.rows.get(row.id)) is not None:
            self._count(before, -1)
        self.rows[row.id] = row
        self._of_model.setdefault(row.model, {})[row.id] = None
        self._count(row, 1)

    def drop(self, row: Replica) -> None:
        """The row is gone."""
        self._count(self.rows.pop(row.id), -1)
        del self._of_model[row.model][row.id]

    def of_model(self, model: str) -> list[Replica]:
        """The rows of a model, oldest first."""
        return [self.rows[name] for name in self._of_model.get(model, ())]

    def say(self, kind: DecisionKind, row: Replica, reason: str, node: str = "") -> None:
        """Decide something about a row."""
        nodes = dict.fromkeys(s.node for s in row.shards)
        where = node or next(iter(nodes), "")
        others = tuple(name for name in nodes if name != where)
        self.decisions.append(Decision(kind, row.model, row.id, where, reason, others))

    # What is the case.

    def connected(self, node: str) -> bool:
        """Whether this node can be told something."""
        found = self.state.node(node)
        return found is not None and found.state is NodeState.CONNECTED

    def lost(self, row: Replica) -> bool:
        """Whether any of its nodes is lost: a replica over several nodes is one thing. Under the brake nothing is."""
        return self.lost_node(row) is not None

    def lost_node(self, row: Replica) -> str | None:
        """The first of its nodes that is lost."""
        for shard in row.shards:
            node = self.state.node(shard.node)
            if node is None or (node.state is NodeState.LOST and self.brake is None):
                return shard.node
        return None

    def drained(self, row: Replica) -> Node | None:
        """The first of its nodes that an operator wants to be empty."""
        nodes = (self.state.node(shard.node) for shard in row.shards)
        return next((node for node in nodes if node is not None and node.drained is not None), None)

    def order(self, row: Replica) -> Order | None:
        """What an operator wants done to this start of it."""
        found = self.state.orders.get(row.id)
        return None if found is None or found.generation != row.generation or row.id in self.given_up else found

    def over(self) -> tuple[Order, ...]:
        """The orders that are done, or have nothing left to be done to."""
        rows = [(order, self.rows.get(order.replica)) for order in self.state.orders.values()]
        return tuple(o for o, r in rows if r is None or r.goal is not Goal.RUN or self.order(r) is None)

    def counts(self, row: Replica) -> bool:
        """Whether it is one of those that the model shall have."""
        return row.goal is Goal.RUN and row.superseded_by is None and bool(row.shards) and not self.lost(row)

    def gone(self, row: Replica) -> bool:
        """Whether it would count if its node were there."""
        return row.goal is Goal.RUN and row.superseded_by is None and self.lost(row)

    def ready(self, row: Replica) -> bool:
        """Rank 0 lists the model, which it cannot before all others have joined it, and none of them is going."""
        reports = [self.state.report(s, row.generation) for s in row.shards]
        if not reports or any(r is None or r.state is ShardState.STOPPING or r.state.ended for r in reports):
            return False
        return reports[0] is not None and reports[0].state is ShardState.READY

    # What is free.

    @property
    def fleet(self) -> Fleet:
        """Every node with what is taken on it: by rows, and by what runs and no row knows of."""
        if self._fleet is None:
            self._fleet = self.fleet_without(frozenset())
        return self._fleet

    def fleet_without(self, rows: frozenset[str], nodes: frozenset[str] | None = None) -> Fleet:
        """As if these rows had nothing; of these nodes only, where they are given."""
        some = self.state.nodes if nodes is None else [n for n in self.state.nodes if n.id in nodes]
        taken: dict[str, dict[int, str]] = {}
        leaving: dict[str, set[int]] = {}
        for node in some:
            here = taken[node.id] = {}
            for report in node.reports:
                if report.state.ended:
                    continue
                there = placed_on(node.inventory, report.devices, report.uuids)
                if report.replica in rows:
                    leaving.setdefault(node.id, set()).update(there)
                else:
                    here.update(dict.fromkeys(there, report.shard))
        for row in self.rows.values():
            if row.id not in rows:
                for shard in row.shards:
                    if shard.node in taken:
                        taken[shard.node].update(dict.fromkeys(shard.devices, shard.shard))
        return Fleet(some, taken, self.sizes, leaving)

    @cached_property
    def sizes(self) -> Sizes:
        """How much memory profiles need."""
        return Sizes(self.state.weights, self.state.learned, self.state.looking)

    def group(self, row: Replica) -> str:
        """Whose quota a row counts against, or an empty text for nobody's."""
        return self._groups.get(row.model, "")

    def quotas(self, group: str) -> Mapping[str, int]:
        """How many devices of each class the models of a group may have."""
        return self.state.quotas.get(group, {}) if group else {}

    def here(self, model: str) -> Counter[str]:
        """How many replicas of a model each node has a part of. Kept up as rows change; not to be changed."""
        if model not in self._here:
            self._here[model] = Counter(s.node for r in self.of_model(model) for s in r.shards)
        return self._here[model]

    def used(self, group: str) -> Counter[str]:
        """How many devices of each class count against a group's quota. Kept up as rows change."""
        if group not in self._used:
            made = self._used[group] = Counter()
            for model, of in self._groups.items():
                for row in self.of_model(model) if of == group else ():
                    made.update(self.charged(row))
        return self._used[group]

    def charged(self, row: Replica) -> Counter[str]:
        """What a row's group is charged for it: its devices by class.

        Nothing for what a lost node still has of it once it is replaced or wanted no more: such a node may never come
        back, and what it has serves nobody.
        """
        made: Counter[str] = Counter()
        if not self.group(row) or (self.lost(row) and not self.gone(row)):
            return made
        for shard in row.shards:
            node = self.state.node(shard.node)
            devices = () if node is None else (node.inventory.device(number) for number in shard.devices)
            made.update(device.device_class for device in devices if device is not None)
        return made

    def _count(self, row: Replica, by: int) -> None:
        """Keep up what was asked for already."""
        if not self._here and not self._used:
            return
        if (here := self._here.get(row.model)) is not None:
            for shard in row.shards:
                here[shard.node] += by
        if (used := self._used.get(self.group(row))) is not None:
            for name, count in self.charged(row).items():
                used[name] += by * count

    # What becomes of rows.

    def add(self, model: Model, found: Placement, why: str) -> Replica:
        """A new row at this place."""
        name = f"{_slug(model.name)}-{self.serial}"
        self.serial += 1
        shards = []
        for rank, part in enumerate(found.parts):
            node = self.state.node(part.node)
            devices = [] if node is None else [node.inventory.device(number) for number in part.devices]
            uuids = tuple(d.uuid for d in devices if d is not None)
            shards.append(Assignment(f"{name}.{rank}", rank, part.node, part.devices, uuids))
            self.fleet.take(part.node, part.devices, f"{name}.{rank}")
        reason = f"{why}; {found.reason}" if why else found.reason
        row = Replica(
            id=name,
            model=model.name,
            profile=found.profile,
            shards=tuple(shards),
            goal=Goal.RUN,
            reason=reason,
            since=self.now,
            fabric=found.fabric,
            placed=self.now,
        )
        self.put(row)
        self.say(DecisionKind.PLACE, row, f"{reason}; {found.against}" if found.against else reason)
        return row

    def evict(self, row: Replica, reason: str, node: str = "") -> None:
        """End what is left of a row that can serve no more. What takes its place is placed anew."""
        self.put(evolve(row, goal=Goal.STOP, reason=reason, since=self.now, other=None))
        self.say(DecisionKind.EVICT, row, reason, node)

    def retire(self, row: Replica, reason: str, kind: DecisionKind | None = None, other: Profile | None = None) -> None:
        """Take a row out of service: drained where its engine can be told, else stopped when its node is back.

        ``other`` is the profile that is placed instead once it has ended.
        """
        row = self.rows[row.id]
        if row.goal is not Goal.RUN:
            return
        if not row.shards:
            self.drop(row)
            return
        goal = Goal.STOP if self.lost_node(row) == row.shards[0].node else Goal.DRAIN
        self.put(evolve(row, goal=goal, reason=reason, since=self.now, other=other))
        usual = DecisionKind.DRAIN if goal is Goal.DRAIN else DecisionKind.STOP
        self.say(kind or usual, row, reason)


def serial(row: Replica) -> int:
    """The number at the end of a row's id: a later one is newer."""
    tail = row.id.rpartition("-")[2]
    return int(tail) if tail.isascii() and tail.isdigit() else 0


def _slug(model: str) -> str:
    """A model's name as part of ids and file names."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", model).strip("-")[:40] or "model"
