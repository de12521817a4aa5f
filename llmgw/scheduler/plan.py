"""What would go where, and why not elsewhere: the same passes as the live loop's, on a state that nobody has yet. Pure.

A plan says what follows from what is known now. It takes nothing: no device is held for it and no serial is used, so
that whatever happens meanwhile can make it come out differently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from attrs import evolve, frozen

from llmgw.scheduler.brake import Brake
from llmgw.scheduler.elsewhere import Room, Settled, elsewhere
from llmgw.scheduler.explain import Candidate, Decision, DecisionKind, Unplaced
from llmgw.scheduler.feasible import unusable
from llmgw.scheduler.scale import scaled
from llmgw.scheduler.simulate import Play, Round, play
from llmgw.scheduler.state import Assignment, ClusterState, Goal, NodeState, Replica
from llmgw.scheduler.working import Working

MOST_EXPLAINED = 20
"""Models and profiles for which a plan says why not elsewhere."""

_SILENT = (DecisionKind.FORGET,)
_LEAVING = (DecisionKind.DRAIN, DecisionKind.PREEMPT, DecisionKind.ROLLBACK, DecisionKind.EVICT)
"""What ends with a stop, and how that is done is not told again."""


@frozen
class Place:
    """What one node gives: device labels as the node's operator knows them."""

    node: str
    devices: tuple[str, ...]


@frozen
class Move:
    """One thing that would be decided. ``anyway`` says that it will be without the change as well.

    The id of a replica that is yet to be made is the one that it would get now.
    """

    kind: DecisionKind
    model: str
    replica: str
    node: str
    reason: str
    anyway: bool
    profile: str = ""
    device_class: str = ""
    fabric: str | None = None
    places: tuple[Place, ...] = ()


@frozen
class Step:
    """Moves of one pass: after ``at_s`` seconds at the earliest, once these replicas have ended and those are ready.

    ``number`` counts the passes from 1, those without a move as well.
    """

    number: int
    at_s: float
    ended: tuple[str, ...]
    ready: tuple[str, ...]
    moves: tuple[Move, ...]


@frozen
class Short:
    """What would have no place, with every candidate. ``anyway``: it has none without the change either."""

    unplaced: Unplaced
    anyway: bool


@frozen
class Elsewhere:
    """Why replicas of a model and profile would not be anywhere else than on ``nodes``."""

    model: str
    profile: str
    nodes: tuple[str, ...]
    candidates: tuple[Candidate, ...]


@frozen
class ModelCount:
    """A model before and after: replicas wanted and placed, and how many of them on which device class.

    ``change`` is ``added``, ``removed``, ``changed`` or ``same``; a number is 0 where there is no model.
    """

    model: str
    change: str
    wanted: tuple[int, int]
    placed: tuple[int, int]
    classes: tuple[tuple[str, int, int], ...]


@frozen
class ClassCount:
    """Devices of a class: all, those that replicas have before and after, and those that anybody could get then."""

    device_class: str
    total: int
    before: int
    after: int
    free: int


@frozen
class Plan:
    """The passes that would follow until nothing more changes (``complete``) or the plan is long enough.

    ``unexplained`` counts the models and profiles beyond :data:`MOST_EXPLAINED`.
    """

    steps: tuple[Step, ...]
    short: tuple[Short, ...]
    elsewhere: tuple[Elsewhere, ...]
    unexplained: int
    models: tuple[ModelCount, ...]
    classes: tuple[ClassCount, ...]
    complete: bool
    brake: Brake | None


def plan(state: ClusterState, then: ClusterState, now: float) -> Plan:
    """What ``then`` would lead to, against what ``state`` leads to by itself; the two may be one and the same."""
    changed = play(then, now)
    usual = None if then is state else play(state, now)
    without = _moved(usual)
    steps = tuple(_steps(changed, without))
    explained = list(_elsewhere(changed, steps))
    return Plan(
        steps=steps,
        short=tuple(_short(changed, usual)),
        elsewhere=tuple(explained[:MOST_EXPLAINED]),
        unexplained=max(0, len(explained) - MOST_EXPLAINED),
        models=tuple(_models(state, then, changed, now)),
        classes=tuple(_classes(Working(state, now), Working(changed.after, now))),
        complete=changed.complete,
        brake=changed.rounds[0].outcome.brake,
    )


