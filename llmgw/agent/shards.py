"""All shards of this node: who is started, watched, adopted and forgotten."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import trio

from llmgw.agent import attempts, leftovers, process, records
from llmgw.agent.ending import remaining
from llmgw.agent.hardware import Hardware
from llmgw.agent.jobs.runner import Job, Jobs
from llmgw.agent.launch import Launches, Prepared, given_up, launch
from llmgw.agent.pending import Pending
from llmgw.agent.proctree import PROC
from llmgw.agent.records import Record
from llmgw.agent.shard import Shard, begin
from llmgw.agent.supervisor import Supervisor
from llmgw.errors import ConflictError, OperatorError, leaves
from llmgw.hardware.inventory import Inventory
from llmgw.link.messages import StartShard
from llmgw.scheduler.jobs import Fetch
from llmgw.scheduler.scale import EngineLoad
from llmgw.scheduler.state import ShardReport, ShardState
from llmgw.settings.catalog import EngineKind
from llmgw.settings.daemon import AgentConfig, EngineInstall
from llmgw.settings.sources import HubSource
from llmgw.telemetry.logging import logger

_FIRST_LOOK_S = 1.0
_SETTLE_S = 5.0
_AGAIN_S = 1.0


class Shards:
    """The shards that run here or ended and are not forgotten. ``changed`` is called with each one that changes.

    With ``jobs`` weights that are not here are fetched first. With ``hardware`` the memory of the devices is watched,
    and with ``delegation``, a cgroup of ours, each engine gets one below it.
    """

    def __init__(
        self,
        config: AgentConfig,
        changed: Callable[[ShardReport], None],
        clock: Callable[[], float],
        *,
        hardware: Hardware | None = None,
        delegation: Path | None = None,
        proc: Path = PROC,
        jobs: Jobs | None = None,
        engines: Callable[[EngineKind], EngineInstall | None] | None = None,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._jobs = jobs
        self._folder = Path(config.state_dir) / "shards"
        self._logs = Path(config.state_dir) / "logs"
        self._hardware = hardware
        self._launches = Launches(
            config, engines or config.engine, clock, lambda: (s.record for s in self.alive()), delegation
        )
        self._proc = proc
        self._changed = changed
        self._clock = clock
        self._steady = steady
        self._known: dict[tuple[str, int], Supervisor | Pending] = {}
        self._nursery: trio.Nursery | None = None
        self._log = logger("shards")

    def reports(self) -> tuple[ShardReport, ...]:
        """What to say of every shard, by name."""
        return tuple(s.report() for _, s in sorted(self._known.items()))

    def loads(self) -> tuple[EngineLoad, ...]:
        """What the engines that serve said last of their work, by shard."""
        serving = (ShardState.READY, ShardState.DRAINING)
        engines = (s for _, s in sorted(self._known.items()) if isinstance(s, Supervisor) and s.shard.state in serving)
        return tuple(engine.load for engine in engines if engine.load is not None)

    def find(self, shard: str, generation: int) -> Supervisor | Pending | None:
        """The supervisor of this start of this shard."""
        return self._known.get((shard, generation))

    def secret(self, shard: str, generation: int) -> str | None:
        """What the engine of this start wants as a bearer token, if it is known."""
        known = self.find(shard, generation)
        return known.record.api_key if isinstance(known, Supervisor) else None

    def writes(self, shard: str, generation: int) -> bool:
        """Whether there is, or may yet be, an engine of this start that writes its log."""
        known = self.find(shard, generation)
        return known is not None and not known.shard.state.ended

    def alive(self) -> Iterable[Supervisor | Pending]:
        """Those whose engine has not ended, or is yet to be launched."""
        return [s for s in self._known.values() if not s.shard.state.ended]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own every supervisor until cancelled. Started once everything that was left behind is adopted."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                await self._adopt()
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._nursery = None

    async def _adopt(self) -> None:
        """Take over what was left behind. Raises :class:`OperatorError`: rather no agent than one that does not see."""
        try:
            await trio.to_thread.run_sync(self._make_folder)
            for folder in await trio.to_thread.run_sync(records.folders, self._folder):
                await self._take_over(folder)
            for shim in await trio.to_thread.run_sync(process.astray, self._folder):
                said = "an engine runs whose folder is gone: nobody can use or adopt it; run llmgw agent stop-engines"
                self._log.error(said, pid=shim.pid)
        except OSError as failed:
            where = failed.filename or self._folder
            raise OperatorError(
                str(where), f"cannot be used: {failed.strerror}", "check the disk and the limit of open files"
            ) from failed

    def _make_folder(self) -> None:
        if self._folder.is_symlink():
            raise OperatorError(str(self._folder), "is a symbolic link", "move what it names here")
        if self._folder.exists() and not self._folder.is_dir():
            raise OperatorError(str(self._folder), "is not a folder", "move it away")
        self._folder.mkdir(mode=0o700, exist_ok=True)

    async def _take_over(self, folder: Path) -> None:
        """Adopt what runs, and report what has ended."""
        left = await trio.to_thread.run_sync(leftovers.find, folder, self._logs, self._clock())
        if left is None:
            return
        assert self._nursery is not None
        supervisor = self._add(folder, left.record, left.shard, adopted=True)
        if left.lives:
            if left.shard.state in (ShardState.STARTING, ShardState.LOADING):
                # It may have become ready in the very moment in which the last agent died.
                await supervisor.look(_FIRST_LOOK_S)
            supervisor.attach()
            state = supervisor.shard.state.value
            self._log.info("adopted", shard=left.record.shard, generation=left.record.generation, state=state)
            self._nursery.start_soon(self._supervise, supervisor)
            return
        supervisor.log_tail = left.log_tail
        if await trio.to_thread.run_sync(supervisor.tracking.left):
            said = "an engine has ended and left processes behind"
            supervisor.shard = remaining(left.shard, self._clock())
            supervisor.tracking.became(ShardState.STOPPING)
            self._nursery.start_soon(self._supervise, supervisor)
        else:
            said = "an engine has ended"
            supervisor.done.set()
            supervisor.settled.set()
        self._log.warning(said, shard=left.record.shard, reason=left.shard.reason)

    def _add(self, folder: Path, record: Record, shard: Shard, *, adopted: bool) -> Supervisor:
        supervisor = Supervisor(
            folder, record, shard, self._on_change, self._clock,
            adopted=adopted, hardware=self._hardware, proc=self._proc, steady=self._steady,
        )  # fmt: skip
        self._known[supervisor.key] = supervisor
        return supervisor

    def _on_change(self, supervisor: Supervisor) -> None:
        self._changed(supervisor.report())

    async def _supervise(self, supervisor: Supervisor) -> None:
        """Run a supervisor; a fault in it is a fault of its shard and ends no other, and is tried again."""
        try:
            while not supervisor.done.is_set():
                try:
                    await self._attend(supervisor)
                except* OSError as failed:
                    said = ", ".join(sorted({str(one) for one in leaves(failed)}))
                    self._log.error("supervision failed; the engine goes on", shard=supervisor.record.shard, error=said)
                    await trio.sleep(_AGAIN_S)
        finally:
            supervisor.settled.set()

    async def _attend(self, supervisor: Supervisor) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._remember, supervisor)
            await supervisor.run()
            nursery.cancel_scope.cancel(reason="the shard has ended")
        await self._write_down(supervisor)

    async def _remember(self, supervisor: Supervisor) -> None:
        """Write the shard's state down as it changes, so that an adopted engine is known to be ready."""
        while True:
            await supervisor.moved.wait()
            supervisor.moved = trio.Event()
            supervisor.written(await self._write_down(supervisor))

    async def _write_down(self, supervisor: Supervisor) -> Record:
        record = supervisor.record
        try:
            await trio.to_thread.run_sync(records.write, supervisor.folder, record)
        except OSError as failed:
            self._log.error("the record cannot be written", shard=record.shard, error=str(failed))
        return record

    async def start(self, command: StartShard, inventory: Inventory) -> None:
        """Launch an engine. Raises :class:`OperatorError` with the reason when it cannot be started here."""
        if self._nursery is None:
            raise OperatorError(command.shard, "the agent is stopping")
        prepared = await self._launches.prepare(command, inventory)
        if prepared.missing is None and not command.hold:
            await self._launch(prepared)
            return
        job = None if prepared.missing is None else await self._fetch(command, prepared.missing)
        pending = Pending(prepared.record, job, lambda it: self._changed(it.report()), self._clock, hold=command.hold)
        self._known[pending.key] = pending
        self._changed(pending.report())
        # The agent may have begun to stop meanwhile; then nobody is to wait for it.
        if self._nursery is not None:
            self._nursery.start_soon(self._when_due, pending, prepared)

    async def _fetch(self, command: StartShard, source: HubSource) -> Job:
        """The job that fetches what the shard needs. Raises :class:`OperatorError`."""
        if self._jobs is None:
            raise OperatorError(str(source), "is not on this node, and this agent fetches nothing")
        rules = command.weights
        return await self._jobs.fetch(Fetch(str(source), rules.mirror, rules.offline), command.shard)

    async def _when_due(self, pending: Pending, prepared: Prepared) -> None:
        """Launch a shard that waits, when that is over; devices and ports are its own meanwhile."""
        try:
            due = await pending.wait()
        finally:
            if pending.shard.state.ended and pending.job is not None and self._jobs is not None:
                self._jobs.leave(pending.job, pending.record.shard)
        if not due:
            return
        try:
            supervisor = await self._launch(prepared.launched(pending.path, self._clock()))
            if pending.stop_asked is not None:
                supervisor.stop(*pending.stop_asked)
        except OperatorError as refused:
            pending.fail(f"{refused.thing}: {refused.reason}", refused.remedy)

    async def _launch(self, prepared: Prepared) -> Supervisor:
        """Start the engine; from then on the shard has a supervisor. Raises :class:`OperatorError`."""
        record = prepared.record
        folder = records.folder_of(self._folder, record.shard, record.generation)
        shard = begin(record.model, record.profile.limits, record.started, record.rank)
        before = self._known.get((record.shard, record.generation))
        supervisor = self._add(folder, record, shard, adopted=False)
        try:
            await launch(folder, prepared)
        except trio.Cancelled:
            # Only before anything was started: the launch itself is shielded.
            self._put_back(supervisor, before)
            raise
        except OperatorError as failed:
            if isinstance(failed, ConflictError) or given_up(folder):
                self._put_back(supervisor, before)
                raise
            self._log.warning("its shim takes long, and is waited for", shard=record.shard, reason=failed.reason)
        try:
            supervisor.attach()
        except OSError as failed:  # whoever watches it tries again
            self._log.warning("what was started cannot be looked at", shard=record.shard, error=str(failed))
        self._changed(supervisor.report())
        self._watch(supervisor)
        return supervisor

    def _watch(self, supervisor: Supervisor) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(self._supervise, supervisor)
        else:
            supervisor.let_go()  # the agent has stopped meanwhile

    def _put_back(self, supervisor: Supervisor, before: Supervisor | Pending | None) -> None:
        if before is None:
            del self._known[supervisor.key]
        else:
            self._known[supervisor.key] = before

    async def forget(self, shard: str, generation: int) -> None:
        """Drop an ended shard's record and keep its log among the last ones (:mod:`llmgw.agent.attempts`).

        Raises :class:`OperatorError` while it has not ended.
        """
        known = self._known.get((shard, generation))
        if known is None:
            return
        if not known.shard.state.ended:
            raise OperatorError(f"shard {shard}", f"is {known.shard.state.value}", "stop it first")
        if isinstance(known, Supervisor):
            with trio.move_on_after(_SETTLE_S):
                await known.settled.wait()
            await attempts.put_away(known.folder, known.record, known.shard, self._logs)
        self._known.pop((shard, generation), None)
