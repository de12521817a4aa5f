from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from attrs import evolve

from llmgw.errors import OperatorError
from llmgw.settings.weight_facts import WeightFacts
from llmgw.store import schema
from llmgw.store.api import NodeRow
from llmgw.store.database import StoreError
from llmgw.store.opening import sqlite_store
from llmgw.store.sql import SqlStore
from llmgw.store.sqlite import SqliteDatabase
from tests.scheduler.clusters import NOW, node, row
from tests.store.test_store import record


def raw(store: SqlStore) -> sqlite3.Connection:
    """The connection beneath."""
    assert isinstance(store.database, SqliteDatabase)
    assert store.database.connection is not None
    return store.database.connection


async def test_a_second_server_is_refused(tmp_path: Path) -> None:
    async with sqlite_store(tmp_path / "db"):
        with pytest.raises(StoreError, match="another process has it open"):
            async with sqlite_store(tmp_path / "db"):
                pass


async def test_files_that_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is no database, and longer than a header of one\n" * 20)
    other = sqlite3.connect(tmp_path / "other")
    other.execute("CREATE TABLE x (y)")
    other.close()
    newer = sqlite3.connect(tmp_path / "newer")
    newer.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
    newer.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    newer.execute("CREATE TABLE x (y)")
    newer.close()
    for name, said in (
        ("text", "is damaged"),
        ("other", "is another program's database"),
        ("newer", f"has schema {schema.VERSION + 1}, this llmgw knows {schema.VERSION}"),
        ("missing/db", "cannot be opened"),
    ):
        with pytest.raises(StoreError, match=said):
            async with sqlite_store(tmp_path / name):
                pass


async def test_a_full_disk_is_said_and_nothing_is_half_written(tmp_path: Path) -> None:
    async with sqlite_store(tmp_path / "db") as store:
        epoch = await store.new_epoch()
        connection = raw(store)
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        huge = tuple(evolve(row(n), reason="x" * 100_000) for n in range(20))
        with pytest.raises(OperatorError, match="the disk is full"):
            await store.save_pass(record(epoch, 9, replicas=huge))
        assert await store.replicas() == ((), 1)
        connection.execute("PRAGMA max_page_count = 1000000")
        await store.save_pass(record(epoch, 9, replicas=huge))
        assert len((await store.replicas())[0]) == 20


async def test_a_node_of_an_older_version_has_no_weights(tmp_path: Path) -> None:
    here = node()
    stored = NodeRow(here.id, here.address, "1", here.inventory, here.engines, (), NOW, (WeightFacts("/w", 1, "f"),))
    async with sqlite_store(tmp_path / "db") as store:
        await store.save_node(stored)
        assert await store.nodes() == (stored,)
    with sqlite3.connect(tmp_path / "db") as raw:
        raw.execute("UPDATE node SET row = json_remove(row, '$.weights')")
    raw.close()
    async with sqlite_store(tmp_path / "db") as store:
        assert await store.nodes() == (evolve(stored, weights=()),)
