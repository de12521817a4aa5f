"""Why something is as it is: a replica, a model or a node now, with the decisions that are stored about it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from llmgw.scheduler.changes import changes
from llmgw.scheduler.explain import Unplaced
from llmgw.scheduler.state import ClusterState
from llmgw.scheduler.summary import replica_view
from llmgw.settings.document import Settings
from llmgw.store.api import StoredDecision
from llmgw.web.views import Json, brake_view, decisions_view, models_view, nodes_view, replica_json


def why_view(
    name: str,
    settings: Settings,
    state: ClusterState,
    unplaced: tuple[Unplaced, ...],
    now: float,
    decisions: tuple[StoredDecision, ...],
) -> Json | None:
    """Everything that has this name; ``None`` when nothing has it, nor ever had as far as the decisions go back."""
    held = brake_view(state)
    model = _model(name, settings, state, unplaced, now)
    row = next((r for r in state.replicas if r.id == name), None)
    replica = None if row is None else replica_json(replica_view(row, state, now, held=held is not None))
    node = next(iter(nodes_view(state, name)), None)
    if model is None and replica is None and node is None and not decisions:
        return None
    kinds = [k for k, found in (("model", model), ("replica", replica), ("node", node)) if found is not None]
    gone = None if kinds else _was(name, decisions)
    return {
        "name": name,
        "now": now,
        "kinds": kinds,
        "gone": gone,
        "brake": held,
        "model": model,
        "replica": replica,
        "node": node,
        "decisions": decisions_view(decisions),
    }


def _was(name: str, decisions: Iterable[StoredDecision]) -> str:
    """What a name that is no longer used was."""
    for stored in decisions:
        for kind in ("replica", "model", "node"):
            if getattr(stored.decision, kind) == name:
                return kind
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
        "replicas": [r.id for r in state.replicas],
        "nodes": [n.id for n in state.nodes],
    }
    close = get_close_matches(name[:200], sorted({n for names in kinds.values() for n in names}), n=3, cutoff=0.5)
    have = ", ".join(f"{len(names)} {kind if len(names) != 1 else kind[:-1]}" for kind, names in kinds.items())
    remedy = f"did you mean {' or '.join(close)}? " if close else ""
    reason = f"no model, replica or node is called {name[:200]}, and no decision is stored about one"
    return reason, f"{remedy}there are {have}"
