"""What the catalog wants: edited profiles roll over, the number of replicas is made right, the important come first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from attrs import evolve, frozen

from llmgw.scheduler.explain import DecisionKind, Unplaced
from llmgw.scheduler.fleet import Fleet
from llmgw.scheduler.place import NoPlace, Placement, doubt, place
from llmgw.scheduler.state import Goal, Replica
from llmgw.scheduler.working import Working, serial
from llmgw.settings.catalog import Model, Profile, Update
from llmgw.settings.digest import profile_digest


def want(pass_: Working) -> None:
    """Bring every model to what its entry in the catalog says.

    What is wanted no more goes before anything is taken from anybody. Then those who may take from others come first,
    so that what comes free does not go to somebody else; and among equals what gave its devices up for an update gets
    its place before what has none yet, which comes before a second copy for an update.
    """
    models = [_accepted(pass_, m) for m in sorted(pass_.state.models, key=lambda m: -m.priority)]
    for row in list(pass_.rows.values()):
        if row.model not in pass_.models:
            pass_.retire(row, f"model {row.model} left the catalog")
    for model in models:
        _shrink(pass_, model)
    for _, level in groupby(models, key=lambda m: m.priority):
        some = list(level)
        for step in (_house, _grow, _refresh):
            for model in some:
                step(pass_, model)


def _accepted(pass_: Working, model: Model) -> Model:
    """The model with the profiles that it can have: for an edited one that did not come up the one before it."""
    before = _before_edits(pass_, model)
    if not before:
        return model
    profiles = (before.get(profile_digest(model.name, p), p) for p in model.profiles)
    return evolve(model, profiles=tuple({p.name: p for p in profiles}.values()))


def _before_edits(pass_: Working, model: Model) -> dict[str, Profile]:
    """By the digest of each edited profile that did not come up, what there was before it."""
    return {
        r.rejected: r.profile if r.goal is Goal.RUN or r.other is None else r.other
        for r in pass_.of_model(model.name)
        if r.rejected
    }


def _add(pass_: Working, model: Model, found: Placement, why: str) -> Replica:
    """A new row, which remembers what its profile stands in for."""
    new = pass_.add(model, found, why)
    if found.profile in pass_.models[model.name].profiles:
        return new
    for digest, profile in _before_edits(pass_, model).items():
        if profile == new.profile:
            new = evolve(new, rejected=digest)
            pass_.put(new)
    return new


def _refresh(pass_: Working, model: Model) -> None:
    """Replace a row whose profile was edited, one at a time, as the model's ``update`` says; or say why not."""
    stale = []
    rows = pass_.of_model(model.name)
    for row in rows:
        wanted = model.profile(row.profile.name)
        if wanted == row.profile or not pass_.counts(row):
            continue
        if wanted is not None and _same_but_limits(wanted, row.profile):
            pass_.put(evolve(row, profile=wanted))
        else:
            stale.append(row)
    if not stale or any(r.superseded_by in pass_.rows or not r.shards for r in rows):
        return
    row = min(stale, key=pass_.ready)  # what serves nothing costs nothing
    wanted = model.profile(row.profile.name)
    why = f"profile {row.profile.name} was {'changed' if wanted is not None else 'removed'}"
    found = _place(pass_, model) if model.update is Update.SURGE else None
    if isinstance(found, Placement):
        new = _add(pass_, model, found, f"{why}: replaces {row.id}")
        pass_.put(evolve(row, superseded_by=new.id))
    elif wanted is not None and (held := doubt(model, wanted, pass_.fleet)):
        if not any(item.model == model.name for item in pass_.unplaced):
            reason = f"{why}, {row.id} serves on as it was: {held.reason}"
            _say_unplaced(pass_, model, model.replicas, reason, held)
    elif any(not pass_.lost(r) and r.goal is not Goal.RUN for r in rows):
        pass  # something is on its way out already: its devices come free first
    elif not pass_.ready(row) or all(pass_.ready(r) for r in rows if pass_.counts(r)):
        if found is not None:
            why = f"{why}, and there is no room for both the old and the new one"
        pass_.retire(row, why, other=wanted)
    # Else another one does not serve, maybe the one that was replaced before it.


