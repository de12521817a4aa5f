from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from attrs import evolve

from llmgw.errors import OperatorError
from llmgw.scheduler.decide import decide
from llmgw.scheduler.explain import Candidate, Decision, DecisionKind, Refusal, Unplaced
from llmgw.scheduler.memory import Learned
from llmgw.scheduler.state import ShardState
from llmgw.settings.weight_facts import WeightFacts
from llmgw.store import schema
from llmgw.store.api import NodeRow, PassRecord
from llmgw.store.learned import KEPT
from llmgw.store.sqlite import SqliteStore, StoreError
from tests.scheduler.clusters import NOW, cluster, model, node, report, row

UNPLACED = Unplaced(
    "m", 2, 1, "nowhere", (Candidate("n1", "p", (Refusal("f", "r", "do"), Refusal("g", "s"))), Candidate("n2", "p", (Refusal("f", "x"),))), 5.0
)  # fmt: skip


def record(epoch: int, serial: int = 1, **more: object) -> PassRecord:
    made = PassRecord(epoch, NOW, (), serial, (), ())
    return evolve(made, **more)


async def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    replica = row()
    here = node(reports=(report(replica, ShardState.READY),))
    stored = NodeRow(here.id, here.address, "1", here.inventory, here.engines, here.reports, NOW)
    decision = Decision(DecisionKind.PLACE, "m", "m-1", "n1", "because")
    async with SqliteStore(tmp_path / "db") as store:
        name = await store.cluster()
        epoch = await store.new_epoch()
        first = await store.add_settings("a: 1", "me", "first", NOW)
        assert await store.add_settings("a: 1", "you", "again", NOW + 1) == first
        await store.add_settings("a: 2", "me", "second", NOW + 2)
        await store.save_node(stored)
        number = await store.save_pass(
            record(epoch, 7, replicas=(replica,), decisions=(decision,), unplaced=(UNPLACED,))
        )
    async with SqliteStore(tmp_path / "db") as store:
        assert await store.cluster() == name
        assert await store.new_epoch() == epoch + 1
        newest = await store.settings()
        assert newest is not None
        assert (newest.revision, newest.text, newest.author) == (2, "a: 2", "me")
        assert await store.nodes() == (stored,)
        assert await store.replicas() == ((replica,), 7)
        assert await store.unplaced() == (UNPLACED,)
        (kept,) = await store.decisions(10)
        assert (kept.pass_id, kept.at, kept.decision) == (number, NOW, decision)
    assert (tmp_path / "db").stat().st_mode & 0o777 == 0o600


async def test_every_row_that_the_scheduler_makes_can_be_stored(tmp_path: Path) -> None:
    outcome = decide(cluster((node(),), (model(replicas=5),)), NOW)
    async with SqliteStore(tmp_path / "db") as store:
        epoch = await store.new_epoch()
        await store.save_pass(
            PassRecord(epoch, NOW, outcome.replicas, outcome.next_serial, outcome.decisions, outcome.unplaced)
        )
        assert await store.replicas() == (outcome.replicas, outcome.next_serial)
        assert await store.unplaced() == outcome.unplaced


async def test_an_older_epoch_writes_nothing(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "db") as store:
        old = await store.new_epoch()
        new = await store.new_epoch()
        with pytest.raises(StoreError, match=f"epoch {new} was taken since"):
            await store.save_pass(record(old, 9))
        assert (await store.replicas())[1] == 1
        await store.save_pass(record(new, 9))
        assert (await store.replicas())[1] == 9


async def test_a_second_server_is_refused(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "db"):
        with pytest.raises(StoreError, match="another process has it open"):
            async with SqliteStore(tmp_path / "db"):
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
            async with SqliteStore(tmp_path / name):
                pass


async def test_a_full_disk_is_said_and_nothing_is_half_written(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "db") as store:
        epoch = await store.new_epoch()
        assert store._connection is not None
        (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
        store._connection.execute(f"PRAGMA max_page_count = {pages}")
        huge = tuple(evolve(row(n), reason="x" * 100_000) for n in range(20))
        with pytest.raises(OperatorError, match="the disk is full"):
            await store.save_pass(record(epoch, 9, replicas=huge))
        assert await store.replicas() == ((), 1)
        store._connection.execute("PRAGMA max_page_count = 1000000")
        await store.save_pass(record(epoch, 9, replicas=huge))
        assert len((await store.replicas())[0]) == 20


async def test_a_write_that_is_cancelled_is_whole_or_not_there(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "db") as store:
        epoch = await store.new_epoch()
        for serial in range(2, 30):
            with trio.move_on_after(0.0005):
                await store.save_pass(record(epoch, serial, replicas=(row(serial),)))
            rows, kept = await store.replicas()
            assert [r.id for r in rows] in ([], [f"m-{kept}"])


WRITER = """
import sys, trio
from pathlib import Path
from llmgw.store.sqlite import SqliteStore
from tests.store.test_sqlite import record, row

async def main():
    async with SqliteStore(Path(sys.argv[1])) as store:
        epoch = await store.new_epoch()
        _, serial = await store.replicas()
        while True:
            serial += 1
            await store.save_pass(record(epoch, serial, replicas=(row(serial),)))
            print(serial, flush=True)

trio.run(main)
"""


async def test_no_acknowledged_write_is_lost_to_sigkill(tmp_path: Path) -> None:
    top = Path(__file__).resolve().parents[2]
    acknowledged = 0
    for wanted in (1, 3, 8, 20, 40):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "db")],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(top)},
        )
        assert writer.stdout is not None
        for _ in range(wanted):
            acknowledged = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split()
        acknowledged = int(rest[-1]) if rest else acknowledged
        writer.wait()
        writer.stdout.close()
        async with SqliteStore(tmp_path / "db") as store:
            assert store._connection is not None
            assert store._connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            rows, serial = await store.replicas()
            assert serial >= acknowledged
            assert [r.id for r in rows] == [f"m-{serial}"], "row and serial are of one transaction"


