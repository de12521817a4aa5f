"""What operators want of nodes and replicas: drained nodes become empty, replicas are started anew or stopped.

Made before broken: what serves goes only once another one serves in its stead, where there is room for both.
"""

from __future__ import annotations

from attrs import evolve

from llmgw.scheduler.explain import DecisionKind
from llmgw.scheduler.orders import OrderKind
from llmgw.scheduler.place import NoPlace, Placement
from llmgw.scheduler.room import add, make_room, place_for, say_unplaced
from llmgw.scheduler.state import Goal, Node, Replica
from llmgw.scheduler.working import Working
from llmgw.settings.catalog import Model, Update


def clear(pass_: Working, model: Model) -> None:
    """What waits for nothing: what is to be stopped, what serves nothing on a drained node, and what is forced off it.

    Before places are looked for, so that what is missing by it is looked for in the same pass.
    """
    for row in pass_.of_model(model.name):
        order = pass_.order(row)
        if row.goal is not Goal.RUN and row.other == row.profile and pass_.drained(row) is not None:
            pass_.put(evolve(row, other=None))  # it was to start anew here: it is replaced elsewhere
        elif order is not None and order.kind is OrderKind.STOP and _told(pass_, row):
            _go(pass_, row, str(order))
        elif (node := _leaves(pass_, row)) is None or node.drained is None:
            continue
        elif not pass_.ready(row):
            _go(pass_, row, f"{node.id} is {node.drained}; it serves nothing there")
        elif node.drained.force and pass_.counts(row):
            found = place_for(pass_, model)
            if isinstance(found, Placement):
                _move(pass_, model, row, found, f"{node.id} is {node.drained}")
            else:
                _go(pass_, row, f"{node.id} is {node.drained}; nothing else can take it: {found.reason}")


def leave(pass_: Working, model: Model) -> None:
    """What serves on drained nodes gets another place; what has none serves on, and the model says why."""
    for row in pass_.of_model(model.name):
        node = _leaves(pass_, row)
        if node is None or not pass_.counts(row):
            continue
        found = place_for(pass_, model)
        if isinstance(found, NoPlace):
            _say_staying(pass_, model, found)
            return
        _move(pass_, model, row, found, f"{node.id} is {node.drained}")


def obey(pass_: Working, model: Model) -> None:
    """What is to be started anew is: beside the old one where there is room and the model's ``update`` wants it so."""
    for row in pass_.of_model(model.name):
        order = pass_.order(row)
        if order is None or order.kind is not OrderKind.RESTART or not pass_.counts(row) or not _told(pass_, row):
            continue
        if pass_.drained(row) is not None:
            continue  # it is to go elsewhere, and starts anew there
        found = place_for(pass_, model) if pass_.ready(row) and model.update is Update.SURGE else None
        if isinstance(found, Placement):
            _move(pass_, model, row, found, str(order))
            continue
        why = str(order) if found is None else f"{order}; there is no room for both the old and the new one"
        pass_.retire(row, why, DecisionKind.RESTART, other=row.profile)


def _told(pass_: Working, row: Replica) -> bool:
    """Whether it can be told something, and is not on its way out."""
    return row.goal is Goal.RUN and bool(row.shards) and all(pass_.connected(s.node) for s in row.shards)


def _leaves(pass_: Working, row: Replica) -> Node | None:
    """The drained node that the row is to leave, if that can be done now: nothing is moved off a silent one."""
    return pass_.drained(row) if _told(pass_, row) else None


def _move(pass_: Working, model: Model, row: Replica, found: Placement, why: str) -> None:
    new = add(pass_, model, found, f"{why}: replaces {row.id}")
    pass_.put(evolve(row, superseded_by=new.id))


def _go(pass_: Working, row: Replica, why: str) -> None:
    """Out of service; what it was to replace counts again."""
    for old in pass_.of_model(row.model):
        if old.superseded_by == row.id:
            pass_.put(evolve(old, superseded_by=None))
    pass_.retire(row, why)


def _say_staying(pass_: Working, model: Model, found: NoPlace) -> None:
    rows = [r for r in pass_.of_model(model.name) if pass_.counts(r)]
    staying = [r for r in rows if _leaves(pass_, r) is not None]
    nodes = dict.fromkeys(n.id for r in staying if (n := pass_.drained(r)) is not None)
    who = f"{', '.join(r.id for r in staying)} serve{'s' if len(staying) == 1 else ''} on"
    where = f"{', '.join(nodes)}, which {'is' if len(nodes) == 1 else 'are'} drained"
    known = next((item for item in pass_.unplaced if item.model == model.name), None)
    if known is not None:
        pass_.unplaced[pass_.unplaced.index(known)] = evolve(known, reason=f"{known.reason}; {who}, on {where}")
        return
    coming = make_room(pass_, model)
    reason = "; ".join(part for part in (f"{who}, on {where}", coming, found.reason) if part)
    say_unplaced(pass_, model, len(rows), f"{reason}{f'; {found.remedy}' if found.remedy else ''}", found)
