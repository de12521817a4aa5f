"""Backups of either database, restored into either; migrations; and stores that are not as they were written."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llmgw.scheduler.explain import Decision, DecisionKind
from llmgw.settings.keys import ApiKey
from llmgw.store import schema
from llmgw.store.audit import Act
from llmgw.store.database import StoreError
from llmgw.store.identity import Event, HeldRow
from llmgw.store.keys import KeyEvent
from llmgw.store.opening import sqlite_store, store_of
from llmgw.store.postgres import PostgresDatabase
from llmgw.store.sql import SqlStore
from llmgw.store.upkeep import EPOCHS, check, looked_at, restore_postgresql, restore_sqlite
from tests.scheduler.clusters import NOW, row
from tests.store.postgresql import Postgresql
from tests.store.test_store import UNPLACED, record

RESTORED = Act(NOW, "account root", "store.restore", "/backup")


async def fill(store: SqlStore) -> None:
    epoch = await store.new_epoch()
    await store.add_settings("a: 1 # ü", "ada", "begun", NOW)
    await store.save_pass(
        record(
            epoch, 5, replicas=(row(4),), unplaced=(UNPLACED,),
            decisions=(Decision(DecisionKind.PLACE, "m", "m-4", "n1", "because", ("n2",)),),
        )
    )  # fmt: skip
    await store.keys.add_key(ApiKey("k", 0, 0, "d", NOW), KeyEvent(NOW, "k", "key.create", "ada", ""))
    await store.identities.save_held(HeldRow("n1", "ab", "k", "r", NOW, None, NOW))
    await store.identities.add_event(Event(NOW, "refused", "n9", "10.0.0.9", "id"))


async def everything(store: SqlStore) -> object:
    return (
        await store.cluster(), await store.revisions(9), (await store.replicas())[0], await store.unplaced(),
        await store.decisions(9), await store.keys.keys(), await store.identities.held(),
        await store.identities.events(9),
        tuple(row for row in await store.audit(99) if row.action != "store.restore"),
    )  # fmt: skip


async def test_a_backup_is_all_of_it_in_either_database(
    opened: Callable[[], SqlStore], tmp_path: Path, postgresql: Postgresql
) -> None:
    backup = tmp_path / "backup"
    async with opened() as store:
        await fill(store)
        before = await everything(store)
        (epoch, serial) = (await store.new_epoch(), (await store.replicas())[1])
        await store.backup(backup)
        await store.record(Act(NOW, "ada", "after.wards", "x"))
    assert backup.stat().st_mode & 0o777 == 0o600
    looked_at(backup)

    here = tmp_path / "here"
    async with sqlite_store(here) as old:
        await old.record(Act(NOW, "bob", "to.be-replaced", "x"))
    kept = await restore_sqlite(backup, here, "stamp", RESTORED)
    assert kept is not None
    async with sqlite_store(kept) as old:
        assert [r.action for r in await old.audit(9)] == ["to.be-replaced"]

    address = postgresql.database()
    database = PostgresDatabase(address, tmp_path)
    async with store_of(address, tmp_path) as old:
        await old.record(Act(NOW, "bob", "to.be-replaced", "x"))
        with pytest.raises(StoreError, match="other connections of llmgw are open"):
            await restore_postgresql(backup, database, tmp_path / "kept", RESTORED)
    await restore_postgresql(backup, database, tmp_path / "kept", RESTORED)
    looked_at(tmp_path / "kept")

    for restored in (sqlite_store(here), store_of(address, tmp_path)):
        async with restored as store:
            assert await everything(store) == before
            assert await store.new_epoch() == epoch + EPOCHS + 1, "agents would refuse an epoch that went back"
            assert (await store.replicas())[1] == serial + EPOCHS
            assert await check(store, lambda _step: None) == ()
            newest, *earlier = await store.audit(99)
            assert (newest.seq, newest.by, newest.action, newest.object) == (
                len(earlier) + 1, RESTORED.by, RESTORED.action, RESTORED.object,
            )  # fmt: skip
            # What the databases number themselves goes on after the last one.
            again = await store.keys.add_key(ApiKey("l", 0, 0, "e", NOW), KeyEvent(NOW, "l", "key.create", "ada", ""))
            assert again.slot == 2
            await store.save_pass(record(epoch + EPOCHS + 1, decisions=(UNPLACED_DECISION,)))
            assert (await store.decisions(1))[0].pass_id == 2


RESTORES = """
import itertools, sys, trio
from pathlib import Path
from llmgw.store.audit import Act
from llmgw.store.upkeep import restore_sqlite
act = Act(0, "account root", "store.restore", "/backup")
for n in itertools.count():
    trio.run(restore_sqlite, Path(sys.argv[1]), Path(sys.argv[2]), f"{sys.argv[3]}-{n}", act)
    print(n, flush=True)
