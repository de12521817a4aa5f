"""Usage on its way to the store: nothing is lost and nothing counted twice, whoever dies when."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from llmgw.router.journal import Batch, Journal, left_behind, remove
from llmgw.settings.usage import UsageBook, UsageRow, merged


def row(requests: int = 1, key: str = "k", model: str = "m") -> UsageRow:
    return UsageRow(key, model, 20000, requests, 0, 0, 10 * requests, requests, 0)


def test_what_a_dead_worker_left(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add((row(1),))
    journal.add((row(2), row(1, "other")))
    assert left_behind(tmp_path) == (), "it lives"
    journal.close()
    ((name, path, batches),) = left_behind(tmp_path)
    assert name == journal.ledger
    assert batches == (Batch(1, (row(1),)), Batch(2, (row(2), row(1, "other"))))
    with path.open("ab") as file:
        file.write(b'{"seq":3,"rows":[{"key":"k","mo')  # killed in its write
    assert left_behind(tmp_path)[0][2] == batches
    remove(path)
    assert left_behind(tmp_path) == ()


def test_said_until_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.next() is None
    journal.add((row(1),))
    journal.add((row(2),))
    said = journal.next()
    assert said == Batch(2, (row(3),)), "together"
    journal.add((row(4),))
    assert journal.next() is said, "what was said stays as it was said"
    journal.kept(1)
    assert journal.next() is said
    journal.kept(2)
    assert journal.next() == Batch(3, (row(4),))
    assert journal.unkept == 1
    journal.kept(3)
    assert journal.unkept == 0
    assert (tmp_path / f"usage-{journal.ledger}.jsonl").stat().st_size == 0
    journal.close()


def test_without_a_control_plane_it_stays_small(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for n in range(3000):
        journal.add(tuple(row(1, f"key-{k}") for k in range(20)))
        if n == 5:
            journal.next()
    assert (tmp_path / f"usage-{journal.ledger}.jsonl").stat().st_size < 2 * 1024 * 1024
    assert journal.unkept <= 70
    journal.close()
    ((_, _, batches),) = left_behind(tmp_path)
    assert sum(r.requests for b in batches for r in b.rows) == 3000 * 20
    assert [b.seq for b in batches] == sorted({b.seq for b in batches})


def test_a_full_disk_is_said_and_forgets_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    os.close(journal._file)
    journal._file = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError):
        journal.add((row(5),))
    assert journal.next() == Batch(1, (row(5),))
    journal._bytes = 1  # as if something had been written before
    journal.kept(1)
    assert journal.next() is None


def test_a_book_gives_its_sums_once() -> None:
    book = UsageBook()
    assert not book
    book.add("k", "m", 1, 10, 2, 7, failed=False, estimated=False)
    book.add("k", "m", 1, 1, 1, 1, failed=True, estimated=True)
    book.add("", "m", 1, 1, 0, 0, failed=False, estimated=False)
    assert book.take() == (UsageRow("k", "m", 1, 2, 1, 1, 11, 3, 8), UsageRow("", "m", 1, 1, 0, 0, 1, 0, 0))
    assert book.take() == ()
    assert merged((row(1), row(2), row(1, "x"))) == (row(3), row(1, "x"))


class Deaths(RuleBasedStateMachine):
    """A worker, a control plane and its store; either may die at any time. A store keeps each ledger up to a number."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Batch] = []
        self.journal = Journal(None)
        self.used = 0
        self.kept: dict[str, int] = {}
        self.total = 0
        self.wire: list[Batch] = []

    def store(self, ledger: str, batch: Batch) -> None:
        if batch.seq > self.kept.get(ledger, 0):
            self.kept[ledger] = batch.seq
            self.total += sum(r.requests for r in batch.rows)

    @rule(requests=st.integers(1, 5))
    def use(self, requests: int) -> None:
        self.journal.add((row(requests),))
        self.used += requests

    @rule()
    def say(self) -> None:
        if (batch := self.journal.next()) is not None:
            self.wire.append(batch)

    @rule(answered=st.booleans())
    def keep(self, answered: bool) -> None:
        """The control plane takes what was said; its answer may be lost with it."""
        for batch in self.wire:
            self.store(self.journal.ledger, batch)
            if answered:
                self.journal.kept(batch.seq)
        self.wire.clear()

    @rule()
    def control_plane_dies(self) -> None:
        self.wire.clear()

    @rule()
    def worker_dies(self) -> None:
        """What its file has is collected."""
        for batch in self.journal.needed():
            self.store(self.journal.ledger, batch)
        self.journal, self.wire = Journal(None), []
        assert self.total == self.used

    @invariant()
    def never_more(self) -> None:
        assert self.total <= self.used


TestDeaths = Deaths.TestCase
