""":class:`llmgw.store.identity.IdentityStore` in the tables of :class:`llmgw.store.sql.SqlStore`."""

from __future__ import annotations

import json

import attrs

from llmgw.store.audit import Act
from llmgw.store.audit_table import record
from llmgw.store.database import ALL, Connection, Tables
from llmgw.store.identity import OUTSIDE, DenyRow, Event, HeldRow, IssuedRow, TokenRow

_KEPT_EVENTS = 10_000
_KEPT_TOKENS = 1_000
_FORGOTTEN_S = 30 * 86400.0
"""Certificates that expired longer ago are not remembered: not even a renewal would take them."""

_ADD_TOKEN = "INSERT INTO join_token VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S105 - no secret
_SAVE_HELD = """
    INSERT INTO held VALUES (?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (node) DO UPDATE SET serial = excluded.serial, key = excluded.key, root = excluded.root,
        not_after = excluded.not_after, cas = excluded.cas, at = excluded.at
"""
_DENY = """
    INSERT INTO denied VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (kind, value) DO UPDATE SET reason = excluded.reason, by = excluded.by, at = excluded.at
"""
_DROP_TOKENS = """
    DELETE FROM join_token WHERE id IN (SELECT id FROM join_token ORDER BY created DESC LIMIT ? OFFSET ?)
"""


