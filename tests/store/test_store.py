"""The store, in SQLite and in PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
from attrs import evolve

from llmgw.scheduler.decide import decide
from llmgw.scheduler.explain import Candidate, Decision, DecisionKind, Refusal, Unplaced
from llmgw.scheduler.memory import Learned
from llmgw.scheduler.state import ShardState
from llmgw.store.api import NodeRow, PassRecord
from llmgw.store.database import StoreError
from llmgw.store.learned import KEPT
from llmgw.store.sql import SqlStore
from tests.scheduler.clusters import NOW, cluster, model, node, report, row

UNPLACED = Unplaced(
    "m", 2, 1, "nowhere", (Candidate("n1", "p", (Refusal("f", "r", "do"), Refusal("g", "s"))), Candidate("n2", "p", (Refusal("f", "x"),))), 5.0
)  # fmt: skip


def record(epoch: int, serial: int = 1, **more: object) -> PassRecord:
    made = PassRecord(epoch, NOW, (), serial, (), ())
    return evolve(made, **more)


async def test_what_was_written_is_there_after_a_restart(opened: Callable[[], SqlStore]) -> None:
    replica = row()
    here = node(reports=(report(replica, ShardState.READY),))
    stored = NodeRow(here.id, here.address, "1", here.inventory, here.engines, here.reports, NOW)
    decision = Decision(DecisionKind.PLACE, "m", "m-1", "n1", "because")
    async with opened() as store:
        name = await store.cluster()
        epoch = await store.new_epoch()
        first = await store.add_settings("a: 1", "me", "first", NOW)
        assert await store.add_settings("a: 1", "you", "again", NOW + 1) == first
        await store.add_settings("a: 2", "me", "second", NOW + 2)
        await store.save_node(stored)
        number = await store.save_pass(
            record(epoch, 7, replicas=(replica,), decisions=(decision,), unplaced=(UNPLACED,))
        )
    async with opened() as store:
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


async def test_every_row_that_the_scheduler_makes_can_be_stored(opened: Callable[[], SqlStore]) -> None:
    outcome = decide(cluster((node(),), (model(replicas=5),)), NOW)
    async with opened() as store:
        epoch = await store.new_epoch()
        await store.save_pass(
            PassRecord(epoch, NOW, outcome.replicas, outcome.next_serial, outcome.decisions, outcome.unplaced)
        )
        assert await store.replicas() == (outcome.replicas, outcome.next_serial)
        assert await store.unplaced() == outcome.unplaced


async def test_an_older_epoch_writes_nothing(opened: Callable[[], SqlStore]) -> None:
    async with opened() as store:
        old = await store.new_epoch()
        new = await store.new_epoch()
        with pytest.raises(StoreError, match=f"epoch {new} was taken since"):
            await store.save_pass(record(old, 9))
        assert (await store.replicas())[1] == 1
        await store.save_pass(record(new, 9))
        assert (await store.replicas())[1] == 9


async def test_a_write_that_is_cancelled_is_whole_or_not_there(opened: Callable[[], SqlStore]) -> None:
    async with opened() as store:
        epoch = await store.new_epoch()
        for serial in range(2, 30):
            with trio.move_on_after(0.0005):
                await store.save_pass(record(epoch, serial, replicas=(row(serial),)))
            rows, kept = await store.replicas()
            assert [r.id for r in rows] in ([], [f"m-{kept}"])


async def test_decisions_about_one_thing_only(opened: Callable[[], SqlStore]) -> None:
    def decided(number: int) -> Decision:
        return Decision(DecisionKind.PLACE, f"m{number % 3}", f"m{number % 3}-{number}", f"n{number % 2}", str(number))

    async with opened() as store:
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


async def test_a_decision_is_found_under_every_node_that_it_concerns(opened: Callable[[], SqlStore]) -> None:
    over = Decision(DecisionKind.PLACE, "m", "m-1", "n1", "over three", ("n3", "n2"))
    alone = Decision(DecisionKind.PLACE, "m", "m-2", "n2", "on one")
    async with opened() as store:
        epoch = await store.new_epoch()
        await store.save_pass(record(epoch, decisions=(over, alone)))
        for name, reasons in (("n1", ["over three"]), ("n2", ["on one", "over three"]), ("n3", ["over three"])):
            assert [d.decision.reason for d in await store.decisions(9, name)] == reasons
        assert [d.decision for d in await store.decisions(9)] == [alone, over]
        assert [d.decision.reason for d in await store.decisions(1, "n2")] == ["on one"]
        # What goes with the oldest passes goes whole.
        await store.database.write(lambda connection: connection.execute("DELETE FROM pass"))
        left = await store.database.read(lambda c: c.execute("SELECT count(*) FROM decision_other").fetchone())
        assert left == (0,)


async def test_what_was_learned_is_kept_and_bounded(opened: Callable[[], SqlStore]) -> None:
    one, other = Learned("d1", "h100-80g", 100, NOW), Learned("d1", "l40s-45g", 50, NOW)
    async with opened() as store:
        assert await store.learned() == ()
        await store.save_learned((one, other))
        await store.save_learned((evolve(one, held_mib=200, at=NOW + 1),))
    async with opened() as store:
        assert await store.learned() == (evolve(one, held_mib=200, at=NOW + 1), other)
        await store.save_learned(Learned(f"n{n:05}", "h100-80g", n + 1, NOW + 10 + n) for n in range(KEPT + 5))
        kept = await store.learned()
    assert len(kept) == KEPT
    assert kept[0].digest == "n00005"
