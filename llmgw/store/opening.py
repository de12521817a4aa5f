"""Which database a store is in."""

from __future__ import annotations

from pathlib import Path

from llmgw.store.postgres import PostgresDatabase
from llmgw.store.sql import SqlStore
from llmgw.store.sqlite import SqliteDatabase

FILE = "llmgw.db"
"""The name of the database in a state folder."""


def sqlite_store(path: Path) -> SqlStore:
    """A store in a file, which is made if need be."""
    return SqlStore(SqliteDatabase(path))


def store_of(address: str | None, state_dir: Path) -> SqlStore:
    """The store that ``server.yaml`` names: a ``postgresql://`` address, or by default a file in the state folder."""
    if address is None:
        return sqlite_store(state_dir / FILE)
    return SqlStore(PostgresDatabase(address, state_dir))