def _house(pass_: Working, model: Model) -> None:
    """Rows that gave up their devices for another profile, and wait for a place of that one."""
    for row in pass_.of_model(model.name):
        if row.shards or row.goal is not Goal.RUN:
            continue
        if model.profile(row.profile.name) != row.profile:
            pass_.drop(row)  # edited once more meanwhile: the usual way from here on
            continue
        found = _place(pass_, evolve(model, profiles=(row.profile,)))
        if isinstance(found, Placement):
            new = pass_.add(model, found, row.reason)
            pass_.put(evolve(new, other=row.other, rejected=row.rejected))
            pass_.drop(row)


@frozen
class _Rows:
    """A model's rows by what they count for.

    ``changing`` ones are on their way out only to come back with another profile; on a lost node they are not, which
    may keep them for ever. ``homeless`` ones wait for a place.
    """

    counting: tuple[Replica, ...]
    gone: tuple[Replica, ...]
    homeless: tuple[Replica, ...]
    changing: tuple[Replica, ...]


def _rows(pass_: Working, model: Model) -> _Rows:
    rows = pass_.of_model(model.name)
    return _Rows(
        counting=tuple(r for r in rows if pass_.counts(r)),
        gone=tuple(r for r in rows if pass_.gone(r)),
        homeless=tuple(r for r in rows if not r.shards),
        changing=tuple(r for r in rows if r.goal is not Goal.RUN and r.other is not None and not pass_.lost(r)),
    )


def _shrink(pass_: Working, model: Model) -> None:
    """What is one too many goes; before anything is updated, so that nothing is made anew only to go."""
    rows = _rows(pass_, model)
    excess = len(rows.counting) + len(rows.gone) + len(rows.homeless) + len(rows.changing) - model.replicas
    if excess <= 0:
        return
    for row in rows.changing[:excess]:
        pass_.put(evolve(row, other=None))
    excess -= len(rows.changing[:excess])
    ready_last = sorted(rows.counting, key=lambda r: (pass_.ready(r), -serial(r)))
    for row in (*rows.homeless, *reversed(rows.gone), *ready_last)[:excess]:
        wanted = f"{model.replicas} replica{' is' if model.replicas == 1 else 's are'} wanted"
        pass_.retire(row, f"{wanted}, this is one too many")


def _grow(pass_: Working, model: Model) -> None:
    """Places for what is missing, and for what was on lost nodes."""
    rows = _rows(pass_, model)
    gone, homeless = list(rows.gone), rows.homeless
    for running in range(len(rows.counting) + len(rows.changing), model.replicas):
        old = gone.pop(0) if gone else None
        found = _place(pass_, model, () if old is None else (old,))
        if isinstance(found, NoPlace):
            lost = len(gone) + (old is not None)
            _say_unplaced(pass_, model, running, _waiting(pass_, model, lost, _make_room(pass_, model), found), found)
            return
        for row in homeless:
            pass_.drop(row)
        homeless = ()
        new = _add(pass_, model, found, "")
        if old is not None:
            pass_.put(evolve(old, superseded_by=new.id))
            pass_.say(DecisionKind.EVICT, old, f"node {pass_.lost_node(old)} is lost; {new.id} replaces it")


def _place(
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
    found = _place(pass_, model, rows, pass_.fleet_without(frozenset(r.id for r in rows), nodes))
    return found if isinstance(found, Placement) else None


def _make_room(pass_: Working, model: Model) -> str:
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


def _same_but_limits(wanted: Profile, has: Profile) -> bool:
    """Limits and sizes are the agent's and the scheduler's to follow; the engine need not start anew for them."""
    sizes = {name: getattr(wanted, name) for name in ("parameters", "concurrency", "memory_gib")}
    return evolve(has, limits=wanted.limits, **sizes) == wanted


def _waiting(pass_: Working, model: Model, lost: int, coming: str, found: NoPlace) -> str:
    """Why a replica has no place, in one sentence."""
    leaving = sum(1 for r in pass_.of_model(model.name) if r.goal is not Goal.RUN)
    parts = (
        f"{lost} on a lost node" if lost else "",
        f"{leaving} still stopping" if leaving else "",
        coming,
        f"{found.reason}{f'; {found.remedy}' if found.remedy else ''}",
    )
    return "; ".join(p for p in parts if p)


def _say_unplaced(pass_: Working, model: Model, running: int, reason: str, found: NoPlace) -> None:
    since = pass_.state.unplaced_since.get(model.name, pass_.now)
    pass_.unplaced.append(Unplaced(model.name, model.replicas, running, reason, found.candidates, since))
