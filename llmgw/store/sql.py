"""The store over a database: every statement, once, for SQLite and PostgreSQL."""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import trio
from attrs import astuple

from llmgw.scheduler.explain import Decision, DecisionKind, Unplaced
from llmgw.scheduler.memory import Learned
from llmgw.scheduler.orders import Drained, Order, OrderKind
from llmgw.scheduler.scale import Scale
from llmgw.scheduler.state import Replica
from llmgw.store import audit_table, learned, wishes
from llmgw.store.api import SETTINGS_CHANGED, JobRow, NodeRow, PassRecord, SettingsRevision, StaleBase, StoredDecision
from llmgw.store.audit import Act, AuditRow, Chain, Noted
from llmgw.store.database import ALL, Connection, Database, Fence, StoreError, check_epoch
from llmgw.store.pass_tables import insert_decisions, insert_unplaced, newest_decisions, unplaced
from llmgw.store.people import SqlAdminTokens
from llmgw.store.rows import from_text, to_text
from llmgw.store.sql_identity import SqlIdentityStore
from llmgw.store.sql_keys import SqlKeys

_Result = TypeVar("_Result")

_SAVE_JOB = """
    INSERT INTO job VALUES (?, ?, ?, ?)
    ON CONFLICT (id) DO UPDATE SET row = excluded.row, started = excluded.started, ended = excluded.ended
"""
_SETTINGS = "SELECT revision, text, digest, author, reason, at FROM settings"
_CLOSE_S = 6.0
_KEPT_PASSES = 5000
_KEPT_JOBS = 1000
_CHECKED_AT_ONCE = 1000


