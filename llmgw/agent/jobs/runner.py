"""The jobs of this node: each in a task that owns its process, written down, cancelled by its id, taken up again.

Jobs hang on the agent, not on a session: a lost link ends none. When the agent stops, its children end with it, and the
next agent takes up what was not done: a fetch goes on with the files that are whole, an install starts anew.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import trio
from attrs import define, field

from llmgw.agent.jobs import child, records
from llmgw.agent.jobs.child import Work
from llmgw.agent.jobs.records import Record
from llmgw.agent.process import Known
from llmgw.discovery.host import boot_id
from llmgw.errors import OperatorError
from llmgw.scheduler import jobs as rules
from llmgw.scheduler.jobs import Fetch, JobReport, JobSpec
from llmgw.telemetry.logging import logger

MOST_AT_ONCE = 2
_STOP_S = 0.2


class Works(Protocol):
    """Who knows what to run for a job, and what to do once it went well."""

    def work(self, spec: JobSpec, folder: Path) -> Work:
        """What to run. Raises :class:`OperatorError`. Blocking."""
        ...

    def finish(self, spec: JobSpec, result: dict[str, str]) -> dict[str, str]:
        """It went well: make it count, and say what the result is. Raises :class:`OperatorError`. Blocking."""
        ...


@define(eq=False)
class Job:
    """One job. ``wanted_by`` are the shards that wait for it; ``asked`` says that somebody asked for it by its id."""

    spec: JobSpec
    report: JobReport
    asked: bool
    wanted_by: set[str] = field(factory=set)
    cancel: str = ""
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    ended: trio.Event = field(factory=trio.Event)
    child: Known | None = None


class Jobs:
    """All jobs. ``changed`` is called with the report of each one that changes."""

    def __init__(
        self,
        state_dir: Path,
        works: Works,
        changed: Callable[[JobReport], None],
        clock: Callable[[], float],
        most: int = MOST_AT_ONCE,
    ) -> None:
        self._folder = state_dir / "jobs"
        self._works = works
        self._changed = changed
        self._clock = clock
        self._turns = trio.CapacityLimiter(most)
        self._known: dict[str, Job] = {}
        self._nursery: trio.Nursery | None = None
        self._log = logger("jobs")

    def reports(self) -> tuple[JobReport, ...]:
        """What to say of every job, oldest first."""
        return tuple(job.report for job in self._known.values())

    def find(self, job: str) -> Job | None:
        """The job of this id."""
        return self._known.get(job)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own every job until cancelled. Started once what a gone agent left is ended or taken up."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                for record in await trio.to_thread.run_sync(records.everything, self._folder):
                    await self._take_up(record)
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._nursery = None

    async def _take_up(self, record: Record) -> None:
        report = record.report
        if not report.state.ended:
            if record.child is not None and record.boot_id == boot_id():
                await child.end_left(record.child)
            report = rules.taken_up(report, self._clock())
        job = Job(record.spec, report, asked=record.asked)
        self._known[record.spec.id] = job
        if report.state.ended:
            job.ended.set()
        else:
            self._log.info("job taken up again", job=report.id, subject=report.subject, attempt=report.attempt)
            await self._begin(job)

    async def start(self, spec: JobSpec) -> None:
        """Begin a job, unless one of its id is known already. Raises :class:`OperatorError`."""
        if spec.id in self._known:
            return
        await self._begin(self._add(spec, asked=True))

    async def fetch(self, fetch: Fetch, shard: str) -> Job:
        """The job that fetches these weights for a shard: the one that does already, or a new one.

        Raises :class:`OperatorError`.
        """
        for job in self._known.values():
            if not job.report.state.ended and not job.cancel and job.spec.fetch == fetch:
                job.wanted_by.add(shard)
                return job
        job = self._add(JobSpec(f"fetch-{secrets.token_hex(6)}", fetch=fetch), asked=False)
        job.wanted_by.add(shard)
        await self._begin(job)
        return job

    def leave(self, job: Job, shard: str) -> None:
        """A shard does not wait for it any more; when nobody else does either, it is cancelled."""
        job.wanted_by.discard(shard)
        if not job.asked and not job.wanted_by:
            self.cancel(job.spec.id, f"shard {shard} was stopped, and nobody else waits for it")

    def cancel(self, job: str, reason: str) -> None:
        """End a job; one that has ended, or that is not known, is left as it is."""
        found = self._known.get(job)
        if found is not None and not found.report.state.ended and not found.cancel:
            found.cancel = reason or "cancelled"
            found.scope.cancel(reason=reason)

    def _add(self, spec: JobSpec, *, asked: bool) -> Job:
        if self._nursery is None:
            raise OperatorError(f"job {spec.id}", "the agent is stopping")
        records.folder_of(self._folder, spec.id)
        job = Job(spec, rules.queued(spec, self._clock()), asked=asked)
        self._known[spec.id] = job
        return job

    async def _begin(self, job: Job) -> None:
        try:
            await self._write(job)
        except OSError as failed:
            self._known.pop(job.spec.id, None)
            raise OperatorError(
                str(self._folder), f"cannot be written: {failed.strerror}", "check the disk"
            ) from failed
        self._changed(job.report)
        if self._nursery is not None:
            self._nursery.start_soon(self._run, job)

    async def _run(self, job: Job) -> None:
        """One job from its turn to its end. Only the agent's own stop leaves it unended, for the next agent."""
        with job.scope:
            try:
                async with self._turns:
                    self._say(job, rules.running(job.report, self._clock()))
                    await self._work(job)
            except OperatorError as wrong:
                self._say(job, rules.failed(job.report, f"{wrong.thing}: {wrong.reason}", wrong.remedy, self._clock()))
            except OSError as failed:
                reason = f"it cannot be run: {failed.strerror or failed}"
                self._say(job, rules.failed(job.report, reason, "check the node's disk", self._clock()))
        if job.cancel and not job.report.state.ended:
            self._say(job, rules.cancelled(job.report, job.cancel, self._clock()))
        job.child = None
        try:
            await self._write(job)
        except OSError as failed:
            self._log.error("a job's end cannot be written", job=job.spec.id, error=str(failed))
        job.ended.set()
        self._log.info("job", job=job.spec.id, subject=job.report.subject, state=job.report.state.value,
                       reason=job.report.reason)  # fmt: skip
        await self._prune()

    async def _work(self, job: Job) -> None:
        folder = records.folder_of(self._folder, job.spec.id)
        work = await trio.to_thread.run_sync(self._works.work, job.spec, folder)
        last: dict[str, Any] = {}

        def heard(said: dict[str, Any]) -> None:
            self._heard(job, said)
            last.update(said)

        def started(known: Known | None) -> None:
            job.child = known
            records.write(folder, self._record(job))  # at once: whoever comes after us must know the process

        def grace_s() -> float:
            return work.grace_s if job.cancel else _STOP_S

        code = await child.run(work, folder / "log.txt", heard, started, grace_s)
        now = self._clock()
        if last.get("type") == "done" and code == 0:
            said = {
                k: v for k, v in last.items() if k in ("path", "commit", "version", "command") and isinstance(v, str)
            }
            result = await trio.to_thread.run_sync(self._works.finish, job.spec, said)
            self._say(job, rules.done(job.report, result, now))
        elif last.get("type") == "failed":
            self._say(job, rules.failed(job.report, str(last.get("reason")), str(last.get("remedy", "")), now))
        else:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            self._say(job, rules.failed(job.report, f"its process {how}", f"see {folder / 'log.txt'}", now))

    def _heard(self, job: Job, said: dict[str, Any]) -> None:
        now, report = self._clock(), job.report
        match said:
            case {"type": "step", "name": str(name)}:
                self._say(job, rules.stepped(report, name, now))
            case {"type": "bytes", "done": int(done), "total": int(total)}:
                self._say(job, rules.progressed(report, done, total, now))
            case {"type": "log", "text": str(text)}:
                self._log.info("job", job=job.spec.id, said=text)
            case _:
                return

    def _say(self, job: Job, report: JobReport) -> None:
        if report != job.report:
            job.report = report
            self._changed(report)

    def _record(self, job: Job) -> Record:
        return Record(job.spec, job.report, job.child, boot_id(), job.asked)

    async def _write(self, job: Job) -> None:
        folder = records.folder_of(self._folder, job.spec.id)
        await trio.to_thread.run_sync(partial(records.write, folder, self._record(job)))

    async def _prune(self) -> None:
        ended = [job for job in self._known.values() if job.report.state.ended]
        for job in ended[: max(0, len(ended) - records.KEPT)]:
            del self._known[job.spec.id]
            await trio.to_thread.run_sync(records.remove, records.folder_of(self._folder, job.spec.id))
