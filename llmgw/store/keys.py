"""Keys and usage in the store: the tables, and what is done with them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Protocol

from attrs import evolve, frozen

from llmgw.errors import OperatorError
from llmgw.settings.keys import ApiKey
from llmgw.settings.usage import UsageRow
from llmgw.store.rows import from_text, to_text
from llmgw.store.sqlite import SqliteStore

_LEDGER_KEPT_S = 30 * 86400.0
_EVENTS_KEPT = 10_000


@frozen
class KeyEvent:
    """What was done to a key, when, and by whom; ``at`` in epoch seconds."""

    at: float
    key: str
    action: str
    by: str
    detail: str


class KeyStore(Protocol):
    """What the store knows of keys and usage."""

    async def keys(self) -> tuple[int, tuple[ApiKey, ...]]:
        """The version of the table of keys, and every key that ever was, by its last change."""
        ...

    async def add_key(self, key: ApiKey, event: KeyEvent) -> ApiKey:
        """Write a new key with its event; returns it with the slot and the version that it got."""
        ...

    async def change_key(self, key: ApiKey, event: KeyEvent) -> ApiKey:
        """Write a key whole, unless it changed since; returns it with its new version."""
        ...

    async def key_events(self, key: str, limit: int) -> tuple[KeyEvent, ...]:
        """The newest events of a key, newest first."""
        ...

    async def add_usage(self, ledger: str, batches: Sequence[tuple[int, tuple[UsageRow, ...]]], now: float) -> None:
        """Add batches of a worker's ledger, but for those up to the highest that was ever added."""
        ...

    async def usage(self, since: int, until: int, key: str | None = None) -> tuple[UsageRow, ...]:
        """The sums of these days, both included."""
        ...


class SqliteKeys:
    """:class:`KeyStore` in the tables of an open store."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    async def keys(self) -> tuple[int, tuple[ApiKey, ...]]:
        """The version, and every key."""

        def work(connection: sqlite3.Connection) -> tuple[int, tuple[ApiKey, ...]]:
            found = connection.execute("SELECT row, slot, version FROM api_key ORDER BY version").fetchall()
            rows = tuple(evolve(from_text(t, ApiKey), slot=slot, version=v) for t, slot, v in found)
            return connection.execute("SELECT version FROM api_key_version").fetchone()[0], rows

        return await self._store.read(work)

    async def add_key(self, key: ApiKey, event: KeyEvent) -> ApiKey:
        """Write a new key with its event."""

        def work(connection: sqlite3.Connection) -> ApiKey:
            version = _next_version(connection)
            made = connection.execute(
                "INSERT INTO api_key (id, version, row) VALUES (?, ?, ?)", (key.id, version, to_text(key))
            )
            assert made.lastrowid is not None
            _insert_event(connection, event)
            return evolve(key, slot=made.lastrowid, version=version)

        return await self._store.write(work)

    async def change_key(self, key: ApiKey, event: KeyEvent) -> ApiKey:
        """Write a key whole, unless it changed since."""

        def work(connection: sqlite3.Connection) -> ApiKey:
            version = _next_version(connection)
            changed = connection.execute(
                "UPDATE api_key SET version = ?, row = ? WHERE id = ? AND version = ?",
                (version, to_text(key), key.id, key.version),
            )
            if changed.rowcount != 1:
                raise OperatorError(f"key {key.id}", "was changed by somebody else just now", "look again, and repeat")
            _insert_event(connection, event)
            return evolve(key, version=version)

        return await self._store.write(work)

    async def key_events(self, key: str, limit: int) -> tuple[KeyEvent, ...]:
        """The newest events of a key."""

        def work(connection: sqlite3.Connection) -> tuple[KeyEvent, ...]:
            found = connection.execute(
                "SELECT at, key, action, by, detail FROM key_event WHERE key = ? ORDER BY id DESC LIMIT ?", (key, limit)
            )
            return tuple(KeyEvent(*row) for row in found)

        return await self._store.read(work)

    async def add_usage(self, ledger: str, batches: Sequence[tuple[int, tuple[UsageRow, ...]]], now: float) -> None:
        """Add batches of a worker's ledger, each once."""

        def work(connection: sqlite3.Connection) -> None:
            found = connection.execute("SELECT seq FROM usage_ledger WHERE id = ?", (ledger,)).fetchone()
            highest: int = found[0] if found else 0
            new = [(seq, rows) for seq, rows in batches if seq > highest]
            if not new:
                return
            for _, rows in new:
                _add(connection, rows)
            connection.execute(
                "INSERT OR REPLACE INTO usage_ledger VALUES (?, ?, ?)", (ledger, max(seq for seq, _ in new), now)
            )
            connection.execute("DELETE FROM usage_ledger WHERE at < ?", (now - _LEDGER_KEPT_S,))

        await self._store.write(work)

    async def usage(self, since: int, until: int, key: str | None = None) -> tuple[UsageRow, ...]:
        """The sums of these days."""

        def work(connection: sqlite3.Connection) -> tuple[UsageRow, ...]:
            found = connection.execute(
                "SELECT key, model, day, requests, failed, estimated, prompt, completion, cost FROM usage"
                " WHERE day BETWEEN ? AND ? AND (? IS NULL OR key = ?) ORDER BY day, key, model",
                (since, until, key, key),
            )
            return tuple(UsageRow(*row) for row in found)

        return await self._store.read(work)


def _next_version(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("UPDATE api_key_version SET version = version + 1 RETURNING version").fetchone()[
        0
    ]
    return version


def _insert_event(connection: sqlite3.Connection, event: KeyEvent) -> None:
    connection.execute(
        "INSERT INTO key_event (at, key, action, by, detail) VALUES (?, ?, ?, ?, ?)",
        (event.at, event.key, event.action, event.by, event.detail),
    )
    connection.execute("DELETE FROM key_event WHERE id <= (SELECT max(id) FROM key_event) - ?", (_EVENTS_KEPT,))


def _add(connection: sqlite3.Connection, rows: Iterable[UsageRow]) -> None:
    connection.executemany(
        "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key, day, model) DO UPDATE SET"
        " requests = requests + excluded.requests, failed = failed + excluded.failed,"
        " estimated = estimated + excluded.estimated, prompt = prompt + excluded.prompt,"
        " completion = completion + excluded.completion, cost = cost + excluded.cost",
        [(r.key, r.day, r.model, r.requests, r.failed, r.estimated, r.prompt, r.completion, r.cost) for r in rows],
    )
