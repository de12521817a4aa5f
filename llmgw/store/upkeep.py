"""What is done to a store while no server has it: it is checked, and replaced by a backup."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import trio

from llmgw.durable import sync_folder, whole
from llmgw.store import audit_table
from llmgw.store.audit import Act, Noted
from llmgw.store.copying import copy_in
from llmgw.store.database import Connection, StoreError
from llmgw.store.postgres import PostgresDatabase
from llmgw.store.schema import APPLICATION_ID, VERSION
from llmgw.store.sql import SqlStore
from llmgw.store.sqlite import SqliteDatabase

EPOCHS = 1000
"""A restored store goes on this much later than it was: agents refuse an epoch below the highest that they saw, and
know commands by the serial numbers of replicas."""

_REVISIONS = 200


async def check(store: SqlStore, tell: Callable[[str], None], noted: Noted | None = None) -> tuple[str, ...]:
    """Read everything, and return what is wrong. ``tell`` hears of each step before it begins.

    The audit has to have the row that was ``noted``.
    """
    wrong: list[str] = []
    if isinstance(store.database, SqliteDatabase):
        tell("integrity of the file")
        found = await store.database.read(lambda c: c.execute("PRAGMA integrity_check(20)").fetchall())
        wrong += [f"integrity: {line}" for (line,) in found if line != "ok"]
        broken = await store.database.read(lambda c: c.execute("PRAGMA foreign_key_check").fetchall())
        wrong += [f"a row of {row[0]} refers to one of {row[2]} that is not there" for row in broken[:20]]
    for name, read in (
        ("nodes", store.nodes), ("replicas", store.replicas), ("jobs", store.jobs), ("scales", store.scales),
        ("what was learned", store.learned), ("what has no place", store.unplaced), ("keys", store.keys.keys),
        ("join tokens", store.identities.tokens), ("certificates", store.identities.newest_issued),
        ("what nodes hold", store.identities.held), ("deny list", store.identities.denied),
        ("admin tokens", store.people.all), ("drains", store.drains), ("orders", store.orders),
    ):  # fmt: skip
        tell(name)
        try:
            await read()
        except Exception as failed:  # noqa: BLE001 - a row that cannot be read is what is looked for
            wrong.append(f"{name}: {failed}")
    tell("settings")
    before: int | None = None
    while rows := await store.revisions(_REVISIONS, before):
        wrong += [f"settings: revision {row.revision} was changed" for row in rows if not row.whole]
        before = rows[-1].revision
    tell("audit")
    if (broken_at := (await store.verify_audit(noted)).wrong) is not None:
        wrong.append(f"audit: {broken_at}")
    return tuple(wrong)


def looked_at(backup: Path) -> None:
    """Raise :class:`StoreError` unless the file is a sound backup that this version can use. Blocking."""
    if not backup.is_file():
        raise StoreError(str(backup), "is no file", "name what llmgw server backup made")
    try:
        connection = sqlite3.connect(f"file:{backup}?mode=ro&immutable=1", uri=True)
        try:
            (mark,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if mark != APPLICATION_ID or not version:
                raise StoreError(str(backup), "is no backup of llmgw", "name what llmgw server backup made")
            if version > VERSION:
                raise StoreError(
                    str(backup), f"has schema {version}, this llmgw knows {VERSION}", "use the newer llmgw"
                )
            (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if found != "ok":
                raise StoreError(str(backup), f"is damaged: {found}", "use another backup")
        finally:
            connection.close()
    except sqlite3.Error as failed:
        remedy = "name what llmgw server backup made, or another one"
        raise StoreError(str(backup), f"is no backup that can be read: {failed}", remedy) from failed


async def restore_sqlite(backup: Path, path: Path, stamp: str, act: Act) -> Path | None:
    """Put a backup in place of the database at ``path``; what it replaces stays beside it, and its name is returned.

    ``act`` goes into the restored audit. Whenever it ends, there is the old store or the new one, and whole.
    Raises :class:`StoreError`.
    """
    new = path.with_name(f".{path.name}.restored")

    def clear() -> None:
        for left in path.parent.glob(f"{new.name}*"):
            left.unlink()

    def copy() -> None:
        looked_at(backup)
        # The log that a killed restore left would be played into the new copy.
        clear()
        with whole(new) as copied:
            shutil.copyfile(backup, copied)

    try:
        await trio.to_thread.run_sync(copy)
        async with SqlStore(SqliteDatabase(new)) as store:
            await store.database.write(lambda c: _go_on(c, act))
        return await trio.to_thread.run_sync(_swap, new, path, stamp)
    except OSError as failed:
        raise StoreError(str(path), f"cannot be replaced: {failed}", "make room, and look at the folder") from failed
    finally:
        clear()


def _swap(new: Path, path: Path, stamp: str) -> Path | None:
    kept = path.with_name(f"{path.name}.replaced-{stamp}") if path.exists() else None
    if kept is not None:
        _fold(path)
        for suffix in ("-wal", "-shm"):
            old = path.with_name(path.name + suffix)
            if old.exists():
                old.rename(kept.with_name(kept.name + suffix))
        # At every instant there is a store under its name: a server that found none would begin a new one.
        os.link(path, kept)
    new.replace(path)
    sync_folder(path.parent)
    return kept


def _fold(path: Path) -> None:
    """Have what is in a database's log beside it moved into the file; one that is damaged stays as it is."""
    try:
        with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except sqlite3.Error:
        pass


async def restore_postgresql(backup: Path, database: PostgresDatabase, kept: Path, act: Act) -> None:
    """Put a backup in place of what is in a PostgreSQL database; what it replaces is written to ``kept`` before.

    ``act`` goes into the restored audit. Raises :class:`StoreError` while anybody else has the database open.
    """
    await trio.to_thread.run_sync(looked_at, backup)
    current = kept.with_name(f".{kept.name}.current")
    await trio.to_thread.run_sync(shutil.copyfile, backup, current)
    try:
        # A backup of an older version is brought up to date first, as a store would be.
        async with SqlStore(SqliteDatabase(current)):
            pass
        async with SqlStore(database) as store:
            await store.database.read(lambda c: _alone(c, str(database)))
            await store.backup(kept)

            def work(connection: Connection) -> None:
                _alone(connection, str(database))
                copy_in(current, connection)
                _go_on(connection, act)

            await store.database.write(work)
    finally:
        for suffix in ("", "-wal", "-shm", f".v{VERSION - 1}"):
            current.with_name(current.name + suffix).unlink(missing_ok=True)


def _alone(connection: Connection, name: str) -> None:
    others = connection.execute(
        "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'llmgw/%' AND datname = current_database()"
        " AND application_name <> current_setting('application_name')"
    ).fetchall()
    if others:
        raise StoreError(name, f"{len(others)} other connections of llmgw are open", "stop every llmgw server first")


def _go_on(connection: Connection, act: Act) -> None:
    connection.execute("UPDATE cluster SET epoch = epoch + ?, next_serial = next_serial + ?", (EPOCHS, EPOCHS))
    audit_table.record(connection, act)
