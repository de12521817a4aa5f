"""The table of what profiles were measured to need."""

from __future__ import annotations

from collections.abc import Iterable

from llmgw.scheduler.memory import Learned
from llmgw.store.database import Connection

KEPT = 2000


def read(connection: Connection) -> tuple[Learned, ...]:
    """All of it."""
    found = connection.execute("SELECT digest, device_class, held_mib, at FROM learned ORDER BY digest, device_class")
    return tuple(Learned(*row) for row in found)


def write(connection: Connection, rows: Iterable[Learned]) -> None:
    """Replace what is known of the same profiles and classes, and drop the oldest of more than :data:`KEPT`."""
    connection.executemany(
        "INSERT INTO learned VALUES (?, ?, ?, ?)"
        " ON CONFLICT (digest, device_class) DO UPDATE SET held_mib = excluded.held_mib, at = excluded.at",
        [(row.digest, row.device_class, row.held_mib, row.at) for row in rows],
    )
    connection.execute(
        "DELETE FROM learned WHERE at < (SELECT at FROM learned ORDER BY at DESC LIMIT 1 OFFSET ?)", (KEPT - 1,)
    )
