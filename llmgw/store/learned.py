"""The table of what profiles were measured to need."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from llmgw.scheduler.memory import Learned

KEPT = 2000


def read(connection: sqlite3.Connection) -> tuple[Learned, ...]:
    """All of it."""
    found = connection.execute("SELECT digest, device_class, held_mib, at FROM learned ORDER BY digest, device_class")
    return tuple(Learned(*row) for row in found)


def write(connection: sqlite3.Connection, rows: Iterable[Learned]) -> None:
    """Replace what is known of the same profiles and classes, and drop the oldest of more than :data:`KEPT`."""
    connection.executemany(
        "INSERT OR REPLACE INTO learned VALUES (?, ?, ?, ?)",
        [(row.digest, row.device_class, row.held_mib, row.at) for row in rows],
    )
    connection.execute(
        "DELETE FROM learned WHERE at < (SELECT at FROM learned ORDER BY at DESC LIMIT 1 OFFSET ?)", (KEPT - 1,)
    )
