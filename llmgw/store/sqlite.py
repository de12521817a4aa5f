"""The store on SQLite: one connection, one writer, every commit on the disk before it is acknowledged."""

from __future__ import annotations

import hashlib
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import trio

from llmgw.errors import OperatorError
from llmgw.scheduler.explain import Candidate, Decision, DecisionKind, Refusal, Unplaced
from llmgw.scheduler.memory import Learned
from llmgw.scheduler.orders import Drained, Order, OrderKind
from llmgw.scheduler.scale import Scale
from llmgw.scheduler.state import Replica
from llmgw.store import learned, wishes
from llmgw.store.api import JobRow, NodeRow, PassRecord, SettingsRevision, StoredDecision
from llmgw.store.audit import Act
from llmgw.store.rows import from_text, to_text
from llmgw.store.schema import APPLICATION_ID, STEPS, VERSION
from llmgw.store.sqlite_identity import SqliteIdentityStore

_Result = TypeVar("_Result")

_KEPT_PASSES = 5000
_KEPT_JOBS = 1000
_CLOSE_S = 5.0


class StoreError(OperatorError):
    """The store cannot be used as it is: the file, what is wrong with it, and what to do."""


class SqliteStore:
    """:class:`llmgw.store.api.Store` in one file, opened in a mode that no other process shares."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._turn = trio.CapacityLimiter(1)
        self._connection: sqlite3.Connection | None = None

    async def __aenter__(self) -> Self:
        self._connection = await trio.to_thread.run_sync(self._open, limiter=self._turn)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        connection, self._connection = self._connection, None
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
            raise self._said(failed) from failed
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
            backup = self._path.with_name(f"{self._path.name}.v{version}")
            connection.execute("VACUUM INTO ?", (str(backup),))
        for number in range(version, VERSION):
            connection.executescript(f"BEGIN IMMEDIATE; {STEPS[number]} PRAGMA user_version = {number + 1}; COMMIT;")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(
            "INSERT OR IGNORE INTO cluster (only, id, epoch, next_serial) VALUES (1, ?, 0, 1)", (secrets.token_hex(6),)
        )
        connection.execute("COMMIT")

    def _said(self, failed: sqlite3.Error) -> StoreError:
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
        return StoreError(str(self._path), reason, remedy)

    async def _read(self, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        return await trio.to_thread.run_sync(self._guarded, work, limiter=self._turn)

    async def _write(self, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        def transaction(connection: sqlite3.Connection) -> _Result:
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            return result

        return await trio.to_thread.run_sync(self._guarded, transaction, limiter=self._turn)

    async def read(self, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        """What ``work`` finds in the tables; it runs in a thread and changes nothing."""
        return await self._read(work)

    async def write(self, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        """Have ``work`` change the tables, in a thread and in one transaction: all of it or nothing."""
        return await self._write(work)

    def _guarded(self, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        assert self._connection is not None, "the store is used outside of its scope"
        try:
            return work(self._connection)
        except sqlite3.Error as failed:
            raise self._said(failed) from failed

    @property
    def identities(self) -> SqliteIdentityStore:
        """Who may be a node, in the same file."""
        return SqliteIdentityStore(self._read, self._write)

    async def cluster(self) -> str:
        """The cluster's id."""

        def work(connection: sqlite3.Connection) -> str:
            found: str = connection.execute("SELECT id FROM cluster").fetchone()[0]
            return found

        return await self._read(work)

    async def new_epoch(self) -> int:
        """Take the next epoch."""

        def work(connection: sqlite3.Connection) -> int:
            taken: int = connection.execute("UPDATE cluster SET epoch = epoch + 1 RETURNING epoch").fetchone()[0]
            return taken

        return await self._write(work)

    async def settings(self) -> SettingsRevision | None:
        """The newest settings."""
        return await self._read(_newest_settings)

    async def add_settings(self, text: str, author: str, reason: str, at: float) -> SettingsRevision:
        """Record a new revision, unless the newest one has this very text."""

        def work(connection: sqlite3.Connection) -> SettingsRevision:
            newest = _newest_settings(connection)
            digest = hashlib.sha256(text.encode()).hexdigest()
            if newest is not None and newest.digest == digest:
                return newest
            made = SettingsRevision(newest.revision + 1 if newest else 1, text, digest, author, reason, at)
            connection.execute(
                "INSERT INTO settings VALUES (?, ?, ?, ?, ?, ?)", (made.revision, text, digest, author, reason, at)
            )
            return made

        return await self._write(work)

    async def nodes(self) -> tuple[NodeRow, ...]:
        """Every node."""

        def work(connection: sqlite3.Connection) -> tuple[NodeRow, ...]:
            found = connection.execute("SELECT row FROM node ORDER BY id")
            return tuple(from_text(text, NodeRow) for (text,) in found)

        return await self._read(work)

    async def save_node(self, row: NodeRow) -> None:
        """Write a node's row whole."""
        text = to_text(row)
        await self._write(
            lambda c: c.execute("INSERT OR REPLACE INTO node VALUES (?, ?, ?)", (row.id, text, row.last_heard))
        )

    async def learned(self) -> tuple[Learned, ...]:
        """What profiles were measured to need."""
        return await self._read(learned.read)

    async def save_learned(self, rows: Iterable[Learned]) -> None:
        """Write these."""
        await self._write(lambda connection: learned.write(connection, rows))

    async def jobs(self) -> tuple[JobRow, ...]:
        """The jobs that are remembered."""

        def work(connection: sqlite3.Connection) -> tuple[JobRow, ...]:
            found = connection.execute("SELECT row FROM job ORDER BY started, id")
            return tuple(from_text(text, JobRow) for (text,) in found)

        return await self._read(work)

    async def save_job(self, row: JobRow) -> None:
        """Write a job's row whole, and drop the oldest that have ended."""
        text, job = to_text(row), row.report

        def work(connection: sqlite3.Connection) -> None:
            values = (job.id, text, job.started, int(job.state.ended))
            connection.execute("INSERT OR REPLACE INTO job VALUES (?, ?, ?, ?)", values)
            connection.execute(
                "DELETE FROM job WHERE id IN"
                " (SELECT id FROM job WHERE ended = 1 ORDER BY started DESC LIMIT -1 OFFSET ?)",
                (_KEPT_JOBS,),
            )

        await self._write(work)

    async def replicas(self) -> tuple[tuple[Replica, ...], int]:
        """The replica rows, and the serial number of the next one."""

        def work(connection: sqlite3.Connection) -> tuple[tuple[Replica, ...], int]:
            found = tuple(from_text(t, Replica) for (t,) in connection.execute("SELECT row FROM replica ORDER BY id"))
            return found, connection.execute("SELECT next_serial FROM cluster").fetchone()[0]

        return await self._read(work)

    async def save_pass(self, record: PassRecord) -> int:
        """Write everything that a pass changes, if no higher epoch was taken since."""

        def work(connection: sqlite3.Connection) -> int:
            number = self._begin_pass(connection, record.epoch, record.at)
            connection.execute("UPDATE cluster SET next_serial = ?", (record.next_serial,))
            connection.execute("DELETE FROM replica")
            connection.executemany("INSERT INTO replica VALUES (?, ?)", [(r.id, to_text(r)) for r in record.replicas])
            _insert_decisions(connection, number, record.decisions)
            connection.execute("DELETE FROM scale")
            connection.executemany(
                "INSERT INTO scale VALUES (?, ?)", [(model, to_text(found)) for model, found in record.scales.items()]
            )
            wishes.drop(connection, record.over)
            connection.execute("DELETE FROM unplaced")
            for item in record.unplaced:
                _insert_unplaced(connection, number, item)
            connection.execute("DELETE FROM pass WHERE id <= ?", (number - _KEPT_PASSES,))
            return number

        return await self._write(work)

    def _begin_pass(self, connection: sqlite3.Connection, ours: int, at: float) -> int:
        (epoch,) = connection.execute("SELECT epoch FROM cluster").fetchone()
        if epoch != ours:
            raise StoreError(
                str(self._path),
                f"epoch {epoch} was taken since, this control plane has {ours}",
                "only one control plane decides; stop this one",
            )
        number = connection.execute("INSERT INTO pass (epoch, at) VALUES (?, ?)", (epoch, at)).lastrowid
        assert number is not None
        return number

    async def scales(self) -> dict[str, Scale]:
        """How many replicas the models that follow their load had in the newest pass."""

        def work(connection: sqlite3.Connection) -> dict[str, Scale]:
            return {m: from_text(text, Scale) for m, text in connection.execute("SELECT model, row FROM scale")}

        return await self._read(work)

    async def brake_released(self) -> float:
        """When an operator last released the brake."""

        def work(connection: sqlite3.Connection) -> float:
            found: float = connection.execute("SELECT brake_released FROM cluster").fetchone()[0]
            return found

        return await self._read(work)

    async def release_brake(
        self, epoch: int, at: float, by: str, silent_since: float, nodes: tuple[str, ...] = ()
    ) -> int:
        """Record that the brake is released."""

        def work(connection: sqlite3.Connection) -> int:
            number = self._begin_pass(connection, epoch, at)
            connection.execute("UPDATE cluster SET brake_released = ?", (silent_since,))
            _insert_decisions(
                connection, number, (Decision(DecisionKind.BRAKE, "", "", "", f"released by {by}", nodes),)
            )
            return number

        return await self._write(work)

    async def drains(self) -> dict[str, Drained]:
        """The nodes that operators want to be empty."""
        return await self._read(wishes.drains)

    async def save_drain(self, epoch: int, node: str, drained: Drained | None, act: Act) -> None:
        """Drain a node, or do not any more."""

        def work(connection: sqlite3.Connection) -> None:
            number = self._begin_pass(connection, epoch, act.at)
            said = f"no longer drained: {act.by}" if drained is None else str(drained)
            if drained is None and act.reason:
                said = f"{said}: {act.reason}"
            wishes.put_drain(connection, node, drained)
            _insert_decisions(connection, number, (Decision(DecisionKind.DRAIN, "", "", node, said),))
            wishes.record(connection, act)

        await self._write(work)

    async def orders(self) -> dict[str, Order]:
        """What operators want done to replicas."""
        return await self._read(wishes.orders)

    async def save_order(self, epoch: int, model: str, order: Order, act: Act) -> None:
        """Remember an order."""

        def work(connection: sqlite3.Connection) -> None:
            number = self._begin_pass(connection, epoch, act.at)
            wishes.put_order(connection, order)
            kind = DecisionKind.RESTART if order.kind is OrderKind.RESTART else DecisionKind.STOP
            said = f"to be {order}"
            _insert_decisions(connection, number, (Decision(kind, model, order.replica, "", said),))
            wishes.record(connection, act)

        await self._write(work)

    async def unplaced(self) -> tuple[Unplaced, ...]:
        """What had no place in the newest pass."""
        return await self._read(_unplaced)

    async def decisions(self, limit: int, about: str | None = None) -> tuple[StoredDecision, ...]:
        """The newest decisions, newest first."""

        def work(connection: sqlite3.Connection) -> tuple[StoredDecision, ...]:
            found = connection.execute(_DECISIONS if about is None else _ABOUT, {"limit": limit, "about": about})
            return tuple(
                StoredDecision(
                    number, at, Decision(DecisionKind(kind), model, replica, node, reason, _others(connection, which))
                )
                for which, number, at, kind, model, replica, node, reason in found.fetchall()
            )

        return await self._read(work)


