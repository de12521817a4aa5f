"""An agent that is killed at any point leaves no engine twice, none unknown, and none disturbed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define, frozen

from llmgw.agent import proctree, records
from llmgw.agent.dispatch import Dispatch
from llmgw.agent.epoch import Epoch, EpochFile
from llmgw.agent.stop import stop_engines
from llmgw.scheduler.state import Exit, ShardReport, ShardState
from tests.agent.test_shards import INVENTORY, Node, alive, config, marked, running, soon, start, until

S = ShardState
TOP = Path(__file__).resolve().parents[2]
STARTS, LIVES, ENDS = ("start", "ready"), ("wait", "drain"), ("stop", "forget")
"""What the agents that are killed do: with nothing there, with an engine that streams, and with one that is ended."""


@frozen
class Point:
    """Where an agent is killed; for a step of its shim also whether the next agent comes before the shim goes on."""

    kind: str
    nth: int
    name: str = ""
    late: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.nth} {self.name}{' late' if self.late else ''}"


@define
class Victims:
    """The process that forks the agents, and a folder for what they leave behind."""

    process: subprocess.Popen[str]
    folder: Path

    async def run(self, place: Path, script: tuple[str, ...], point: Point, **engine: Any) -> Victim:
        """One agent on this state folder; returns when it has ended."""
        victim = Victim(self.folder / uuid.uuid4().hex)
        task = {
            "folder": str(place), "script": script, "kind": point.kind, "nth": point.nth, "engine": engine,
            "command": config(place).engines[0].command, "result": str(victim.result), "go": str(victim.go), "asked": str(victim.asked),
        }  # fmt: skip
        if point.kind != "shim" or not point.late:
            victim.go.touch()
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps(task)}\n")
        self.process.stdin.flush()
        with trio.fail_after(30):
            while not victim.result.exists():
                await trio.sleep(0.01)
        victim.code = json.loads(victim.result.read_text())["code"]
        log = Path(f"{victim.result}.log")
        assert victim.code in (0, -signal.SIGKILL), log.read_text() if log.exists() else victim
        return victim


@define
class Victim:
    """An agent that was started to be killed."""

    result: Path
    code: int = 0

    @property
    def go(self) -> Path:
        """The file for which a shim waits after it killed the agent."""
        return Path(f"{self.result}.go")

    @property
    def asked(self) -> Path:
        """What it began to do."""
        return Path(f"{self.result}.asked")

    def points(self) -> tuple[Point, ...]:
        """Every point of a life that was not killed."""
        seen = json.loads(Path(f"{self.result}.points").read_text())
        found = [Point("step", n) for n in range(1, seen["steps"] + 1)]
        found += [Point("mark", n, name) for n, name in enumerate(seen["marks"], 1)]
        steps = Path(f"{self.go}.steps")
        if steps.exists():
            names = steps.read_text().splitlines()
            found += [Point("shim", n, name, late) for late in (False, True) for n, name in enumerate(names, 1)]
        return tuple(found)


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victims]:
    environment = {**os.environ, "PYTHONPATH": str(TOP)}
    command = [sys.executable, "-m", "tests.agent.victim"]
    with subprocess.Popen(command, env=environment, cwd=TOP, stdin=subprocess.PIPE, text=True) as served:
        yield Victims(served, tmp_path_factory.mktemp("victims"))
        assert served.stdin is not None
        served.stdin.close()


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Path]:
    """A folder for state folders; no engine of any of them is left after the test."""
    yield tmp_path
    for place in tmp_path.iterdir():
        if (place / "shards").is_dir():
            stop_engines(place, 0.0)
    assert soon(lambda: marked(tmp_path) == [])


def engines_of(place: Path) -> set[int | None]:
    """Every living process that an engine's command line names and that works below this state folder.

    What an engine forks has its command line until it runs something else, and is no engine.
    """
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            line = (entry / "cmdline").read_bytes()
            if (
                b"engine.py" in line
                and b"/shim/main.py" not in line
                and os.readlink(entry / "cwd").startswith(str(place))
            ):
                now = proctree.stat(int(entry.name))
                found |= {} if now is None else {int(entry.name): now.parent}
    return {pid for pid, parent in found.items() if parent not in found}


def fresh(places: Path) -> Path:
    place = places / uuid.uuid4().hex[:8]
    place.mkdir(mode=0o700)
    return place


async def settled(node: Node, place: Path) -> None:
    """Every engine that lives is known to a shard: at once, or as soon as a shim that was just starting is through."""
    with trio.move_on_after(5):
        while not engines_of(place) <= {s.pid for s in node.shards.alive()}:
            await trio.sleep(0.02)
    assert engines_of(place) <= {s.pid for s in node.shards.alive()}, "an engine that no shard knows"
    assert len(engines_of(place)) <= 1, "two engines"


async def start_again(node: Node, place: Path, **engine: Any) -> None:
    """What the control plane does when it never heard how its command went."""
    dispatch = Dispatch(node.shards, Epoch(EpochFile(place)), lambda: INVENTORY)
    result = await dispatch.run(start(**engine))
    assert result.accepted, result


async def one_start(victims: Victims, place: Path, point: Point, **engine: Any) -> int:
    """Kill an agent while it starts a shard; returns the pid of the one engine that there is in the end."""
    victim = await victims.run(place, STARTS, point, **engine)
    before = engines_of(place)
    async with running(config(place)) as node:
        victim.go.touch()
        await start_again(node, place, **engine)
        await node.until(S.READY)
        # One that was held back right before it told its engine's pid tells it now; the engine may serve already.
        await until(lambda: node.get().pid)
        await settled(node, place)
        pid = node.get().pid
        assert pid is not None
        assert engines_of(place) == {pid}
        assert before <= {pid}, "the engine that was there goes on"
        assert records.read(place / "shards/m-1.0-g1").shard == "m-1.0"
    return pid


async def one_end(victims: Victims, place: Path, point: Point) -> None:
    """Kill an agent while it ends a shard; the next one ends the rest of it, and knows that it was asked to."""
    victim = await victims.run(place, ENDS, point)
    asked = victim.asked.read_text().split() if victim.asked.exists() else []
    async with running(config(place)) as node:
        await settled(node, place)
        if (known := node.shards.find("m-1.0", 1)) is None:
            assert "forget" in asked
        else:
            if not known.shard.state.ended:
                known.stop("enough", 2.0)
            ended = await node.until_ended()
            assert ended.state is S.STOPPED, ended
            # Told twice, by two agents, it dies of the second SIGTERM.
            told_before = "stop" in asked and ended.exit == Exit(None, signal.SIGTERM)
            assert ended.exit == Exit(0) or told_before, ended
            await node.shards.forget("m-1.0", 1)
        assert list((place / "shards").iterdir()) == []
        assert engines_of(place) == set()


@define
class Client:
    """A stream of words, read while agents come and go."""

    report: ShardReport
    tokens: int
    got: bytes = b""

    async def read(self) -> bytes:
        """All of it."""
        body = json.dumps({"model": "m", "prompt": "x", "max_tokens": self.tokens, "stream": True}).encode()
        assert self.report.endpoint is not None
        host, port = self.report.endpoint.removeprefix("http://").split(":")
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            await stream.send_all(
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.report.api_key}\r\n"
                f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )  # fmt: skip
            async for more in stream:
                self.got += more
        return self.got


async def lives(victims: Victims, place: Path, points: list[Point], at_least: float) -> None:
    """Kill one agent after the other while one stream goes through the engine."""
    async with running(config(place)) as node:
        await start_again(node, place, token_s=0.02)
        ready = await node.until(S.READY)
    expected = await Client(ready, 20).read()
    with trio.fail_after(at_least + 60):
        async with trio.open_nursery() as nursery:
            client = Client(ready, int(at_least / 0.02))
            nursery.start_soon(client.read)
            for point in points:
                await victims.run(place, LIVES, point)
                assert alive(ready.pid), f"the engine ended at {point}"
                async with running(config(place)) as node:
                    (report,) = node.shards.reports()
                    assert report.state in (S.READY, S.DRAINING), (point, report)
                    assert (report.pid, report.endpoint) == (ready.pid, ready.endpoint), point
                    assert report.api_key == ready.api_key
                    await settled(node, place)
    head, _, body = client.got.partition(b"\r\n\r\n")
    assert b"200 OK" in head
    assert client.got.endswith(b"0\r\n\r\n"), "the stream ended as it should"
    assert body.count(b"data: ") == client.tokens + 1
    again = await Client(ready, client.tokens).read() if at_least < 2 else None
    assert again is None or again == client.got
    assert expected.endswith(b"0\r\n\r\n")


def spread(points: tuple[Point, ...], kind: str, count: int, seed: int) -> list[Point]:
    """So many points of a kind, all over a life: one of each part of it, which one is drawn."""
    found = [p for p in points if p.kind == kind]
    rng = random.Random(seed)
    count = min(count, len(found))
    return [found[rng.randrange(n * len(found) // count, (n + 1) * len(found) // count)] for n in range(count)]


async def points_of(victims: Victims, places: Path) -> tuple[tuple[Point, ...], tuple[Point, ...], tuple[Point, ...]]:
    """The points of a start, of a life and of an end, from agents that nobody kills."""
    place, nowhere = fresh(places), Point("none", 0)
    return tuple([(await victims.run(place, script, nowhere)).points() for script in (STARTS, LIVES, ENDS)])  # type: ignore[return-value]


async def in_parallel(rounds: list[tuple[Point, Point]], victims: Victims, places: Path) -> None:
    """A start and an end each, a few at a time."""
    todo = iter(rounds)

    async def worker() -> None:
        for first, last in todo:
            try:
                place = fresh(places)
                await one_start(victims, place, first)
                await one_end(victims, place, last)
            except BaseException as failed:
                failed.add_note(f"killed at {first}, then at {last}")
                raise

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(worker)


@pytest.mark.long
async def test_an_agent_killed_at_points_of_a_life(victims: Victims, places: Path) -> None:
    starts, goes_on, ends = await points_of(victims, places)
    first = spread(starts, "step", 2, 1) + spread(starts, "mark", 4, 2) + spread(starts, "shim", 6, 3)
    last = spread(ends, "step", 5, 4) + spread(ends, "mark", 7, 5)
    middle = spread(goes_on, "step", 3, 6) + spread(goes_on, "mark", 3, 7)
    await in_parallel(list(zip(first, last, strict=True)), victims, places)
    await lives(victims, fresh(places), middle, 1.5)


@pytest.mark.soak
async def test_an_agent_killed_at_every_point_of_a_life(victims: Victims, places: Path) -> None:
    starts, goes_on, ends = await points_of(victims, places)
    print(f"\npoints: {len(starts)} of a start, {len(goes_on)} of a life, {len(ends)} of an end")
    rng = random.Random(20)
    named = [p for p in starts if p.kind != "step"]
    first = named + rng.choices([p for p in starts if p.kind == "step"], k=max(40, 200 - len(named)))
    marks = [p for p in ends if p.kind == "mark"]
    last = (marks + rng.choices([p for p in ends if p.kind == "step"], k=max(20, len(first) - len(marks))))[
        : len(first)
    ]
    last += rng.choices(ends, k=len(first) - len(last))
    rng.shuffle(last)
    middle = [p for p in goes_on if p.kind == "mark"] + spread(goes_on, "step", 40, 7)
    print(f"rounds: {len(first)} starts, {len(last)} ends, {len(middle)} lives")
    await in_parallel(list(zip(first, last, strict=True)), victims, places)
    await lives(victims, fresh(places), middle, 10)
