"""The keys of a control plane, with a real store and a router that only listens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from attrs import evolve

from llmgw.errors import OperatorError
from llmgw.router.journal import Journal
from llmgw.router.keys import KeyTable
from llmgw.server.keys import KeyBook
from llmgw.settings.document import KeyPolicy
from llmgw.settings.keys import KeyTerms, Limits, Period, Spent
from llmgw.settings.usage import UsageRow
from llmgw.store.opening import sqlite_store
from llmgw.store.sql import SqlStore

NOW = 20_000 * 86400.0 + 3600


class Router:
    """Hears of changes, and has them at once or never."""

    def __init__(self) -> None:
        self.told = 0
        self.there = True

    def keys_changed(self) -> None:
        self.told += 1

    async def keys_in_force(self, version: int, seconds: float) -> bool:
        return self.there


class Plane:
    def __init__(self, store: SqlStore, folder: Path) -> None:
        self.now = NOW
        self.router = Router()
        self.policy = KeyPolicy()
        self.book = KeyBook(store.keys, self.router, folder / "router", lambda: self.now, lambda: self.policy)


@asynccontextmanager
async def plane(folder: Path) -> AsyncIterator[Plane]:
    (folder / "router").mkdir(exist_ok=True)
    async with sqlite_store(folder / "db") as store:
        made = Plane(store, folder)
        await made.book.load()
        yield made


def worker_of(book: KeyBook) -> KeyTable:
    table = KeyTable()
    table.apply(0, book.version, book.since(0), last=True)
    return table


def row(key: str, tokens: int, day: int = 20_000) -> UsageRow:
    return UsageRow(key, "m", day, 1, 0, 0, tokens, 0, 2 * tokens)


async def test_made_used_rotated_revoked(tmp_path: Path) -> None:
    async with plane(tmp_path) as it:
        key, token, in_force = await it.book.create(KeyTerms(owner="ada"), "me")
        assert in_force
        assert it.router.told
        header = b"Bearer " + token.encode()
        assert worker_of(it.book).find(header, NOW).key == key
        assert token.split("_")[2] not in (tmp_path / "db").read_bytes().decode("latin-1")
        before = it.book.version
        rotated, new, _ = await it.book.rotate(key.id, 60.0, "me")
        assert it.book.since(before) == (rotated,)
        both = worker_of(it.book)
        assert both.find(header, NOW + 59)
        assert both.find(b"Bearer " + new.encode(), NOW)
        it.router.there = False
        _, in_force = await it.book.revoke(key.id, "me")
        assert not in_force, "said, where no router confirms it"
        with pytest.raises(OperatorError, match="is revoked, which is for good"):
            await it.book.rotate(key.id, 0, "me")
        with pytest.raises(OperatorError, match="is revoked"):
            await it.book.change(key.id, KeyTerms(), "me")
        with pytest.raises(OperatorError, match="there is none of this id"):
            it.book.row("nope")
        said = [(e.action, e.by) for e in await it.book.events(key.id, 9)]
        assert said == [("key.revoke", "me"), ("key.rotate", "me"), ("key.create", "me")]
    async with plane(tmp_path) as it:
        assert [k.revoked for k in it.book.rows()] == [NOW]
        assert it.book.version == 3


async def test_terms_that_are_refused(tmp_path: Path) -> None:
    async with plane(tmp_path) as it:
        for terms, said in (
            (KeyTerms(owner="a\nb"), "one line"),
            (KeyTerms(tags=("x",) * 33), "more than 32"),
            (KeyTerms(models=()), "are none"),
            (KeyTerms(models=("a b",)), "neither a model's name nor a pattern"),
            (KeyTerms(limits=Limits(requests_per_minute=-1)), "requests a minute"),
            (KeyTerms(limits=Limits(budget_cost=2**60)), "budget of cost"),
            (KeyTerms(expires=NOW), "in the past"),
            (KeyTerms(expires=1e300), "seconds since 1970"),
        ):
            with pytest.raises(OperatorError, match=said):
                await it.book.create(terms, "me")
        assert it.book.rows() == ()
        key, _, _ = await it.book.create(KeyTerms(expires=NOW + 5), "me")
        it.now += 10
        changed, _ = await it.book.change(key.id, evolve(key.terms, owner="x"), "me")
        assert changed.owner == "x", "an expiry that stays may be over"


async def test_budgets_are_added_up_from_the_store(tmp_path: Path) -> None:
    async with plane(tmp_path) as it:
        terms = KeyTerms(limits=Limits(budget_tokens=100, budget_period=Period.DAY))
        key, _, _ = await it.book.create(terms, "me")
        free, _, _ = await it.book.create(KeyTerms(), "me")
        mark, rows = it.book.spent(0)
        assert rows == (Spent(key.slot, 20_000 * 86400, 0, 0, Period.DAY),)
        assert await it.book.used("w", 1, (row(key.id, 30), row(key.id, 500, 19_999), row(free.id, 7)))
        new_mark, rows = it.book.spent(mark)
        assert rows == (Spent(key.slot, 20_000 * 86400, 30, 60, Period.DAY),)
        assert it.book.spent(new_mark) == (new_mark, ())
        limited, _ = await it.book.change(free.id, evolve(free.terms, limits=terms.limits), "me")
        assert it.book.spent(new_mark)[1] == (Spent(free.slot, 20_000 * 86400, 7, 14, Period.DAY),), (
            "what it used already counts"
        )
        assert it.book.budget_spent(limited) == Spent(free.slot, 20_000 * 86400, 7, 14, Period.DAY)
        assert await it.book.used("w", 2, (row(free.id, 500, 19_999),))
        for period, began, tokens in ((Period.MONTH, 19_997, 507), (Period.DAY, 20_000, 7)):
            mark = it.book.spent(0)[0]
            limits = evolve(terms.limits, budget_period=period)
            await it.book.change(free.id, evolve(free.terms, limits=limits), "me")
            assert it.book.spent(mark)[1] == (Spent(free.slot, began * 86400, tokens, 2 * tokens, period),)
    async with plane(tmp_path) as it:
        assert {s.tokens for s in it.book.spent(0)[1]} == {30, 7}


async def test_what_a_dead_worker_left_is_collected_once(tmp_path: Path) -> None:
    (tmp_path / "router").mkdir()
    journal = Journal(tmp_path / "router")
    journal.add((row("a", 5),))
    journal.add((row("a", 6),))
    async with plane(tmp_path) as it:
        said = journal.next()
        assert said is not None
        assert await it.book.used(journal.ledger, said.seq, said.rows)
        journal.add((row("a", 7),))
        journal.close()
    for _ in range(2):
        async with plane(tmp_path) as it:
            (found,) = await it.book.usage(0, 99_999, None)
            assert (found.requests, found.prompt) == (3, 18)
    assert list((tmp_path / "router").glob("usage-*")) == []


async def test_a_store_that_cannot_be_written_leaves_usage_with_the_worker(tmp_path: Path) -> None:
    async with plane(tmp_path) as it:
        await it.book._store._db.write(lambda c: c.execute("DROP TABLE usage"))  # type: ignore[attr-defined]
        assert not await it.book.used("w", 1, (row("a", 1),))


async def test_no_key_lives_longer_than_the_policy_says(tmp_path: Path) -> None:
    async with plane(tmp_path) as it:
        old, _, _ = await it.book.create(KeyTerms(owner="old"), "me")
        it.policy = KeyPolicy(longest_days=30.0)
        key, _, _ = await it.book.create(KeyTerms(owner="ada"), "me")
        assert key.expires == NOW + 30 * 86400
        with pytest.raises(OperatorError, match=r"is 31 days from now\. keys\.longest_days of the settings allows 30"):
            await it.book.create(KeyTerms(expires=NOW + 31 * 86400), "me")
        with pytest.raises(OperatorError, match="the expiry: is none"):
            await it.book.change(key.id, evolve(key.terms, expires=None), "me")
        changed, _ = await it.book.change(old.id, evolve(old.terms, owner="older"), "me")
        assert (changed.owner, changed.expires) == ("older", None), "keys that there are stay as they are"
        it.now += 20 * 86400
        renewed, _ = await it.book.change(key.id, evolve(key.terms, expires=NOW + 50 * 86400), "me")
        assert renewed.expires == NOW + 50 * 86400
