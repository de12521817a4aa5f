"""Room for one more replica: what is free, what is being stopped, and what a lower priority gives up for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from attrs import evolve, frozen

from llmgw.scheduler.explain import DecisionKind, Unplaced
from llmgw.scheduler.fleet import Fleet
from llmgw.scheduler.place import NoPlace, Placement, place
from llmgw.scheduler.state import Goal, Replica
from llmgw.scheduler.working import Working
from llmgw.settings.catalog import Model, Profile


def before_edits(pass_: Working, model: Model) -> dict[str, Profile]:
    """By the digest of each edited profile that did not come up, what there was before it."""
    return {
        r.rejected: r.profile if r.goal is Goal.RUN or r.other is None else r.other
        for r in pass_.of_model(model.name)
        if r.rejected
    }


def add(pass_: Working, model: Model, found: Placement, why: str) -> Replica:
    """A new row, which remembers what its profile stands in for."""
    new = pass_.add(model, found, why)
    if found.profile in pass_.models[model.name].profiles:
        return new
    for digest, profile in before_edits(pass_, model).items():
        if profile == new.profile:
            new = evolve(new, rejected=digest)
            pass_.put(new)
    return new


def place_for(
    pass_: Working, model: Model, giving: Sequence[Replica] = (), fleet: Fleet | None = None
) -> Placement | NoPlace:
    """A place for one more; what ``giving`` has of the model's quota and of its share of each node counts as free."""
    here, used = pass_.here(model.name), pass_.used(model.group)
    if giving:
        here = here - Counter(s.node for r in giving if r.model == model.name for s in r.shards)
        mine = [pass_.charged(r) for r in giving if pass_.group(r) == model.group]
        used = used - sum(mine, Counter())
    return place(model, pass_.fleet if fleet is None else fleet, here, used, pass_.quotas(model.group))


def _place_without(
    pass_: Working, model: Model, rows: Sequence[Replica], nodes: frozenset[str] | None = None
) -> Placement | None:
    """A place as if these rows were gone, on these nodes where they are given."""
    found = place_for(pass_, model, rows, pass_.fleet_without(frozenset(r.id for r in rows), nodes))
    return found if isinstance(found, Placement) else None


def make_room(pass_: Working, model: Model) -> str:
    """Take devices from models of a lower priority, if nothing that is leaving already would do; what is said of it.

    Whatever is free of the place that it will have is kept for it meanwhile: else others would settle there, and it
    would have to wait for those in turn.
    """
    leaving = [
        r for r in pass_.rows.values() if r.goal is not Goal.RUN and any(pass_.connected(s.node) for s in r.shards)
    ]
    if leaving and (found := _place_without(pass_, model, leaving)) is not None:
        _keep(pass_, model, found)
        return "it gets what is being stopped"
    lower = {name: m for name, m in pass_.models.items() if m.priority < model.priority}
    able = {
        r.id: r.placed + lower[r.model].min_run_s for r in pass_.rows.values() if r.model in lower and pass_.counts(r)
    }
    ripe = {name: at for name, at in able.items() if at <= pass_.now}
    # Now it is the newest ones that give way, and later those that may first.
    if (taken := _taken(pass_, model, leaving, sorted(ripe, key=lambda n: pass_.rows[n].placed))) is not None:
        _keep(pass_, model, taken.place)
        for row in taken.rows:
            reason = f"{model.name} (priority {model.priority}) takes its devices, it has priority"
            pass_.retire(row, f"{reason} {lower[row.model].priority}", DecisionKind.PREEMPT)
        return "devices are taken from models of a lower priority"
    if len(ripe) == len(able):
        return ""
    if (taken := _taken(pass_, model, leaving, sorted(able, key=lambda n: -able[n]))) is None:
        return ""
    _keep(pass_, model, taken.place)
    last = max(taken.rows, key=lambda r: able[r.id])
    pass_.wake.append(able[last.id])
    return f"it takes the devices of {last.id} once that had them for {lower[last.model].min_run_s:.0f} s (min_run_s)"


@frozen
class _Taken:
    """A place, and whose devices or quota it takes."""

    place: Placement
    rows: tuple[Replica, ...]


def _taken(pass_: Working, model: Model, leaving: Sequence[Replica], able: Sequence[str]) -> _Taken | None:
    """A place that some of ``able`` give way for: the least important ones, of these the last, and none needlessly."""

    def priority(row: Replica) -> int:
        return pass_.models[row.model].priority

    everyone = sorted((pass_.rows[name] for name in able), key=lambda r: -priority(r))
    for level in sorted({priority(r) for r in everyone}):
        rows = [r for r in everyone if priority(r) <= level]
        where = None
        if not pass_.quotas(model.group) and all(p.nodes == 1 for p in model.profiles):
            where = frozenset(s.node for r in rows for s in r.shards)
        found = _place_without(pass_, model, [*leaving, *rows], where)
        if found is None:
            continue
        nodes = frozenset(part.node for part in found.parts)
        giving = [r for r in rows if any(s.node in nodes for s in r.shards)]
        others = [r for r in rows if pass_.group(r) == model.group and all(s.node not in nodes for s in r.shards)]
        while _place_without(pass_, model, [*leaving, *giving], nodes) is None and others:
            giving.append(others.pop())  # what it lacks is quota
        for row in list(giving):
            rest = [r for r in giving if r is not row]
            if (again := _place_without(pass_, model, [*leaving, *rest], nodes)) is not None:
                giving, found = rest, again
        return _Taken(found, tuple(giving))
    return None


def _keep(pass_: Working, model: Model, found: Placement) -> None:
    """What of this place and its quota is free already stays so for this pass: else who gives way has it again."""
    for part in found.parts:
        taken = pass_.fleet.view(part.node).taken
        free = [number for number in part.devices if number not in taken]
        pass_.fleet.take(part.node, free, f"nothing yet, it is kept for {model.name} (priority {model.priority})")
    pass_.used(model.group)[found.device_class] += found.profile.devices


def say_unplaced(pass_: Working, model: Model, running: int, reason: str, found: NoPlace) -> None:
    """So many run, and no more have a place: why, with every candidate."""
    since = pass_.state.unplaced_since.get(model.name, pass_.now)
    pass_.unplaced.append(Unplaced(model.name, model.replicas, running, reason, found.candidates, since))
