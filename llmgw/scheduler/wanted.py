"""What the catalog wants: edited profiles roll over, the number of replicas is made right, the important come first."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import evolve, frozen

from llmgw.scheduler.explain import DecisionKind, Unplaced
from llmgw.scheduler.fleet import Fleet
from llmgw.scheduler.place import NoPlace, Placement, doubt, place
from llmgw.scheduler.state import Goal, Replica
from llmgw.scheduler.working import Working, serial
from llmgw.settings.catalog import Model, Profile, Update
from llmgw.settings.digest import profile_digest


def want(pass_: Working, model: Model) -> None:
    """Bring one model to what its entry in the catalog says."""
    _shrink(pass_, model)
    held = _refresh(pass_, model)
    _house(pass_, model)
    _grow(pass_, model)
    if held is not None and not any(item.model == model.name for item in pass_.unplaced):
        since = pass_.state.unplaced_since.get(model.name, pass_.now)
        count = model.replicas
        pass_.unplaced.append(Unplaced(model.name, count, count, held.reason, held.candidates, since))


def _refresh(pass_: Working, model: Model) -> NoPlace | None:
    """Replace rows whose profile was edited, one at a time, as the model's ``update`` says; or why not."""
    rows = pass_.of_model(model.name)
    if all(model.profile(row.profile.name) == row.profile for row in rows):
        return None
    # What does not serve first: nobody misses it.
    rows.sort(key=pass_.ready)
    rejected = {r.rejected for r in rows if r.rejected}
    busy = any(
        not r.shards or (r.superseded_by is not None and r.superseded_by in pass_.rows) or _coming_up(pass_, model, r)
        for r in rows
    )
    for row in rows:
        wanted = model.profile(row.profile.name)
        if wanted == row.profile or not pass_.counts(row):
            continue
        if wanted is not None and _same_but_limits(wanted, row.profile):
            pass_.rows[row.id] = evolve(row, profile=wanted)
            continue
        if busy or (rejected and wanted is not None and profile_digest(model.name, wanted) in rejected):
            continue
        why = f"profile {row.profile.name} was {'changed' if wanted is not None else 'removed'}"
        found = _place(pass_, model) if model.update is Update.SURGE else None
        if isinstance(found, Placement):
            new = pass_.add(model, found, f"{why}: replaces {row.id}")
            pass_.rows[row.id] = evolve(row, superseded_by=new.id)
        elif wanted is not None and (held := doubt(model, wanted, pass_.fleet)):
            return evolve(held, reason=f"{why}, {row.id} serves on as it was: {held.reason}")
        elif _missing(pass_, model) and isinstance(found or _place(pass_, model), Placement):
            return None  # it gets its place first
        elif not any(not pass_.lost(r) and r.goal is not Goal.RUN for r in rows):
            if found is not None:
                why = f"{why}, and there is no room for both the old and the new one"
            pass_.retire(row, why, other=wanted)
        # Else something is on its way out already: its devices come free first.
        busy = True
    return None


def _coming_up(pass_: Working, model: Model, row: Replica) -> bool:
    """Whether the row is as the catalog wants it and does not serve yet; till then the others are needed."""
    return pass_.counts(row) and not pass_.ready(row) and model.profile(row.profile.name) == row.profile


def _missing(pass_: Working, model: Model) -> bool:
    """Whether the model has fewer replicas than it shall have, those that come back with another profile included."""
    rows = _rows(pass_, model)
    return len(rows.counting) + len(rows.changing) + len(rows.homeless) < model.replicas


def _house(pass_: Working, model: Model) -> None:
    """Rows that gave up their devices for another profile, and wait for a place of that one."""
    for row in pass_.of_model(model.name):
        if row.shards or row.goal is not Goal.RUN:
            continue
        catalog = model.profile(row.profile.name)
        if catalog is None or (
            catalog != row.profile if not row.rejected else profile_digest(model.name, catalog) != row.rejected
        ):
            pass_.drop(row)  # edited once more meanwhile: the usual way from here on
            continue
        found = _place(pass_, evolve(model, profiles=(row.profile,)))
        if isinstance(found, Placement):
            new = pass_.add(model, found, row.reason)
            pass_.rows[new.id] = evolve(new, other=row.other, rejected=row.rejected)
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
        pass_.rows[row.id] = evolve(row, other=None)
    excess -= len(rows.changing[:excess])
    ready_last = sorted(rows.counting, key=lambda r: (pass_.ready(r), -serial(r)))
    for row in (*rows.homeless, *reversed(rows.gone), *ready_last)[:excess]:
        wanted = f"{model.replicas} replica{' is' if model.replicas == 1 else 's are'} wanted"
        pass_.retire(row, f"{wanted}, this is one too many")


