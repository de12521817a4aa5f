"""What the agent has to say, until the link takes it."""

from __future__ import annotations

import trio
from attrs import frozen

from llmgw.link.messages import CommandResult, DoctorReport, JobStatus, NotUnderstood, SettingsApplied, ShardStatus
from llmgw.scheduler.jobs import JobReport
from llmgw.scheduler.state import ShardReport

_RESULTS_WAITING = 1000
"""Beyond these no more commands are read: flow control then stops a control plane that does not take its answers."""


@frozen
class Taken:
    """What there was to say, reports before results; and whether hardware, engines or weights are others by now."""

    messages: tuple[ShardStatus | JobStatus | CommandResult | DoctorReport | NotUnderstood | SettingsApplied, ...]
    hardware: bool
    engines: bool
    weights: bool


class Outbox:
    """What is to be said, newest first where it is about the same shard: a slow link must not pile up old news."""

    def __init__(self) -> None:
        self._reports: dict[tuple[str, int], ShardReport] = {}
        self._results: list[CommandResult | DoctorReport | NotUnderstood] = []
        self._jobs: dict[str, JobReport] = {}
        self._engines = False
        self._hardware = False
        self._weights = False
        self._settings: SettingsApplied | None = None
        self._filled = trio.Event()
        self._taken = trio.Event()

    def job(self, report: JobReport) -> None:
        """A job changed."""
        self._jobs[report.id] = report
        self._filled.set()

    def engines(self) -> None:
        """An engine was installed."""
        self._engines = True
        self._filled.set()

    def report(self, report: ShardReport) -> None:
        """A shard changed."""
        self._reports[report.shard, report.generation] = report
        self._filled.set()

    def result(self, result: CommandResult | DoctorReport | NotUnderstood) -> None:
        """A command was dealt with, or something came of it."""
        self._results.append(result)
        self._filled.set()

    async def room(self) -> None:
        """Wait until so many results wait to be sent that more may be made."""
        while len(self._results) >= _RESULTS_WAITING:
            await self._taken.wait()

    def hardware(self) -> None:
        """The hardware was read again and is not as it was."""
        self._hardware = True
        self._filled.set()

    def weights(self) -> None:
        """Weights were looked at."""
        self._weights = True
        self._filled.set()

    def settings(self, said: SettingsApplied) -> None:
        """What became of the settings that the control plane sent last."""
        self._settings = said
        self._filled.set()

    def clear(self) -> None:
        """A registration says all of it."""
        self._reports.clear()
        self._results.clear()
        self._jobs.clear()
        self._settings = None
        self._engines = self._hardware = self._weights = False

    async def take(self) -> Taken:
        """Wait for something to say, and take all of it."""
        while not (
            self._reports
            or self._jobs
            or self._results
            or self._hardware
            or self._engines
            or self._weights
            or self._settings
        ):
            await self._filled.wait()
            self._filled = trio.Event()
        self._filled = trio.Event()
        taken = Taken(
            (
                *(ShardStatus(r) for r in self._reports.values()),
                *(JobStatus(r) for r in self._jobs.values()),
                *self._results,
                *(() if self._settings is None else (self._settings,)),
            ),
            hardware=self._hardware,
            engines=self._engines,
            weights=self._weights,
        )
        self._hardware = self._engines = self._weights = False
        self._settings = None
        self._reports.clear()
        self._jobs.clear()
        self._results.clear()
        self._taken.set()
        self._taken = trio.Event()
        return taken
