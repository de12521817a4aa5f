"""``POST /api/v1/plan``: what is asked, checked, and the plan as JSON. Pure, but not quick: call it in a thread."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from llmgw.errors import ConflictError, OperatorError
from llmgw.scheduler.orders import Drained
from llmgw.scheduler.plan import Elsewhere, Move, Plan, Short, plan
from llmgw.scheduler.state import ClusterState
from llmgw.scheduler.what_if import with_drain, with_model, with_settings
from llmgw.settings.bounds import between
from llmgw.settings.difference import differences
from llmgw.settings.document import Settings
from llmgw.settings.load import load_settings
from llmgw.web.views import Json, candidates_view, unplaced_view

MOST_REPLICAS = 10_000


def _either(*ways: Json) -> Json:
    return {"anyOf": list(ways)}


def _text(key: str) -> Json:
    return {"properties": {key: {"type": "string"}}, "required": [key]}


@frozen
class Question:
    """What to plan: other settings, or those in use; one model otherwise than they say; a node drained, by force
    or not. All of it may be left out: then it is what follows by itself."""

    SCHEMA_RULES: ClassVar = {
        "allOf": [
            _either({"properties": {"replicas": {"type": "null"}, "profile": {"type": "null"}}}, _text("model")),
            _either({"properties": {"force": {"enum": [False, None]}}}, _text("drain")),
        ]
    }
    model: str | None = None
    replicas: int | None = between(0, MOST_REPLICAS, None)
    profile: str | None = None
    settings: str | None = None
    drain: str | None = None
    force: bool | None = None


def checked(asked: Question) -> Question:
    """The question, if what it says goes together. Raises :class:`OperatorError`."""
    if asked.model is None and (asked.replicas is not None or asked.profile is not None):
        raise OperatorError("plan", "replicas and profile are a model's", "name the model")
    if asked.drain is None and asked.force:
        raise OperatorError("plan", "force is about a node to be drained", "name it as drain")
    return asked


def answer(asked: Question, settings: Settings, state: ClusterState, now: float) -> Json:
    """The plan. Raises :class:`OperatorError` for settings with faults, and for what the catalog does not have."""
    then, after, notes = state, settings, []
    if asked.settings is not None:
        after = load_settings(asked.settings, "settings")
        then = with_settings(state, after, now)
        if after.needs_control_plane != settings.needs_control_plane:
            notes.append("they turn a router into a control plane or back: llmgw server starts itself anew for them")
    if asked.model is not None:
        static = after.model(asked.model)
        if static is not None and not static.profiles:
            raise ConflictError(
                f"model {asked.model}", "is served by engines that llmgw does not run", "there is nothing to place"
            )
        then = with_model(then, asked.model, asked.replicas, asked.profile)
    if asked.drain is not None:
        then = with_drain(then, asked.drain, Drained("this plan", now, force=bool(asked.force)))
    made = plan(state, then if then != state else state, now)
    if not made.complete:
        notes.append("it goes on like this: the plan is longer than what is shown")
    if made.unexplained:
        notes.append(f"why not elsewhere is left out for {made.unexplained} models and profiles")
    return {
        "now": now,
        "asked": {"model": asked.model, "replicas": asked.replicas, "profile": asked.profile,
                  "settings": asked.settings is not None, "drain": asked.drain, "force": bool(asked.force)},
        "differences": [str(d) for d in differences(settings, after)],
        "notes": notes,
        "fits": not _lacking(made, asked.model),
        "lacking": _lacking(made, asked.model),
    } | plan_json(made)  # fmt: skip


def _lacking(made: Plan, asked: str | None) -> list[str]:
    """The models of which something has no place: for one model its own, and those that lose theirs by it."""
    return [s.unplaced.model for s in made.short if asked is None or s.unplaced.model == asked or not s.anyway]


def plan_json(made: Plan) -> Json:
    """Everything that a plan says."""
    return {
        "complete": made.complete,
        "brake": None if made.brake is None else made.brake.reason,
        "steps": [
            {
                "pass": s.number,
                "at_s": s.at_s,
                "ended": list(s.ended),
                "ready": list(s.ready),
                "moves": [_move(m) for m in s.moves],
            }
            for s in made.steps
        ],
        "unplaced": [_short(s) for s in made.short],
        "elsewhere": [_elsewhere(e) for e in made.elsewhere],
        "models": [
            {
                "name": m.model,
                "change": m.change,
                "wanted": list(m.wanted),
                "placed": list(m.placed),
                "classes": [{"device_class": c, "before": before, "after": after} for c, before, after in m.classes],
            }
            for m in made.models
        ],
        "classes": [
            {"device_class": c.device_class, "total": c.total, "before": c.before, "after": c.after, "free": c.free}
            for c in made.classes
        ],
    }


def _move(move: Move) -> Json:
    return {
        "kind": move.kind.value,
        "model": move.model,
        "replica": move.replica,
        "node": move.node,
        "reason": move.reason,
        "anyway": move.anyway,
        "profile": move.profile,
        "device_class": move.device_class,
        "fabric": move.fabric,
        "places": [{"node": p.node, "devices": list(p.devices)} for p in move.places],
    }


def _short(short: Short) -> Json:
    return {"model": short.unplaced.model, "anyway": short.anyway} | unplaced_view(short.unplaced)


def _elsewhere(told: Elsewhere) -> Json:
    return {
        "model": told.model,
        "profile": told.profile,
        "nodes": list(told.nodes),
        "candidates": candidates_view(told.candidates),
    }
