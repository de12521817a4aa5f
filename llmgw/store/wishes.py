"""What operators want of nodes and replicas, as rows: drains and orders."""

from __future__ import annotations

from collections.abc import Iterable

from llmgw.scheduler.orders import Drained, Order
from llmgw.store.database import Connection
from llmgw.store.rows import from_text, to_text

_SAVE_DRAIN = "INSERT INTO node_drain VALUES (?, ?) ON CONFLICT (node) DO UPDATE SET row = excluded.row"
_SAVE_ORDER = """
    INSERT INTO replica_order VALUES (?, ?, ?)
    ON CONFLICT (replica) DO UPDATE SET at = excluded.at, row = excluded.row
"""


def drains(connection: Connection) -> dict[str, Drained]:
    """The nodes that are to be empty."""
    return {n: from_text(t, Drained) for n, t in connection.execute("SELECT node, row FROM node_drain ORDER BY node")}


def put_drain(connection: Connection, node: str, drained: Drained | None) -> None:
    """Write a node's drain, or that it is over."""
    if drained is None:
        connection.execute("DELETE FROM node_drain WHERE node = ?", (node,))
    else:
        connection.execute(_SAVE_DRAIN, (node, to_text(drained)))


def orders(connection: Connection) -> dict[str, Order]:
    """The orders that are not done."""
    found = connection.execute("SELECT replica, row FROM replica_order ORDER BY replica")
    return {replica: from_text(text, Order) for replica, text in found}


def put_order(connection: Connection, order: Order) -> None:
    """Write an order."""
    connection.execute(_SAVE_ORDER, (order.replica, order.at, to_text(order)))


def drop(connection: Connection, over: Iterable[Order]) -> None:
    """These are done; what was ordered since for the same replicas stays."""
    connection.executemany(
        "DELETE FROM replica_order WHERE replica = ? AND at = ?", [(order.replica, order.at) for order in over]
    )
