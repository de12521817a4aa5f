"""SQLite as the store's database: one connection, one writer, every commit on the disk before it is acknowledged."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, cast

import trio

from llmgw.durable import whole
from llmgw.store.database import Connection, StoreError
from llmgw.store.schema import APPLICATION_ID, VERSION, for_sqlite, step_to

_Result = TypeVar("_Result")

_CLOSE_S = 5.0


class SqliteDatabase:
    """:class:`llmgw.store.database.Database` in one file, opened in a mode that no other process shares."""

    shared = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._turn = trio.CapacityLimiter(1)
        self.connection: sqlite3.Connection | None = None

    def __str__(self) -> str:
        return str(self._path)

    async def __aenter__(self) -> Self:
        self.connection = await trio.to_thread.run_sync(self._open, limiter=self._turn)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            with trio.move_on_after(_CLOSE_S, shield=True):
                await trio.to_thread.run_sync(connection.close, limiter=self._turn)

    def _open(self) -> sqlite3.Connection:
        try:
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=1.0)
        except (OSError, sqlite3.Error) as failed:
            raise StoreError(
                str(self._path), f"cannot be opened: {failed}", "check the folder and its mode"
            ) from failed
        try:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            self._migrate(connection)
        except sqlite3.Error as failed:
            connection.close()
            raise said(str(self._path), failed) from failed
        except BaseException:
            connection.close()
            raise
        return connection

    def _migrate(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (mark,) = connection.execute("PRAGMA application_id").fetchone()
        if version == 0 and connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise StoreError(str(self._path), "is another program's database", "set state_dir to another folder")
        if version and mark != APPLICATION_ID:
            raise StoreError(str(self._path), "is another program's database", "set state_dir to another folder")
        if version > VERSION:
            backups = ", ".join(sorted(p.name for p in self._path.parent.glob(f"{self._path.name}.v*"))) or "none"
            raise StoreError(
                str(self._path),
                f"has schema {version}, this llmgw knows {VERSION}",
                f"run the newer llmgw, or go back to a backup ({backups})",
            )
        if 0 < version < VERSION:
            copy_to(connection, self._path.with_name(f"{self._path.name}.v{version}"))
        for number in range(version, VERSION):
            connection.execute("BEGIN IMMEDIATE")
            try:
                step_to(number + 1, cast("Connection", connection), for_sqlite)
                connection.execute(f"PRAGMA user_version = {number + 1}")
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    async def read(self, work: Callable[[Connection], _Result]) -> _Result:
        """What ``work`` finds in the tables."""
        return await trio.to_thread.run_sync(self._guarded, work, limiter=self._turn)

    async def write(self, work: Callable[[Connection], _Result]) -> _Result:
        """Have ``work`` change the tables, all of it or nothing."""

        def transaction(connection: Connection) -> _Result:
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(connection)
                connection.execute("COMMIT")
            except BaseException:
                if cast("sqlite3.Connection", connection).in_transaction:
                    connection.execute("ROLLBACK")
                raise
            return result

        return await trio.to_thread.run_sync(self._guarded, transaction, limiter=self._turn)

    def _guarded(self, work: Callable[[Connection], _Result]) -> _Result:
        assert self.connection is not None, "the store is used outside of its scope"
        try:
            return work(cast("Connection", self.connection))
        except sqlite3.Error as failed:
            raise said(str(self._path), failed) from failed

    async def backup(self, path: Path) -> None:
        """Write all of it, as one state of everything, into a new file that is 0600 from its first byte."""

        def work(connection: Connection) -> None:
            copy_to(cast("sqlite3.Connection", connection), path)

        await self.read(work)


def copy_to(connection: sqlite3.Connection, path: Path) -> None:
    """Write a whole database into another file, which is replaced when it is there, and is durable then.

    Raises :class:`sqlite3.Error` and :class:`OSError`; what was there is still there then.
    """
    with whole(path) as new:
        connection.execute("VACUUM INTO ?", (str(new),))


def said(name: str, failed: sqlite3.Error) -> StoreError:
    """What went wrong with a SQLite file, for an operator."""
    code = getattr(failed, "sqlite_errorname", "") or ""
    reason, remedy = str(failed), "look at the disk and the kernel's log"
    if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        reason, remedy = "another process has it open", "stop the other llmgw server"
    elif code.startswith("SQLITE_FULL"):
        reason, remedy = "the disk is full", "free some space; nothing was changed"
    elif code.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN")):
        reason, remedy = f"cannot be written ({failed})", "check the folder's mode and that its disk is writable"
    elif code.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        reason, remedy = f"is damaged ({failed})", "stop the server and put a backup in its place"
    return StoreError(name, reason, remedy)
