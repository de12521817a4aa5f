"""Agents that are cancelled wherever they may be: each ends at once, and every process is accounted for by the next."""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define, evolve, frozen

from fakes.machines import MACHINES, render
from llmgw.agent import main, records
from llmgw.agent.dispatch import Dispatch
from llmgw.agent.epoch import Epoch, EpochFile
from llmgw.agent.kept import KeptFile
from llmgw.agent.own_file import OwnFile
from llmgw.agent.turnover import Turnover
from llmgw.link.messages import DrainShard, ForgetShard, ShardCommand, StopShard
from llmgw.scheduler.state import ShardState
from llmgw.settings.daemon import Discovery, GpuSource
from tests.agent.test_shards import (
    INVENTORY,
    SLEEPER,
    Node,
    alive,
    config,
    processes,
    running,
    soon,
    start,
    until,
    written,
)
from tests.sweep import CancelAt, Injection, sweep

S = ShardState
WITHIN_S = 2.0
"""A cancelled agent ends within this: what is being launched at that moment is launched first, which takes a moment."""

STUBBORN = ("/bin/sh", "-c", "trap '' TERM; sleep 3600 & wait; wait")
"""As :data:`tests.agent.test_shards.SLEEPER`, and ends by SIGKILL only."""


@frozen
class Place:
    """A state folder, and the agents on it."""

    folder: Path
    command: tuple[str, ...] | None = None

    async def ask(self, node: Node, command: ShardCommand) -> None:
        """As a control plane would; an agent that has just been cancelled may say so before its tasks are told."""
        result = await Dispatch(node.shards, Epoch(EpochFile(self.folder)), lambda: INVENTORY).run(command)
        assert result.accepted or result.reason.endswith("the agent is stopping"), result

    def agent(self) -> Node:
        """The next agent of this folder; :meth:`Node.shards.run` is yet to be started."""
        return Node(config(self.folder, self.command))

    async def accounted(self) -> None:
        """Whatever lives here is known to the next agent, which can end it; then nothing is left of it at all."""
        async with running(config(self.folder, self.command)) as node:
            known = tuple(node.shards.alive())
            for supervisor in known:
                supervisor.stop("the round is over", 0.0)
            with trio.fail_after(10):
                for supervisor in known:
                    await supervisor.done.wait()
            for report in node.shards.reports():
                await node.shards.forget(report.shard, report.generation)
        assert soon(lambda: processes(self.folder) == set()), "a process that no agent knows"
        assert list((self.folder / "shards").iterdir()) == []

    async def goes_on(self, pid: int, state: ShardState) -> None:
        """The engine lives and is known, in this state; for the next round it is as it was before this one."""
        assert alive(pid)
        place = self.folder / "shards/m-1.0-g1"
        async with running(config(self.folder, self.command)) as node:
            (report,) = node.shards.reports()
            assert report.pid == pid
            assert not report.state.ended
        record = records.read(place)
        records.write(place, evolve(record, state=state))


async def launched(place: Place, state: ShardState, **engine: object) -> int:
    """An engine in this state that no agent watches."""
    async with running(config(place.folder, place.command)) as node:
        await node.shards.start(start(**engine), INVENTORY)
        report = await node.until(state)
        with trio.fail_after(5):
            while records.read(place.folder / "shards/m-1.0-g1").state is not state:
                await trio.sleep(0.01)
    assert report.pid is not None
    return report.pid


Tried = tuple[Injection, ...]
Phase = Callable[[Path, int], Tried]
"""Sweeps one part of a life in a state folder, at every so manieth point."""


def starts(folder: Path, stride: int, instrument_of: Callable[[int, str], CancelAt] = CancelAt) -> Tried:
    place = Place(folder, SLEEPER)

    async def scenario() -> None:
        node = place.agent()
        async with trio.open_nursery() as nursery:
            await nursery.start(node.shards.run)
            await commanded(instrument_of, partial(place.ask, node, start()))
            nursery.cancel_scope.cancel()

    return sweep(
        scenario, after=place.accounted, instrument_of=instrument_of, within_s=WITHIN_S, stride=stride, real_clock=True
    )


async def seen_loading(_place: Place, node: Node) -> None:
    """It was adopted as not known to be ready, and has answered since."""
    await node.until(S.LOADING)


async def seen_serving(_place: Place, node: Node) -> None:
    """It has said what it has to do."""
    await until(lambda: node.shards.loads())


async def seen_draining(place: Place, node: Node) -> None:
    await place.ask(node, DrainShard("d", 1, "m-1.0", 1, "enough"))
    await node.until(S.DRAINING)
    await seen_serving(place, node)


