"""What operators want of nodes and replicas, as rows: drains and orders."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from llmgw.scheduler.orders import Drained, Order
from llmgw.store.audit import Act
from llmgw.store.rows import from_text, to_text


def drains(connection: sqlite3.Connection) -> dict[str, Drained]:
    """The nodes that are to be empty."""
    return {n: from_text(t, Drained) for n, t in connection.execute("SELECT node, row FROM node_drain ORDER BY node")}


def put_drain(connection: sqlite3.Connection, node: str, drained: Drained | None) -> None:
    """Write a node's drain, or that it is over."""
    if drained is None:
        connection.execute("DELETE FROM node_drain WHERE node = ?", (node,))
    else:
        connection.execute("INSERT OR REPLACE INTO node_drain VALUES (?, ?)", (node, to_text(drained)))


def orders(connection: sqlite3.Connection) -> dict[str, Order]:
    """The orders that are not done."""
    found = connection.execute("SELECT replica, row FROM replica_order ORDER BY replica")
    return {replica: from_text(text, Order) for replica, text in found}


def put_order(connection: sqlite3.Connection, order: Order) -> None:
    """Write an order."""
    values = (order.replica, order.at, to_text(order))
    connection.execute("INSERT OR REPLACE INTO replica_order VALUES (?, ?, ?)", values)


def drop(connection: sqlite3.Connection, over: Iterable[Order]) -> None:
    """These are done; what was ordered since for the same replicas stays."""
    connection.executemany(
        "DELETE FROM replica_order WHERE replica = ? AND at = ?", [(order.replica, order.at) for order in over]
    )


def record(connection: sqlite3.Connection, act: Act) -> None:
    """Write down who did what."""
    detail = "; ".join(part for part in (act.object, act.reason, act.detail) if part)
    connection.execute(
        "INSERT INTO identity_event (at, kind, node, by, detail) VALUES (?, ?, ?, ?, ?)",
        (act.at, act.action, act.object if act.action.startswith("node.") else "", act.by, detail),
    )
