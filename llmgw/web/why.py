"""Why something is as it is: a replica, a model or a node now, with the decisions that are stored about it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches

from attrs import evolve

from llmgw.scheduler.changes import changes
from llmgw.scheduler.explain import Unplaced
from llmgw.scheduler.state import ClusterState
from llmgw.scheduler.summary import ModelView, model_views, of_adapter, replica_view
from llmgw.settings.catalog import Model
from llmgw.settings.document import Settings
from llmgw.store.api import StoredDecision
from llmgw.web.routing import routing_view
from llmgw.web.source import Routed
from llmgw.web.views import Json, brake_view, decisions_view, models_view, nodes_view, replica_json


def model_of_adapter(name: str, settings: Settings) -> Model | None:
    """The model that has an adapter of this name, ``<model>:<adapter>``; no name is a model's and an adapter's."""
    if settings.model(name) is not None:
        return None
    return next((m for m in settings.models if name in m.names), None)


def why_view(
    name: str,
    settings: Settings,
    state: ClusterState,
    unplaced: tuple[Unplaced, ...],
    now: float,
    decisions: tuple[StoredDecision, ...],
    routed: Callable[[Model], Routed],
) -> Json | None:
    """Everything that has this name; ``None`` when nothing has it, nor ever had as far as the decisions go back."""
    held = brake_view(state)
    base = model_of_adapter(name, settings)
    model = _model(name if base is None else base.name, settings, state, unplaced, now)
    asked = settings.model(name) if base is None else base
    if model is not None and asked is not None:
        model["routing"] = routing_view(asked, routed(asked), now)
    adapter = None
    if base is not None and model is not None:
        (view,) = model_views(
            evolve(state, models=tuple(m for m in state.models if m.name == base.name)), unplaced, now
        )
        adapter = _adapter(name, base, view, model["replicas"], state)
    row = next((r for r in state.replicas if r.id == name), None)
    replica = None if row is None else replica_json(replica_view(row, state, now, held=held is not None))
    node = next(iter(nodes_view(state, name)), None)
    if model is None and replica is None and node is None and not decisions:
        return None
    found = {"adapter": adapter, "model": model if base is None else None, "replica": replica, "node": node}
    kinds = [kind for kind, thing in found.items() if thing is not None]
    gone = None if kinds else _was(name, decisions)
    return {
        "name": name,
        "now": now,
        "kinds": kinds,
        "gone": gone,
        "brake": held,
        "adapter": adapter,
        "model": model,
        "replica": replica,
        "node": node,
        "decisions": decisions_view(decisions),
    }


def _adapter(name: str, base: Model, view: ModelView, replicas: Iterable[Json], state: ClusterState) -> Json:
    """Which replicas of the model were started with the adapter, and which of its profiles would not be."""
    served = {row.id: name in row.profile.served(base.name) for row in state.replicas}
    there = [r for r in replicas if r["nodes"]]
    how = of_adapter(view, sum(1 for r in there if r["state"] == "ready" and served[r["id"]]))
    return {
        "name": name,
        "model": base.name,
        "state": how.state,
        "ready": how.ready,
        "public": how.public,
        "replicas": [r["id"] for r in there if served[r["id"]]],
        "without": [r["id"] for r in there if not served[r["id"]]],
        "profiles_without": [p.name for p in base.profiles if name not in p.served(base.name)],
    }


def _was(name: str, decisions: Iterable[StoredDecision]) -> str:
    """What a name that is no longer used was."""
    for stored in decisions:
        for kind in ("replica", "model", "node"):
            if getattr(stored.decision, kind) == name:
                return kind
        if name in stored.decision.nodes:
            return "node"
    return "replica"


def _model(
    name: str, settings: Settings, state: ClusterState, unplaced: tuple[Unplaced, ...], now: float
) -> Json | None:
    wanted = settings.model(name)
    if wanted is None:
        return None
    held = brake_view(state) is not None
    only = Settings(models=(wanted,))
    rows = tuple(r for r in state.replicas if r.model == name)
    (view,) = models_view(only, state, unplaced, now)
    return view | {
        "changes": list(changes(state, wanted)),
        "replicas": [replica_json(replica_view(row, state, now, held=held)) for row in rows],
    }


def unknown(name: str, settings: Settings, state: ClusterState) -> tuple[str, str]:
    """Reason and remedy for a name that nothing has."""
    kinds = {
        "models": [m.name for m in settings.models],
        "adapters": [n for m in settings.models for n in m.names if n != m.name],
        "replicas": [r.id for r in state.replicas],
        "nodes": [n.id for n in state.nodes],
    }
    close = get_close_matches(name[:200], sorted({n for names in kinds.values() for n in names}), n=3, cutoff=0.5)
    have = ", ".join(
        f"{len(names)} {kind if len(names) != 1 else kind[:-1]}"
        for kind, names in kinds.items()
        if names or kind != "adapters"
    )
    remedy = f"did you mean {' or '.join(close)}? " if close else ""
    reason = f"no model, replica or node is called {name[:200]}, and no decision is stored about one"
    return reason, f"{remedy}there are {have}"