class SqlIdentityStore:
    """Usable as long as the database is open."""

    def __init__(self, database: Tables) -> None:
        self._read = database.read
        self._write = database.write

    async def add_token(self, row: TokenRow, event: Event) -> None:
        """Remember a new token."""

        def work(connection: Connection) -> None:
            connection.execute(_ADD_TOKEN, attrs.astuple(row))
            connection.execute(_DROP_TOKENS, (ALL, _KEPT_TOKENS))
            _add_event(connection, event)

        await self._write(work)

    async def tokens(self) -> tuple[TokenRow, ...]:
        """Every token, newest first."""

        def work(connection: Connection) -> tuple[TokenRow, ...]:
            found = connection.execute("SELECT * FROM join_token ORDER BY created DESC, id")
            return tuple(TokenRow(*row) for row in found)

        return await self._read(work)

    async def token(self, token: str) -> TokenRow | None:
        """The token with this id."""

        def work(connection: Connection) -> TokenRow | None:
            found = connection.execute("SELECT * FROM join_token WHERE id = ?", (token,)).fetchone()
            return None if found is None else TokenRow(*found)

        return await self._read(work)

    async def use_token(self, token: str, key: str, remote: str, now: float, event: Event) -> bool:
        """Mark a token used, if nobody has."""

        def work(connection: Connection) -> bool:
            changed = connection.execute(
                "UPDATE join_token SET used = ?, used_key = ?, used_from = ?"
                " WHERE id = ? AND used = 0 AND revoked = 0 AND expires > ?",
                (now, key, remote, token, now),
            ).rowcount
            if changed:
                _add_event(connection, event)
            return changed == 1

        return await self._write(work)

    async def revoke_token(self, token: str, now: float, event: Event) -> bool:
        """Revoke a token that was not used."""

        def work(connection: Connection) -> bool:
            asked = "UPDATE join_token SET revoked = ? WHERE id = ? AND used = 0 AND revoked = 0"
            changed = connection.execute(asked, (now, token)).rowcount
            if changed:
                _add_event(connection, event)
            return changed == 1

        return await self._write(work)

    async def issued(self, row: IssuedRow, event: Event) -> None:
        """Remember a certificate."""

        def work(connection: Connection) -> None:
            connection.execute("INSERT INTO issued VALUES (?, ?, ?, ?, ?, ?)", attrs.astuple(row))
            connection.execute("DELETE FROM issued WHERE not_after < ?", (row.at - _FORGOTTEN_S,))
            _add_event(connection, event)

        await self._write(work)

    async def newest_issued(self) -> tuple[IssuedRow, ...]:
        """The certificate that was issued last for each node."""

        def work(connection: Connection) -> tuple[IssuedRow, ...]:
            newest: dict[str, IssuedRow] = {}
            for row in connection.execute("SELECT * FROM issued ORDER BY at, serial"):
                found = IssuedRow(*row)
                newest[found.node] = found
            return tuple(newest[node] for node in sorted(newest))

        return await self._read(work)

    async def held(self) -> tuple[HeldRow, ...]:
        """What every node uses."""

        def work(connection: Connection) -> tuple[HeldRow, ...]:
            found = connection.execute("SELECT node, serial, key, root, not_after, cas, at FROM held ORDER BY node")
            return tuple(
                HeldRow(node, serial, key, root, not_after, None if cas is None else tuple(json.loads(cas)), at)
                for node, serial, key, root, not_after, cas, at in found
            )

        return await self._read(work)

    async def save_held(self, row: HeldRow) -> None:
        """Replace what is known of a node."""
        cas = None if row.cas is None else json.dumps(row.cas)
        values = (row.node, row.serial, row.key, row.root, row.not_after, cas, row.at)
        await self._write(lambda c: c.execute(_SAVE_HELD, values))

    async def denied(self) -> tuple[DenyRow, ...]:
        """The deny list."""

        def work(connection: Connection) -> tuple[DenyRow, ...]:
            found = connection.execute("SELECT kind, value, reason, by, at FROM denied ORDER BY at, kind, value")
            return tuple(DenyRow(*row) for row in found)

        return await self._read(work)

    async def deny(self, row: DenyRow, event: Event) -> None:
        """Add an entry."""

        def work(connection: Connection) -> None:
            connection.execute(_DENY, attrs.astuple(row))
            _add_event(connection, event)

        await self._write(work)

    async def lift(self, kind: str, value: str, event: Event) -> bool:
        """Remove an entry."""

        def work(connection: Connection) -> bool:
            gone = connection.execute("DELETE FROM denied WHERE kind = ? AND value = ?", (kind, value)).rowcount
            if gone:
                _add_event(connection, event)
            return gone == 1

        return await self._write(work)

    async def forget_node(self, node: str, event: Event) -> bool:
        """Remove a node's row, what it holds and what was issued for it."""

        def work(connection: Connection) -> bool:
            gone = connection.execute("DELETE FROM node WHERE id = ?", (node,)).rowcount
            connection.execute("DELETE FROM node_drain WHERE node = ?", (node,))
            gone += connection.execute("DELETE FROM held WHERE node = ?", (node,)).rowcount
            gone += connection.execute("DELETE FROM issued WHERE node = ?", (node,)).rowcount
            if gone:
                _add_event(connection, event)
            return gone > 0

        return await self._write(work)

    async def add_event(self, event: Event) -> None:
        """Remember an event."""
        await self._write(lambda connection: _add_event(connection, event))

    async def ca_acts(self) -> tuple[Event, ...]:
        """Every act about a CA, oldest first."""

        def work(connection: Connection) -> tuple[Event, ...]:
            found = connection.execute(
                "SELECT at, action, object, by, detail FROM audit WHERE topic = 'ca' ORDER BY seq"
            )
            return tuple(Event(*row) for row in found)

        return await self._read(work)

    async def events(self, limit: int) -> tuple[Event, ...]:
        """The newest events."""

        def work(connection: Connection) -> tuple[Event, ...]:
            found = connection.execute(_EVENTS, (limit, limit, limit))
            return tuple(Event(*row) for row in found)

        return await self._read(work)


_EVENTS = """
    SELECT at, kind, node, by, detail FROM (
        SELECT * FROM (
            SELECT at, 0 AS seq, kind, node, by, detail FROM identity_event ORDER BY id DESC LIMIT ?
        ) AS a UNION ALL
        SELECT * FROM (
            SELECT at, seq, action AS kind, object AS node, by, detail FROM audit
            WHERE topic = 'identity' ORDER BY seq DESC LIMIT ?
        ) AS b
    ) AS c ORDER BY at DESC, seq DESC LIMIT ?
"""


def _add_event(connection: Connection, event: Event) -> None:
    if event.kind not in OUTSIDE:
        topic = "ca" if event.kind.startswith("ca.") else "identity"
        record(connection, Act(event.at, event.by, event.kind, event.node, "", event.detail), topic)
        return
    (made,) = connection.execute(
        "INSERT INTO identity_event (at, kind, node, by, detail) VALUES (?, ?, ?, ?, ?) RETURNING id",
        attrs.astuple(event),
    ).fetchone()
    connection.execute("DELETE FROM identity_event WHERE id <= ?", (made - _KEPT_EVENTS,))
