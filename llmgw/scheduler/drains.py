"""Drained nodes as people see them: what leaves, what stays, and what comes next; and what an order leads to. Pure."""

from __future__ import annotations

from attrs import evolve, frozen

from llmgw.scheduler.decide import decide
from llmgw.scheduler.explain import Outcome, Unplaced
from llmgw.scheduler.orders import Drained, Order, OrderKind
from llmgw.scheduler.state import ClusterState, Goal, Node, NodeState, Replica


@frozen
class DrainView:
    """What a drained node still has: replicas on their way off it, and those that have no other place (yet)."""

    leaving: tuple[str, ...]
    staying: tuple[str, ...]
    next: str

    @property
    def empty(self) -> bool:
        """Whether nothing of ours is there any more."""
        return not self.leaving and not self.staying


def drain_view(node: Node, state: ClusterState) -> DrainView | None:
    """How far a node's drain has come; ``None`` for one that is not drained."""
    if node.drained is None:
        return None
    here = [r for r in state.replicas if any(s.node == node.id for s in r.shards)]
    leaving = {r.id for r in here if r.goal is not Goal.RUN or r.superseded_by is not None}
    staying = tuple(r.id for r in here if r.id not in leaving)
    live = (r for r in node.reports if not r.state.ended and r.cluster == state.cluster)
    leaving |= {r.replica for r in live if r.replica not in staying}
    return DrainView(tuple(sorted(leaving)), staying, _next(node, tuple(sorted(leaving)), staying))


def _next(node: Node, leaving: tuple[str, ...], staying: tuple[str, ...]) -> str:
    if not leaving and not staying:
        return f"it is empty; llmgw ctl node undrain {node.id} gives it work again"
    if node.state is not NodeState.CONNECTED:
        return "nothing is moved off it while it is not heard; once it is lost what it has is placed elsewhere"
    parts = [f"{', '.join(leaving)} leave{'s' if len(leaving) == 1 else ''} it"] if leaving else []
    if staying:
        parts.append(f"{', '.join(staying)} serve{'s' if len(staying) == 1 else ''} on until there is another place")
    return "; ".join(parts)


@frozen
class Fate:
    """What the next pass does with a replica: ``moves``, ``stops``, ``restarts``, ``stays`` or ``waits``.

    ``to`` are the nodes of what takes its place, ``by`` its id as it would be now.
    """

    replica: str
    model: str
    word: str
    reason: str
    by: str = ""
    to: tuple[str, ...] = ()


@frozen
class Effect:
    """What follows from a change in the very next pass, with every candidate of what has no place by then."""

    fates: tuple[Fate, ...]
    unplaced: tuple[Unplaced, ...]


def drain_effect(state: ClusterState, name: str, drained: Drained, now: float) -> Effect:
    """What draining a node leads to; nothing is changed."""
    nodes = tuple(evolve(n, drained=drained) if n.id == name else n for n in state.nodes)
    then = evolve(state, nodes=nodes)
    outcome = decide(then, now)
    here = [r for r in state.replicas if any(s.node == name for s in r.shards)]
    models = {r.model for r in here}
    return Effect(
        tuple(_fate(row, then, outcome) for row in here), tuple(u for u in outcome.unplaced if u.model in models)
    )


def order_effect(state: ClusterState, order: Order, now: float) -> Effect:
    """What an order leads to; nothing is changed."""
    then = evolve(state, orders={**state.orders, order.replica: order})
    outcome = decide(then, now)
    rows = [r for r in state.replicas if r.id == order.replica]
    models = {r.model for r in rows}
    return Effect(
        tuple(_fate(row, then, outcome) for row in rows), tuple(u for u in outcome.unplaced if u.model in models)
    )


def _fate(row: Replica, state: ClusterState, outcome: Outcome) -> Fate:
    after = {r.id: r for r in outcome.replicas}
    new = after.get(row.id)
    if new is not None and new.goal is Goal.RUN and new.superseded_by is not None:
        by = after.get(new.superseded_by)
        to = () if by is None else tuple(s.node for s in by.shards)
        reason = f"{new.superseded_by} comes up on {', '.join(to)} first, then it is drained and stopped"
        return Fate(row.id, row.model, "moves", reason, new.superseded_by, to)
    if new is not None and new.goal is Goal.RUN:
        return _pending(row, state)
    if new is not None and new.other is not None and new.other == new.profile:
        reason = "drained, stopped, and started anew on the same devices"
        return Fate(row.id, row.model, "restarts", reason)
    if new is not None and new.other is not None:
        reason = f"drained and stopped; once it has ended a place is looked for with profile {new.other.name}"
        return Fate(row.id, row.model, "stops", reason)
    return _stopped(row, state, outcome)


def _pending(row: Replica, state: ClusterState) -> Fate:
    nodes = [n for s in row.shards if (n := state.node(s.node)) is not None]
    silent = [n.id for n in nodes if n.state is not NodeState.CONNECTED]
    if silent:
        reason = f"nothing is done while {', '.join(silent)} {'is' if len(silent) == 1 else 'are'} not heard"
        return Fate(row.id, row.model, "waits", reason)
    drained = [n.id for n in nodes if n.drained is not None]
    if drained:
        reason = f"it serves on: {', '.join(drained)} is drained, and there is no other place for it"
        return Fate(row.id, row.model, "stays", reason)
    return Fate(row.id, row.model, "stays", "nothing is done about it")


def _stopped(row: Replica, state: ClusterState, outcome: Outcome) -> Fate:
    """It goes; what comes in its stead is what the pass makes besides."""
    known = {r.id for r in state.replicas}
    made = next((r for r in outcome.replicas if r.model == row.model and r.id not in known and r.shards), None)
    if made is not None:
        to = tuple(s.node for s in made.shards)
        reason = f"drained and stopped; {made.id} takes its place on {', '.join(to)}"
        return Fate(row.id, row.model, "stops", reason, made.id, to)
    short = next((u for u in outcome.unplaced if u.model == row.model and u.running < u.wanted), None)
    if short is not None:
        return Fate(row.id, row.model, "stops", f"drained and stopped; replaced once there is room: {short.reason}")
    return Fate(row.id, row.model, "stops", "drained and stopped; the model wants no other one in its place")


def waiting_for(row: Replica, state: ClusterState) -> str:
    """What an operator's wish means for a replica that has not left yet; empty without one."""
    if row.goal is not Goal.RUN or row.superseded_by is not None:
        return ""
    order = state.orders.get(row.id)
    if order is not None and order.generation == row.generation:
        word = "started anew" if order.kind is OrderKind.RESTART else "stopped"
        return f"{word} in the next pass in which its nodes are heard and there is a place: {order}"
    for shard in row.shards:
        node = state.node(shard.node)
        if node is not None and node.drained is not None:
            return f"leaves {node.id}, which is {node.drained}, as soon as there is another place"
    return ""