def _grow(pass_: Working, model: Model) -> None:
    """Places for what is missing, and for what was on lost nodes."""
    rows = _rows(pass_, model)
    gone, homeless = list(rows.gone), rows.homeless
    running = len(rows.counting) + len(rows.changing)
    while running < model.replicas:
        found = _place(pass_, model)
        if isinstance(found, NoPlace):
            coming = _make_room(pass_, model)
            leaving = sum(1 for r in pass_.of_model(model.name) if r.goal is not Goal.RUN)
            since = pass_.state.unplaced_since.get(model.name, pass_.now)
            pass_.unplaced.append(_explain(pass_, model, running, len(gone), leaving, coming, found, since))
            return
        for row in homeless:
            pass_.drop(row)
        homeless = ()
        new = pass_.add(model, found, "")
        if gone:
            old = gone.pop(0)
            pass_.rows[old.id] = evolve(pass_.rows[old.id], superseded_by=new.id)
            pass_.say(DecisionKind.EVICT, old, f"node {pass_.lost_node(old)} is lost; {new.id} replaces it")
        running += 1


def _place(pass_: Working, model: Model, fleet: Fleet | None = None) -> Placement | NoPlace:
    quotas = pass_.state.quotas.get(model.group, {}) if model.group else {}
    fleet = pass_.fleet if fleet is None else fleet
    return place(model, fleet, pass_.here(model.name), pass_.used(model.group), quotas)


def _make_room(pass_: Working, model: Model) -> str:
    """Take devices from models of a lower priority, fewest and least important first; what is said of it.

    Nothing is taken while what is leaving already would do.
    """
    priorities = {m.name: m for m in pass_.state.models}
    lower = [
        r
        for r in pass_.rows.values()
        if r.shards and r.model in priorities and priorities[r.model].priority < model.priority
    ]
    if not lower:
        return ""
    leaving = frozenset(r.id for r in pass_.rows.values() if r.goal is not Goal.RUN and not pass_.lost(r))
    if leaving and isinstance(found := _place(pass_, model, pass_.fleet_without(leaving)), Placement):
        _keep(pass_, model, found)
        return "it gets what is being stopped"
    able = [r for r in lower if pass_.counts(r)]
    ripe = [r for r in able if pass_.now - r.placed >= priorities[r.model].min_run_s]
    for level in sorted({priorities[r.model].priority for r in ripe}):
        rows = [r for r in ripe if priorities[r.model].priority <= level]
        nodes = frozenset(s.node for r in rows for s in r.shards) if _one_node(model) else None
        found = _place(pass_, model, pass_.fleet_without(leaving | {r.id for r in rows}, nodes))
        if isinstance(found, Placement):
            wanted = {(part.node, device) for part in found.parts for device in part.devices}
            for row in rows:
                if any((s.node, d) in wanted for s in row.shards for d in s.devices):
                    reason = f"{model.name} (priority {model.priority}) takes its devices, it has priority {level}"
                    pass_.retire(row, reason, DecisionKind.PREEMPT)
            _keep(pass_, model, found)
            return "devices are taken from models of a lower priority"
    young = [r for r in able if r not in ripe]
    if young:
        at = min(r.placed + priorities[r.model].min_run_s for r in young)
        pass_.wake.append(at)
        return f"models of a lower priority may keep their devices for {at - pass_.now:.0f} s yet (min_run_s)"
    return ""


def _keep(pass_: Working, model: Model, found: Placement) -> None:
    """What of this place is free already stays so for this pass: else those who give way for it settle there again."""
    for part in found.parts:
        taken = pass_.fleet.view(part.node).taken
        free = [number for number in part.devices if number not in taken]
        pass_.fleet.take(part.node, free, f"nothing yet, it is kept for {model.name} (priority {model.priority})")


def _one_node(model: Model) -> bool:
    return all(p.nodes == 1 for p in model.profiles)


def _same_but_limits(wanted: Profile, has: Profile) -> bool:
    """Limits and sizes are the agent's and the scheduler's to follow; the engine need not start anew for them."""
    sizes = {name: getattr(wanted, name) for name in ("parameters", "concurrency", "memory_gib")}
    return evolve(has, limits=wanted.limits, **sizes) == wanted


def _explain(
    pass_: Working, model: Model, running: int, gone: int, leaving: int, coming: str, found: NoPlace, since: float
) -> Unplaced:
    parts: Iterable[str] = (
        f"{gone} on a lost node" if gone else "",
        f"{leaving} still stopping" if leaving else "",
        coming,
        f"{found.reason}{f'; {found.remedy}' if found.remedy else ''}",
    )
    return Unplaced(model.name, model.replicas, running, "; ".join(p for p in parts if p), found.candidates, since)
