"""Replicas and models as people see them: one state, why, since when, and what happens next. Pure."""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve, frozen

from llmgw.scheduler.brake import HELD, brake
from llmgw.scheduler.changes import taken_back
from llmgw.scheduler.drains import waiting_for
from llmgw.scheduler.explain import Unplaced
from llmgw.scheduler.public import public
from llmgw.scheduler.scale import Scale
from llmgw.scheduler.state import Assignment, ClusterState, Goal, Node, NodeState, Replica, ShardReport, ShardState
from llmgw.settings.catalog import Model


@frozen
class ShardView:
    """One rank of a replica: its place, and what its agent says of this start of it (nothing yet: ``None``).

    ``load_mib`` and ``serving_mib`` are by device, as in :class:`ReplicaView`.
    """

    shard: str
    rank: int
    node: str
    devices: tuple[str, ...]
    report: ShardReport | None
    load_mib: tuple[int | None, ...] = ()
    serving_mib: tuple[int | None, ...] = ()


@frozen
class ReplicaView:
    """One replica. ``state`` is its shards', or one of ``placed``, ``waiting`` and ``lost``.

    Over several nodes that is rank 0's, unless another rank has ended, is not there yet, or is on a node that is not.
    ``load_mib`` and ``serving_mib`` are by device, in the order of ``devices``, ``None`` for what is not known;
    ``warnings`` name their node. ``log_path`` is a file on the first node.
    """

    id: str
    model: str
    profile: str
    nodes: tuple[str, ...]
    devices: tuple[str, ...]
    state: str
    reason: str
    since: float
    next: str
    endpoint: str | None
    pid: int | None
    generation: int
    progress: float | None
    fabric: str | None
    shards: tuple[ShardView, ...]
    load_mib: tuple[int | None, ...] = ()
    serving_mib: tuple[int | None, ...] = ()
    warnings: tuple[str, ...] = ()
    log_path: str = ""


@frozen
class ModelView:
    """One model that is placed. ``state``: ``ready``, ``off``, ``idle``, ``unplaced``, ``degraded``, or its replicas'
    worst.

    ``public`` is for its users: a phrase that names no node, no replica and no other model. ``scale`` is what its load
    makes of it where its number follows that, as of the last pass.
    """

    name: str
    wanted: int
    ready: int
    state: str
    reason: str
    since: float | None
    next: str
    public: str = ""
    scale: Scale | None = None


_FARTHEST = ("failed", "waiting", "lost", "placed", "starting", "loading", "draining", "stopping", "stopped", "ready")


def _labels(node: Node | None, numbers: tuple[int, ...]) -> tuple[str, ...]:
    found = (node.inventory.device(n) if node is not None else None for n in numbers)
    return tuple(d.label if d is not None else f"device {n}" for d, n in zip(found, numbers, strict=True))


_Seen = tuple[Assignment, Node | None, ShardReport | None]


def _telling(row: Replica, state: ClusterState) -> _Seen | None:
    """The shard that says most of how the replica is: the first whose trouble is everybody's, else rank 0's."""
    seen: list[_Seen] = [(s, state.node(s.node), state.report(s, row.generation)) for s in row.shards]
    troubles: tuple[Callable[[_Seen], bool], ...] = (
        lambda s: s[1] is None or s[1].state is NodeState.LOST,
        lambda s: s[2] is not None and s[2].state.ended,
        lambda s: s[2] is not None and s[2].state is ShardState.STOPPING,
        lambda s: s[1] is not None and s[1].state is NodeState.UNREACHABLE,
        lambda s: s[2] is None,
    )
    for trouble in troubles:
        if (found := next((s for s in seen if trouble(s)), None)) is not None:
            return found
    return seen[0] if seen else None