def goes_on(
    folder: Path, stride: int, state: S, seen: Callable[[Place, Node], Awaitable[None]], **engine: Any
) -> Tried:
    """An engine that is adopted in this state, watched until something is seen of it, and let go."""
    place = Place(folder)
    pid = trio.run(partial(launched, place, state, **engine))

    async def scenario() -> None:
        node = place.agent()
        async with trio.open_nursery() as nursery:
            await nursery.start(node.shards.run)
            await seen(place, node)
            nursery.cancel_scope.cancel()

    return sweep(scenario, after=partial(place.goes_on, pid, state), within_s=WITHIN_S, stride=stride, real_clock=True)


def loads(folder: Path, stride: int) -> Tried:
    return goes_on(folder, stride, S.LOADING, seen_loading, load_s=3600)


def serves(folder: Path, stride: int) -> Tried:
    return goes_on(folder, stride, S.READY, seen_serving)


def drains(folder: Path, stride: int) -> Tried:
    return goes_on(folder, stride, S.READY, seen_draining)


def stops(folder: Path, stride: int, command: tuple[str, ...] = SLEEPER, grace_s: float = 1.0) -> Tried:
    place = Place(folder, command)

    async def again() -> None:
        await place.accounted()
        await launched(place, S.STARTING)

    async def scenario() -> None:
        node = place.agent()
        async with trio.open_nursery() as nursery:
            await nursery.start(node.shards.run)
            await place.ask(node, StopShard("s", 1, "m-1.0", 1, "enough", grace_s))
            assert (await node.until_ended()).state is S.STOPPED
            await place.ask(node, ForgetShard("f", 1, "m-1.0", 1))
            nursery.cancel_scope.cancel()

    trio.run(launched, place, S.STARTING)
    return sweep(scenario, after=again, within_s=WITHIN_S, stride=stride, real_clock=True)


def kills(folder: Path, stride: int) -> Tried:
    return stops(folder, stride, STUBBORN, 0.0)


def turnover(file: Path, folder: Path) -> Turnover:
    """All that an agent is, but for its lock on the state folder."""
    return Turnover(OwnFile(file), KeptFile(folder), main._life, main.usable)


def whole(folder: Path, stride: int) -> Tried:
    """All that an agent is: signals, hardware, link, and an engine that it adopts; its control plane is not there."""
    place, machine = Place(folder), folder.parent / "machine"
    pid = trio.run(partial(launched, place, S.READY))
    render(MACHINES["l40s-2"], machine)
    settings = evolve(config(folder), discovery=Discovery(GpuSource.NVML, str(machine), interval_s=1000))
    written(settings, folder.parent / "agent.yaml")

    async def scenario() -> None:
        with trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_DGRAM) as told:
            await told.bind(os.environ["NOTIFY_SOCKET"])
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(main._main, turnover(folder.parent / "agent.yaml", folder))
                    assert await told.recv(100) == b"READY=1"
                    nursery.cancel_scope.cancel()
            finally:
                os.unlink(os.environ["NOTIFY_SOCKET"])

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("NOTIFY_SOCKET", str(folder.parent / "notify"))
        return sweep(
            scenario, after=partial(place.goes_on, pid, S.READY), within_s=WITHIN_S, stride=stride, real_clock=True
        )


PHASES: dict[str, tuple[Phase, int]] = {
    "start": (starts, 9),
    "loading": (loads, 70),
    "serving": (serves, 70),
    "drain": (drains, 70),
    "stop": (stops, 90),
    "kill": (kills, 130),
    "agent": (whole, 130),
}
"""The parts of a life, each with the stride of the usual suite. A part that is new is one line here."""


@pytest.mark.parametrize("name", PHASES)
def test_cancelled_at_some_points(folder: Path, name: str) -> None:
    phase, stride = PHASES[name]
    assert len(phase(folder, stride)) >= 2


@pytest.mark.soak
@pytest.mark.parametrize("name", PHASES)
def test_cancelled_at_every_point(folder: Path, name: str) -> None:
    points = PHASES[name][0](folder, 1)
    took = max(p.took_s for p in points)
    print(
        f"\n{name}: cancelled at {len(points)} points in {len({p.site for p in points})} places, {took:.2f} s at most"
    )
    assert len(points) > 50


