"""A shard whose engine is yet to be launched: its weights are fetched first, or the other ranks' are.

It stands where a :class:`llmgw.agent.supervisor.Supervisor` will stand then. No process and no record of it exist:
after a restart of the agent the control plane asks for the start again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import trio
from attrs import evolve, frozen

from llmgw.agent.jobs.runner import Job
from llmgw.agent.records import Record
from llmgw.scheduler.jobs import JobReport, JobState, way
from llmgw.scheduler.state import ShardReport, ShardState, WaitsFor

_LOOK_S = 1.0


@frozen
class Waiting:
    """How a shard that waits stands: its state, why, since when, and what happens next."""

    state: ShardState
    since: float
    reason: str
    next: str
    progress: float | None = None
    remedy: str = ""
    waits_for: WaitsFor = WaitsFor.NOTHING


def waiting(weights: str, job: JobReport, since: float, now: float, still_s: float, stall_s: float) -> Waiting:
    """What the job's report means for a shard that waits for it. Pure.

    Its deadline moves on with every byte: only a fetch that stands still, for ``still_s`` by now, is too slow.
    """
    if job.state in (JobState.FAILED, JobState.CANCELLED):
        return Waiting(ShardState.FAILED, now, f"{weights} cannot be fetched: {job.reason}", "", remedy=job.remedy)
    if job.state is JobState.RUNNING and still_s > stall_s:
        reason = f"{weights}: no byte came for {still_s:.0f} s ({way(job, now)})"
        return Waiting(ShardState.FAILED, now, reason, "", remedy="check the network, the proxy and the mirror")
    progress = job.done_bytes / job.total_bytes if job.total_bytes else None
    then = f"the engine is started once they are here; fails after {stall_s:g} s without a byte"
    fetches = f"fetches {weights}: {way(job, now)}"
    return Waiting(ShardState.STARTING, since, fetches, then, progress, waits_for=WaitsFor.WEIGHTS)


def held(weights: str, since: float) -> Waiting:
    """A rank that has all it needs: an engine that waits for the others would use up its time limits. Pure."""
    reason, then = f"{weights} is here; other ranks still fetch theirs", "all ranks are started together"
    return Waiting(ShardState.STARTING, since, reason, then, waits_for=WaitsFor.RANKS)


class Pending:
    """One shard that waits: for ``job``, if there is one, and with ``hold`` until :meth:`launch` is called.

    ``changed`` is called with it whenever what it says is another.
    """

    def __init__(
        self,
        record: Record,
        job: Job | None,
        changed: Callable[[Pending], None],
        clock: Callable[[], float],
        *,
        hold: bool = False,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self.record = record
        self.job = job
        self.stop_asked: tuple[str, float] | None = None
        self._hold = hold
        self._launching = False
        self._told = trio.Event()
        self._changed = changed
        self._clock = clock
        self._steady = steady
        self._moved, self._moved_at = 0.0, steady()
        self.shard = self._look(clock())

    @property
    def key(self) -> tuple[str, int]:
        """Which start of which shard this is."""
        return self.record.shard, self.record.generation

    @property
    def path(self) -> str | None:
        """Where its weights were fetched to."""
        return None if self.job is None else self.job.report.result["path"]

    def launch(self) -> None:
        """The other ranks are as far."""
        self._hold = False
        self._told.set()

    def drain(self, reason: str) -> None:
        """Nothing is routed to it yet."""

    def stop(self, reason: str, grace_s: float) -> None:
        """Wait no more. There is no process to end, but where one is just started: that is stopped right after it."""
        if self._launching:
            self.stop_asked = (reason, grace_s)
        elif not self.shard.state.ended:
            self._become(Waiting(ShardState.STOPPED, self._clock(), f"{reason}; the engine was not started yet", ""))
            self._told.set()

    def fail(self, reason: str, remedy: str) -> None:
        """The weights are here, and the engine cannot be started all the same."""
        self._become(Waiting(ShardState.FAILED, self._clock(), reason, "", remedy=remedy))

    def report(self) -> ShardReport:
        """What goes up to the control plane."""
        shard = self.shard
        said = self.record.report(shard.state, shard.reason, shard.next, shard.since)
        return evolve(said, progress=shard.progress, remedy=shard.remedy, waits_for=shard.waits_for)

    async def wait(self) -> bool:
        """Wait until it is to be launched; ``False`` when its weights did not come, or nobody wants it any more."""
        while not self.shard.state.ended:
            self._told = trio.Event()
            if self._here and not self._hold:
                self._launching = True
                return True
            self._become(self._look(self.shard.since))
            with trio.move_on_after(_LOOK_S):
                async with trio.open_nursery() as nursery:
                    for event in (self._told, *(() if self.job is None or self._here else (self.job.ended,))):
                        nursery.start_soon(_either, event, nursery.cancel_scope)
        return False

    @property
    def _here(self) -> bool:
        return self.job is None or self.job.report.state is JobState.DONE

    def _look(self, since: float) -> Waiting:
        profile = self.record.profile
        if self.job is None or (self._here and self._hold):
            return held(profile.weights, since)
        report = self.job.report
        if report.moved != self._moved:  # told by the time of day, which may be set meanwhile
            self._moved, self._moved_at = report.moved, self._steady()
        still_s = self._steady() - self._moved_at
        return waiting(profile.weights, report, since, self._clock(), still_s, profile.limits.load_s)

    def _become(self, shard: Waiting) -> None:
        if evolve(shard, since=self.shard.since) != self.shard or shard.state is not self.shard.state:
            self.shard = shard
            self._changed(self)


async def _either(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel(reason="it happened")
