"""Keys and usage in the tables of a database."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import evolve

from llmgw.errors import OperatorError
from llmgw.settings.keys import ApiKey
from llmgw.settings.usage import UsageRow
from llmgw.store.audit import Act
from llmgw.store.audit_table import record
from llmgw.store.database import Connection, Tables
from llmgw.store.keys import KeyEvent
from llmgw.store.rows import from_text, to_text

_LEDGER_KEPT_S = 30 * 86400.0


class SqlKeys:
    """:class:`KeyStore` in the tables of an open database."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def version(self) -> int:
        """The version of the table."""

        def work(connection: Connection) -> int:
            found: int = connection.execute("SELECT version FROM api_key_version").fetchone()[0]
            return found

        return await self._db.read(work)

    async def keys(self) -> tuple[int, tuple[ApiKey, ...]]:
        """The version, and every key."""

        def work(connection: Connection) -> tuple[int, tuple[ApiKey, ...]]:
            found = connection.execute("SELECT row, slot, version FROM api_key ORDER BY version").fetchall()
            rows = tuple(evolve(from_text(t, ApiKey), slot=slot, version=v) for t, slot, v in found)
            return connection.execute("SELECT version FROM api_key_version").fetchone()[0], rows

        return await self._db.read(work)

    async def add_key(self, key: ApiKey, event: KeyEvent) -> ApiKey:
        """Write a new key with its event."""

        def work(connection: Connection) -> ApiKey:
            version = _next_version(connection)
            (slot,) = connection.execute(
                "INSERT INTO api_key (id, version, row) VALUES (?, ?, ?) RETURNING slot",
                (key.id, version, to_text(key)),
            ).fetchone()
            record(connection, _act(event), "key")
            return evolve(key, slot=slot, version=version)

        return await self._db.write(work)

    async def change_key(self, key: ApiKey, event: KeyEvent) -> ApiKey:
        """Write a key whole, unless it changed since."""

        def work(connection: Connection) -> ApiKey:
            version = _next_version(connection)
            changed = connection.execute(
                "UPDATE api_key SET version = ?, row = ? WHERE id = ? AND version = ?",
                (version, to_text(key), key.id, key.version),
            )
            if changed.rowcount != 1:
                raise OperatorError(f"key {key.id}", "was changed by somebody else just now", "look again, and repeat")
            record(connection, _act(event), "key")
            return evolve(key, version=version)

        return await self._db.write(work)

    async def key_events(self, key: str, limit: int) -> tuple[KeyEvent, ...]:
        """The newest events of a key."""

        def work(connection: Connection) -> tuple[KeyEvent, ...]:
            found = connection.execute(
                "SELECT at, object, action, by, detail FROM audit"
                " WHERE topic = 'key' AND object = ? ORDER BY seq DESC LIMIT ?",
                (key, limit),
            )
            return tuple(KeyEvent(*row) for row in found)

        return await self._db.read(work)

    async def add_usage(self, ledger: str, batches: Sequence[tuple[int, tuple[UsageRow, ...]]], now: float) -> None:
        """Add batches of a worker's ledger, each once."""

        def work(connection: Connection) -> None:
            found = connection.execute("SELECT seq FROM usage_ledger WHERE id = ?", (ledger,)).fetchone()
            highest: int = found[0] if found else 0
            new = [(seq, rows) for seq, rows in batches if seq > highest]
            if not new:
                return
            for _, rows in new:
                _add(connection, rows)
            connection.execute(
                "INSERT INTO usage_ledger VALUES (?, ?, ?)"
                " ON CONFLICT (id) DO UPDATE SET seq = excluded.seq, at = excluded.at",
                (ledger, max(seq for seq, _ in new), now),
            )
            connection.execute("DELETE FROM usage_ledger WHERE at < ?", (now - _LEDGER_KEPT_S,))

        await self._db.write(work)

    async def usage(self, since: int, until: int, key: str | None = None) -> tuple[UsageRow, ...]:
        """The sums of these days."""

        def work(connection: Connection) -> tuple[UsageRow, ...]:
            found = connection.execute(
                "SELECT key, model, day, requests, failed, estimated, prompt, completion, cost FROM usage"
                " WHERE day BETWEEN ? AND ? AND (CAST(? AS TEXT) IS NULL OR key = ?) ORDER BY day, key, model",
                (since, until, key, key),
            )
            return tuple(UsageRow(*row) for row in found)

        return await self._db.read(work)


def _next_version(connection: Connection) -> int:
    version: int = connection.execute("UPDATE api_key_version SET version = version + 1 RETURNING version").fetchone()[
        0
    ]
    return version


def _act(event: KeyEvent) -> Act:
    return Act(event.at, event.by, event.action, event.key, "", event.detail)


def _add(connection: Connection, rows: Iterable[UsageRow]) -> None:
    connection.executemany(
        "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key, day, model) DO UPDATE SET"
        " requests = usage.requests + excluded.requests, failed = usage.failed + excluded.failed,"
        " estimated = usage.estimated + excluded.estimated, prompt = usage.prompt + excluded.prompt,"
        " completion = usage.completion + excluded.completion, cost = usage.cost + excluded.cost",
        [(r.key, r.day, r.model, r.requests, r.failed, r.estimated, r.prompt, r.completion, r.cost) for r in rows],
    )