def _judge(row: Replica, seen: _Seen | None, now: float, *, held: bool) -> tuple[str, str, float, str]:
    """State, reason, since, next; ``held`` says that the brake is on."""
    place, node, report = seen if seen is not None else (None, None, None)
    if not row.shards:
        return "waiting", row.reason, row.since, f"placed with profile {row.profile.name} as soon as there is room"
    if row.goal is Goal.STOP:
        until = "removed when its engine has ended"
        if node is not None and node.state is not NodeState.CONNECTED:
            until = f"removed when node {node.id} is back and its engine has ended"
        return "stopping", row.reason, row.since, until
    if row.goal is Goal.DRAIN:
        left = max(0.0, row.since + row.profile.limits.drain_s - now)
        return "draining", row.reason, row.since, f"stopped when nothing is in flight, in {left:.0f} s at most"
    if node is None or node.state is NodeState.LOST:
        was = report.state.value if report is not None else "not started"
        name = place.node if place is not None else "?"
        then = (
            f"stopped once {row.superseded_by} is ready and the node is back"
            if row.superseded_by
            else HELD
            if held
            else "taken back with its engine if the node returns before there is another place"
        )
        return "lost", f"node {name} is lost; its engine was {was}", node.since if node else row.since, then
    if report is None:
        if row.not_before > now:
            return "waiting", row.reason, row.since, f"started again in {row.not_before - now:.0f} s"
        rank = 0 if place is None else place.rank
        return "placed", row.reason, row.since, "its agent starts it" if rank == 0 else f"rank {rank} meets rank 0"
    reason, then = report.reason, report.next
    if len(row.shards) > 1 and report.rank > 0:
        reason = f"rank {report.rank} on {node.id}: {reason}"
    if row.superseded_by:
        then = f"stopped once {row.superseded_by} is ready"
    if node.state is NodeState.UNREACHABLE:
        reason = f"{reason}; node {node.id} is unreachable, this is what it said last"
        then = HELD if held else then
    return report.state.value, reason, report.since, then


def replica_view(row: Replica, state: ClusterState, now: float, *, held: bool = False) -> ReplicaView:
    """One replica as it stands; ``held`` says that the brake is on."""
    reports = tuple((s, state.report(s, row.generation)) for s in row.shards)
    shards = tuple(
        ShardView(
            s.shard,
            s.rank,
            s.node,
            _labels(state.node(s.node), s.devices),
            told,
            _peaks(s, told, lambda r: r.load_mib),
            _peaks(s, told, lambda r: r.serving_mib),
        )
        for s, told in reports
    )
    report = shards[0].report if shards else None
    word, reason, since, then = _judge(row, _telling(row, state), now, held=held)
    then = waiting_for(row, state) or then
    return ReplicaView(
        id=row.id,
        model=row.model,
        profile=row.profile.name,
        nodes=tuple(s.node for s in row.shards),
        devices=tuple(f"{s.node}/{label}" if len(shards) > 1 else label for s in shards for label in s.devices),
        state=word,
        reason=reason,
        since=since,
        next=then,
        endpoint=report.endpoint if report is not None else None,
        pid=report.pid if report is not None else None,
        generation=row.generation,
        progress=report.progress if report is not None and report.state is ShardState.LOADING else None,
        fabric=row.fabric,
        shards=shards,
        load_mib=tuple(mib for shard in shards for mib in shard.load_mib),
        serving_mib=tuple(mib for shard in shards for mib in shard.serving_mib),
        warnings=tuple(f"{s.node}: {w}" for s, r in reports if r is not None for w in r.warnings),
        log_path=report.log_path if report is not None else "",
    )


def _peaks(
    place: Assignment, report: ShardReport | None, of: Callable[[ShardReport], tuple[int, ...] | None]
) -> tuple[int | None, ...]:
    """By device; a shard that does not say, or says it of other devices than its row has, leaves its own unknown."""
    said = None if report is None else of(report)
    return said if said is not None and len(said) == len(place.devices) else (None,) * len(place.devices)


def replica_views(state: ClusterState, now: float) -> tuple[ReplicaView, ...]:
    """Every replica, by id."""
    held = _held(state)
    return tuple(replica_view(row, state, now, held=held) for row in sorted(state.replicas, key=lambda r: r.id))