class SqlStore:
    """:class:`llmgw.store.api.Store` in the tables of a database."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._fence = Fence(database)

    async def __aenter__(self) -> Self:
        await self._db.__aenter__()
        try:
            await self._db.write(_begin)
        except BaseException:
            with trio.move_on_after(_CLOSE_S, shield=True):
                await self._db.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with trio.move_on_after(_CLOSE_S, shield=True):
            await self._db.__aexit__(kind, error, trace)

    @property
    def database(self) -> Database:
        """Where the tables are."""
        return self._db

    async def backup(self, path: Path) -> None:
        """Write all of it into a new SQLite file, as one state of everything. Raises :class:`StoreError`."""
        try:
            await self._db.backup(path)
        except (OSError, sqlite3.Error) as failed:
            reason = getattr(failed, "strerror", None) or failed
            raise StoreError(str(path), f"no backup can be written: {reason}", "make room, or name another") from failed

    @property
    def identities(self) -> SqlIdentityStore:
        """Who may be a node, in the same database."""
        return SqlIdentityStore(self._fence)

    @property
    def keys(self) -> SqlKeys:
        """API keys and usage, in the same database."""
        return SqlKeys(self._fence)

    def lead(self, epoch: int | None) -> None:
        """From now on every write is refused once a higher epoch was taken; ``None`` ends that."""
        self._fence.epoch = epoch

    async def _write(self, work: Callable[[Connection], _Result]) -> _Result:
        """Change what others look at: see :meth:`changes`."""

        def noted(connection: Connection) -> _Result:
            result = work(connection)
            connection.execute("UPDATE cluster SET changes = changes + 1")
            return result

        return await self._fence.write(noted)

    async def changes(self) -> int:
        """A number that is another one whenever nodes, replicas, settings or jobs changed."""

        def work(connection: Connection) -> int:
            found: int = connection.execute("SELECT changes FROM cluster").fetchone()[0]
            return found

        return await self._db.read(work)

    @property
    def people(self) -> SqlAdminTokens:
        """Who may use the admin API, in the same database."""
        return SqlAdminTokens(self._fence)

    async def cluster(self) -> str:
        """The cluster's id."""

        def work(connection: Connection) -> str:
            found: str = connection.execute("SELECT id FROM cluster").fetchone()[0]
            return found

        return await self._db.read(work)

    async def new_epoch(self) -> int:
        """Take the next epoch."""

        def work(connection: Connection) -> int:
            taken: int = connection.execute("UPDATE cluster SET epoch = epoch + 1 RETURNING epoch").fetchone()[0]
            return taken

        return await self._write(work)

    async def settings(self) -> SettingsRevision | None:
        """The newest settings."""
        return await self._db.read(_newest_settings)

    async def add_settings(
        self, text: str, author: str, reason: str, at: float, *, base: int | None = None, action: str = SETTINGS_CHANGED
    ) -> SettingsRevision:
        """Record a new revision, unless the newest one has this very text or is not the base."""

        def work(connection: Connection) -> SettingsRevision:
            newest = _newest_settings(connection)
            number = 0 if newest is None else newest.revision
            if newest is not None and base is not None and base != number:
                raise StaleBase(base, newest)
            digest = hashlib.sha256(text.encode()).hexdigest()
            if newest is not None and newest.digest == digest:
                return newest
            made = SettingsRevision(number + 1, text, digest, author, reason, at)
            connection.execute(
                "INSERT INTO settings (revision, text, digest, author, reason, at) VALUES (?, ?, ?, ?, ?, ?)",
                astuple(made),
            )
            act = Act(at, author, action, f"revision {made.revision}", reason, f"sha256 {digest}")
            audit_table.record(connection, act)
            return made

        return await self._write(work)

    async def revisions(self, limit: int, before: int | None = None) -> tuple[SettingsRevision, ...]:
        """The newest revisions."""

        def work(connection: Connection) -> tuple[SettingsRevision, ...]:
            asked = f"{_SETTINGS} WHERE revision < ? ORDER BY revision DESC LIMIT ?"
            found = connection.execute(asked, (ALL if before is None else before, limit))
            return tuple(SettingsRevision(*row) for row in found)

        return await self._db.read(work)

    async def revision(self, number: int) -> SettingsRevision | None:
        """One revision."""

        def work(connection: Connection) -> SettingsRevision | None:
            found = connection.execute(f"{_SETTINGS} WHERE revision = ?", (number,)).fetchone()
            return None if found is None else SettingsRevision(*found)

        return await self._db.read(work)

    async def record(self, act: Act) -> AuditRow:
        """Add an act to the audit."""
        return await self._write(lambda connection: audit_table.record(connection, act))

    async def audit(self, limit: int, before: int | None = None) -> tuple[AuditRow, ...]:
        """The newest rows of the audit."""
        return await self._db.read(lambda connection: audit_table.newest(connection, limit, before))

    async def verify_audit(self, noted: Noted | None = None) -> Chain:
        """Follow the audit from its first row, some rows at a time; the chain says what is wrong."""
        chain = Chain(noted)
        while True:
            rows = await self._db.read(partial(audit_table.following, after=chain.count, limit=_CHECKED_AT_ONCE))
            if chain.follow(rows) is not None or not rows:
                chain.end()
                return chain

    async def nodes(self) -> tuple[NodeRow, ...]:
        """Every node."""

        def work(connection: Connection) -> tuple[NodeRow, ...]:
            found = connection.execute("SELECT row FROM node ORDER BY id")
            return tuple(from_text(text, NodeRow) for (text,) in found)

        return await self._db.read(work)

    async def save_node(self, row: NodeRow) -> None:
        """Write a node's row whole."""
        text = to_text(row)
        await self._write(
            lambda c: c.execute(
                "INSERT INTO node VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET row = excluded.row,"
                " last_heard = excluded.last_heard",
                (row.id, text, row.last_heard),
            )
        )

    async def learned(self) -> tuple[Learned, ...]:
        """What profiles were measured to need."""
        return await self._db.read(learned.read)

    async def save_learned(self, rows: Iterable[Learned]) -> None:
        """Write these."""
        await self._write(lambda connection: learned.write(connection, rows))

    async def jobs(self) -> tuple[JobRow, ...]:
        """The jobs that are remembered."""

        def work(connection: Connection) -> tuple[JobRow, ...]:
            found = connection.execute("SELECT row FROM job ORDER BY started, id")
            return tuple(from_text(text, JobRow) for (text,) in found)

        return await self._db.read(work)

    async def save_job(self, row: JobRow, act: Act | None = None) -> None:
        """Write a job's row whole, and drop the oldest that have ended."""
        text, job = to_text(row), row.report

        def work(connection: Connection) -> None:
            values = (job.id, text, job.started, int(job.state.ended))
            connection.execute(_SAVE_JOB, values)
            connection.execute(
                "DELETE FROM job WHERE id IN"
                " (SELECT id FROM job WHERE ended = 1 ORDER BY started DESC LIMIT ? OFFSET ?)",
                (ALL, _KEPT_JOBS),
            )
            if act is not None:
                audit_table.record(connection, act)

        await self._write(work)

    async def replicas(self) -> tuple[tuple[Replica, ...], int]:
        """The replica rows, and the serial number of the next one."""

        def work(connection: Connection) -> tuple[tuple[Replica, ...], int]:
            found = tuple(from_text(t, Replica) for (t,) in connection.execute("SELECT row FROM replica ORDER BY id"))
            return found, connection.execute("SELECT next_serial FROM cluster").fetchone()[0]

        return await self._db.read(work)

    async def save_pass(self, record: PassRecord) -> int:
        """Write everything that a pass changes, if no higher epoch was taken since."""

        def work(connection: Connection) -> int:
            number = self._begin_pass(connection, record.epoch, record.at)
            connection.execute("UPDATE cluster SET next_serial = ?", (record.next_serial,))
            connection.execute("DELETE FROM replica")
            connection.executemany("INSERT INTO replica VALUES (?, ?)", [(r.id, to_text(r)) for r in record.replicas])
            insert_decisions(connection, number, record.decisions)
            connection.execute("DELETE FROM scale")
            connection.executemany(
                "INSERT INTO scale VALUES (?, ?)", [(model, to_text(found)) for model, found in record.scales.items()]
            )
            wishes.drop(connection, record.over)
            connection.execute("DELETE FROM unplaced")
            for item in record.unplaced:
                insert_unplaced(connection, number, item)
            connection.execute("DELETE FROM pass WHERE id <= ?", (number - _KEPT_PASSES,))
            return number

        return await self._write(work)

    def _begin_pass(self, connection: Connection, ours: int, at: float) -> int:
        check_epoch(connection, ours, str(self._db))
        number: int = connection.execute(
            "INSERT INTO pass (epoch, at) VALUES (?, ?) RETURNING id", (ours, at)
        ).fetchone()[0]
        return number

    async def scales(self) -> dict[str, Scale]:
        """How many replicas the models that follow their load had in the newest pass."""

        def work(connection: Connection) -> dict[str, Scale]:
            return {m: from_text(text, Scale) for m, text in connection.execute("SELECT model, row FROM scale")}

        return await self._db.read(work)

    async def brake_released(self) -> float:
        """When an operator last released the brake."""

        def work(connection: Connection) -> float:
            found: float = connection.execute("SELECT brake_released FROM cluster").fetchone()[0]
            return found

        return await self._db.read(work)

    async def release_brake(
        self, epoch: int, at: float, by: str, silent_since: float, nodes: tuple[str, ...] = ()
    ) -> int:
        """Record that the brake is released."""

        def work(connection: Connection) -> int:
            number = self._begin_pass(connection, epoch, at)
            connection.execute("UPDATE cluster SET brake_released = ?", (silent_since,))
            insert_decisions(
                connection, number, (Decision(DecisionKind.BRAKE, "", "", "", f"released by {by}", nodes),)
            )
            audit_table.record(connection, Act(at, by, "brake.release", ", ".join(nodes)))
            return number

        return await self._write(work)

    async def drains(self) -> dict[str, Drained]:
        """The nodes that operators want to be empty."""
        return await self._db.read(wishes.drains)

    async def save_drain(self, epoch: int, node: str, drained: Drained | None, act: Act) -> None:
        """Drain a node, or do not any more."""

        def work(connection: Connection) -> None:
            number = self._begin_pass(connection, epoch, act.at)
            said = str(drained)
            if drained is None:
                said = f"no longer drained, says {act.by}{f': {act.reason}' if act.reason else ''}"
            wishes.put_drain(connection, node, drained)
            insert_decisions(connection, number, (Decision(DecisionKind.DRAIN, "", "", node, said),))
            audit_table.record(connection, act)

        await self._write(work)

    async def orders(self) -> dict[str, Order]:
        """What operators want done to replicas."""
        return await self._db.read(wishes.orders)

    async def save_order(self, epoch: int, model: str, order: Order, act: Act) -> None:
        """Remember an order."""

        def work(connection: Connection) -> None:
            number = self._begin_pass(connection, epoch, act.at)
            wishes.put_order(connection, order)
            kind = DecisionKind.RESTART if order.kind is OrderKind.RESTART else DecisionKind.STOP
            decision = Decision(kind, model, order.replica, "", f"to be {order}")
            insert_decisions(connection, number, (decision,))
            audit_table.record(connection, act)

        await self._write(work)

    async def unplaced(self) -> tuple[Unplaced, ...]:
        """What had no place in the newest pass."""
        return await self._db.read(unplaced)

    async def decisions(self, limit: int, about: str | None = None) -> tuple[StoredDecision, ...]:
        """The newest decisions, newest first."""

        return await self._db.read(lambda connection: newest_decisions(connection, limit, about))


def _begin(connection: Connection) -> None:
    """A new store gets its id."""
    connection.execute(
        'INSERT INTO cluster ("only", id, epoch, next_serial) VALUES (1, ?, 0, 1) ON CONFLICT DO NOTHING',
        (secrets.token_hex(6),),
    )


def _newest_settings(connection: Connection) -> SettingsRevision | None:
    found = connection.execute(f"{_SETTINGS} ORDER BY revision DESC LIMIT 1").fetchone()
    return None if found is None else SettingsRevision(*found)