async def test_decisions_about_one_thing_only(tmp_path: Path) -> None:
    def decided(number: int) -> Decision:
        return Decision(DecisionKind.PLACE, f"m{number % 3}", f"m{number % 3}-{number}", f"n{number % 2}", str(number))

    async with SqliteStore(tmp_path / "db") as store:
        epoch = await store.new_epoch()
        for number in range(12):
            await store.save_pass(record(epoch, decisions=(decided(number), decided(number + 100))))

        async def about(name: str, limit: int = 100) -> list[str]:
            return [d.decision.reason for d in await store.decisions(limit, name)]

        assert await about("m0-6") == ["6"]
        assert await about("n1", 3) == ["111", "11", "109"]
        assert {int(r) % 3 for r in await about("m2")} == {2}
        assert len(await about("m2")) == 8
        assert await about("m2", 2) == (await about("m2"))[:2]
        assert await about("' OR 1=1 --") == []
        assert len(await store.decisions(100)) == 24
        # One thing that is named in two ways is told once.
        await store.save_pass(record(epoch, decisions=(Decision(DecisionKind.PLACE, "x", "x", "x", "all three"),)))
        assert await about("x") == ["all three"]


async def test_a_decision_is_found_under_every_node_that_it_concerns(tmp_path: Path) -> None:
    over = Decision(DecisionKind.PLACE, "m", "m-1", "n1", "over three", ("n3", "n2"))
    alone = Decision(DecisionKind.PLACE, "m", "m-2", "n2", "on one")
    async with SqliteStore(tmp_path / "db") as store:
        epoch = await store.new_epoch()
        await store.save_pass(record(epoch, decisions=(over, alone)))
        for name, reasons in (("n1", ["over three"]), ("n2", ["on one", "over three"]), ("n3", ["over three"])):
            assert [d.decision.reason for d in await store.decisions(9, name)] == reasons
        assert [d.decision for d in await store.decisions(9)] == [alone, over]
        assert [d.decision.reason for d in await store.decisions(1, "n2")] == ["on one"]
        # What goes with the oldest passes goes whole.
        assert store._connection is not None
        store._connection.execute("DELETE FROM pass")
        assert store._connection.execute("SELECT count(*) FROM decision_other").fetchone() == (0,)


async def test_what_was_learned_is_kept_and_bounded(tmp_path: Path) -> None:
    one, other = Learned("d1", "h100-80g", 100, NOW), Learned("d1", "l40s-45g", 50, NOW)
    async with SqliteStore(tmp_path / "db") as store:
        assert await store.learned() == ()
        await store.save_learned((one, other))
        await store.save_learned((evolve(one, held_mib=200, at=NOW + 1),))
    async with SqliteStore(tmp_path / "db") as store:
        assert await store.learned() == (evolve(one, held_mib=200, at=NOW + 1), other)
        await store.save_learned(Learned(f"n{n:05}", "h100-80g", n + 1, NOW + 10 + n) for n in range(KEPT + 5))
        kept = await store.learned()
    assert len(kept) == KEPT
    assert kept[0].digest == "n00005"


async def test_a_node_of_an_older_version_has_no_weights(tmp_path: Path) -> None:
    here = node()
    stored = NodeRow(here.id, here.address, "1", here.inventory, here.engines, (), NOW, (WeightFacts("/w", 1, "f"),))
    async with SqliteStore(tmp_path / "db") as store:
        await store.save_node(stored)
        assert await store.nodes() == (stored,)
    with sqlite3.connect(tmp_path / "db") as raw:
        raw.execute("UPDATE node SET row = json_remove(row, '$.weights')")
    raw.close()
    async with SqliteStore(tmp_path / "db") as store:
        assert await store.nodes() == (evolve(stored, weights=()),)