_DECISIONS = """
    SELECT decision.id, pass, at, kind, model, replica, node, reason FROM decision JOIN pass ON pass.id = pass
    ORDER BY decision.id DESC LIMIT :limit
"""

# Each part is read backwards from its own index, so that it costs what is asked for and not what is stored.
_ABOUT = """
    SELECT decision.id, pass, at, kind, model, replica, node, reason FROM decision JOIN pass ON pass.id = pass
    WHERE decision.id IN (
        SELECT * FROM (SELECT id FROM decision WHERE replica = :about ORDER BY id DESC LIMIT :limit) UNION
        SELECT * FROM (SELECT id FROM decision WHERE model = :about ORDER BY id DESC LIMIT :limit) UNION
        SELECT * FROM (SELECT id FROM decision WHERE node = :about ORDER BY id DESC LIMIT :limit) UNION
        SELECT * FROM (
            SELECT decision FROM decision_other WHERE node = :about ORDER BY decision DESC LIMIT :limit
        )
    )
    ORDER BY decision.id DESC LIMIT :limit
"""


def _newest_settings(connection: sqlite3.Connection) -> SettingsRevision | None:
    found = connection.execute("SELECT * FROM settings ORDER BY revision DESC LIMIT 1").fetchone()
    return None if found is None else SettingsRevision(*found)


