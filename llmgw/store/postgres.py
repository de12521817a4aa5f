"""PostgreSQL (14 or newer) as the store's database, for several control planes.

Writes follow each other by an advisory lock that ends with the transaction, as they do by the nature of SQLite: so no
statement needs to think of another writer. One connection writes, one reads; each is made anew when it breaks.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import trio

from llmgw.errors import OperatorError
from llmgw.store.copying import copy_out
from llmgw.store.database import Connection, Cursor, StoreAwayError, StoreError, Values
from llmgw.store.schema import VERSION, for_postgres, step_to

if TYPE_CHECKING:
    import psycopg

_Result = TypeVar("_Result")

OLDEST = 140_000
"""PostgreSQL 14, as its ``server_version_num`` says it."""

_WRITERS = 0x6C6D6777
"""The advisory lock of whoever writes: ``lmgw``, as the mark of the SQLite file."""

PROGRAM = "llmgw"
"""What ``application_name`` of our connections begins with."""

CONNECT_S = 5
STATEMENT_S = 10.0
LOCK_S = 5.0
BOUND_S = 15.0
"""After this time (seconds) the connection of a transaction is cut, whatever the server does or does not."""

_OPTIONS = (
    f"-c statement_timeout={int(STATEMENT_S * 1000)} -c lock_timeout={int(LOCK_S * 1000)}"
    f" -c idle_in_transaction_session_timeout={int(BOUND_S * 1000)} -c client_encoding=UTF8"
    # An answer that was given must outlive a crash, whatever the server's own settings say.
    " -c synchronous_commit=on -c default_transaction_isolation=repeatable\\ read"
)
_VALUE = re.compile(r"\?|(?<!:):([a-z_]+)|%")


@cache
def translated(statement: str) -> str:
    """A statement with its values marked as psycopg wants them."""
    return _VALUE.sub(lambda m: "%s" if m[0] == "?" else "%%" if m[0] == "%" else f"%({m[1]})s", statement)


def shown(url: str) -> str:
    """The address of a database without its password."""
    return re.sub(r"(?i)([?&](?:password|sslpassword)=)[^&]*", r"\1…", re.sub(r"(://[^:/@]*):[^@]*@", r"\1:…@", url))


def _clean(value: Any) -> Any:
    # Its text has no NUL. What we store as JSON has none either; a reason may.
    return value.replace("\0", "\ufffd") if isinstance(value, str) and "\0" in value else value


class _Dialect:
    """A psycopg connection that understands :mod:`llmgw.store.database`'s statements."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def execute(self, statement: str, values: Values = (), /) -> Cursor:
        given: Any = (
            {key: _clean(value) for key, value in values.items()}
            if isinstance(values, dict)
            else tuple(_clean(value) for value in values)
        )
        return self._connection.execute(translated(statement), given)

    def executemany(self, statement: str, rows: Iterable[Sequence[Any]], /) -> object:
        cursor = self._connection.cursor()
        cursor.executemany(translated(statement), ([_clean(v) for v in row] for row in rows))
        return cursor


