"""Keys and usage in SQLite."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from attrs import evolve

from llmgw.errors import OperatorError
from llmgw.settings.keys import ApiKey, Limits
from llmgw.settings.usage import UsageRow
from llmgw.store.keys import KeyEvent
from llmgw.store.sql import SqlStore


def event(action: str, key: str = "a") -> KeyEvent:
    return KeyEvent(1.0, key, action, "me", "")


def row(day: int, requests: int = 1, key: str = "a", model: str = "m") -> UsageRow:
    return UsageRow(key, model, day, requests, 0, 1, 10 * requests, requests, 7)


async def test_keys_are_numbered_and_versioned(opened: Callable[[], SqlStore]) -> None:
    async with opened() as store:
        keys = store.keys
        assert await keys.keys() == (0, ())
        a = await keys.add_key(ApiKey("a", 0, 0, "d", 1.0, limits=Limits(5)), event("created"))
        b = await keys.add_key(ApiKey("b", 0, 0, "e", 1.0), event("created", "b"))
        assert [(k.slot, k.version) for k in (a, b)] == [(1, 1), (2, 2)]
        changed = await keys.change_key(evolve(a, revoked=2.0), event("revoked"))
        assert (changed.slot, changed.version) == (1, 3)
        with pytest.raises(OperatorError, match="changed by somebody else"):
            await keys.change_key(evolve(a, owner="late"), event("changed"))
        with pytest.raises(OperatorError):
            await keys.add_key(ApiKey("b", 0, 0, "f", 1.0), event("created", "b"))
        assert [e.action for e in await keys.key_events("a", 10)] == ["revoked", "created"]
        assert len(await keys.key_events("a", 1)) == 1
    async with opened() as store:
        assert await store.keys.keys() == (3, (b, changed)), "by their last change"


async def test_a_batch_counts_once(opened: Callable[[], SqlStore]) -> None:
    async with opened() as store:
        keys = store.keys
        await keys.add_usage("one", ((1, (row(5),)), (2, (row(5, 2), row(6)))), 0.0)
        await keys.add_usage("one", ((2, (row(5, 99),)),), 0.0)
        await keys.add_usage("two", ((1, (row(5), row(5, key="b"), row(5, model="n"))),), 0.0)
        assert await keys.usage(5, 5, "a") == (UsageRow("a", "m", 5, 4, 0, 3, 40, 4, 21), row(5, model="n"))
        assert [r.day for r in await keys.usage(0, 9)] == [5, 5, 5, 6]
        assert await keys.usage(7, 9) == ()


async def test_old_ledgers_are_forgotten(opened: Callable[[], SqlStore]) -> None:
    async with opened() as store:
        keys = store.keys
        await keys.add_usage("old", ((1, (row(5),)),), 0.0)
        await keys.add_usage("new", ((1, (row(5),)),), 31 * 86400.0)
        left = await store.database.read(lambda c: c.execute("SELECT id FROM usage_ledger").fetchall())
        assert left == [("new",)]
