"""The picture of the cluster as it would be under other settings: what a plan is made of. Pure."""

from __future__ import annotations

from attrs import evolve

from llmgw.errors import UnknownError
from llmgw.scheduler.liveness import node_state
from llmgw.scheduler.orders import Drained
from llmgw.scheduler.scale import scaled
from llmgw.scheduler.state import ClusterState
from llmgw.settings.document import NodeRules, Settings
from llmgw.settings.faults import nearest

_NO_RULES = NodeRules()


def with_model(state: ClusterState, name: str, replicas: int | None, profile: str | None) -> ClusterState:
    """The state with so many replicas of a model, and with this profile as its only one.

    Raises :class:`UnknownError` for a model or profile that the catalog does not have.
    """
    model = state.model(name)
    if model is None and (base := next((m for m in state.models if name in m.names), None)) is not None:
        raise UnknownError(
            f"model {name[:200]}", f"is an adapter of {base.name}, and goes where that goes", f"plan {base.name}"
        )
    if model is None:
        raise UnknownError(
            f"model {name[:200]}", "is not in the catalog", nearest(name, [m.name for m in state.models])
        )
    if profile is not None:
        only = model.profile(profile)
        if only is None:
            known = nearest(profile, [p.name for p in model.profiles])
            raise UnknownError(f"model {name}", f"has no profile {profile[:200]}", known)
        model = evolve(model, profiles=(only,))
    if replicas is not None:
        model = evolve(model, replicas=replicas, scaling=None)
    return evolve(state, models=tuple(model if m.name == name else m for m in state.models))


def with_drain(state: ClusterState, name: str, drained: Drained | None) -> ClusterState:
    """The state with a node drained, or not any more. Raises :class:`UnknownError` for one that is not known."""
    if state.node(name) is None:
        known = [n.id for n in state.nodes]
        raise UnknownError(f"node {name[:200]}", "is not known", nearest(name, known) or "see: llmgw ctl nodes")
    return evolve(state, nodes=tuple(evolve(n, drained=drained) if n.id == name else n for n in state.nodes))


def with_settings(state: ClusterState, settings: Settings, now: float) -> ClusterState:
    """The state under another settings document."""
    nodes = []
    for node in state.nodes:
        rules = settings.nodes.get(node.id, _NO_RULES)
        node = evolve(node, labels=rules.labels, taints=rules.taints)
        if settings.liveness != state.liveness:
            node = evolve(node, state=node_state(node.heard, now, settings.liveness).state)
        nodes.append(node)
    return evolve(
        state,
        models=scaled((m for m in settings.models if m.profiles), state.scales),
        nodes=tuple(nodes),
        quotas=settings.quotas,
        liveness=settings.liveness,
    )