def _held(state: ClusterState) -> bool:
    return brake(state.nodes, state.liveness, state.brake_released) is not None


@frozen
class _Brief:
    """As much of a replica as its model's view needs."""

    row: Replica
    state: str
    reason: str
    since: float
    next: str
    progress: float | None


def _brief(row: Replica, state: ClusterState, now: float, *, held: bool) -> _Brief:
    seen = _telling(row, state)
    progress = None if seen is None or seen[2] is None else seen[2].progress
    return _Brief(row, *_judge(row, seen, now, held=held), progress)


def model_views(state: ClusterState, unplaced: tuple[Unplaced, ...], now: float) -> tuple[ModelView, ...]:
    """Every model that is placed, in the catalog's order."""
    missing = {item.model: item for item in unplaced}
    held = _held(state)
    of_model: dict[str, list[_Brief]] = {model.name: [] for model in state.models}
    for row in state.replicas:
        if row.model in of_model:
            of_model[row.model].append(_brief(row, state, now, held=held))
    scales = {m.name: state.scales.get(m.name) if m.scaling is not None else None for m in state.models}
    return tuple(_model(m, of_model[m.name], missing.get(m.name), scales[m.name]) for m in state.models)


def of_adapter(view: ModelView, having: int) -> ModelView:
    """How an adapter of the model is, that so many of its ready replicas were started with."""
    if having >= view.ready:
        return view
    if not having:
        return evolve(view, ready=0, state="waiting", public="is being updated")
    said = public("ready", having, view.wanted, progress=None, updating=True, failed=False)
    return evolve(view, ready=having, state="degraded", public=said)


def _model(model: Model, briefs: list[_Brief], missing: Unplaced | None, scale: Scale | None) -> ModelView:
    wanted = model.replicas
    ready = [b for b in briefs if b.state == "ready"]
    behind = sorted((b for b in briefs if b.state != "ready"), key=lambda b: (_rank(b.state), b.row.id))
    first = behind[0] if behind else None
    word, reason, since, then = _words(wanted, ready, first, missing)
    if word == "off" and not wanted and scale is not None and model.scaling is not None and model.scaling.max:
        word, since = "idle", scale.changed
        reason, then = f"scaled to zero: {scale.reason}", "the first request starts a replica, and waits for it"
    if names := taken_back(model, (b.row for b in briefs)):
        which = f"profile{'' if len(names) == 1 else 's'} {', '.join(names)}"
        reason = f"{reason}; the edited {which} did not come up, what was before it stays"
        then = then or "it is tried again once it is edited"
    said = public(
        word,
        len(ready),
        wanted,
        progress=None if first is None else first.progress,
        updating=any(not b.row.shards or (b.row.goal is not Goal.RUN and b.row.other is not None) for b in briefs),
        failed=first is not None and first.row.failures > 0,
    )
    return ModelView(model.name, wanted, len(ready), word, reason, since, then, said, scale)


def _words(
    wanted: int, ready: list[_Brief], first: _Brief | None, missing: Unplaced | None
) -> tuple[str, str, float | None, str]:
    """State, reason, since, next; ``first`` is the replica that is farthest from ready."""
    count = len(ready)
    if wanted == 0 and not count and first is None:
        return "off", "no replica is wanted", None, "set replicas in the settings"
    if count >= wanted:
        since = max((b.since for b in ready), default=None)
        return "ready" if wanted else "off", f"{count} of {wanted} ready", since, ""
    if missing is not None and (first is None or first.state in ("lost", "stopping", "draining")):
        then = "placed as soon as one of the reasons below is gone"
        return "degraded" if count else "unplaced", missing.reason, missing.since, then
    if first is None:
        return "degraded" if count else "waiting", "not looked at yet", None, "placed in the next pass"
    return "degraded" if count else first.state, f"{first.row.id}: {first.reason}", first.since, first.next


def _rank(word: str) -> int:
    return _FARTHEST.index(word) if word in _FARTHEST else 0