class _Lane:
    """One connection, which one transaction at a time uses."""

    def __init__(self, begin: str) -> None:
        self.begin = begin
        self.turn = trio.CapacityLimiter(1)
        self.connection: psycopg.Connection[Any] | None = None

    def cut(self) -> None:
        """End the connection under whoever waits on it."""
        if self.connection is None or self.connection.closed:
            return
        try:
            with socket.socket(fileno=os.dup(self.connection.fileno())) as line:
                line.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended by itself

    def drop(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()


class PostgresDatabase:
    """:class:`llmgw.store.database.Database` at a ``postgresql://`` address.

    ``backups`` is the folder for what is written before the schema is changed. ``bound_s`` is how long a
    transaction may take in all.
    """

    shared = True

    def __init__(self, url: str, backups: Path, bound_s: float = BOUND_S) -> None:
        self._url = url
        self._bound_s = bound_s
        self._backups = backups
        self._name = shown(url)
        self._me = f"{PROGRAM}/{os.getpid()}/{secrets.token_hex(4)}"
        self._writing = _Lane("BEGIN ISOLATION LEVEL READ COMMITTED")
        self._reading = _Lane("BEGIN READ ONLY")

    def __str__(self) -> str:
        return self._name

    async def __aenter__(self) -> Self:
        try:
            import psycopg
        except ImportError as missing:
            raise StoreError(
                self._name, f"psycopg cannot be imported: {missing}", "install llmgw[postgres]"
            ) from missing
        self._psycopg = psycopg
        try:
            await self.write(self._migrate)
        except BaseException:
            self._writing.drop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Closing sends one packet and waits for nothing.
        self._writing.drop()
        self._reading.drop()

    async def read(self, work: Callable[[Connection], _Result]) -> _Result:
        """What ``work`` finds in the tables."""
        return await self._run(self._reading, work)

    async def write(self, work: Callable[[Connection], _Result]) -> _Result:
        """Have ``work`` change the tables, all of it or nothing."""

        def alone(connection: Connection) -> _Result:
            connection.execute("SELECT pg_advisory_xact_lock(?)", (_WRITERS,))
            return work(connection)

        return await self._run(self._writing, alone)

    async def _run(self, lane: _Lane, work: Callable[[Connection], _Result]) -> _Result:
        async def cut() -> None:
            await trio.sleep(self._bound_s)
            lane.cut()

        with trio.move_on_after(self._bound_s) as queue:
            await lane.turn.acquire()
        if queue.cancelled_caught:
            raise StoreError(
                self._name,
                f"others have been waiting for it for {self._bound_s:g} s",
                "look whether PostgreSQL answers, and what else runs on it",
            )
        result: _Result
        failed: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cut)
                try:
                    result = await trio.to_thread.run_sync(self._transaction, lane, work)
                except Exception as error:  # noqa: BLE001 - raised below: the nursery would wrap it in a group
                    failed = error
                nursery.cancel_scope.cancel()
        finally:
            lane.turn.release()
        if failed is not None:
            raise failed
        return result

    def _transaction(self, lane: _Lane, work: Callable[[Connection], _Result]) -> _Result:
        """In a thread: one transaction, tried once more on a new connection if the old one turns out to be dead."""
        again = lane.connection is not None
        while True:
            committing = False
            try:
                connection = self._connection(lane)
                try:
                    connection.execute(lane.begin)
                    result = work(_Dialect(connection))
                    committing = True
                    connection.execute("COMMIT")
                except BaseException:
                    self._roll_back(lane, connection)
                    raise
                return result
            except self._psycopg.Error as failed:
                broken = lane.connection is None
                if broken and again and not committing:
                    again = False
                    continue
                raise self._said(failed, committing and broken) from failed

    def _connection(self, lane: _Lane) -> psycopg.Connection[Any]:
        if lane.connection is not None and lane.connection.closed:
            lane.drop()
        if lane.connection is None:
            made = self._psycopg.connect(
                self._url, autocommit=True, connect_timeout=CONNECT_S, options=_OPTIONS, application_name=self._me,
                keepalives_idle=5, keepalives_interval=2, keepalives_count=3,
                tcp_user_timeout=int(BOUND_S * 1000),
            )  # fmt: skip
            if made.info.server_version < OLDEST:
                found = made.info.server_version
                made.close()
                raise StoreError(self._name, f"is PostgreSQL {found // 10000}", "14 is the oldest that is used")
            lane.connection = made
        return lane.connection

    def _roll_back(self, lane: _Lane, connection: psycopg.Connection[Any]) -> None:
        try:
            if not connection.closed and not connection.broken:
                connection.execute("ROLLBACK")
                return
        except self._psycopg.Error:
            pass  # what failed first is what is told
        lane.drop()

    def _said(self, failed: psycopg.Error, unknown: bool) -> StoreError:
        errors = self._psycopg.errors
        reason, remedy = str(failed).strip().splitlines()[0] if str(failed).strip() else type(failed).__name__, ""
        if unknown:
            reason = f"the connection ended while a change was being written ({reason})"
            remedy = "look whether it is there before you repeat it"
        elif isinstance(failed, errors.DiskFull):
            reason, remedy = "the disk is full", "free some space; nothing was changed"
        elif isinstance(failed, errors.LockNotAvailable):
            reason = f"another control plane has been writing for {LOCK_S:g} s"
            remedy = "look for one that hangs: select * from pg_stat_activity where application_name like 'llmgw/%'"
        elif isinstance(failed, errors.ReadOnlySqlTransaction):
            reason, remedy = "takes no writes: it is a standby", "name the primary in store, in server.yaml"
        elif isinstance(failed, errors.InsufficientPrivilege):
            remedy = "let the role own its database, or give it CREATE on the schema"
        elif isinstance(failed, errors.QueryCanceled):
            reason, remedy = f"did not answer within {STATEMENT_S:g} s", "look at what else runs on the database"
        elif isinstance(failed, self._psycopg.OperationalError):
            reason = f"cannot be used: {reason}".replace(self._url, self._name)
            return StoreAwayError(self._name, reason, "check that PostgreSQL runs there, and what store says")
        return StoreError(self._name, reason.replace(self._url, self._name), remedy)

    def _migrate(self, connection: Connection) -> None:
        (here,) = connection.execute("SELECT to_regclass('llmgw_schema') IS NOT NULL").fetchone()
        if not here:
            (others,) = connection.execute(
                "SELECT count(*) FROM information_schema.tables WHERE table_schema = current_schema()"
            ).fetchone()
            if others:
                raise StoreError(self._name, "has tables of another program", "make a database for llmgw alone")
            connection.execute("CREATE TABLE llmgw_schema (version BIGINT NOT NULL)")
            connection.execute("INSERT INTO llmgw_schema VALUES (0)")
        (version,) = connection.execute("SELECT version FROM llmgw_schema").fetchone()
        if version > VERSION:
            backups = ", ".join(sorted(p.name for p in self._backups.glob("postgresql.v*"))) or "none here"
            raise StoreError(
                self._name,
                f"has schema {version}, this llmgw knows {VERSION}",
                f"run the newer llmgw, or restore a backup ({backups})",
            )
        if 0 < version < VERSION:
            try:
                copy_out(connection, version, self._backups / f"postgresql.v{version}")
            except OSError as failed:
                raise OperatorError(
                    str(self._backups), f"no backup can be written: {failed}", "nothing was changed; make room"
                ) from failed
        for number in range(version, VERSION):
            step_to(number + 1, connection, for_postgres)
        if version < VERSION:
            connection.execute("UPDATE llmgw_schema SET version = ?", (VERSION,))

    async def backup(self, path: Path) -> None:
        """Write all of it, as one state of everything, into a new SQLite file."""
        await self.read(lambda connection: copy_out(connection, VERSION, path))
