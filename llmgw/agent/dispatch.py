"""Commands of the control plane: each is done once, refused with a reason, or known to be done already."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from llmgw.agent.epoch import Epoch
from llmgw.errors import OperatorError
from llmgw.hardware.inventory import Inventory
from llmgw.link.messages import (
    CancelJob,
    Command,
    CommandResult,
    DrainShard,
    ForgetShard,
    RunDoctor,
    RunJob,
    ShardCommand,
    StartShard,
    StopShard,
)
from llmgw.scheduler.jobs import JobSpec
from llmgw.telemetry.logging import logger

_REMEMBERED = 1000


class Running(Protocol):
    """One start of one shard, as far as commands go; see :class:`llmgw.agent.supervisor.Supervisor`."""

    def launch(self) -> None:
        """It need not be held any more: start its engine."""
        ...

    def drain(self, reason: str) -> None:
        """The router sends nothing new here."""
        ...

    def stop(self, reason: str, grace_s: float) -> None:
        """End the engine."""
        ...


class Runs(Protocol):
    """Who starts shards and knows them; see :class:`llmgw.agent.shards.Shards`."""

    def find(self, shard: str, generation: int) -> Running | None:
        """This start of this shard, if it is known."""
        ...

    async def start(self, command: StartShard, inventory: Inventory) -> None:
        """Launch an engine. Raises :class:`OperatorError`."""
        ...

    async def forget(self, shard: str, generation: int) -> None:
        """Drop an ended shard's record. Raises :class:`OperatorError`."""
        ...


class RunsJobs(Protocol):
    """Who does jobs; see :class:`llmgw.agent.jobs.runner.Jobs`."""

    async def start(self, spec: JobSpec) -> None:
        """Begin a job. Raises :class:`OperatorError`."""
        ...

    def cancel(self, job: str, reason: str) -> None:
        """End a job."""
        ...


class Examines(Protocol):
    """Who looks at the node; see :class:`llmgw.agent.doctor.Doctor`."""

    def start(self, command: RunDoctor) -> None:
        """Begin. Raises :class:`OperatorError`."""
        ...


def _subject(command: Command) -> str:
    match command:
        case RunDoctor():
            return "the doctor"
        case RunJob(job=job):
            return f"job {job.id}"
        case CancelJob(job=name):
            return f"job {name}"
        case _:
            return f"shard {command.shard}"


class Dispatch:
    """Carries commands out. ``inventory`` is asked for the hardware as it is now."""

    def __init__(
        self,
        shards: Runs,
        epoch: Epoch,
        inventory: Callable[[], Inventory],
        jobs: RunsJobs | None = None,
        doctor: Examines | None = None,
    ) -> None:
        self._doctor = doctor
        self._shards = shards
        self._jobs = jobs
        self._epoch = epoch
        self._inventory = inventory
        self._results: OrderedDict[str, CommandResult] = OrderedDict()
        self._log = logger("dispatch")

    async def run(self, command: Command) -> CommandResult:
        """Do one command and say how that went. Never raises for what a command asks."""
        if (known := self._results.get(command.command)) is not None:
            return known
        try:
            admitted = await self._epoch.admit(command.epoch)
        except OperatorError as failed:
            return CommandResult(command.command, False, f"{failed.thing}: {failed.reason}", failed.remedy)
        if not admitted:
            reason = f"epoch {command.epoch} is over, {self._epoch.highest} was seen"
            return CommandResult(command.command, False, reason, "only the newest control plane is obeyed")
        try:
            await self._carry_out(command)
            result = CommandResult(command.command, True)
        except OperatorError as refused:
            self._log.warning("command refused", command=command.command, reason=str(refused))
            result = CommandResult(command.command, False, f"{refused.thing}: {refused.reason}", refused.remedy)
        except OSError as failed:
            where = failed.filename or _subject(command)
            self._log.error("command failed", command=command.command, error=str(failed))
            remedy = "check the node's disk, memory and limit of open files"
            result = CommandResult(command.command, False, f"{where}: {failed.strerror}", remedy)
        if not result.accepted and not isinstance(command, StartShard):
            return result  # what keeps its record may be gone when it is asked again
        self._results[command.command] = result
        while len(self._results) > _REMEMBERED:
            self._results.popitem(last=False)
        return result

    async def _carry_out(self, command: Command) -> None:
        match command:
            case RunJob() | CancelJob() if self._jobs is None:
                raise OperatorError("jobs", "are not done by this agent")
            case RunJob(job=job):
                assert self._jobs is not None
                await self._jobs.start(job)
            case CancelJob(job=name, reason=reason):
                assert self._jobs is not None
                self._jobs.cancel(name, reason)
            case RunDoctor():
                if self._doctor is None:
                    raise OperatorError("the doctor", "does not come to this agent")
                self._doctor.start(command)
            case _:
                await self._shard(command)

    async def _shard(self, command: ShardCommand) -> None:
        supervisor = self._shards.find(command.shard, command.generation)
        match command:
            case StartShard(hold=hold):
                if supervisor is None:
                    await self._shards.start(command, self._inventory())
                elif not hold:
                    supervisor.launch()
            case DrainShard(reason=reason):
                if supervisor is not None:
                    supervisor.drain(reason)
            case StopShard(reason=reason, grace_s=grace_s):
                # One that is not here has been stopped already, or never came about: nothing is left to do.
                if supervisor is not None:
                    supervisor.stop(reason, grace_s)
            case ForgetShard():
                await self._shards.forget(command.shard, command.generation)
