"""A shard whose weights are not on the node yet: it waits for the job that fetches them, and says how far that is.

It stands where a :class:`llmgw.agent.supervisor.Supervisor` will stand once the engine is started. No process and no
record of it exist: after a restart of the agent the control plane asks for the start again.
"""

from __future__ import annotations

from collections.abc import Callable

import trio
from attrs import evolve, frozen

from llmgw.agent.jobs.runner import Job
from llmgw.agent.records import Record
from llmgw.scheduler.jobs import JobReport, JobState, way
from llmgw.scheduler.state import ShardReport, ShardState

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


def waiting(weights: str, job: JobReport, since: float, now: float, stall_s: float) -> Waiting:
    """What the job's report means for a shard that waits for it. Pure.

    Its deadline moves on with every byte: only a fetch that stands still for ``stall_s`` is too slow.
    """
    if job.state in (JobState.FAILED, JobState.CANCELLED):
        return Waiting(ShardState.FAILED, now, f"{weights} cannot be fetched: {job.reason}", "", remedy=job.remedy)
    if job.state is JobState.RUNNING and now - job.moved > stall_s:
        reason = f"{weights}: no byte came for {now - job.moved:.0f} s ({way(job, now)})"
        return Waiting(ShardState.FAILED, now, reason, "", remedy="check the network, the proxy and the mirror")
    progress = job.done_bytes / job.total_bytes if job.total_bytes else None
    then = f"the engine is started once they are here; fails after {stall_s:g} s without a byte"
    return Waiting(ShardState.STARTING, since, f"fetches {weights}: {way(job, now)}", then, progress)


class Fetching:
    """One shard that waits. ``changed`` is called with it whenever what it says is another."""

    def __init__(
        self, record: Record, job: Job, changed: Callable[[Fetching], None], clock: Callable[[], float]
    ) -> None:
        self.record = record
        self.job = job
        self.shard = waiting(record.profile.weights, job.report, clock(), clock(), record.profile.limits.load_s)
        self.stop_asked: tuple[str, float] | None = None
        self._launching = False
        self._stop = trio.Event()
        self._changed = changed
        self._clock = clock

    @property
    def key(self) -> tuple[str, int]:
        """Which start of which shard this is."""
        return self.record.shard, self.record.generation

    def drain(self, reason: str) -> None:
        """Nothing is routed to it yet."""

    def stop(self, reason: str, grace_s: float) -> None:
        """Wait no more. There is no process to end, but where one is just started: that is stopped right after it."""
        if self._launching:
            self.stop_asked = (reason, grace_s)
        elif not self.shard.state.ended:
            self._become(Waiting(ShardState.STOPPED, self._clock(), f"{reason}; the engine was not started yet", ""))
            self._stop.set()

    def fail(self, reason: str, remedy: str) -> None:
        """The weights are here, and the engine cannot be started all the same."""
        self._become(Waiting(ShardState.FAILED, self._clock(), reason, "", remedy=remedy))

    def report(self) -> ShardReport:
        """What goes up to the control plane."""
        shard = self.shard
        said = self.record.report(shard.state, shard.reason, shard.next, shard.since)
        return evolve(said, progress=shard.progress, remedy=shard.remedy)

    async def wait(self) -> bool:
        """Wait for the weights; ``False`` when they did not come, or nobody wants them any more."""
        weights, limits = self.record.profile.weights, self.record.profile.limits
        while not self.shard.state.ended:
            if self.job.report.state is JobState.DONE:
                self._launching = True
                return True
            self._become(waiting(weights, self.job.report, self.shard.since, self._clock(), limits.load_s))
            with trio.move_on_after(_LOOK_S):
                async with trio.open_nursery() as nursery:
                    for event in (self.job.ended, self._stop):
                        nursery.start_soon(_either, event, nursery.cancel_scope)
        return False

    def _become(self, shard: Waiting) -> None:
        if evolve(shard, since=self.shard.since) != self.shard or shard.state is not self.shard.state:
            self.shard = shard
            self._changed(self)


async def _either(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel(reason="it happened")
