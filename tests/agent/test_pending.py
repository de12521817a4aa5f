"""A start whose weights are on a hub: fetched first, with progress, shared, cancelled by a stop, then served."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve

pytest.importorskip("huggingface_hub")

from fakes.hub import Hub
from llmgw.agent import records
from llmgw.agent.jobs.runner import Job, Jobs
from llmgw.agent.jobs.works import NodeWorks
from llmgw.agent.pending import Pending, waiting
from llmgw.agent.shards import Shards
from llmgw.agent.supervisor import Supervisor
from llmgw.errors import OperatorError
from llmgw.link.messages import StartShard
from llmgw.scheduler import jobs as rules
from llmgw.scheduler.jobs import Fetch, JobSpec, JobState
from llmgw.scheduler.state import ShardReport, ShardState, WaitsFor
from llmgw.settings.catalog import Limits
from llmgw.settings.daemon import WeightsConfig
from llmgw.settings.document import WeightsRules
from tests.agent.test_shards import INVENTORY, config, start, until

S = ShardState


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub({"org/tiny": {"config.json": b"{}", "a.safetensors": bytes(200_000)}}) as made:
        yield made


def asked(hub: Hub, name: str = "m-1.0", sources: tuple[str, ...] = ("hf:org/*",), **more: Any) -> StartShard:
    command = start(name, **more)
    profile = evolve(command.profile, weights="hf:org/tiny@main")
    return evolve(command, profile=profile, weights=WeightsRules(sources, hub.url))


class Node:
    def __init__(self, folder: Path) -> None:
        # What is fetched is not below the folder of what is not.
        settings = evolve(config(folder), weights=WeightsConfig(reserve_gib=0.0), weights_dir="/models")
        self.said: list[ShardReport] = []
        self.jobs = Jobs(folder, NodeWorks(settings), lambda _: None, time.time)
        self.shards = Shards(settings, self.said.append, time.time, jobs=self.jobs)

    def report(self, shard: str = "m-1.0") -> ShardReport:
        return next(r for r in self.shards.reports() if r.shard == shard)


@asynccontextmanager
async def node(folder: Path) -> AsyncIterator[Node]:
    made = Node(folder)
    async with trio.open_nursery() as nursery:
        await nursery.start(made.shards.run)
        await nursery.start(made.jobs.run)
        yield made
        for supervisor in made.shards.alive():
            supervisor.stop("the test has ended", 0.1)
        with trio.fail_after(15):
            while list(made.shards.alive()):
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel(reason="the test has ended")


async def test_two_shards_share_a_fetch_say_how_far_it_is_and_serve(tmp_path: Path, hub: Hub) -> None:
    hub.faults.hold_after = 64 * 1024
    async with node(tmp_path) as here:
        await here.shards.start(asked(hub), INVENTORY)
        await here.shards.start(asked(hub, "m-2.0", devices=(1,)), INVENTORY)
        await until(hub.held.is_set)
        await until(lambda: here.report().progress)
        report = here.report()
        assert report.state is S.STARTING
        assert "of 200002 bytes" in report.reason
        assert report.pid is None
        assert report.next.startswith("the engine is started once they are here")
        assert len(here.jobs.reports()) == 1
        with pytest.raises(OperatorError, match=r"is held by shard m-1\.0"):
            await here.shards.start(asked(hub, "m-3.0"), INVENTORY)
        hub.go.set()
        for shard in ("m-1.0", "m-2.0"):
            await until(lambda s=shard: here.report(s).state is S.READY)
        supervisor = here.shards.find("m-1.0", 1)
        assert supervisor is not None
        assert supervisor.record.argv[3] == here.jobs.reports()[0].result["path"]
        assert supervisor.record.profile.weights == "hf:org/tiny@main"
        assert hub.bytes_sent["a.safetensors"] == 200_000
        before = len(hub.asked)
        await here.shards.start(asked(hub, "m-4.0", devices=(2,)), INVENTORY)
        assert not isinstance(here.shards.find("m-4.0", 1), Pending), "what is here is not fetched again"
        assert len(hub.asked) == before


async def test_a_stop_cancels_the_fetch_and_the_devices_are_free_again(tmp_path: Path, hub: Hub) -> None:
    hub.faults.hold_after = 64 * 1024
    async with node(tmp_path) as here:
        await here.shards.start(asked(hub), INVENTORY)
        await until(hub.held.is_set)
        found = here.shards.find("m-1.0", 1)
        assert found is not None
        found.stop("nobody wants it", 1.0)
        await until(lambda: here.jobs.reports()[0].state is JobState.CANCELLED)
        assert (here.report().state, here.report().reason) == (
            S.STOPPED, "nobody wants it; the engine was not started yet",
        )  # fmt: skip
        await here.shards.forget("m-1.0", 1)
        assert here.shards.find("m-1.0", 1) is None
        hub.go.set()
        await here.shards.start(asked(hub, generation=2), INVENTORY)
        await until(lambda: here.report().state is S.READY)


@pytest.mark.parametrize("here", [False, True], ids=["fetched", "was here"])
async def test_a_rank_is_held_until_the_others_have_their_weights_and_its_time_begins_then(
    tmp_path: Path, hub: Hub, here: bool
) -> None:
    async with node(tmp_path) as it:
        if here:
            job = await it.jobs.fetch(Fetch("hf:org/tiny@main", hub.url), "another")
            await job.ended.wait()
        before = len(it.jobs.reports())
        await it.shards.start(evolve(asked(hub), hold=True), INVENTORY)
        await until(lambda: it.report().waits_for is WaitsFor.RANKS)
        held = it.report()
        assert (held.state, held.pid) == (S.STARTING, None)
        assert held.reason == "hf:org/tiny@main is here; other ranks still fetch theirs"
        assert len(it.jobs.reports()) == before + (0 if here else 1)
        with pytest.raises(OperatorError, match=r"is held by shard m-1\.0"):
            await it.shards.start(asked(hub, "m-3.0"), INVENTORY)
        found = it.shards.find("m-1.0", 1)
        assert isinstance(found, Pending)
        released = time.time()
        found.launch()
        await until(lambda: it.report().pid)
        assert it.report().waits_for is WaitsFor.NOTHING
        supervisor = it.shards.find("m-1.0", 1)
        assert isinstance(supervisor, Supervisor)
        deadline = supervisor.shard.deadline
        assert deadline is None or deadline >= released + supervisor.record.profile.limits.start_s
        await until(lambda: it.report().state is S.READY)
        await it.shards.start(evolve(asked(hub, "m-2.0", devices=(1,)), hold=True), INVENTORY)
        await until(lambda: it.report("m-2.0").waits_for is WaitsFor.RANKS)
        held_back = it.shards.find("m-2.0", 1)
        assert held_back is not None
        held_back.stop("another rank failed", 1.0)
        assert it.report("m-2.0").reason == "another rank failed; the engine was not started yet"
        await it.shards.forget("m-2.0", 1)


async def test_the_next_agent_goes_on_with_the_fetch_and_the_start_that_is_asked_for_again_shares_it(
    tmp_path: Path, hub: Hub
) -> None:
    hub.faults.hold_after = 64 * 1024
    async with trio.open_nursery() as nursery:
        first = Node(tmp_path)
        await nursery.start(first.shards.run)
        await nursery.start(first.jobs.run)
        for number in range(2):
            await first.shards.start(asked(hub, f"m-{number}.0", devices=(number,)), INVENTORY)
        await until(hub.held.is_set)
        (job,) = first.jobs.reports()
        nursery.cancel_scope.cancel(reason="the agent stops")
    async with node(tmp_path) as here:
        assert here.shards.reports() == (), "what was not launched is asked for again"
        assert [(r.id, r.attempt) for r in here.jobs.reports()] == [(job.id, 2)]
        for number in range(2):
            await here.shards.start(asked(hub, f"m-{number}.0", devices=(number,)), INVENTORY)
        assert len(here.jobs.reports()) == 1, "they share the fetch that goes on"
        found = here.shards.find("m-1.0", 1)
        assert found is not None
        found.stop("nobody wants it", 1.0)
        hub.go.set()
        await until(lambda: here.report("m-0.0").state is S.READY)
        (ended,) = here.jobs.reports()
        assert (ended.id, ended.state) == (job.id, JobState.DONE)
        assert here.report().state is S.STOPPED


async def test_a_fetch_that_went_on_with_the_next_agent_ends_with_the_last_shard_that_wants_it(
    tmp_path: Path, hub: Hub
) -> None:
    hub.faults.hold_after = 64 * 1024
    async with trio.open_nursery() as nursery:
        first = Node(tmp_path)
        await nursery.start(first.shards.run)
        await nursery.start(first.jobs.run)
        await first.shards.start(asked(hub), INVENTORY)
        await until(hub.held.is_set)
        nursery.cancel_scope.cancel(reason="the agent stops")
    async with node(tmp_path) as here:
        await here.shards.start(asked(hub), INVENTORY)
        found = here.shards.find("m-1.0", 1)
        assert found is not None
        found.stop("nobody wants it", 1.0)
        await until(lambda: here.jobs.reports()[0].state is JobState.CANCELLED)
        hub.go.set()


async def test_what_cannot_be_fetched_fails_with_the_reason(tmp_path: Path, hub: Hub) -> None:
    hub.faults.gated = True
    async with node(tmp_path) as here:
        await here.shards.start(asked(hub), INVENTORY)
        await until(lambda: here.report().state is S.FAILED)
        assert "hf:org/tiny@main cannot be fetched" in here.report().reason
        assert "it is gated" in here.report().reason
        assert "token" in here.report().remedy


async def test_what_is_not_allowed_or_could_not_run_is_refused_before_anything_is_fetched(
    tmp_path: Path, hub: Hub
) -> None:
    async with node(tmp_path) as here:
        with pytest.raises(OperatorError, match="is not in weights"):
            await here.shards.start(asked(hub, sources=("hf:other/*",)), INVENTORY)
        wrong = asked(hub)
        wrong = evolve(wrong, profile=evolve(wrong.profile, device_class=("l4-22g",)))
        with pytest.raises(OperatorError, match="the profile wants l4-22g"):
            await here.shards.start(wrong, INVENTORY)
        assert here.jobs.reports() == ()
        assert hub.asked == []


def test_the_deadline_follows_the_bytes() -> None:
    job = rules.running(rules.queued(JobSpec("j", Fetch("hf:o/n")), 0.0), 0.0)
    job = rules.progressed(rules.stepped(job, "download", 10.0), 100, 1000, 20.0)
    job = rules.progressed(job, 300, 1000, 30.0)
    told = waiting("hf:o/n", job, 0.0, 85.0, 55.0, 60.0)
    assert (told.state, told.progress) == (S.STARTING, 0.3)
    assert told.reason == "fetches hf:o/n: download, 300 bytes of 1000 bytes, about 0 s left"
    assert waiting("hf:o/n", job, 0.0, 31.0, 1.0, 60.0).reason.endswith("about 34 s left")
    late = waiting("hf:o/n", job, 0.0, 91.0, 61.0, 60.0)
    assert late.state is S.FAILED
    assert late.reason.startswith("hf:o/n: no byte came for 61 s (")


async def test_only_bytes_move_the_deadline_and_a_clock_that_is_set_does_not() -> None:
    job = Job(JobSpec("j", Fetch("hf:o/n")), rules.queued(JobSpec("j", Fetch("hf:o/n")), 0.0), asked=False)
    day, steady = 0.0, 0.0
    command = start()
    record = records.Record(
        "c", "m-1", "m-1.0", 1, 0, "m", evolve(command.profile, weights="hf:o/n", limits=Limits(load_s=60)), "d", (0,),
        (), "h", 1, "m", "/", "/", 1.0, "", 0.0,
    )  # fmt: skip
    pending = Pending(record, job, lambda _: None, lambda: day, steady=lambda: steady)

    async def looked() -> ShardState:
        with trio.move_on_after(0.01):
            await pending.wait()
        return pending.shard.state

    job.report = rules.progressed(rules.stepped(rules.running(job.report, 0.0), "download", 0.0), 100, 1000, 0.0)
    assert await looked() is S.STARTING
    day, steady = 5000.0, 59.0
    assert await looked() is S.STARTING, "it was set"
    job.report = rules.progressed(job.report, 200, 1000, day)
    assert await looked() is S.STARTING
    steady = 118.0
    job.report = rules.progressed(job.report, 200, 1000, day + 30)
    assert await looked() is S.STARTING
    steady = 120.0
    assert await looked() is S.FAILED, "the same bytes again are no step"
