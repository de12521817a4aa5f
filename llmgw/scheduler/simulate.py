"""Passes played forward on a picture of the cluster: agents do what they are told, and everything that starts works.

Nothing is kept of it: serial numbers, rows and times are those of a cluster that nobody has.
"""

from __future__ import annotations

from attrs import evolve, frozen

from llmgw.hardware.inventory import Inventory
from llmgw.scheduler.decide import decide
from llmgw.scheduler.explain import Outcome, StartCommand, StopCommand
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

ROUNDS = 80
"""Passes that are played at most: a rolling update takes about four a replica."""

_JUMPS = 4
_FARTHEST_S = 3600.0
"""How often, and how far in all, time is moved on while something has no place and may get one by waiting."""


@frozen
class Round:
    """One pass: what it was given, what it decided, and when, in seconds from the first one.

    ``ended`` and ``ready`` are the replicas whose engines ended, or came up, just before it.
    """

    before: ClusterState
    outcome: Outcome
    at_s: float
    ended: tuple[str, ...]
    ready: tuple[str, ...]


@frozen
class Play:
    """Every round, and the state after them. ``complete`` says that nothing more would follow."""

    rounds: tuple[Round, ...]
    after: ClusterState
    complete: bool


def play(state: ClusterState, now: float) -> Play:
    """Decide again and again until nothing changes any more. Deterministic; the state is not changed."""
    rounds: list[Round] = []
    began, jumps = now, 0
    ended: tuple[str, ...] = ()
    ready: tuple[str, ...] = ()
    for _ in range(ROUNDS):
        outcome = decide(state, now)
        rounds.append(Round(state, outcome, now - began, ended, ready))
        after, ended, ready = _obeyed(state, outcome, now)
        quiet = after is None and outcome.replicas == state.replicas
        state = _taken_over(state if after is None else after, outcome)
        if not quiet:
            continue
        if not outcome.unplaced or outcome.wake_at is None or jumps == _JUMPS:
            return Play(tuple(rounds), state, complete=True)
        if outcome.wake_at <= now or outcome.wake_at - began > _FARTHEST_S:
            return Play(tuple(rounds), state, complete=True)
        now, jumps = outcome.wake_at, jumps + 1
    return Play(tuple(rounds), state, complete=False)


def _taken_over(state: ClusterState, outcome: Outcome) -> ClusterState:
    return evolve(
        state,
        replicas=outcome.replicas,
        next_serial=outcome.next_serial,
        unplaced_since={item.model: item.since for item in outcome.unplaced},
    )


class _Nodes:
    """The nodes that something happens on, by what their agents report next."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._reports: dict[str, list[ShardReport]] = {}
        self._freed: dict[str, set[int]] = {}

    def reports(self, name: str) -> list[ShardReport] | None:
        """What a connected node says, to be changed in place; ``None`` for one that does not answer."""
        if name not in self._reports:
            node = self._state.node(name)
            if node is None or node.state is not NodeState.CONNECTED:
                return None
            self._reports[name] = list(node.reports)
        return self._reports[name]

    def end(self, name: str, shard: str, generation: int | None) -> bool:
        """The engine of a shard is gone, and what it held; whether there was one, or nobody knows better."""
        reports = self.reports(name)
        node = self._state.node(name)
        if reports is None or node is None:
            return node is None  # of a node that is unknown nobody will ever hear
        for at, report in enumerate(reports):
            if report.shard == shard and generation in (None, report.generation) and not report.state.ended:
                reports[at] = evolve(report, state=ShardState.STOPPED)
                there = placed_on(node.inventory, report.devices, report.uuids)
                self._freed.setdefault(name, set()).update(there)
        return True

    def state(self) -> ClusterState | None:
        """The state with these nodes, or ``None`` when none of them changed."""
        changed: dict[str, Node] = {}
        for name, reports in self._reports.items():
            node = self._state.node(name)
            if node is not None and tuple(reports) != node.reports:
                inventory = _emptied(node.inventory, self._freed.get(name, set()))
                changed[name] = evolve(node, reports=tuple(reports), inventory=inventory)
        if not changed:
            return None
        return evolve(self._state, nodes=tuple(changed.get(n.id, n) for n in self._state.nodes))


def _emptied(inventory: Inventory, numbers: set[int]) -> Inventory:
    """What engines held of these devices is free: the hardware is read again after an engine has ended."""
    if not numbers:
        return inventory
    devices = tuple(evolve(d, used_mib=None, processes=()) if d.number in numbers else d for d in inventory.devices)
    return evolve(inventory, devices=devices)


def _obeyed(
    state: ClusterState, outcome: Outcome, now: float
) -> tuple[ClusterState | None, tuple[str, ...], tuple[str, ...]]:
    """The state once the commands have worked, and the replicas that ended and came up; ``None`` for no change."""
    nodes = _Nodes(state)
    started = {c.replica.id for c in outcome.commands if isinstance(c, StartCommand)}
    ended: list[str] = []
    ready: list[str] = []
    for command in outcome.commands:
        if isinstance(command, StopCommand):
            nodes.end(command.node, command.shard, command.generation)
    for row in outcome.replicas:
        if row.goal is not Goal.RUN:
            gone = [nodes.end(s.node, s.shard, None) for s in row.shards]
            _say_ended(row, nodes, state.cluster, now)
            if gone and all(gone):
                ended.append(row.id)
        elif _come_up(row, nodes, state.cluster, now, started=row.id in started):
            ready.append(row.id)
    return nodes.state(), tuple(ended), tuple(ready)


def _come_up(row: Replica, nodes: _Nodes, cluster: str, now: float, *, started: bool) -> bool:
    """Every shard of a row is ready by now: those that are on their way, and those that it is told to start."""
    came = False
    for shard in row.shards:
        reports = nodes.reports(shard.node)
        if reports is None:
            continue
        at = next((i for i, r in enumerate(reports) if (r.shard, r.generation) == (shard.shard, row.generation)), None)
        if at is None and started:
            reports.append(_report(row, shard, cluster, now, ShardState.READY))
            came = True
        elif at is not None and reports[at].state in (ShardState.STARTING, ShardState.LOADING):
            reports[at] = evolve(reports[at], state=ShardState.READY, since=now)
            came = True
    return came


def _say_ended(row: Replica, nodes: _Nodes, cluster: str, now: float) -> None:
    """What was never heard of has ended as well."""
    for shard in row.shards:
        reports = nodes.reports(shard.node)
        if reports is not None and all((r.shard, r.generation) != (shard.shard, row.generation) for r in reports):
            reports.append(_report(row, shard, cluster, now, ShardState.STOPPED))


def _report(row: Replica, shard: Assignment, cluster: str, now: float, state: ShardState) -> ShardReport:
    return ShardReport(
        shard=shard.shard,
        replica=row.id,
        generation=row.generation,
        model=row.model,
        rank=shard.rank,
        cluster=cluster,
        profile_digest="",
        devices=shard.devices,
        uuids=shard.uuids,
        state=state,
        reason="planned",
        next="",
        since=now,
    )
