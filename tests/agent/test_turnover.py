"""Taking over settings and an edited file: what is tried, what is gone back to, and what is left after a kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing
from attrs import define, evolve, field

from fakes.machines import MACHINES, render
from llmgw.agent.kept import Kept, KeptFile, Refusal
from llmgw.agent.offers import Offers
from llmgw.agent.own_file import OwnFile
from llmgw.agent.plan import MOST_TRIES
from llmgw.agent.turnover import PROVEN_S, Turnover
from llmgw.errors import OperatorError
from llmgw.link.messages import SettingsApplied
from llmgw.settings.agent_part import NodeSettings
from llmgw.settings.daemon import AgentConfig, Discovery, GpuSource
from tests.agent.taker import settings_of
from tests.agent.test_shards import S, alive, config, running, start, written
from tests.sweep import busy_threads, sweep

TOP = Path(__file__).resolve().parents[2]
FILE = {
    "id": "n1", "control_planes": ["127.0.0.1:1"], "tls": {"certificate": "c", "key": "k", "ca": "a"}, "ports": "20000-20010",
}  # fmt: skip


@define
class World:
    """A turnover over an agent that is only a configuration; ``bad`` says on which it fails, and how."""

    folder: Path
    bad: Callable[[AgentConfig], BaseException | None] = lambda _: None
    later: Callable[[AgentConfig], BaseException | None] = lambda _: None
    slow: Callable[[AgentConfig], bool] = lambda _: False
    lives: list[AgentConfig] = field(factory=list)
    said: list[SettingsApplied] = field(factory=list)
    steps: list[str] = field(factory=list)
    offers: Offers | None = None
    turnover: Turnover | None = None
    proven_s: float = PROVEN_S
    look_s: float = 0.5

    def __attrs_post_init__(self) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if not self.file.exists():
            self.write()

    @property
    def file(self) -> Path:
        return self.folder / "agent.yaml"

    def write(self, **more: object) -> None:
        fresh = self.folder / "fresh"
        fresh.write_text(json.dumps({**FILE, "state_dir": str(self.folder), **more}))
        fresh.replace(self.file)

    @property
    def kept(self) -> Kept:
        return KeptFile(self.folder).read()

    def usable(self, config: AgentConfig) -> None:
        if config.discovery.root == "/gone":
            raise OperatorError("discovery.root", "/gone is not a folder")

    async def life(
        self, config: AgentConfig, offers: Offers, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        if self.slow(config):
            await trio.sleep_forever()
        await trio.sleep(self.look_s / 5)
        if (failure := self.bad(config)) is not None:
            raise failure
        self.lives.append(config)
        self.offers = offers
        task_status.started()
        if (failure := self.later(config)) is not None:
            await trio.sleep(5)
            raise failure
        await trio.sleep_forever()

    async def start(self, nursery: trio.Nursery) -> None:
        """Start it, as a new process would."""
        self.turnover = Turnover(
            OwnFile(self.file), KeptFile(self.folder), self.life, self.usable, self.steps.append, self.proven_s
        )
        nursery.start_soon(self.turnover.run)
        await self.until(1)

    async def until(self, lives: int) -> AgentConfig:
        with trio.fail_after(200):
            while len(self.lives) < lives:
                await trio.sleep(self.look_s)
        await trio.sleep(self.look_s)
        return self.lives[-1]

    async def when(self, so: Callable[[], bool]) -> None:
        """The disk takes real time, so what is waited for is seen and not timed."""
        with trio.fail_after(400):
            while not so():
                await trio.sleep(self.look_s)

    async def proven(self, times: int = 1) -> None:
        await self.when(lambda: self.steps.count("proven") == times)

    async def offer(self, settings: NodeSettings) -> SettingsApplied | None:
        """What a control plane sends; the answer, or ``None`` when the agent starts again first."""
        assert self.offers is not None
        before = len(self.said), len(self.lives)
        self.offers.offered(settings, self.said.append)
        with trio.fail_after(200):
            while (len(self.said), len(self.lives)) == before:
                await trio.sleep(self.look_s)
        return self.said[-1] if len(self.said) > before[0] else None


GOOD = settings_of({"ports": "30000-30010"})
BETTER = settings_of({"ports": "40000-40010"}, 3)


def yes(settings: NodeSettings) -> SettingsApplied:
    return SettingsApplied(settings.revision, settings.digest)


def on(settings: NodeSettings, failure: BaseException) -> Callable[[AgentConfig], BaseException | None]:
    first = int(json.loads(settings.text)["ports"].split("-")[0])
    return lambda config: failure if config.port_first == first else None


@pytest.fixture
def clock(autojump_clock: trio.testing.MockClock) -> trio.testing.MockClock:
    autojump_clock.autojump_threshold = 0.001
    return autojump_clock


async def test_settings_are_taken_over_proven_and_kept(
    tmp_path: Path, nursery: trio.Nursery, clock: trio.testing.MockClock
) -> None:
    world = World(tmp_path / "n")
    await world.start(nursery)
    assert await world.offer(GOOD) is None
    assert world.lives[-1].port_first == 30000
    assert await world.offer(GOOD) == yes(GOOD), "it is said once they are in force"
    assert (world.kept.trial, world.kept.used) == (GOOD, None)
    await world.proven()
    assert world.kept == Kept(used=GOOD)
    refused = await world.offer(settings_of({"ports": "1"}, 8))
    assert refused is not None
    assert world.kept.refused is not None
    later = evolve(GOOD, revision=9)
    assert await world.offer(later) == yes(later)
    assert world.kept.refused is None, "they are wanted no more"
    assert (world.kept.used, len(world.lives)) == (later, 2), "the same of a later revision needs no start"
    assert await world.offer(settings_of({"ports": "30000-30010", "weights": {"reserve_gib": 10.0}}, 10)) is not None
    assert len(world.lives) == 2, "what makes no difference needs no start"
    assert world.steps == ["starting", "ready", "written", "ending", "ended", "starting", "ready", "proven"]
    assert world.turnover is not None
    assert world.turnover.revision == 10


async def test_settings_that_do_not_load_or_lack_something_are_refused(
    tmp_path: Path, nursery: trio.Nursery, clock: trio.testing.MockClock
) -> None:
    world = World(tmp_path / "n")
    await world.start(nursery)
    for part, said in (
        ({"prots": "1"}, "prots: unknown key (did you mean ports?)"),
        ({"ports": "2-1"}, "ports: 2-1 is not a range within 1024-65535 (such as 20000-20999)"),
        ({"id": "x"}, "say id, which only agent.yaml may"),
        ({"discovery": {"root": "/gone"}}, "/gone is not a folder"),
    ):
        answer = await world.offer(settings_of(part, 5))
        assert answer is not None
        assert said in answer.refused
        assert world.kept.refused == Refusal(settings_of(part, 5), answer.refused)
    assert len(world.lives) == 1
    assert await world.offer(GOOD) is None
    assert world.kept.refused is None


@pytest.mark.parametrize("how", ["at once", "later", "never up"])
async def test_what_does_not_come_up_is_gone_back_from_and_not_tried_again(
    tmp_path: Path, nursery: trio.Nursery, clock: trio.testing.MockClock, how: str
) -> None:
    failure = OperatorError("nvml", "does not work")
    world = World(tmp_path / "n")
    await world.start(nursery)
    assert await world.offer(GOOD) is None
    await world.proven()
    match how:
        case "at once":
            world.bad, lives, said = on(BETTER, failure), 3, "nvml: does not work"
        case "later":
            world.later, lives, said = on(BETTER, ValueError("odd")), 4, "ValueError: odd"
        case _:
            world.slow, lives, said = lambda c: c.port_first == 40000, 3, "the agent: did not come up on it within 60 s"
    assert await world.offer(BETTER) is None
    assert (await world.until(lives)).port_first == 30000
    await world.when(lambda: world.kept.refused is not None)
    assert (world.kept.used, world.kept.trial) == (GOOD, None)
    assert world.kept.refused == Refusal(BETTER, said, tried=True)
    for _ in range(3):
        assert await world.offer(BETTER) == evolve(yes(BETTER), refused=said)
    assert len(world.lives) == lives, "they stay refused"
    world.bad = world.later = lambda _: None
    world.slow = lambda _: False
    assert world.turnover is not None
    world.turnover.look_again()
    assert (await world.until(lives + 1)).port_first == 40000, "an operator may have them tried again"


async def test_the_next_agent_starts_on_what_was_kept(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    world = World(tmp_path / "n")
    KeptFile(world.folder).write(Kept(used=GOOD))
    async with trio.open_nursery() as nursery:
        await world.start(nursery)
        assert world.lives[-1].port_first == 30000
        nursery.cancel_scope.cancel()
    world = World(tmp_path / "n", bad=on(GOOD, OSError("the driver is gone")))
    async with trio.open_nursery() as nursery:
        await world.start(nursery)
        assert world.lives[-1].port_first == 20000, "rather an agent on its file alone than none"
        answer = await world.offer(GOOD)
        assert answer is not None
        assert answer.refused == "OSError: the driver is gone"
        nursery.cancel_scope.cancel()
    world = World(tmp_path / "n", bad=lambda _: OSError("nothing works"))
    with pytest.raises(ExceptionGroup) as failed:
        async with trio.open_nursery() as nursery:
            await world.start(nursery)
    assert failed.group_contains(OSError, match="nothing works", depth=None)
    assert world.kept.used == GOOD


async def test_settings_that_end_the_process_are_given_up(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    place = World(tmp_path / "n").folder
    KeptFile(place).write(Kept(used=GOOD, trial=BETTER, tries=1))
    for tries in range(2, MOST_TRIES + 1):
        world = World(place)
        async with trio.open_nursery() as nursery:
            await world.start(nursery)
            assert world.lives[-1].port_first == 40000
            assert world.kept.tries == tries
            nursery.cancel_scope.cancel()  # as SIGKILL: nobody says that it was stopped
    world = World(place)
    async with trio.open_nursery() as nursery:
        await world.start(nursery)
        assert world.lives[-1].port_first == 30000
        answer = await world.offer(BETTER)
        assert answer is not None
        assert "the agent ended 3 times while it started on them" in answer.refused
        nursery.cancel_scope.cancel()
    KeptFile(place).write(Kept(used=GOOD, trial=BETTER, tries=1))
    for _ in range(5):
        world = World(place)
        async with trio.open_nursery() as nursery:
            await world.start(nursery)
            nursery.cancel_scope.cancel()
        assert world.turnover is not None
        world.turnover.stopped()
        assert world.kept == Kept(used=GOOD, trial=BETTER, tries=0), (
            "an agent that is stopped says nothing against them"
        )


async def test_an_edited_file(tmp_path: Path, nursery: trio.Nursery, clock: trio.testing.MockClock) -> None:
    world = World(tmp_path / "n")
    await world.start(nursery)
    world.write(weights={"reserve_gib": 1})
    assert (await world.until(2)).weights.reserve_gib == 1
    await world.proven()
    for wrong, said in (({"ports": "1"}, "ports: "), ({"state_dir": "/x"}, "and this agent keeps its engines in"),
                        ({"discovery": {"root": "/gone"}}, "/gone is not a folder")):  # fmt: skip
        world.write(**wrong)
        await world.when(lambda said=said: said in world.kept.file)  # type: ignore[misc]
        assert len(world.lives) == 2
    world.bad = lambda config: OSError("no") if config.weights.reserve_gib == 2 else None
    world.write(weights={"reserve_gib": 2})
    assert (await world.until(3)).weights.reserve_gib == 1, "it loads, and nothing comes up on it"
    await world.when(lambda: world.kept.file == "OSError: no")
    await trio.sleep(100)
    assert len(world.lives) == 3, "it is not tried for ever"
    world.write(weights={"reserve_gib": 3})
    assert (await world.until(4)).weights.reserve_gib == 3
    await world.when(lambda: world.kept.file == "")
    assert await world.offer(GOOD) is None
    world.write(weights={"reserve_gib": 3}, ports="20500-20600")
    await trio.sleep(5)
    assert (len(world.lives), world.lives[-1].port_first) == (5, 30000), "the settings win"


async def test_a_full_disk_takes_nothing_over(
    tmp_path: Path, nursery: trio.Nursery, clock: trio.testing.MockClock
) -> None:
    world = World(tmp_path / "n")
    await world.start(nursery)
    (world.folder / ".settings.json.new").mkdir()  # it cannot be written
    answer = await world.offer(GOOD)
    assert answer is not None
    assert answer.refused.startswith("they cannot be kept on the node's disk: ")
    (world.folder / ".settings.json.new").rmdir()
    world.write(ports="1")
    await world.when(lambda: world.kept.file != "")
    assert world.kept.trial is None, "what could not be kept is not kept later"
    world.write()
    await world.when(lambda: world.kept.file == "")
    assert await world.offer(GOOD) is None


@pytest.mark.long
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.soak)])
def test_cancelled_anywhere_what_is_kept_can_be_started_on(tmp_path: Path, stride: int) -> None:
    place = tmp_path / "n"
    World(place)

    async def scenario() -> None:
        world = World(place, bad=on(BETTER, OSError("no")), proven_s=0.05, look_s=0.01)
        KeptFile(place).write(Kept())
        try:
            async with trio.open_nursery() as nursery:
                await world.start(nursery)
                await world.offer(GOOD)
                await world.proven()
                await world.offer(BETTER)
                await world.until(3)
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                while busy_threads() > threads:  # a look at the disk is left behind, and ends by itself
                    await trio.sleep(0.001)

    async def after() -> None:
        kept = KeptFile(place).read()
        world = World(place, bad=on(BETTER, OSError("no")), look_s=0.01)
        async with trio.open_nursery() as nursery:
            await world.start(nursery)
            assert world.lives[-1].port_first == (20000 if kept.used is None and kept.trial is None else 30000)
            nursery.cancel_scope.cancel()

    threads = busy_threads()
    assert len(sweep(scenario, after=after, stride=stride, real_clock=True, within_s=5.0)) > 5


def taken(file: Path, part: object, point: str = "", until: str = "") -> tuple[int, list[str]]:
    """Run one agent until it dies or has said ``until``; its exit code and what it said."""
    said: list[str] = []
    command = [sys.executable, "-m", "tests.agent.taker", str(file), json.dumps(part), point]
    with subprocess.Popen(command, cwd=TOP, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as agent:
        assert agent.stdout is not None
        for line in agent.stdout:
            said.append(line.strip())
            if until and line.startswith(until):
                agent.send_signal(signal.SIGTERM)
        return agent.wait(10), said


async def an_engine(settings: AgentConfig) -> int:
    from tests.agent.test_shards import INVENTORY

    async with running(settings) as node:
        await node.shards.start(start(), INVENTORY)
        pid = (await node.until(S.READY)).pid
    assert pid is not None
    return pid


def node_with_an_engine(folder: Path) -> tuple[Path, int]:
    machine = folder.parent / "machine"
    render(MACHINES["l40s-2"], machine)
    settings = attrs.evolve(config(folder), discovery=Discovery(GpuSource.NONE, str(machine), interval_s=1000))
    return written(settings, folder.parent / "agent.yaml"), trio.run(partial(an_engine, settings))


@pytest.mark.long
def test_killed_at_each_step_of_taking_over(folder: Path) -> None:
    file, engine = node_with_an_engine(folder)
    for at, point in enumerate(("written", "ending", "ended")):
        part = {"weights": {"reserve_gib": 20 + at}}
        code, said = taken(file, part, point)
        assert (code, said[-1]) == (-signal.SIGKILL, point)
        assert alive(engine)
        code, said = taken(file, part, "starting")
        assert (code, said) == (-signal.SIGKILL, ["starting"]), "in the middle of the next start"
        code, said = taken(file, part, until="applied")
        assert (code, said) == (0, ["starting", "ready", "applied 2"]), "the next one starts on them"
        assert alive(engine)


@pytest.mark.long
def test_settings_that_kill_the_agent_make_no_crash_loop(folder: Path) -> None:
    file, engine = node_with_an_engine(folder)
    part = {"weights": {"reserve_gib": 666}}
    codes = [taken(file, part, until="refused") for _ in range(MOST_TRIES + 1)]
    assert [code for code, _ in codes] == [-signal.SIGKILL] * MOST_TRIES + [0]
    assert codes[-1][1][:2] == ["starting", "ready"]
    assert "refused 2 the agent ended 3 times while it started on them" in codes[-1][1][2]
    assert taken(file, part, until="refused")[0] == 0
    assert alive(engine)
