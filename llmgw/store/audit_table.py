"""The table of the audit."""

from __future__ import annotations

from attrs import astuple

from llmgw.store.audit import Act, AuditRow, sealed
from llmgw.store.database import ALL, Connection

_INSERT = """
    INSERT INTO audit (seq, at, by, action, object, reason, detail, before, digest, topic)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_NEWEST = """
    SELECT seq, at, by, action, object, reason, detail, before, digest FROM audit
    WHERE seq < ? ORDER BY seq DESC LIMIT ?
"""
_FOLLOWING = """
    SELECT seq, at, by, action, object, reason, detail, before, digest FROM audit
    WHERE seq > ? ORDER BY seq LIMIT ?
"""


def record(connection: Connection, act: Act, topic: str = "") -> AuditRow:
    """Add an act, in the transaction of what it did. By its ``topic`` it is found again."""
    last = connection.execute("SELECT seq, digest FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
    seq, before = last or (0, "")
    row = sealed(act, seq + 1, before)
    connection.execute(_INSERT, (*astuple(row), topic))
    return row


def newest(connection: Connection, limit: int, before: int | None) -> tuple[AuditRow, ...]:
    """The newest rows, newest first, of those that come before a row."""
    found = connection.execute(_NEWEST, (ALL if before is None else before, limit))
    return tuple(AuditRow(*row) for row in found)


def following(connection: Connection, after: int, limit: int) -> tuple[AuditRow, ...]:
    """The rows that come after a row, oldest first."""
    found = connection.execute(_FOLLOWING, (after, limit))
    return tuple(AuditRow(*row) for row in found)
