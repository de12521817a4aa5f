"""Jobs on the control plane: begun once, told until the node knows, and known after a restart of either end."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from llmgw.errors import OperatorError
from llmgw.link.messages import CancelJob, JobCommand, RunJob
from llmgw.scheduler import jobs as rules
from llmgw.scheduler.jobs import Fetch, Install, JobSpec, JobState
from llmgw.server.jobs import Jobs
from llmgw.settings.catalog import EngineKind
from llmgw.settings.document import Settings, WeightsRules
from llmgw.store.opening import sqlite_store
from llmgw.store.sql import SqlStore
from tests.scheduler.clusters import model

PROFILE = model().profiles[0]
MODEL = evolve(model(), profiles=(evolve(PROFILE, weights="hf:org/a@v1"), evolve(PROFILE, name="q", weights="/w")))
SETTINGS = Settings(models=(MODEL,), weights=WeightsRules(sources=("hf:org/*",), mirror="http://mirror"))


class Plane:
    def __init__(self, store: SqlStore, settings: Settings = SETTINGS) -> None:
        self.sent: list[JobCommand] = []
        self.jobs = Jobs(store, 7, lambda: settings, lambda: ("n1",), lambda _, c: self.sent.extend(c), lambda: 100.0)


async def test_what_may_be_fetched(tmp_path: Path) -> None:
    async with sqlite_store(tmp_path / "db") as store:
        plane = Plane(store)
        (row,) = await plane.jobs.fetch("n1", "m", "me")
        assert row.spec == JobSpec(row.report.id, fetch=Fetch("hf:org/a@v1", "http://mirror"))
        assert plane.sent == [RunJob(f"{row.report.id}:run", 7, row.spec)]
        for node, what, reason in (
            ("n2", "m", "has never registered"),
            ("n1", "hf:evil/a", "is not in weights.sources"),
            ("n1", "nope", "is no model"),
        ):
            with pytest.raises(OperatorError, match=reason):
                await plane.jobs.fetch(node, what, "me")
        assert len(plane.jobs.rows()) == 1


async def test_a_job_is_told_until_the_node_knows_and_its_end_is_kept(tmp_path: Path) -> None:
    async with sqlite_store(tmp_path / "db") as store:
        plane = Plane(store)
        (row,) = await plane.jobs.fetch("n1", "hf:org/a", "me")
        run = plane.sent[0]
        assert await plane.jobs.registered("n1", ()) == [run]
        assert await plane.jobs.registered("n2", ()) == []
        report = rules.stepped(rules.running(row.report, 101.0), "download", 102.0)
        await plane.jobs.reported("n2", evolve(report, reason="not its node"))
        await plane.jobs.reported("n1", report)
        assert await plane.jobs.registered("n1", (report,)) == []
        again = Plane(store)
        await again.jobs.load()
        assert again.jobs.row(report.id).report == report
        await again.jobs.cancel(report.id, "you", "enough")
        cancel = CancelJob(f"{report.id}:cancel", 7, report.id, "enough")
        assert again.sent == [cancel]
        third = Plane(store)
        await third.jobs.load()
        assert await third.jobs.registered("n1", (report,)) == [cancel], "a cancel is not forgotten either"
        await third.jobs.reported("n1", rules.cancelled(report, "enough", 103.0))
        await third.jobs.reported("n1", rules.failed(report, "late news", "", 104.0))
    async with sqlite_store(tmp_path / "db") as store:
        last = Plane(store)
        await last.jobs.load()
        assert last.jobs.row(report.id).report.state is JobState.CANCELLED
        assert await last.jobs.registered("n1", ()) == []


async def test_a_job_that_the_node_has_lost_has_failed_and_one_of_its_own_is_listed(tmp_path: Path) -> None:
    async with sqlite_store(tmp_path / "db") as store:
        plane = Plane(store)
        (row,) = await plane.jobs.fetch("n1", "hf:org/a", "me")
        await plane.jobs.reported("n1", rules.running(row.report, 101.0))
        own = rules.queued(JobSpec("fetch-1", fetch=Fetch("hf:org/b")), 99.0)
        assert await plane.jobs.registered("n1", (own,)) == []
        assert plane.jobs.row(row.report.id).report.reason == "the node does not know of it any more"
        assert plane.jobs.row("fetch-1").report == own


async def test_a_refusal_is_a_failure_and_a_lock_files_text_is_kept_only_while_it_is_needed(tmp_path: Path) -> None:
    install = Install(EngineKind.VLLM, "vllm", "0.12", lock="vllm==0.12 --hash=sha256:00")
    async with sqlite_store(tmp_path / "db") as store:
        plane = Plane(store)
        with pytest.raises(OperatorError, match="needs a lock file or a folder of wheels"):
            await plane.jobs.install("n1", evolve(install, wheels="/w"), "me")
        for wrong in (
            {"version": "../../x"},
            {"name": "a/b"},
            {"packages": ("https://h/x.whl",)},
            {"command": ("/bin/sh",)},
        ):
            with pytest.raises(OperatorError, match=r"is no name and version|is not a p"):
                await plane.jobs.install("n1", evolve(install, **wrong), "me")
        assert plane.jobs.rows() == ()
        row = await plane.jobs.install("n1", install, "me")
        await plane.jobs.refused(row.report.id, "no room", "make some")
        assert plane.jobs.row(row.report.id).report.state is JobState.FAILED
        other = await plane.jobs.install("n1", install, "me")
        await plane.jobs.reported("n1", rules.done(other.report, {"path": "/p"}, 101.0))
        spec = plane.jobs.row(other.report.id).spec
        assert spec is not None
        assert spec.install is not None
        assert spec.install.lock == ""


async def test_who_began_and_who_ended_a_job_is_in_the_audit(tmp_path: Path) -> None:
    async with sqlite_store(tmp_path / "db") as store:
        plane = Plane(store)
        (row,) = await plane.jobs.fetch("n1", "hf:org/a", "me")
        await plane.jobs.reported("n1", rules.running(row.report, 101.0))
        await plane.jobs.cancel(row.report.id, "you", "enough")
        await plane.jobs.cancel(row.report.id, "you", "enough")
        told = [(r.action, r.object, r.by, r.reason, r.detail) for r in await store.audit(10)]
        assert told == [
            ("job.cancel", row.report.id, "you", "enough", "fetch hf:org/a@main on n1"),
            ("job.run", row.report.id, "me", "", "fetch hf:org/a@main on n1"),
        ]


async def test_jobs_that_nobody_asked_for_make_way_for_each_other_and_for_no_other_nodes(tmp_path: Path) -> None:
    async with sqlite_store(tmp_path / "db") as store:
        plane = Plane(store)
        (asked,) = await plane.jobs.fetch("n1", "m", "me")
        other = evolve(asked.report, id="job-other", state=JobState.DONE)
        await plane.jobs.reported("n2", other)
        for number in range(300):
            await plane.jobs.reported("n1", evolve(asked.report, id=f"job-{number}", state=JobState.DONE))
        known = [row.report.id for row in plane.jobs.rows()]
        assert known == [asked.report.id, "job-other", *(f"job-{n}" for n in range(100, 300))]
        for number in range(300, 600):
            await plane.jobs.reported("n1", evolve(asked.report, id=f"job-{number}", state=JobState.RUNNING))
        assert len(plane.jobs.rows()) == 202
        await plane.jobs.reported("n1", evolve(asked.report, state=JobState.RUNNING))
        assert plane.jobs.row(asked.report.id).report.state is JobState.RUNNING, "what was asked for goes on"
