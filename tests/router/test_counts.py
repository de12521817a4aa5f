"""Cells that processes share: lanes, locks, growth, deaths."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llmgw.errors import OperatorError
from llmgw.router import limits
from llmgw.router.counts import SharedCounts
from llmgw.router.limits import LANES, Grant
from llmgw.settings.keys import Limits

WORKER = """
import sys
from pathlib import Path
from llmgw.router import limits
from llmgw.router.counts import SharedCounts
from llmgw.settings.keys import Limits
counts = SharedCounts(Path(sys.argv[1]))
most = Limits(requests_per_minute=int(sys.argv[2]))
print("there", flush=True)
sys.stdin.readline()
granted = 0
for _ in range(int(sys.argv[3])):
    cells, base = counts.cells(3)
    counts.lock(3)
    found = limits.reserve(cells, base, counts.lane, most, 1000.0, 0.0, 1, 0)
    counts.unlock(3)
    if isinstance(found, limits.Grant):
        granted += 1
        counts.lock(3)
        limits.settle(cells, base, counts.lane, found, most, 1000.0, 0.0, 1, 0)
        counts.unlock(3)
print(granted, flush=True)
sys.stdin.readline()
"""


def start(folder: Path, limit: int, each: int) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", WORKER, str(folder), str(limit), str(each)],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdout.readline() == "there\n"  # type: ignore[union-attr]
    process.stdin.write("go\n")  # type: ignore[union-attr]
    process.stdin.flush()  # type: ignore[union-attr]


def test_workers_together_grant_exactly_the_limit(tmp_path: Path) -> None:
    """One of them is there first, alone and so without a lock, and is joined by the others in the middle of its work."""
    limit, each = 60_000, 40_000
    first = start(tmp_path, limit, each)
    started = [first]
    try:
        go(first)
        started += [start(tmp_path, limit, each) for _ in range(2)]
        for process in started[1:]:
            go(process)
        granted = [int(process.stdout.readline()) for process in started]  # type: ignore[union-attr]
        assert sum(granted) == limit
        assert sum(bool(n) for n in granted) > 1
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_who_is_alone_knows_it(tmp_path: Path) -> None:
    def locks(counts: SharedCounts) -> bool:
        counts.lock(1)
        locked = counts._locked
        counts.unlock(1)
        assert not counts._locked
        return locked

    one = SharedCounts(tmp_path)
    assert not locks(one)
    other = SharedCounts(tmp_path)
    assert locks(one)
    assert locks(other)
    one.close()
    assert not locks(other)
    process = start(tmp_path, 1, 0)
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.communicate()
    assert locks(other), "nobody said that it is gone"
    SharedCounts(tmp_path).close()
    assert not locks(other)
    other.close()


def reserve(counts: SharedCounts, slot: int = 1, concurrent: int = 2) -> object:
    cells, base = counts.cells(slot)
    counts.lock(slot)
    try:
        return limits.reserve(cells, base, counts.lane, Limits(concurrent=concurrent), 1000.0, 0.0, 5, 0)
    finally:
        counts.unlock(slot)


def test_what_a_dead_worker_had_under_way_is_forgotten_and_nothing_else(tmp_path: Path) -> None:
    living, dying = SharedCounts(tmp_path), SharedCounts(tmp_path)
    assert {living.lane, dying.lane} == {0, 1}
    assert isinstance(reserve(living), Grant)
    assert isinstance(reserve(dying), Grant)
    assert not isinstance(reserve(living), Grant)
    dying.close()
    assert isinstance(reserve(living), Grant)
    assert not isinstance(reserve(living), Grant)
    living.close()


def test_killed_without_a_word(tmp_path: Path) -> None:
    script = WORKER.replace(
        "print(granted",
        "reserve = limits.reserve(*counts.cells(1), counts.lane, most, 1000.0, 0.0, 5, 0); print(granted",
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path), "9", "0"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdout.readline()
    process.stdin.write("go\n")
    process.stdin.flush()
    process.stdout.readline()
    beside = SharedCounts(tmp_path)
    assert beside.lane == 1
    assert not isinstance(reserve(beside, concurrent=1), Grant)
    process.kill()
    process.communicate()
    after = SharedCounts(tmp_path)
    assert after.lane == 0
    assert isinstance(reserve(beside, concurrent=1), Grant)
    after.close()
    beside.close()


def test_what_was_granted_outlives_every_worker_of_this_boot(tmp_path: Path) -> None:
    first = SharedCounts(tmp_path)
    assert isinstance(reserve(first), Grant)
    first.close()
    second = SharedCounts(tmp_path)
    cells, base = second.cells(1)
    assert cells[base + 1] == 1, "a request in the window"
    second.close()
    with (tmp_path / "limits-3").open("r+b") as file:
        file.write(b"\1" * 8)  # as another boot left it
    third = SharedCounts(tmp_path)
    cells, base = third.cells(1)
    assert cells[base + 1] == 0
    third.close()


def test_more_keys_than_there_was_room_for(tmp_path: Path) -> None:
    one, other = SharedCounts(tmp_path), SharedCounts(tmp_path)
    assert isinstance(reserve(one, slot=5000, concurrent=1), Grant)
    assert not isinstance(reserve(other, slot=5000, concurrent=1), Grant)
    assert isinstance(reserve(one, slot=1), Grant), "the first ones are where they were"
    assert (tmp_path / "limits-3").stat().st_size % (1024 * 1024) == 0
    one.close()
    other.close()


def test_more_workers_than_lanes(tmp_path: Path) -> None:
    there = [SharedCounts(tmp_path) for _ in range(LANES)]
    with pytest.raises(OperatorError, match="16 router workers count there already"):
        SharedCounts(tmp_path)
    there.pop().close()
    SharedCounts(tmp_path).close()
    for counts in there:
        counts.close()
