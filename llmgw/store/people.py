"""Admin tokens in the tables of a database. Of a token there is only the SHA-256 of its secret.

Times are seconds since the epoch, 0 where something has not happened.
"""

from __future__ import annotations

from attrs import astuple, frozen

from llmgw.store.audit import Act
from llmgw.store.audit_table import record
from llmgw.store.database import Connection, Fence

_FIND = "SELECT id, name, role, digest, created, expires, by, used, revoked FROM admin_token WHERE id = ?"
_ALL = "SELECT id, name, role, digest, created, expires, by, used, revoked FROM admin_token ORDER BY created DESC, id"


@frozen
class AdminToken:
    """A token of the admin API: what it is called, what it may, and what became of it."""

    id: str
    name: str
    role: str
    digest: str
    created: float
    expires: float
    by: str
    used: float = 0.0
    revoked: float = 0.0


class SqlAdminTokens:
    """Admin tokens; each change is in the audit, in the same transaction."""

    def __init__(self, database: Fence) -> None:
        self._db = database

    async def find(self, token: str) -> AdminToken | None:
        """The token with this id."""

        def work(connection: Connection) -> AdminToken | None:
            found = connection.execute(_FIND, (token,)).fetchone()
            return None if found is None else AdminToken(*found)

        return await self._db.read(work)

    async def all(self) -> tuple[AdminToken, ...]:
        """Every token that is remembered, newest first."""

        def work(connection: Connection) -> tuple[AdminToken, ...]:
            rows = connection.execute(_ALL).fetchall()
            return tuple(AdminToken(*row) for row in rows)

        return await self._db.read(work)

    async def add(self, row: AdminToken) -> None:
        """Remember a new token."""

        def work(connection: Connection) -> None:
            connection.execute("INSERT INTO admin_token VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", astuple(row))
            detail = f"id {row.id}, role {row.role}, until {row.expires:.0f}"
            record(connection, Act(row.created, row.by, "admin.token.create", row.name, "", detail), "admin")

        await self._db.write(work)

    async def revoke(self, token: str, by: str, at: float) -> AdminToken | None:
        """Revoke a token; ``None`` if there is none that could be."""

        def work(connection: Connection) -> AdminToken | None:
            ended = connection.execute("UPDATE admin_token SET revoked = ? WHERE id = ? AND revoked = 0", (at, token))
            if ended.rowcount != 1:
                return None
            row = AdminToken(*connection.execute(_FIND, (token,)).fetchone())
            record(connection, Act(at, by, "admin.token.revoke", row.name, "", f"id {row.id}"), "admin")
            return row

        return await self._db.write(work)

    async def used(self, token: str, at: float) -> None:
        """Somebody used it."""
        await self._db.write(lambda c: c.execute("UPDATE admin_token SET used = ? WHERE id = ?", (at, token)))
