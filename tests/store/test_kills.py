"""A writer is killed at any instant: what was acknowledged is there, and what belongs together is there together."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from llmgw.store.upkeep import check
from tests.store.postgresql import running
from tests.store.writer import store_at

TOP = Path(__file__).resolve().parents[2]
OPEN_S = 3.0


class Forks:
    """Writers, one after the other, and what they said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        assert process.stdin is not None
        self._said = process.stdout
        self._asked = process.stdin

    def killed(self, address: str, changes: int, later_s: float) -> int:
        """Kill a writer some time after it said so many changes; the highest that it said, 0 if none.

        With ``changes`` of -1 the time counts from its first instruction, and it may not even have opened the store.
        """
        self._asked.write(f"{address}\n")
        self._asked.flush()
        pid = int(self._line().removeprefix("pid "))
        highest = 0
        if changes >= 0:
            assert self._line() == "opened"
            for _ in range(changes):
                highest = int(self._line())
        time.sleep(later_s)
        os.kill(pid, signal.SIGKILL)
        while not (word := self._line()).startswith("end "):
            if word != "opened":
                highest = int(word)
        assert word == f"end {signal.SIGKILL}", "it has ended by itself"
        return highest

    def _line(self) -> str:
        word = self._said.readline().strip()
        assert word, "the writers are gone"
        return word


@contextmanager
def forks() -> Iterator[Forks]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.store.writer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=TOP,
        env={**os.environ, "PYTHONPATH": str(TOP)},
    )  # fmt: skip
    with process:
        try:
            yield Forks(process)
        finally:
            process.terminate()


async def looked_at(address: str, acknowledged: int) -> float:
    """Open the store that was left behind, look at all of it, and return how long the opening took."""
    began = time.monotonic()
    async with store_at(address) as store:
        seconds = time.monotonic() - began
        assert await check(store, lambda _: None) == ()
        newest = await store.settings()
        settings = 0 if newest is None else int(newest.reason)
        _, keys = await store.keys.keys()
        replicas, serial = await store.replicas()
        acts = [(row.action, row.object) for row in await store.audit(100_000)]
        # Each with its row of the audit, or neither.
        assert acts.count(("settings.change", f"revision {settings}")) == (settings > 0)
        assert sum(action == "settings.change" for action, _ in acts) == settings
        assert sorted(thing for action, thing in acts if action == "key.create") == sorted(k.id for k in keys)
        assert len(acts) == settings + len(keys)
        # A writer goes on after what it finds, so that each kill leaves at most one change undone.
        done = [n for n in range(1, settings + 1) if f"k{n}" in {k.id for k in keys}]
        assert settings >= acknowledged
        assert acknowledged == 0 or acknowledged in done
        assert not replicas or [r.id for r in replicas] == [f"m-{serial}"]
        assert acknowledged == 0 or serial >= acknowledged
    return seconds


def rounds(address: str, times: int, aside: Callable[[int], None] = lambda _: None) -> list[float]:
    """So many kills of one store's writers; how long each opening after it took."""
    dice = random.Random(8)
    opened, acknowledged = [], 0
    with forks() as writers:
        for number in range(times):
            changes = dice.choice((-1, 0, 1, 2, 5))
            later = dice.uniform(0, 0.06) if changes < 0 else dice.uniform(0, 0.02)
            acknowledged = max(acknowledged, writers.killed(address, changes, later))
            aside(number)
            opened.append(trio.run(looked_at, address, acknowledged))
    assert acknowledged > times / 4
    assert max(opened) < OPEN_S
    return opened


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a new database of either kind."""
    if request.param == "sqlite":
        return str(tmp_path / "db")
    made: str = request.getfixturevalue("postgresql").database()
    return made


def test_nothing_acknowledged_is_lost_to_sigkill(address: str) -> None:
    rounds(address, 20)


@pytest.mark.soak
def test_nothing_acknowledged_is_lost_to_sigkill_500_times(address: str) -> None:
    opened = rounds(address, 500)
    print(
        f"\n{address.split(':')[0]}: opened in {max(opened):.3f} s at most, {sorted(opened)[250]:.3f} s at the median"
    )


def test_nothing_acknowledged_is_lost_when_postgresql_is_killed_as_well(tmp_path: Path) -> None:
    with running() as server:
        address = server.database()

        def crash(_: int) -> None:
            server.kill()
            server.start()

        rounds(address, 4, crash)