def _insert_decisions(connection: sqlite3.Connection, number: int, decisions: Iterable[Decision]) -> None:
    for d in decisions:
        which = connection.execute(
            "INSERT INTO decision (pass, kind, model, replica, node, reason) VALUES (?, ?, ?, ?, ?, ?)",
            (number, d.kind.value, d.model, d.replica, d.node, d.reason),
        ).lastrowid
        connection.executemany(
            "INSERT INTO decision_other VALUES (?, ?, ?)", [(which, at, node) for at, node in enumerate(d.others)]
        )


def _others(connection: sqlite3.Connection, decision: int) -> tuple[str, ...]:
    """The further nodes of a decision."""
    found = connection.execute("SELECT node FROM decision_other WHERE decision = ? ORDER BY position", (decision,))
    return tuple(node for (node,) in found)


def _insert_unplaced(connection: sqlite3.Connection, number: int, item: Unplaced) -> None:
    connection.execute(
        "INSERT INTO unplaced VALUES (?, ?, ?, ?, ?, ?)",
        (number, item.model, item.wanted, item.running, item.reason, item.since),
    )
    connection.executemany(
        "INSERT INTO refusal VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (number, item.model, at, position, c.node, c.profile, r.filter, r.reason, r.remedy)
            for at, c in enumerate(item.candidates)
            for position, r in enumerate(c.refusals)
        ],
    )


def _unplaced(connection: sqlite3.Connection) -> tuple[Unplaced, ...]:
    made = []
    for number, model, wanted, running, reason, since in connection.execute(
        "SELECT * FROM unplaced ORDER BY model"
    ).fetchall():
        candidates: dict[int, Candidate] = {}
        rows = connection.execute(
            "SELECT candidate, node, profile, filter, reason, remedy FROM refusal WHERE pass = ? AND model = ?"
            " ORDER BY candidate, position",
            (number, model),
        )
        for at, node, profile, *refusal in rows:
            known = candidates.get(at, Candidate(node, profile))
            candidates[at] = Candidate(node, profile, (*known.refusals, Refusal(*refusal)))
        made.append(Unplaced(model, wanted, running, reason, tuple(candidates.values()), since))
    return tuple(made)
