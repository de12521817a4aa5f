"""Backups: a whole store in a SQLite file, whatever database it is in, and back into either."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from llmgw.durable import whole
from llmgw.store.database import Connection, StoreError
from llmgw.store.schema import APPLICATION_ID, VERSION, for_sqlite, step_to

_AT_ONCE = 500


def copy_out(source: Connection, version: int, path: Path) -> None:
    """Write the tables of a store with the schema ``version`` into a file, which is replaced when it is there.

    Blocking. Raises :class:`OSError` and :class:`sqlite3.Error`; what was there is still there then.
    """
    with whole(path) as new:
        target = sqlite3.connect(new, isolation_level=None)
        try:
            target.execute("PRAGMA journal_mode = OFF")
            target.execute("BEGIN")
            for number in range(version):
                step_to(number + 1, cast("Connection", target), for_sqlite)
            for table, columns in tables(target):
                target.execute(f"DELETE FROM {table}")  # noqa: S608 - names of our own schema
                _copy(source, target, table, columns)
            target.execute(f"PRAGMA user_version = {version}")
            target.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            target.execute("COMMIT")
        finally:
            target.close()


def copy_in(backup: Path, target: Connection) -> None:
    """Put a backup in place of what is in the tables of a store, in the transaction that ``target`` is in.

    Raises :class:`StoreError` when the file is no backup of this version.
    """
    source = sqlite3.connect(f"file:{backup}?mode=ro", uri=True)
    try:
        (version,) = source.execute("PRAGMA user_version").fetchone()
        if version != VERSION:
            raise StoreError(str(backup), f"has schema {version}, this llmgw knows {VERSION}", "use the llmgw it is of")
        found = list(tables(source))
        for table, _ in reversed(found):
            target.execute(f"DELETE FROM {table}")  # noqa: S608 - names of our own schema
        for table, columns in found:
            _copy(source, target, table, columns)
            if columns[0] in ("id", "slot") and _numbered(source, table, columns[0]):
                target.execute(
                    f"SELECT setval(pg_get_serial_sequence('{table}', '{columns[0]}'),"  # noqa: S608 - as above
                    f" (SELECT coalesce(max({columns[0]}), 0) + 1 FROM {table}), false)"
                )
    finally:
        source.close()


def tables(connection: sqlite3.Connection) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The tables of a store with their columns, those that others refer to first."""
    found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    for (name,) in found.fetchall():
        yield name, tuple(row[1] for row in connection.execute(f"PRAGMA table_info({name})"))


def _numbered(connection: sqlite3.Connection, table: str, column: str) -> bool:
    """Whether the database numbers this column itself."""
    (made,) = connection.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    return f"{column} INTEGER PRIMARY KEY AUTOINCREMENT" in made


def _copy(source: Connection | sqlite3.Connection, target: Connection | sqlite3.Connection, table: str,
          columns: tuple[str, ...]) -> None:  # fmt: skip
    names = ", ".join(f'"{column}"' for column in columns)
    marks = ", ".join("?" * len(columns))
    insert = f"INSERT INTO {table} ({names}) VALUES ({marks})"  # noqa: S608 - names of our own schema
    rows = []
    for row in source.execute(f"SELECT {names} FROM {table}"):  # noqa: S608 - names of our own schema
        rows.append(tuple(row))
        if len(rows) == _AT_ONCE:
            target.executemany(insert, rows)
            rows = []
    target.executemany(insert, rows)
