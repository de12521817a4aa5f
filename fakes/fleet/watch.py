"""What must hold of every pass that is written down, by the settings that held when it was decided."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import trio
from attrs import frozen

from llmgw.scheduler.explain import DecisionKind
from llmgw.scheduler.state import Goal, Replica
from llmgw.settings.catalog import Model
from llmgw.settings.document import NodeRules, Settings
from llmgw.store.api import PassRecord

from .engines import Engine, Phase

if TYPE_CHECKING:
    from .world import World

_LAG_S = 5.0
"""A pass is written this long after its picture was taken, at most."""

_NO_RULES = NodeRules()


@frozen
class _Edited:
    """Settings, and until when a pass may still go by them."""

    settings: Settings
    until: float


class Watch:
    """Looks at each pass as it is written."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._before: list[_Edited] = []

    def edited(self, before: Settings) -> None:
        """There are other settings from now on."""
        now = trio.current_time()
        self._before = [e for e in self._before if e.until >= now]
        self._before.append(_Edited(before, now + _LAG_S))

    def passed(self, old: tuple[Replica, ...], record: PassRecord) -> None:
        """A pass is written: what it placed and what it takes away must be allowed."""
        known = {r.id for r in old}
        new = [r for r in record.replicas if r.id not in known and r.shards]
        now = trio.current_time()
        held = [self._world.settings, *(e.settings for e in self._before if e.until >= now)]
        if new:
            wrong = [list(self._wrong(settings, record, new)) for settings in held]
            if all(wrong):
                self._world.fail("placed as the settings say", wrong[0][0])
        for decision in record.decisions:
            if decision.kind is DecisionKind.SCALE and " instead of 0: " in decision.reason:
                if not self._world.traffic.held_lately(decision.model) and "the settings say" not in decision.reason:
                    self._world.fail("zero without demand", f"{decision.model}: {decision.reason}")
            elif decision.kind is DecisionKind.DRAIN and decision.reason.startswith("profile "):
                self._one_at_a_time(record, decision.replica)

    def _wrong(self, settings: Settings, record: PassRecord, new: Iterable[Replica]) -> Iterator[str]:
        for row in new:
            model = settings.model(row.model)
            if model is None:
                yield f"{row.id} of no model"
                continue
            yield from self._nodes(settings, record, model, row)
            yield from self._quota(settings, record, model, row)

    @staticmethod
    def _nodes(settings: Settings, record: PassRecord, model: Model, row: Replica) -> Iterator[str]:
        wants = model.placement
        for shard in row.shards:
            rules = settings.nodes.get(shard.node, _NO_RULES)
            if set(rules.taints) - set(wants.tolerate):
                yield f"{row.id} on {shard.node} in spite of its taint"
            if any(rules.labels.get(name) != value for name, value in wants.nodes.items()):
                yield f"{row.id} on {shard.node} without its labels"
            here = sum(r.model == row.model and any(s.node == shard.node for s in r.shards) for r in record.replicas)
            if wants.per_node is not None and here > wants.per_node:
                yield f"{row.id} is one of {here} on {shard.node}, where {wants.per_node} may be"

    def _quota(self, settings: Settings, record: PassRecord, model: Model, row: Replica) -> Iterator[str]:
        quotas = settings.quotas.get(model.group, {}) if model.group else {}
        group = {m.name for m in settings.models if m.group == model.group}
        rows = (r for r in record.replicas if r.model in group and r.goal is Goal.RUN and r.superseded_by is None)
        used = self._world.devices_of(rows)
        for name in self._world.devices_of((row,)):
            if used[name] > quotas.get(name, used[name]):
                yield f"{row.id} is one too many: {model.group} has {used[name]} of {quotas[name]} {name}"

    def _one_at_a_time(self, record: PassRecord, name: str) -> None:
        """What serves is taken away for an update only while nothing else of its model is still on its way."""
        row = next((r for r in record.replicas if r.id == name), None)
        engine = None if row is None else self._head(row)
        if row is None or engine is None or engine.phase is not Phase.SERVING or engine.hung:
            return
        for other in record.replicas:
            counts = other.model == row.model and other.goal is Goal.RUN and other.superseded_by is None
            head = self._head(other) if counts else None
            if head is not None and head.phase in (Phase.BOOTING, Phase.LOADING, Phase.LOADED):
                self._world.fail("one at a time", f"{name} is drained for an update while {other.id} does not serve")

    def _head(self, row: Replica) -> Engine | None:
        """The engine that serves for a row, if it lives."""
        if not row.shards:
            return None
        head = row.shards[0]
        engines = self._world.nodes[head.node].engines
        return next((e for e in engines if e.key[1:] == (head.shard, row.generation)), None)