"""


async def test_a_restore_that_is_killed_leaves_the_old_store_or_the_new_one(tmp_path: Path) -> None:
    here, backup, dice = tmp_path / "here", tmp_path / "backup", random.Random(8)
    async with sqlite_store(here) as store:
        await fill(store)
        cluster, epoch = await store.cluster(), await store.new_epoch()
        before = await everything(store)
        await store.backup(backup)
    for round_ in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", RESTORES, str(backup), str(here), str(round_)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "0\n"
            time.sleep(dice.uniform(0, 0.05))
            process.kill()
        async with sqlite_store(here) as store:
            assert await store.cluster() == cluster
            assert await everything(store) == before
            assert await check(store, lambda _step: None) == ()
            assert await store.new_epoch() == epoch + EPOCHS + 1


async def test_what_a_killed_restore_left_is_no_part_of_the_next(tmp_path: Path) -> None:
    here, backup = tmp_path / "here", tmp_path / "backup"
    async with sqlite_store(here) as store:
        epoch = await store.new_epoch()
        await store.backup(backup)
    left = tmp_path / ".here.restored"
    left.write_bytes(backup.read_bytes())
    async with sqlite_store(left) as store:
        await store.new_epoch()
        log = left.with_name(f"{left.name}-wal").read_bytes()
    left.with_name(f"{left.name}-wal").write_bytes(log)
    await restore_sqlite(backup, here, "stamp", RESTORED)
    async with sqlite_store(here) as store:
        assert await store.new_epoch() == epoch + EPOCHS + 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["backup", "here", "here.replaced-stamp"]


async def test_what_is_replaced_is_kept_with_what_its_log_had(tmp_path: Path) -> None:
    here, backup, copy = tmp_path / "here", tmp_path / "backup", tmp_path / "copy"
    async with sqlite_store(here) as store:
        await store.backup(backup)
        await store.record(Act(NOW, "ada", "in.the-log", "x"))
        # As a server that is killed leaves it.
        copy.write_bytes(here.read_bytes())
        copy.with_name("copy-wal").write_bytes(here.with_name("here-wal").read_bytes())
    kept = await restore_sqlite(backup, copy, "stamp", RESTORED)
    assert kept is not None
    async with sqlite_store(kept) as old:
        assert [r.action for r in await old.audit(9)] == ["in.the-log"]
    async with sqlite_store(copy) as new:
        assert [r.action for r in await new.audit(9)] == ["store.restore"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["backup", "copy", "copy.replaced-stamp", "here"]


UNPLACED_DECISION = Decision(DecisionKind.PLACE, "m", "m-5", "n1", "again")


async def test_what_is_no_backup_is_not_restored(tmp_path: Path) -> None:
    here, text, newer = tmp_path / "here", tmp_path / "text", tmp_path / "newer"
    async with sqlite_store(here) as store:
        cluster = await store.cluster()
        await store.backup(newer)
    text.write_text("no database\n" * 100)
    with sqlite3.connect(newer) as raw:
        raw.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    raw.close()
    for backup, why in (
        (tmp_path / "missing", "is no file"),
        (text, "is no backup that can be read: file is not a database"),
        (newer, f"has schema {schema.VERSION + 1}, this llmgw knows {schema.VERSION}"),
    ):
        with pytest.raises(StoreError, match=why):
            await restore_sqlite(backup, here, "stamp", RESTORED)
    async with sqlite_store(here) as store:
        assert await store.cluster() == cluster


async def test_what_was_changed_by_hand_is_found(opened: Callable[[], SqlStore]) -> None:
    async with opened() as store:
        await fill(store)
        for statement, said in (
            ("UPDATE settings SET text = 'a: 2'", "settings: revision 1 was changed"),
            ("UPDATE replica SET row = '{}'", "replicas: "),
            ("UPDATE audit SET reason = 'x' WHERE seq = 2", "audit: row 2 was changed"),
        ):
            await store.database.write(lambda c, statement=statement: c.execute(statement))
            assert any(line.startswith(said) for line in await check(store, lambda _step: None)), said


def old_store(path: Path) -> None:
    """A store as version 7 left it, with things done to keys and identities."""
    raw = sqlite3.connect(path, isolation_level=None)
    for step in schema.STEPS[:7]:
        raw.executescript(step)
    raw.execute("INSERT INTO cluster VALUES (1, 'c', 3, 9, 0)")
    raw.executemany(
        "INSERT INTO identity_event (at, kind, node, by, detail) VALUES (?, ?, ?, ?, ?)",
        [(1, "token-created", "n1", "ada", "t"), (4, "refused", "n1", "1.2.3.4", "x"), (5, "evicted", "n1", "bob", "")],
    )
    raw.execute("INSERT INTO key_event (at, key, action, by, detail) VALUES (3, 'k', 'created', 'ada', 'd')")
    raw.execute("PRAGMA user_version = 7")
    raw.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
    raw.close()


async def test_an_older_store_is_brought_forward_after_a_backup(tmp_path: Path) -> None:
    old_store(tmp_path / "db")
    async with sqlite_store(tmp_path / "db") as store:
        assert [(r.seq, r.at, r.action, r.object) for r in await store.audit(9)] == [
            (3, 5.0, "node.forget", "n1"), (2, 3.0, "key.create", "k"), (1, 1.0, "token.create", "n1"),
        ]  # fmt: skip
        assert (await store.verify_audit()).wrong is None
        assert [e.kind for e in await store.identities.events(9)] == ["node.forget", "refused", "token.create"]
        assert [e.action for e in await store.keys.key_events("k", 9)] == ["key.create"]
        assert await store.new_epoch() == 4
    raw = sqlite3.connect(tmp_path / "db.v7")
    assert raw.execute("PRAGMA user_version").fetchone() == (7,)
    assert raw.execute("SELECT count(*) FROM key_event").fetchone() == (1,)
    raw.close()
    assert (tmp_path / "db.v7").stat().st_mode & 0o777 == 0o600


async def test_the_same_in_postgresql(tmp_path: Path, postgresql: Postgresql) -> None:
    address = postgresql.database()
    name = address.split("/")[3].split("?")[0]
    for step in schema.STEPS[:7]:
        postgresql.sql(";".join(schema.for_postgres(step)), name)
    postgresql.sql(
        "CREATE TABLE llmgw_schema (version BIGINT NOT NULL); INSERT INTO llmgw_schema VALUES (7);"
        "INSERT INTO cluster VALUES (1, 'c', 3, 9, 0);"
        "INSERT INTO key_event (at, key, action, by, detail) VALUES (3, 'k', 'created', 'ada', 'd')",
        name,
    )
    async with store_of(address, tmp_path) as store:
        assert [(r.action, r.object) for r in await store.audit(9)] == [("key.create", "k")]
        assert await store.new_epoch() == 4
    raw = sqlite3.connect(tmp_path / "postgresql.v7")
    assert raw.execute("SELECT key FROM key_event").fetchall() == [("k",)]
    raw.close()
    postgresql.sql(f"UPDATE llmgw_schema SET version = {schema.VERSION + 1}", name)
    with pytest.raises(StoreError, match=f"has schema {schema.VERSION + 1}, this llmgw knows .*postgresql.v7"):
        async with store_of(address, tmp_path):
            pass
    other = postgresql.database()
    postgresql.sql("CREATE TABLE theirs (x INT)", other.split("/")[3].split("?")[0])
    with pytest.raises(StoreError, match="tables of another program"):
        async with store_of(other, tmp_path):
            pass