_Key = tuple[DecisionKind, str, tuple[Assignment, ...] | str]


def _key(decision: Decision, rows: dict[str, Replica]) -> _Key:
    """What makes a decision the same in another play: new rows have other ids there."""
    row = rows.get(decision.replica)
    if decision.kind is not DecisionKind.PLACE or row is None:
        return decision.kind, decision.model, f"{decision.replica} {decision.node}"
    shards = tuple(evolve(s, shard="") for s in row.shards)
    return decision.kind, f"{decision.model} {row.profile.name}", shards


def _decided(played: Play) -> Iterator[tuple[int, Round, Decision, dict[str, Replica]]]:
    """Every decision that is a move of its own: not how one goes on that was decided before, nor how it ends."""
    said: set[tuple[DecisionKind, str, str, str]] = set()
    leaving: set[str] = set()
    for at, one in enumerate(played.rounds):
        leaving |= {r.id for r in one.before.replicas if r.goal is not Goal.RUN}
        rows = {r.id: r for r in one.outcome.replicas}
        for decision in one.outcome.decisions:
            if decision.kind in _SILENT or (decision.kind is DecisionKind.STOP and decision.replica in leaving):
                continue
            if decision.kind in _LEAVING:
                leaving.add(decision.replica)
            mark = (decision.kind, decision.replica, decision.node, decision.reason)
            if mark not in said:
                said.add(mark)
                yield at, one, decision, rows


def _moved(played: Play | None) -> frozenset[_Key]:
    if played is None:
        return frozenset()
    return frozenset(_key(decision, rows) for _, _one, decision, rows in _decided(played))


def _steps(played: Play, without: frozenset[_Key]) -> Iterator[Step]:
    moves: dict[int, list[Move]] = {}
    for at, one, decision, rows in _decided(played):
        anyway = _key(decision, rows) in without
        moves.setdefault(at, []).append(_move(decision, rows.get(decision.replica), one.before, anyway=anyway))
    ended: dict[str, None] = {}
    ready: dict[str, None] = {}
    for at, one in enumerate(played.rounds):
        ended |= dict.fromkeys(one.ended)
        ready |= dict.fromkeys(one.ready)
        if at in moves:
            yield Step(at + 1, one.at_s, tuple(ended), tuple(ready), tuple(moves[at]))
            ended, ready = {}, {}


def _move(decision: Decision, row: Replica | None, state: ClusterState, *, anyway: bool) -> Move:
    move = Move(decision.kind, decision.model, decision.replica, decision.node, decision.reason, anyway)
    if decision.kind is not DecisionKind.PLACE or row is None:
        return move
    return evolve(
        move,
        reason=row.reason,
        profile=row.profile.name,
        device_class=_class_of(row, state),
        fabric=row.fabric,
        places=tuple(Place(s.node, _labels(s, state)) for s in row.shards),
    )


def _labels(place: Assignment, state: ClusterState) -> tuple[str, ...]:
    node = state.node(place.node)
    found = [(n, node.inventory.device(n) if node is not None else None) for n in place.devices]
    return tuple(f"device {n}" if device is None else device.label for n, device in found)


def _class_of(row: Replica, state: ClusterState) -> str:
    for place in row.shards:
        node = state.node(place.node)
        for number in place.devices:
            if node is not None and (device := node.inventory.device(number)) is not None:
                return device.device_class
    return ""


