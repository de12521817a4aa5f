"""The jobs of all nodes: what was asked for, what nodes say of it, and what they are told again until they know.

A job's row is written before its node hears of it, and with each of its steps; its bytes are in memory only. So what
became of a job is known after a restart of either end.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable

from attrs import evolve

from llmgw.errors import OperatorError, UnknownError
from llmgw.link.messages import CancelJob, JobCommand, RunJob
from llmgw.scheduler import jobs as rules
from llmgw.scheduler.jobs import Fetch, Install, JobReport, JobSpec, check_install
from llmgw.settings.document import Settings
from llmgw.settings.sources import HubSource, allowed, hub_source
from llmgw.store.api import JobRow, Store
from llmgw.store.audit import Act
from llmgw.telemetry.logging import logger

_ID_BYTES = 6
_KEPT = 1000
_UNASKED = 200
"""So many jobs that nobody here asked for are known of one node: those that its engines' starts began."""


def sources_of(settings: Settings, what: str) -> tuple[HubSource, ...]:
    """What to fetch for this: a name on a hub, or all that a model's profiles name.

    Raises :class:`OperatorError` for what is not allowed, or names nothing.
    """
    model = settings.model(what)
    named = [what] if model is None else [p.weights for p in model.profiles]
    found = tuple(dict.fromkeys(s for text in named if (s := hub_source(text)) is not None))
    if not found:
        reason = "no profile of it has weights from a hub" if model is not None else "is no model and no hf:org/name"
        raise UnknownError(what[:200], reason, "paths are used where they are; see weights in the settings")
    for source in found:
        if not allowed(source, settings.weights.sources):
            raise OperatorError(str(source), "is not in weights.sources of the settings", "add it there")
    return found


