"""A job whose agent is cancelled wherever it may be: it ends in time, and the next agent finishes what was begun."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from llmgw.agent.jobs.child import Work
from llmgw.errors import OperatorError
from llmgw.scheduler.jobs import JobSpec, JobState
from tests.agent.jobs.test_runner import end, get, running, spec
from tests.agent.test_shards import until
from tests.sweep import Injection, sweep

WITHIN_S = 3.0
"""What a child is given to end by itself, and a moment."""

# It starts a process of its own, says how far it is, and is done when it may go on: left alone, neither ever ends.
FETCH = """
sleep 600 &
echo '{"type": "bytes", "done": 5, "total": 10}'
while [ ! -e "$GO" ]; do sleep 0.01; done
kill $!
echo '{"type": "done", "path": "/p"}'
"""


class Marked:
    """Every job is the script above, told from everything else by a variable."""

    def __init__(self, folder: Path) -> None:
        self.mark = f"LLMGW_SWEEP={folder}"
        self.go = folder / "go"

    def work(self, _spec: JobSpec, _folder: Path) -> Work:
        name, _, value = self.mark.partition("=")
        return Work(("/bin/sh", "-c", FETCH), {**os.environ, name: value, "GO": str(self.go)})

    def finish(self, _spec: JobSpec, result: dict[str, str]) -> dict[str, str]:
        return result

    def living(self) -> list[str]:
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(entry.name)
        return found


def fetches(folder: Path, stride: int) -> tuple[Injection, ...]:
    works = Marked(folder)

    async def scenario() -> None:
        async with running(folder, works) as jobs:
            try:
                await jobs.start(spec("w"))
            except OperatorError as refused:
                # An agent that has just been cancelled may say so before its tasks are told.
                assert refused.reason == "the agent is stopping"
                return
            await until(lambda: get(jobs).report.done_bytes)
            works.go.touch()
            await end(jobs)

    async def after() -> None:
        with trio.fail_after(10):
            while works.living():
                await trio.sleep(0.01)
        works.go.touch()
        async with running(folder, works) as jobs:
            await jobs.start(spec("w"))
            report = await end(jobs)
        assert report.state is JobState.DONE
        assert report.result == {"path": "/p"}
        shutil.rmtree(folder / "jobs")
        works.go.unlink()

    return sweep(scenario, after=after, within_s=WITHIN_S, stride=stride, real_clock=True)


def test_cancelled_at_some_points_of_a_fetch(tmp_path: Path) -> None:
    assert len(fetches(tmp_path, 12)) >= 3


@pytest.mark.soak
def test_cancelled_at_every_point_of_a_fetch(tmp_path: Path) -> None:
    points = fetches(tmp_path, 1)
    took = max(p.took_s for p in points)
    print(f"\nfetch: cancelled at {len(points)} points in {len({p.site for p in points})} places, {took:.2f} s at most")
    assert len(points) > 30
