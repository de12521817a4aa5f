"""Drains and orders in either database: with the decision and the audit row or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llmgw.errors import OperatorError
from llmgw.scheduler.orders import Drained, Order, OrderKind
from llmgw.store.api import PassRecord
from llmgw.store.audit import Act
from llmgw.store.sql import SqlStore

NewStore = Callable[[], Callable[[], SqlStore]]
DRAINED = Drained("anna", 5.0, "new fans", force=True)
ORDER = Order("m-1", OrderKind.RESTART, 3, "anna", 6.0, "it stutters")


def did(action: str, what: str) -> Act:
    return Act(7.0, "anna", action, what, "why")


async def test_they_are_written_with_decision_and_audit_row_and_taken_back(new_store: NewStore) -> None:
    opened = new_store()
    async with opened() as store:
        epoch = await store.new_epoch()
        await store.save_drain(epoch, "n1", Drained("b", 1.0), did("node.drain", "n1"))
        await store.save_drain(epoch, "n1", DRAINED, did("node.drain", "n1"))
        await store.save_order(epoch, "m", ORDER, did("replica.restart", "m-1"))
    async with opened() as store:
        assert (await store.drains(), await store.orders()) == ({"n1": DRAINED}, {"m-1": ORDER})
        assert [d.decision.reason for d in await store.decisions(1, "n1")] == ["drained by anna: new fans"]
        assert [d.decision.reason for d in await store.decisions(1, "m-1")] == ["to be restarted by anna: it stutters"]
        await store.save_drain(epoch, "n1", None, did("node.undrain", "n1"))
        newer = Order("m-1", OrderKind.STOP, 3, "b", 8.0)
        await store.save_order(epoch, "m", newer, did("replica.stop", "m-1"))
        await store.save_pass(PassRecord(epoch, 9.0, (), 1, (), (), over=(ORDER,)))
        assert (await store.drains(), await store.orders()) == ({}, {"m-1": newer}), "a newer one is not done by it"
        await store.save_pass(PassRecord(epoch, 9.0, (), 1, (), (), over=(newer,)))
        assert await store.orders() == {}
        assert [row.action for row in await store.audit(9)] == [
            "replica.stop", "node.undrain", "replica.restart", "node.drain", "node.drain",
        ]  # fmt: skip
        assert (await store.verify_audit()).wrong is None


async def test_who_leads_no_more_changes_nothing(new_store: NewStore) -> None:
    async with new_store()() as store:
        epoch = await store.new_epoch()
        await store.new_epoch()
        with pytest.raises(OperatorError, match="was taken since"):
            await store.save_drain(epoch, "n1", DRAINED, did("node.drain", "n1"))
        with pytest.raises(OperatorError, match="was taken since"):
            await store.save_order(epoch, "m", ORDER, did("replica.restart", "m-1"))
        assert (await store.drains(), await store.orders(), await store.audit(9)) == ({}, {}, ())