class Jobs:
    """All jobs. ``send`` queues commands for a node's session, where there is one."""

    def __init__(
        self,
        store: Store,
        epoch: int,
        settings: Callable[[], Settings],
        nodes: Callable[[], Iterable[str]],
        send: Callable[[str, list[JobCommand]], None],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._epoch = epoch
        self._settings = settings
        self._nodes = nodes
        self._send = send
        self._clock = clock
        self._rows: dict[str, JobRow] = {}
        self._log = logger("jobs")

    async def load(self) -> None:
        """Take over what the store remembers."""
        self._rows = {row.report.id: row for row in await self._store.jobs()}

    def rows(self) -> tuple[JobRow, ...]:
        """Every job, oldest first."""
        return tuple(self._rows.values())

    def row(self, job: str) -> JobRow:
        """One job. Raises :class:`OperatorError`."""
        if (row := self._rows.get(job)) is None:
            raise UnknownError(f"job {job[:100]}", "is not known", "see llmgw ctl jobs")
        return row

    async def fetch(self, node: str, what: str, by: str, *, update: bool = False) -> tuple[JobRow, ...]:
        """Have a node fetch weights, or all weights of a model. Raises :class:`OperatorError`."""
        settings = self._settings()
        made = []
        for source in sources_of(settings, what):
            fetch = Fetch(str(source), settings.weights.mirror, settings.weights.offline, update)
            made.append(await self._run(node, JobSpec(self._id(), fetch=fetch), by))
        return tuple(made)

    async def install(self, node: str, install: Install, by: str) -> JobRow:
        """Have a node install an engine. Raises :class:`OperatorError`."""
        check_install(install)
        return await self._run(node, JobSpec(self._id(), install=install), by)

    async def cancel(self, job: str, by: str, reason: str) -> JobRow:
        """End a job; one that has ended is left as it is. Raises :class:`OperatorError`."""
        row = self.row(job)
        if row.report.state.ended or row.cancel:
            return row
        row = evolve(row, cancel=reason)
        await self._save(row, Act(self._clock(), by, "job.cancel", job, reason, self._about(row)))
        self._send(row.node, self._commands(row))
        return row

    def _id(self) -> str:
        return f"job-{secrets.token_hex(_ID_BYTES)}"

    @staticmethod
    def _about(row: JobRow) -> str:
        return f"{row.report.kind.value} {row.report.subject} on {row.node}"

    async def _run(self, node: str, spec: JobSpec, by: str) -> JobRow:
        if node not in set(self._nodes()):
            raise UnknownError(f"node {node[:100]}", "has never registered", "see llmgw ctl nodes")
        row = JobRow(node, rules.queued(spec, self._clock()), spec)
        await self._save(row, Act(self._clock(), by, "job.run", spec.id, "", self._about(row)))
        self._log.info("job", job=spec.id, node=node, subject=spec.subject)
        self._send(node, self._commands(row))
        return row

    async def registered(self, node: str, reports: tuple[JobReport, ...]) -> list[JobCommand]:
        """A node said which jobs it has; returns what it must be told."""
        said = {report.id for report in reports}
        for report in reports:
            await self.reported(node, report)
        commands: list[JobCommand] = []
        for row in self.rows():
            if row.node != node or row.report.state.ended:
                continue
            if row.seen and row.report.id not in said:
                gone = rules.failed(row.report, "the node does not know of it any more", "start it anew", self._clock())
                await self._keep(evolve(row, report=gone))
            else:
                commands += self._commands(row)
        return commands

    def _commands(self, row: JobRow) -> list[JobCommand]:
        made: list[JobCommand] = []
        job = row.report.id
        if row.report.state.ended:
            return made
        if row.spec is not None and not row.seen:
            made.append(RunJob(f"{job}:run", self._epoch, row.spec))
        if row.cancel:
            made.append(CancelJob(f"{job}:cancel", self._epoch, job, row.cancel))
        return made

    async def reported(self, node: str, report: JobReport) -> None:
        """A node said how a job is. What another node's job is called like is not taken for it."""
        if report.id not in self._rows and not self._room(node):
            return
        row = self._rows.get(report.id, JobRow(node, report, seen=False))
        if row.node != node or (row.report.state.ended and row.seen):
            return
        told = row.seen and row.report.state is report.state and row.report.steps == report.steps
        row = evolve(row, report=report, seen=True)
        if report.state.ended and row.spec is not None and row.spec.install is not None:
            row = evolve(row, spec=evolve(row.spec, install=evolve(row.spec.install, lock="")))
        if told:
            self._rows[report.id] = row
            return
        self._log.info("job", job=report.id, node=node, subject=report.subject, state=report.state.value,
                       reason=report.reason)  # fmt: skip
        await self._keep(row)

    def _room(self, node: str) -> bool:
        """Whether one more job of this node can be known that nobody here asked for; its oldest end makes way."""
        unasked = [i for i, row in self._rows.items() if row.node == node and row.spec is None]
        if len(unasked) < _UNASKED:
            return True
        if (oldest := next((i for i in unasked if self._rows[i].report.state.ended), None)) is None:
            return False
        del self._rows[oldest]
        return True

    async def refused(self, job: str, reason: str, remedy: str) -> None:
        """A node would not begin it."""
        row = self._rows.get(job)
        if row is not None and not row.report.state.ended:
            await self._keep(evolve(row, report=rules.failed(row.report, reason, remedy, self._clock())))

    async def _save(self, row: JobRow, act: Act | None = None) -> None:
        await self._store.save_job(row, act)
        self._rows[row.report.id] = row
        ended = [i for i, known in self._rows.items() if known.report.state.ended]
        for old in ended[: max(0, len(ended) - _KEPT)]:
            del self._rows[old]

    async def _keep(self, row: JobRow) -> None:
        """Write down what a node said; a store that cannot take it must not cost us the node."""
        self._rows[row.report.id] = row
        try:
            await self._save(row)
        except OperatorError as failed:
            self._log.error("a job's report is not stored", job=row.report.id, error=str(failed))