class Pair(CancelAt):
    """Cancels the command that is being carried out, as the end of a session does, and the agent some steps later."""

    made: Pair | None = None

    def __init__(self, nth: int, when: str, gap: int) -> None:
        super().__init__(nth, when)
        self.session: trio.CancelScope | None = None
        self.gap = gap
        Pair.made = self

    def _step(self, task: trio.lowlevel.Task) -> None:
        if self.session is not None and not self.session.cancel_called and self.seen == self.nth - 1:
            self.session.cancel(reason="the session is over")
            self.nth += self.gap
        super()._step(task)


async def commanded(instrument_of: Callable[[int, str], CancelAt], command: Callable[[], Awaitable[None]]) -> None:
    """Carry a command out in a scope of its own, and again where that was cancelled: the link came back."""
    pair = None if instrument_of is CancelAt else Pair.made
    with trio.CancelScope() as session:
        if pair is not None:
            pair.session = session
        await command()
    if session.cancelled_caught:
        await command()


def test_a_command_and_its_agent_cancelled_one_after_the_other(folder: Path) -> None:
    assert len(starts(folder, 30, partial(Pair, gap=6))) >= 3


@pytest.mark.soak
@pytest.mark.parametrize("gap", [1, 3, 10, 30])
def test_a_command_and_its_agent_cancelled_at_every_pair(folder: Path, gap: int) -> None:
    points = starts(folder, 1, partial(Pair, gap=gap))
    print(f"\n{len(points)} pairs, {gap} steps apart")
    assert len(points) > 30


async def test_a_start_that_its_session_cut_off_is_started_by_the_next(folder: Path) -> None:
    """Nothing of it may be taken for the shard that was asked for."""
    place = Place(folder, SLEEPER)
    async with running(config(folder, SLEEPER)) as node:
        with trio.CancelScope() as session:
            session.cancel()
            await node.shards.start(start(), INVENTORY)
        assert node.shards.reports() == ()
        await place.ask(node, start())
        assert alive(node.get().pid)


@define
class Churn:
    """Sessions that come and go ask for this and that, under agents that come and go."""

    place: Place
    cut: int = 0
    done: int = 0

    async def session(self, node: Node, number: int, generation: int, rng: random.Random) -> None:
        """What one shard is asked for, until this session ends wherever that is."""
        name = f"m-{number}.0"
        with trio.CancelScope(deadline=trio.current_time() + rng.uniform(0.0, 0.8)) as scope:
            await self.place.ask(node, start(name, generation, (number,)))
            await self.place.ask(node, StopShard("s", 1, name, generation, "enough", 0.05))
            if (known := node.shards.find(name, generation)) is not None:
                await known.done.wait()
            await self.place.ask(node, ForgetShard("f", 1, name, generation))
            self.done += 1
        self.cut += scope.cancelled_caught

    async def shard(self, node: Node, number: int, generation: int, rng: random.Random) -> None:
        """Three starts of one shard; those that a session left behind are ended first."""
        for turn in range(generation, generation + 3):
            for known in [s for s in node.shards.alive() if s.record.devices == (number,)]:
                known.stop("left behind", 0.05)
                await known.done.wait()
            await self.session(node, number, turn, rng)

    async def agent(self, generation: int, rng: random.Random) -> None:
        """One agent with four shards, cancelled wherever it is by then."""
        node = self.place.agent()
        with trio.move_on_after(rng.uniform(0.1, 1.5)) as life:
            async with trio.open_nursery() as nursery:
                await nursery.start(node.shards.run)
                async with trio.open_nursery() as shards:
                    for number in range(4):
                        shards.start_soon(self.shard, node, number, generation, random.Random(rng.randbytes(8)))
                nursery.cancel_scope.cancel()
        assert trio.current_time() - life.deadline < WITHIN_S

    async def run(self, seed: int, agents: int) -> None:
        """So many agents one after the other; in the end everything is known, and can be ended."""
        rng = random.Random(seed)
        # Sessions are one after the other in an agent; here they are not, so nobody may have to write this.
        await EpochFile(self.place.folder).write(1)
        for number in range(agents):
            await self.agent(10 * number + 1, rng)
        await self.place.accounted()


async def test_churn(folder: Path) -> None:
    churn = Churn(Place(folder, SLEEPER))
    await churn.run(1, 3)
    assert churn.cut


@pytest.mark.soak
async def test_much_churn(folder: Path) -> None:
    churn = Churn(Place(folder, SLEEPER))
    for seed in range(10):
        await churn.run(seed, 10)
    print(f"\nchurn: 100 agents, {churn.cut} sessions cut off, {churn.done} whole")
    assert churn.cut > 50
    assert churn.done > 20
