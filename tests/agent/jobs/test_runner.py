"""Jobs as an agent runs them: their processes, their records, a cancel, and an agent that dies in between."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve

from fakes.hub import Hub
from llmgw.agent.jobs import records
from llmgw.agent.jobs.child import Work
from llmgw.agent.jobs.records import Record
from llmgw.agent.jobs.runner import Job, Jobs
from llmgw.agent.jobs.works import NodeWorks
from llmgw.agent.process import start_time
from llmgw.discovery.host import boot_id
from llmgw.errors import OperatorError
from llmgw.scheduler import jobs as rules
from llmgw.scheduler.jobs import Fetch, JobReport, JobSpec, JobState
from llmgw.settings.daemon import Address, AgentConfig, TlsFiles, WeightsConfig
from tests.agent.test_shards import until

FETCH = Fetch("hf:org/tiny@main")
# It says that it runs, starts a process that ignores SIGTERM in its group, and waits until its agent is gone.
LASTING = """
import json, os, subprocess, sys
said = subprocess.Popen([sys.executable, "-c", "import signal,time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
print(json.dumps({"type": "step", "name": str(said.pid)}), flush=True)
sys.stdin.buffer.read()
"""


class Scripts:
    """Jobs that are a script of Python each, by the name of what they would fetch."""

    def __init__(self, **scripts: str) -> None:
        self.scripts = scripts

    def work(self, spec: JobSpec, folder: Path) -> Work:
        assert spec.fetch is not None
        if spec.fetch.weights not in self.scripts:
            raise OperatorError(spec.fetch.weights, "is nothing", "do something else")
        return Work((sys.executable, "-c", self.scripts[spec.fetch.weights]), dict(os.environ), grace_s=0.2)

    def finish(self, spec: JobSpec, result: dict[str, str]) -> dict[str, str]:
        return result


@asynccontextmanager
async def running(folder: Path, works: Any, said: list[JobReport] | None = None, most: int = 2) -> AsyncIterator[Jobs]:
    jobs = Jobs(folder, works, ([] if said is None else said).append, time.time, most)
    async with trio.open_nursery() as nursery:
        await nursery.start(jobs.run)
        yield jobs
        nursery.cancel_scope.cancel(reason="the test has ended")


def get(jobs: Jobs, job: str = "j1") -> Job:
    found = jobs.find(job)
    assert found is not None
    return found


async def end(jobs: Jobs, job: str = "j1") -> JobReport:
    with trio.fail_after(30):
        await get(jobs, job).ended.wait()
    return get(jobs, job).report


def spec(name: str, job: str = "j1") -> JobSpec:
    return JobSpec(job, Fetch(name))


def script(*said: str) -> str:
    return "\n".join(f"print({line!r}, flush=True)" for line in said)


async def test_a_job_says_its_steps_and_bytes_and_its_result_is_kept(tmp_path: Path) -> None:
    done = script(
        '{"type": "step", "name": "download"}', '{"type": "bytes", "done": 5, "total": 10}', "no json", "[]",
        '{"type": "done", "path": "/p", "commit": "c", "secret": "no"}',
    )  # fmt: skip
    said: list[JobReport] = []
    async with running(tmp_path, Scripts(a=done), said) as jobs:
        await jobs.start(spec("a"))
        await jobs.start(spec("a"))  # the same id again changes nothing
        report = await end(jobs)
    assert [r.state for r in said] == [JobState.QUEUED, *[JobState.RUNNING] * 3, JobState.DONE]
    assert report.result == {"path": "/p", "commit": "c"}
    assert [s.name for s in report.steps] == ["download"]
    assert (report.done_bytes, report.total_bytes) == (5, 10)
    async with running(tmp_path, Scripts()) as jobs:
        assert jobs.reports() == (report,), "a result survives its agent"
        await jobs.start(spec("a"))
        assert get(jobs).report == report


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (script('{"type": "failed", "reason": "no room", "remedy": "free some"}'), "no room"),
        ("import os; os.kill(os.getpid(), 9)", "its process was killed by signal 9"),
        ("import sys; sys.exit(3)", "its process ended with exit code 3"),
        (script('{"type": "done", "path": "/p"}') + "\nimport sys; sys.exit(1)", "its process ended with exit code 1"),
    ],
)
async def test_a_failure_says_why(tmp_path: Path, body: str, reason: str) -> None:
    async with running(tmp_path, Scripts(a=body)) as jobs:
        await jobs.start(spec("a"))
        report = await end(jobs)
        assert (report.state, report.reason) == (JobState.FAILED, reason)
        assert report.remedy
        await jobs.start(spec("b", "j2"))
        assert (await end(jobs, "j2")).reason == "b: is nothing"


async def test_a_cancel_ends_all_that_the_job_started(tmp_path: Path) -> None:
    async with running(tmp_path, Scripts(a=LASTING)) as jobs:
        await jobs.start(spec("a"))
        await until(lambda: get(jobs).report.steps)
        child, pid = get(jobs).child, int(get(jobs).report.steps[0].name)
        jobs.cancel("j1", "not needed")
        jobs.cancel("j1", "again")
        report = await end(jobs)
        assert (report.state, report.reason) == (JobState.CANCELLED, "not needed")
        assert child is not None
        await until(lambda: start_time(child.pid) is None and start_time(pid) is None)


async def test_one_that_waits_for_its_turn_can_be_cancelled(tmp_path: Path) -> None:
    async with running(tmp_path, Scripts(a=LASTING, b=script('{"type": "done"}')), most=1) as jobs:
        await jobs.start(spec("a"))
        await until(lambda: get(jobs).report.steps)
        await jobs.start(spec("b", "j2"))
        assert get(jobs, "j2").report.state is JobState.QUEUED
        jobs.cancel("j2", "no")
        assert (await end(jobs, "j2")).state is JobState.CANCELLED
        await jobs.start(spec("b", "j3"))
        jobs.cancel("j1", "no")
        assert (await end(jobs, "j3")).state is JobState.DONE


async def test_an_agent_stop_is_quick_ends_the_child_and_the_next_agent_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path, Scripts(a=LASTING)) as jobs:
        await jobs.start(spec("a"))
        await until(lambda: get(jobs).report.steps)
        pid = int(get(jobs).report.steps[0].name)
        began = trio.current_time()
    assert trio.current_time() - began < 1
    await until(lambda: start_time(pid) is None)
    async with running(tmp_path, Scripts(a=script('{"type": "done", "path": "/p"}'))) as jobs:
        report = await end(jobs)
    assert (report.state, report.attempt) == (JobState.DONE, 2)


async def test_a_process_of_an_agent_that_is_gone_is_ended_first_and_no_other(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    left = await trio.lowlevel.open_process(argv, start_new_session=True)
    other = await trio.lowlevel.open_process(argv, start_new_session=True)
    try:
        folder = tmp_path / "jobs"
        for job, process, off in (("j1", left, 0), ("j2", other, 1)):
            started = start_time(process.pid)
            assert started is not None
            known = records.Known(process.pid, started + off)  # the second was another process's number before
            report = rules.running(rules.queued(spec("a", job), 1.0), 1.0)
            records.write(folder / job, Record(spec("a", job), report, known, boot_id()))
        async with running(tmp_path, Scripts(a=script('{"type": "done"}'))) as jobs:
            for job in ("j1", "j2"):
                assert (await end(jobs, job)).state is JobState.DONE
            with trio.fail_after(5):
                assert await left.wait() == -signal.SIGKILL
            assert other.poll() is None
    finally:
        for process in (left, other):
            process.kill()
            await process.wait()


async def test_a_job_that_never_comes_to_its_end_is_not_taken_up_for_ever(tmp_path: Path) -> None:
    report = evolve(rules.running(rules.queued(spec("a"), 1.0), 1.0), attempt=rules.MOST_ATTEMPTS)
    records.write(tmp_path / "jobs" / "j1", Record(spec("a"), report))
    async with running(tmp_path, Scripts(a=script('{"type": "done"}'))) as jobs:
        assert get(jobs).report.state is JobState.FAILED


async def test_only_the_newest_ended_jobs_are_kept(tmp_path: Path) -> None:
    for number in range(records.KEPT + 3):
        one = spec("a", f"old{number}")
        records.write(
            tmp_path / "jobs" / one.id, Record(one, rules.failed(rules.queued(one, float(number)), "", "", 1.0))
        )
    async with running(tmp_path, Scripts(a=script('{"type": "done"}'))) as jobs:
        await jobs.start(spec("a"))
        await end(jobs)
        await until(lambda: len(list((tmp_path / "jobs").iterdir())) == records.KEPT)
        assert len(jobs.reports()) == records.KEPT
        assert jobs.find("old3") is None


async def test_shards_share_a_fetch_and_the_last_one_to_leave_ends_it(tmp_path: Path) -> None:
    async with running(tmp_path, Scripts(a=LASTING)) as jobs:
        first = await jobs.fetch(Fetch("a"), "m-1.0")
        assert await jobs.fetch(Fetch("a"), "m-2.0") is first
        jobs.leave(first, "m-1.0")
        assert not first.cancel
        jobs.leave(first, "m-2.0")
        third = await jobs.fetch(Fetch("a"), "m-3.0")
        assert third is not first
        with trio.fail_after(10):
            await first.ended.wait()
        assert first.report.state is JobState.CANCELLED
        await jobs.start(spec("a"))
        asked = await jobs.fetch(Fetch("a"), "m-3.0")
        assert asked is third


def config(folder: Path, **weights: Any) -> AgentConfig:
    weights = {"reserve_gib": 0.0, **weights}
    address = (Address("127.0.0.1", 1),)
    return AgentConfig("n1", address, TlsFiles("c", "k", "ca"), str(folder), weights=WeightsConfig(**weights))


async def test_weights_are_fetched_from_a_hub_and_gone_on_with_by_the_next_agent(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    files = {"config.json": b"{}", "a.safetensors": bytes(200_000)}
    secret = tmp_path / "token"
    secret.write_text("hub-token")
    secret.chmod(0o600)
    works = NodeWorks(config(tmp_path, token_file=str(secret)))
    with Hub({"org/tiny": files}) as hub:
        hub.faults.gated = True
        hub.faults.hold_after = 64 * 1024
        fetch = JobSpec("j1", Fetch("hf:org/tiny@main", mirror=hub.url))
        async with running(tmp_path, works) as jobs:
            await jobs.start(fetch)
            await until(hub.held.is_set)
            await until(lambda: get(jobs).report.done_bytes)
            assert get(jobs).report.total_bytes == 200_002
        hub.go.set()
        async with running(tmp_path, works) as jobs:
            report = await end(jobs)
    assert report.state is JobState.DONE, report
    assert (Path(report.result["path"]) / "a.safetensors").read_bytes() == files["a.safetensors"]
    written = [p for p in tmp_path.rglob("*") if p.is_file() and b"hub-token" in p.read_bytes()]
    assert written == [secret]
