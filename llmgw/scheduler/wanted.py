"""What the catalog wants: edited profiles roll over, the number of replicas is made right, the important come first."""

from __future__ import annotations

from itertools import groupby

from attrs import evolve, frozen

from llmgw.scheduler.explain import DecisionKind
from llmgw.scheduler.place import NoPlace, Placement, doubt
from llmgw.scheduler.room import add, before_edits, make_room, place_for, say_unplaced
from llmgw.scheduler.state import Goal, Replica
from llmgw.scheduler.vacate import clear, leave, obey
from llmgw.scheduler.working import Working, serial
from llmgw.settings.catalog import Model, Profile, Update
from llmgw.settings.digest import profile_digest


def want(pass_: Working) -> None:
    """Bring every model to what its entry in the catalog says.

    What is wanted no more goes before anything is taken from anybody. Then those who may take from others come first,
    so that what comes free does not go to somebody else; and among equals what gave its devices up for an update gets
    its place before what has none yet, which comes before a second copy: of what leaves a drained node, of what an
    operator has started anew, and for an update.
    """
    models = [_accepted(pass_, m) for m in sorted(pass_.state.models, key=lambda m: -m.priority)]
    for row in list(pass_.rows.values()):
        if row.model not in pass_.models:
            pass_.retire(row, f"model {row.model} left the catalog")
    for model in models:
        _shrink(pass_, model)
    for _, level in groupby(models, key=lambda m: m.priority):
        some = list(level)
        for step in (clear, _house, _grow, leave, obey, _refresh):
            for model in some:
                step(pass_, model)


def _accepted(pass_: Working, model: Model) -> Model:
    """The model with the profiles that it can have: for an edited one that did not come up the one before it."""
    before = before_edits(pass_, model)
    if not before:
        return model
    profiles = (before.get(profile_digest(model.name, p), p) for p in model.profiles)
    return evolve(model, profiles=tuple({p.name: p for p in profiles}.values()))


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
    found = place_for(pass_, model) if model.update is Update.SURGE else None
    if isinstance(found, Placement):
        new = add(pass_, model, found, f"{why}: replaces {row.id}")
        pass_.put(evolve(row, superseded_by=new.id))
    elif wanted is not None and (held := doubt(model, wanted, pass_.fleet)):
        if not any(item.model == model.name for item in pass_.unplaced):
            reason = f"{why}, {row.id} serves on as it was: {held.reason}"
            say_unplaced(pass_, model, model.replicas, reason, held)
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
        found = place_for(pass_, evolve(model, profiles=(row.profile,)))
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
    ready_last = sorted(rows.counting, key=lambda r: (pass_.ready(r), pass_.drained(r) is None, -serial(r)))
    for row in (*rows.homeless, *reversed(rows.gone), *ready_last)[:excess]:
        wanted = f"{model.replicas} replica{' is' if model.replicas == 1 else 's are'} wanted"
        pass_.retire(row, f"{wanted}, this is one too many")


def _grow(pass_: Working, model: Model) -> None:
    """Places for what is missing, and for what was on lost nodes."""
    rows = _rows(pass_, model)
    gone, homeless = list(rows.gone), rows.homeless
    for running in range(len(rows.counting) + len(rows.changing), model.replicas):
        old = gone.pop(0) if gone else None
        found = place_for(pass_, model, () if old is None else (old,))
        if isinstance(found, NoPlace):
            lost = len(gone) + (old is not None)
            say_unplaced(pass_, model, running, _waiting(pass_, model, lost, make_room(pass_, model), found), found)
            return
        for row in homeless:
            pass_.drop(row)
        homeless = ()
        new = add(pass_, model, found, "")
        if old is not None:
            pass_.put(evolve(old, superseded_by=new.id))
            pass_.say(DecisionKind.EVICT, old, f"node {pass_.lost_node(old)} is lost; {new.id} replaces it")


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
