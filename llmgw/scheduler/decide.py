"""One reconcile pass: what is wanted against what is there, and everything that follows. Pure and total.

The words: a row **counts** when it shall run and its node is not lost; it is **gone** when its node is lost. Silence
alone moves nothing; a lost node's rows are replaced elsewhere, and the replaced row is *superseded*: it serves on, if
it still does, until its replacement is ready. A row that could not be replaced before its node came back simply counts
again, with the engine that it has.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from attrs import evolve

from llmgw.scheduler.explain import (
    Command,
    Decision,
    DecisionKind,
    DrainCommand,
    Outcome,
    StartCommand,
    StopCommand,
    Unplaced,
)
from llmgw.scheduler.place import NoPlace, Placement, place, views
from llmgw.scheduler.state import (
    Assignment,
    ClusterState,
    Goal,
    Node,
    NodeState,
    Replica,
    ShardReport,
    ShardState,
    placed_on,
)
from llmgw.settings.catalog import Limits, Model, Profile

BACKOFF_FIRST_S = 5.0
BACKOFF_LONGEST_S = 300.0
FINAL_S = 1800.0
"""What the engine says can never run is tried again after this time: somebody may have put it right on the node."""

STEADY_S = 600.0
"""A replica that was ready for this long has its failures forgiven."""

DRAIN_SETTLE_S = 1.0
"""An idle count means something only after the router had time to take in that nothing new goes there."""


def decide(state: ClusterState, now: float) -> Outcome:
    """Decide one pass. Never raises, whatever the state; deterministic; on its own result it changes nothing more."""
    return _Pass(state, now).run()


class _Pass:
    """The rows as they become during one pass. Lives only inside :func:`decide`."""

    def __init__(self, state: ClusterState, now: float) -> None:
        self.state = state
        self.now = now
        self.rows: dict[str, Replica] = {r.id: r for r in state.replicas}
        self.serial = state.next_serial
        self.decisions: list[Decision] = []
        self.commands: list[Command] = []
        self.unplaced: list[Unplaced] = []
        self.wake: list[float] = []

    def run(self) -> Outcome:
        for row in self.state.replicas:
            self._renumber(row)
        for row in list(self.rows.values()):
            self._follow(row)
        for model in self.state.models:
            self._refresh(model)
            self._scale(model)
        known = {m.name for m in self.state.models}
        for row in list(self.rows.values()):
            if row.model not in known:
                self._retire(row, f"model {row.model} left the catalog")
        self._finish_superseded()
        for row in list(self.rows.values()):
            self._command(row)
        self._reap()
        return Outcome(
            replicas=tuple(sorted(self.rows.values(), key=lambda r: r.id)),
            next_serial=self.serial,
            commands=tuple(self.commands),
            decisions=tuple(self.decisions),
            unplaced=tuple(self.unplaced),
            wake_at=min(self.wake, default=None),
        )

    def _say(self, kind: DecisionKind, row: Replica, reason: str, node: str = "") -> None:
        where = node or (row.shards[0].node if row.shards else "")
        self.decisions.append(Decision(kind, row.model, row.id, where, reason))

    def _node(self, row: Replica) -> Node | None:
        return self.state.node(row.shards[0].node) if row.shards else None

    def _lost(self, row: Replica) -> bool:
        node = self._node(row)
        return node is None or node.state is NodeState.LOST

    def _counts(self, row: Replica) -> bool:
        return row.goal is Goal.RUN and row.superseded_by is None and not self._lost(row)

    def _gone(self, row: Replica) -> bool:
        return row.goal is Goal.RUN and row.superseded_by is None and self._lost(row)

    def _ready(self, row: Replica) -> bool:
        reports = [self.state.report(s, row.generation) for s in row.shards]
        return bool(reports) and all(r is not None and r.state is ShardState.READY for r in reports)

    def _renumber(self, row: Replica) -> None:
        """Follow a row's devices to the numbers that they have by now."""
        shards = tuple(
            shard if node is None else evolve(shard, devices=placed_on(node.inventory, shard.devices, shard.uuids))
            for shard in row.shards
            for node in (self.state.node(shard.node),)
        )
        if shards != row.shards:
            self.rows[row.id] = evolve(row, shards=shards)

    # What a row's own reports say.

    def _follow(self, row: Replica) -> None:
        if row.goal is not Goal.RUN or self._lost(row):
            return
        reports = [r for s in row.shards if (r := self.state.report(s, row.generation)) is not None]
        ended = next((r for r in reports if r.state.ended), None)
        if ended is not None:
            self._failed(row, ended)
        elif row.failures and self._ready(row) and all(self.now - r.since >= STEADY_S for r in reports):
            self.rows[row.id] = evolve(row, failures=0)

    def _failed(self, row: Replica, report: ShardReport) -> None:
        node = self._node(row)
        assert node is not None
        uuids = row.shards[0].uuids
        for position, number in enumerate(row.shards[0].devices):
            device = node.inventory.device(number)
            if device is not None and uuids and device.uuid != uuids[position]:
                device = None
            if device is None or device.faults:
                fault = "is not there any more" if device is None else device.faults[0].reason
                label = f"device {number}" if device is None else device.label
                reason = f"it failed ({report.reason}) and {label} {fault}; placed anew"
                self.rows[row.id] = evolve(row, goal=Goal.STOP, reason=reason, since=self.now)
                self._say(DecisionKind.EVICT, row, reason)
                return
        failures = row.failures + 1
        wait = min(BACKOFF_FIRST_S * 2 ** min(failures - 1, 16), BACKOFF_LONGEST_S)
        if report.final:
            wait = FINAL_S
        reason = f"failed {failures} time{'s' if failures > 1 else ''} in a row, last: {report.reason}"
        if report.remedy:
            reason = f"{reason}; {report.remedy}"
        self.rows[row.id] = evolve(
            row,
            generation=row.generation + 1,
            failures=failures,
            not_before=self.now + wait,
            reason=reason,
            since=self.now,
        )
        again = f"{'cannot run like this; ' if report.final else ''}started again in {wait:.0f} s (failure {failures})"
        remedy = f"{report.remedy}; " if report.remedy else ""
        self._say(DecisionKind.RESTART, row, f"{report.reason}; {remedy}{again}")

    # What the catalog wants.

    def _refresh(self, model: Model) -> None:
        """Replace rows whose profile was edited, one at a time: the new one first where both have room."""
        rows = [r for r in self.rows.values() if r.model == model.name]
        busy = any(r.superseded_by in self.rows for r in rows if r.superseded_by)
        for row in sorted(rows, key=_serial):
            if not self._counts(row) or row.goal is not Goal.RUN:
                continue
            wanted = model.profile(row.profile.name)
            if wanted == row.profile:
                continue
            if wanted is not None and _same_but_limits(wanted, row.profile):
                self.rows[row.id] = evolve(row, profile=wanted)
                continue
            if busy:
                continue
            why = f"profile {row.profile.name} was {'changed' if wanted is not None else 'removed'}"
            found = self._place(model)
            if isinstance(found, Placement):
                new = self._add(model, found, f"{why}: replaces {row.id}")
                self.rows[row.id] = evolve(row, superseded_by=new.id)
                busy = True
            elif any(not self._lost(r) and r.goal is not Goal.RUN for r in rows):
                busy = True  # something is on its way out already: its devices come free first
            else:
                self._retire(row, f"{why}, and there is no room for both the old and the new one")
                busy = True

    def _scale(self, model: Model) -> None:
        rows = [r for r in self.rows.values() if r.model == model.name]
        counting = [r for r in rows if self._counts(r)]
        gone = sorted((r for r in rows if self._gone(r)), key=_serial)
        excess = len(counting) + len(gone) - model.replicas
        for row in (*reversed(gone), *sorted(counting, key=lambda r: (self._ready(r), -_serial(r)))):
            if excess <= 0:
                break
            self._retire(row, f"{model.replicas} replicas are wanted, this is one too many")
            excess -= 1
        running = len(counting)
        while running < model.replicas:
            found = self._place(model)
            if isinstance(found, NoPlace):
                leaving = sum(1 for r in self.rows.values() if r.model == model.name and r.goal is not Goal.RUN)
                since = self.state.unplaced_since.get(model.name, self.now)
                self.unplaced.append(_explain(model, running, len(gone), leaving, found, since))
                return
            new = self._add(model, found, "")
            if gone:
                old = gone.pop(0)
                node = old.shards[0].node if old.shards else "?"
                self.rows[old.id] = evolve(self.rows[old.id], superseded_by=new.id)
                self._say(DecisionKind.EVICT, old, f"node {node} is lost; {new.id} replaces it")
            running += 1

    def _place(self, model: Model) -> Placement | NoPlace:
        taken: dict[str, dict[int, str]] = {node.id: {} for node in self.state.nodes}
        for node in self.state.nodes:
            for report in node.reports:
                if not report.state.ended:
                    there = placed_on(node.inventory, report.devices, report.uuids)
                    taken[node.id].update(dict.fromkeys(there, report.shard))
        for row in self.rows.values():
            for shard in row.shards:
                if shard.node in taken:
                    taken[shard.node].update(dict.fromkeys(shard.devices, shard.shard))
        here = Counter(s.node for r in self.rows.values() if r.model == model.name for s in r.shards)
        return place(model, views(self.state.nodes, taken), here)

    def _add(self, model: Model, found: Placement, why: str) -> Replica:
        name = f"{_slug(model.name)}-{self.serial}"
        node = self.state.node(found.node)
        devices = [] if node is None else [node.inventory.device(number) for number in found.devices]
        uuids = tuple(d.uuid for d in devices if d is not None)
        self.serial += 1
        reason = f"{why}; {found.reason}" if why else found.reason
        row = Replica(
            id=name,
            model=model.name,
            profile=found.profile,
            shards=(Assignment(f"{name}.0", 0, found.node, found.devices, uuids),),
            goal=Goal.RUN,
            reason=reason,
            since=self.now,
        )
        self.rows[name] = row
        self._say(DecisionKind.PLACE, row, reason)
        return row

    # How rows end.

    def _retire(self, row: Replica, reason: str) -> None:
        """Take a row out of service: drained where its engine can be told, else stopped when its node is back."""
        row = self.rows[row.id]
        if row.goal is not Goal.RUN:
            return
        goal = Goal.STOP if self._lost(row) else Goal.DRAIN
        self.rows[row.id] = evolve(row, goal=goal, reason=reason, since=self.now)
        self._say(DecisionKind.DRAIN if goal is Goal.DRAIN else DecisionKind.STOP, row, reason)

    def _finish_superseded(self) -> None:
        for row in list(self.rows.values()):
            if row.superseded_by is None or row.goal is not Goal.RUN:
                continue
            new = self.rows.get(row.superseded_by)
            if new is None or new.goal is not Goal.RUN:
                # Its replacement is going away itself: this row counts again.
                self.rows[row.id] = evolve(row, superseded_by=None)
            elif self._ready(new) and not self._lost(row):
                self._retire(row, f"{new.id} replaces it and is ready")

    def _command(self, row: Replica) -> None:
        if row.goal is Goal.DRAIN:
            row = self._drain(row)
        if row.goal is Goal.STOP:
            self._stop(row)
            return
        for shard in row.shards:
            node = self.state.node(shard.node)
            if node is None or node.state is not NodeState.CONNECTED:
                continue
            report = self.state.report(shard, row.generation)
            if row.goal is Goal.DRAIN and report is not None and report.state is ShardState.READY:
                self.commands.append(DrainCommand(shard.node, shard.shard, row.generation, row.reason))
            if row.goal is Goal.RUN and report is None:
                if self.now >= row.not_before:
                    self.commands.append(StartCommand(row, shard))
                else:
                    self.wake.append(row.not_before)

    def _drain(self, row: Replica) -> Replica:
        """Move a draining row on to ``STOP`` once nothing is in flight, or its time is over."""
        end = row.since + row.profile.limits.drain_s
        serving = any(
            r is not None and r.state in (ShardState.READY, ShardState.DRAINING)
            for r in (self.state.report(s, row.generation) for s in row.shards)
        )
        counts = [self.state.in_flight.get(s.shard) for s in row.shards]
        settled = self.now >= row.since + DRAIN_SETTLE_S
        if not serving:
            why = "it serves nothing"
        elif settled and all(c == 0 for c in counts):
            why = "nothing is in flight"
        elif self.now >= end:
            why = f"drained for {row.profile.limits.drain_s:.0f} s"
        else:
            self.wake.append(end if settled else min(end, row.since + DRAIN_SETTLE_S))
            return row
        stopped = evolve(row, goal=Goal.STOP, since=self.now)
        self.rows[row.id] = stopped
        self._say(DecisionKind.STOP, row, f"{row.reason}; {why}")
        return stopped

    def _stop(self, row: Replica) -> None:
        waiting = False
        ends: list[str] = []
        for shard in row.shards:
            node = self.state.node(shard.node)
            if node is None:
                continue
            ends += (str(r.exit) for r in node.reports if r.shard == shard.shard and r.state.ended and r.exit)
            if node.state is not NodeState.CONNECTED:
                waiting = True
                continue
            for report in node.reports:
                if report.shard == shard.shard and not report.state.ended:
                    waiting = True
                    grace = row.profile.limits.stop_s
                    self.commands.append(StopCommand(node.id, report.shard, report.generation, row.reason, grace))
        if not waiting:
            del self.rows[row.id]
            how = f": {', '.join(ends)}" if ends else ""
            self._say(DecisionKind.FORGET, row, f"its engine has ended{how}")

    def _reap(self) -> None:
        """Stop what runs in this cluster's name and belongs to no row, or to an earlier start of one."""
        wanted = {(s.shard, r.generation) for r in self.rows.values() for s in r.shards}
        stopping = {s.shard for r in self.rows.values() if r.goal is Goal.STOP for s in r.shards}
        grace = Limits().stop_s
        for node in self.state.nodes:
            if node.state is not NodeState.CONNECTED:
                continue
            for report in node.reports:
                key = (report.shard, report.generation)
                if (
                    report.state.ended
                    or report.cluster != self.state.cluster
                    or key in wanted
                    or report.shard in stopping
                ):
                    continue
                known = any(s.shard == report.shard for r in self.rows.values() for s in r.shards)
                reason = "an earlier start of this shard still runs" if known else "no replica wants this shard"
                self.commands.append(StopCommand(node.id, report.shard, report.generation, reason, grace))
                self.decisions.append(Decision(DecisionKind.REAP, report.model, report.replica, node.id, reason))


def _serial(row: Replica) -> int:
    tail = row.id.rpartition("-")[2]
    return int(tail) if tail.isascii() and tail.isdigit() else 0


def _slug(model: str) -> str:
    """A model's name as part of ids and file names."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", model).strip("-")[:40] or "model"


def _same_but_limits(wanted: Profile, has: Profile) -> bool:
    """Limits are the agent's and the scheduler's to follow; the engine need not start anew for them."""
    return evolve(has, limits=wanted.limits) == wanted


def _explain(model: Model, running: int, gone: int, leaving: int, found: NoPlace, since: float) -> Unplaced:
    parts: Iterable[str] = (
        f"{gone} on a lost node" if gone else "",
        f"{leaving} still stopping" if leaving else "",
        f"{found.reason}{f'; {found.remedy}' if found.remedy else ''}",
    )
    return Unplaced(model.name, model.replicas, running, "; ".join(p for p in parts if p), found.candidates, since)
