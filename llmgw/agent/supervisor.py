"""One shard's supervisor: feeds what it sees to :mod:`llmgw.agent.lifecycle`, and does what that says.

Cancelling it lets go of the engine, which goes on serving. Only a stop that was asked for ends an engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import trio
from attrs import evolve

from llmgw.agent import logs, records
from llmgw.agent.events import (
    Action,
    DrainAsked,
    Ended,
    Gone,
    KeepStacks,
    Kill,
    KillRemains,
    Observation,
    Progressed,
    StopAsked,
    Terminate,
    Tick,
    Worked,
)
from llmgw.agent.hardware import Hardware
from llmgw.agent.lifecycle import step
from llmgw.agent.probe import probe, work_of
from llmgw.agent.process import Grip, Handle, Known
from llmgw.agent.proctree import PROC
from llmgw.agent.records import Record
from llmgw.agent.shard import Shard
from llmgw.agent.tracking import Tracking
from llmgw.engines.diagnosis import NOTICED_WORD, Noticing, diagnose
from llmgw.engines.progress import progress
from llmgw.scheduler.scale import EngineLoad
from llmgw.scheduler.state import Exit, ShardReport, ShardState
from llmgw.telemetry.logging import logger

_PROBE_LOADING_S = 0.25
_PROBE_READY_S = 2.0
_LOG_EVERY_S = 0.25
_TICK_S = 0.25
_LOST_PEER = frozenset({"nccl-timeout"})
"""What engines log when another rank is gone or hangs (:mod:`llmgw.engines.diagnosis`)."""

_ATTACH_LOOK_S = 0.05
_JUMP_S = 1.0
_STOOD_STILL_S = 5.0
"""Something is observed at every tick; later than this, agent or machine were stopped, or have no time at all."""


Changed = Callable[["Supervisor"], None]


class Supervisor:
    """A launched engine and what is known of it. ``changed`` is called at every change worth reporting.

    ``moved`` is set when the record is to be written; who does puts a new event in its place, and says when it is
    ``written``. ``settled``
    is set when the end is written down and nobody touches the folder any more. ``load`` is what the engine said last of
    its work. ``clock`` tells the time of day, which may be set; ``steady`` is only good for how long something takes.
    """

    def __init__(
        self,
        folder: Path,
        record: Record,
        shard: Shard,
        changed: Changed,
        clock: Callable[[], float],
        *,
        adopted: bool,
        hardware: Hardware | None = None,
        proc: Path = PROC,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.record = record
        self.shard = shard
        self.pid: int | None = None
        self.load: EngineLoad | None = None
        self.log_tail: tuple[str, ...] = ()
        self.done = trio.Event()
        self.moved = trio.Event()
        self.settled = trio.Event()
        self._changed = changed
        self._clock = clock
        self._steady = steady
        self._looked_at = steady()
        self._offset = clock() - self._looked_at
        self._adopted = adopted
        self._grip: Grip | None = None
        self._to_end = False
        self._engine: Known | None = None
        self._noticing = Noticing()
        self.tracking = Tracking(
            folder, record, shard.state, self._observe, lambda: changed(self), hardware=hardware, proc=proc
        )
        self._log = logger("shard").bind(shard=record.shard, generation=record.generation)

    @property
    def key(self) -> tuple[str, int]:
        """Which start of which shard this is."""
        return self.record.shard, self.record.generation

    def report(self) -> ShardReport:
        """What goes up to the control plane."""
        record, shard = self.record, self.shard
        serving = record.rank == 0 and shard.state in (ShardState.READY, ShardState.DRAINING)
        found, ended = shard.diagnosis, shard.state.ended
        return evolve(
            record.report(shard.state, shard.reason, shard.next, shard.since),
            pid=None if ended else self.pid,
            endpoint=record.endpoint if serving else None,
            api_key=record.api_key if serving else None,
            progress=shard.progress,
            exit=shard.exit,
            log_tail=self.log_tail,
            remedy=found.remedy if found is not None else shard.remedy,
            final=shard.final or (found is not None and found.final),
            load_mib=self.tracking.load_mib,
            serving_mib=self.tracking.serving_mib,
            warnings=() if ended else (*self.tracking.warnings, *self._noticed()),
            log_path=str(self.folder / "engine.log"),
            ended=shard.ended_at if ended else None,
            lost_peer=found is not None and found.code in _LOST_PEER,
        )

    def _noticed(self) -> tuple[str, ...]:
        found = self._noticing.found
        return () if found is None else (f"{found.cause}: {found.remedy}",)

    def launch(self) -> None:
        """It is."""

    def drain(self, reason: str) -> None:
        """The router sends nothing new here."""
        self._observe(DrainAsked(reason))

    def stop(self, reason: str, grace_s: float) -> None:
        """End the engine; :attr:`done` is set when nothing of it is left."""
        self._observe(StopAsked(reason, grace_s))

    def attach(self) -> bool:
        """Take hold of the processes, by what the shim wrote down of them; before anybody may ask for a stop.

        The shim knows the exit status; should it be gone, the engine itself is watched. Whether the engine's pid is
        known: a shim that is only just starting has not told it yet. Blocking, for a moment.
        """
        pids = records.pids(self.folder)
        if pids is None:
            return False
        self.pid = pids.engine
        if self._grip is None:
            self._grip = pids.grip()
        if pids.engine is not None and pids.engine_start is not None:
            self._engine = Known(pids.engine, pids.engine_start)
        return self.pid is not None

    def written(self, record: Record) -> None:
        """This record is on the disk, or cannot be: what waited for that is done.

        It may be an older one, whose writing was under way when the shard was told to stop.
        """
        if self._to_end and record.state is ShardState.STOPPING and self._grip is not None:
            self._to_end = False
            self._grip.terminate()

    async def look(self, within_s: float) -> None:
        """Ask the engine once how it is; for one that was adopted, so that what is reported first is true already."""
        if self.record.rank > 0:
            return
        with trio.move_on_after(within_s):
            self._observe(await probe(self.record))

    async def run(self) -> None:
        """Watch until the shard has ended, or until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_end)
                nursery.start_soon(self._watch_first)
                nursery.start_soon(self._watch_log)
                nursery.start_soon(self._watch_health)
                nursery.start_soon(self._watch_clock)
                nursery.start_soon(self.tracking.run)
                await self.done.wait()
                nursery.cancel_scope.cancel(reason="the shard has ended")
        finally:
            self.let_go()

    async def _watch_end(self) -> None:
        ended: Ended | None = None
        await self._take_hold()
        while ended is None and self._grip is not None:
            await self._grip.wait()
            ended = await self._read_end()
            self.let_go()
            if ended is None:
                self._hold()
                if self._grip is not None:
                    self._log.warning("the shim is gone; the engine goes on, and is watched itself")
                    if self.shard.state is ShardState.STOPPING and not self.shard.held:
                        self._grip.terminate()  # the shim may have died before it passed that on
        if ended is None:
            ended = await self._read_end()  # it was over before anybody could take hold of it
        lines = await trio.to_thread.run_sync(logs.tail, self.folder, logs.DIAGNOSED_LINES)
        self.log_tail = lines[-logs.TAIL_LINES :]
        last = lines[-1] if lines else ""
        found = await trio.to_thread.run_sync(diagnose, lines)
        ended = evolve(ended or Ended(Exit()), last=last, diagnosis=found)
        self.pid = None
        await self.tracking.clear(ended)
        self._observe(ended)

    async def _take_hold(self) -> None:
        """Wait for what the shim says of itself and its engine, for as long as it holds its folder and has not."""
        known = self._hold()
        while not known and await trio.to_thread.run_sync(records.is_held, self.folder):
            await trio.sleep(_ATTACH_LOOK_S)
            if known := self._hold():
                self._changed(self)
        if not known:
            self._hold()

    def _hold(self) -> bool:
        had = self._grip
        known = self.attach()
        if had is None and self._to_end:
            self.moved.set()  # it was asked for when nobody could be told yet
        return known

    async def _watch_first(self) -> None:
        """Its shim ends only after all that it started, which takes seconds; it serves nobody from now on."""
        if self._engine is None:
            return
        handle = Handle.open(self._engine)
        if handle is not None:
            try:
                await handle.wait()
            finally:
                handle.close()
        self._observe(Gone())

    async def _read_end(self) -> Ended | None:
        """What the shim wrote down before it ended; ``None`` when it could not."""
        found = await trio.to_thread.run_sync(records.end, self.folder)
        return None if found is None else Ended(found.exit, found.error, found.left, at=found.at)

    def let_go(self) -> None:
        """Close what :meth:`attach` opened; the engine goes on."""
        if self._grip is not None:
            self._grip.close()
            self._grip = None

    async def _watch_log(self) -> None:
        # What a rank above 0 has loaded only its log says, and it may have said it before it was adopted.
        from_end = self._adopted and self.record.rank == 0
        reader = logs.LogReader(self.folder / "engine.log", from_end=from_end)
        if self._adopted:
            self._notice(await trio.to_thread.run_sync(logs.naming, self.folder, NOTICED_WORD))
        loading = True
        while loading:
            # What it logged before it was ready is looked at once more when it is.
            loading = self.shard.state in (ShardState.STARTING, ShardState.LOADING)
            newest: Progressed | None = None
            lines = await trio.to_thread.run_sync(reader.lines)
            for line in lines:
                if (said := progress(self.record.profile.engine, line)) is not None:
                    loaded = said.loaded or (newest is not None and newest.loaded)
                    newest = Progressed(said.phase, said.fraction, loaded)
            self._notice(lines)
            if newest is not None:
                self._observe(newest)
            if loading:
                await trio.sleep(_LOG_EVERY_S)

    def _notice(self, lines: Iterable[str]) -> None:
        if self._noticing.read(lines):
            self._log.warning("; ".join(self._noticed()))
            self._changed(self)

    async def _watch_health(self) -> None:
        """Ask rank 0; the others answer nobody (vLLM), or always that they are fine (SGLang)."""
        if self.record.rank > 0:
            return
        while not self.shard.state.ended:
            if self.shard.state is not ShardState.STOPPING:
                self._observe(await probe(self.record))
            if self.shard.state in (ShardState.READY, ShardState.DRAINING):
                seen = await work_of(self.record)
                if seen is not None:
                    self.load = EngineLoad(
                        self.record.shard, self.record.generation, seen.running, seen.waiting, seen.kv_usage
                    )
                    self._observe(Worked(seen.running, seen.work))
            loading = self.shard.state in (ShardState.STARTING, ShardState.LOADING)
            # Often enough to see within its time that it hangs.
            serving_s = min(_PROBE_READY_S, self.record.profile.limits.hang_s / 4)
            await trio.sleep(_PROBE_LOADING_S if loading else serving_s)

    async def _watch_clock(self) -> None:
        while True:
            self._observe(Tick())
            await trio.sleep(_TICK_S)

    def _now(self) -> float:
        """The time of day. No limit may be over because that was set, or because this agent stood still itself."""
        now, steady = self._clock(), self._steady()
        jump, gap = now - steady - self._offset, steady - self._looked_at
        self._looked_at = steady
        if gap > _STOOD_STILL_S:
            self._log.warning("nobody looked at the engine for some time", seconds=round(gap, 1))
            self.shard = self.shard.unwatched(gap)
        if abs(jump) > _JUMP_S:
            self._log.warning("the clock was set", by_s=round(jump, 1))
            self._offset += jump
            self.shard = self.shard.shifted(jump)
        return now

    def _observe(self, observation: Observation) -> None:
        before, now = self.shard, self._now()
        self.shard, actions = step(self.shard, observation, self.record.model, self.record.profile.limits, now)
        for action in actions:
            self._act(action)
        if self.shard == before:
            return
        if self.shard.state is not before.state:
            self._log.info("shard", state=self.shard.state.value, reason=self.shard.reason)
            self.tracking.became(self.shard.state)
            # A successor that reads ``stopping`` takes the end for one that was asked for.
            if self.shard.ended_while is None:
                self.record = evolve(
                    self.record,
                    state=self.shard.state,
                    since=self.shard.since,
                    doom=self.shard.doom or self.record.doom,
                )
                self.moved.set()
        if self.shard.state.ended:
            self.done.set()
        self._changed(self)

    def _act(self, action: Action) -> None:
        match action:
            case Terminate():
                # Written down first, so that an end that was asked for is known as one even if this agent dies now.
                self._to_end = True
                self.moved.set()
            case Kill() if self._grip is not None:
                self._log.warning("killing the engine and everything it started")
                self._grip.kill()
            case Kill():
                # What its shim wrote down of itself cannot be read, and may never be.
                self._log.warning("killing what bears the mark of this launch: nothing tells its processes")
                self.tracking.kill_all()
            case KeepStacks():
                self.tracking.keep_stacks()
            case KillRemains():
                self.tracking.kill_remains()