def _short(changed: Play, usual: Play | None) -> Iterator[Short]:
    before = {} if usual is None else {u.model: u for u in usual.rounds[-1].outcome.unplaced}
    for item in changed.rounds[-1].outcome.unplaced:
        was = before.get(item.model)
        yield Short(item, was is not None and was.wanted - was.running >= item.wanted - item.running)


def _elsewhere(played: Play, steps: Iterable[Step]) -> Iterator[Elsewhere]:
    """By model and profile, as of the last pass that places one of it."""
    wanted = {m.replica for s in steps for m in s.moves if m.kind is DecisionKind.PLACE}
    last: dict[tuple[str, str], Round] = {}
    nodes: dict[tuple[str, str], set[str]] = {}
    newest: dict[tuple[str, str], Replica] = {}
    for one in played.rounds:
        old = {r.id for r in one.before.replicas}
        for row in one.outcome.replicas:
            if row.id in wanted and row.id not in old:
                key = (row.model, row.profile.name)
                last[key], newest[key] = one, row
                nodes.setdefault(key, set()).update(s.node for s in row.shards)
    views: dict[int, Working] = {}
    for number, (key, one) in enumerate(sorted(last.items(), key=lambda i: i[0])):
        model, row = one.before.model(key[0]), newest[key]
        if model is None:
            continue
        some: tuple[Candidate, ...] = ()
        if number < MOST_EXPLAINED:
            after = views.get(id(one))
            if after is None:
                after = views[id(one)] = Working(evolve(one.before, replicas=one.outcome.replicas), 0.0)
            settled = Settled(frozenset(nodes[key]), _class_of(row, one.before), row.fabric)
            quotas = one.before.quotas.get(model.group, {}) if model.group else {}
            room = Room(after.fleet, after.here(model.name), after.used(model.group), quotas)
            some = elsewhere(model, row.profile, settled, room)
        yield Elsewhere(*key, tuple(sorted(nodes[key])), some)


def _models(state: ClusterState, then: ClusterState, changed: Play, now: float) -> Iterator[ModelCount]:
    old = {m.name: m for m in state.models}
    new = {m.name: m for m in then.models}
    count = {m.name: m.replicas for m in state.models}
    counts = {m.name: m.replicas for m in scaled(then.models, changed.rounds[-1].outcome.scales)}
    had, has = _placed(state, now), _placed(changed.after, now)
    for name in {**old, **new}:
        was, is_ = old.get(name), new.get(name)
        change = "added" if was is None else "removed" if is_ is None else "same" if was == is_ else "changed"
        wanted = (count.get(name, 0), counts.get(name, 0))
        before, later = had.get(name, Counter()), has.get(name, Counter())
        classes = tuple((c, before[c], later[c]) for c in sorted({*before, *later}))
        yield ModelCount(name, change, wanted, (before.total(), later.total()), classes)


def _placed(state: ClusterState, now: float) -> dict[str, Counter[str]]:
    """Replicas that count, by model and device class."""
    working = Working(state, now)
    made: dict[str, Counter[str]] = {}
    for row in state.replicas:
        if working.counts(row):
            made.setdefault(row.model, Counter())[_class_of(row, state)] += 1
    return made


def _classes(before: Working, after: Working) -> Iterator[ClassCount]:
    total, free = Counter[str](), Counter[str]()
    had, has = _held(before), _held(after)
    for view in after.fleet:
        for device in view.node.inventory.devices:
            total[device.device_class] += 1
            usable = view.node.state is NodeState.CONNECTED and view.node.drained is None
            if usable and unusable(device, view) is None:
                free[device.device_class] += 1
    for name in sorted(total):
        yield ClassCount(name, total[name], had[name], has[name], free[name])


def _held(working: Working) -> Counter[str]:
    """Devices that replicas have."""
    made: Counter[str] = Counter()
    for row in working.rows.values():
        for place in row.shards:
            node = working.state.node(place.node)
            for number in place.devices:
                if node is not None and (device := node.inventory.device(number)) is not None:
                    made[device.device_class] += 1
    return made
