"""The life of a shard as a pure state machine: what was observed goes in, what to do comes out.

``starting`` (process up, not answering) → ``loading`` (``/health`` answers or the log shows progress) → ``ready``
(``/v1/models`` lists the model) → ``draining`` → ``stopping`` → ``stopped`` or ``failed``. The last two are ends: no
process is left. An exit that nobody asked for is a failure whatever its code, because engines exit with 0 when they
crash.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attrs import evolve, field, frozen

from llmgw.engines.diagnosis import Diagnosis
from llmgw.scheduler.state import Exit, ShardState
from llmgw.settings.catalog import Limits

_S = ShardState
_LAST_LINE = 200

NEXT: Mapping[ShardState, frozenset[ShardState]] = MappingProxyType(
    {
        _S.STARTING: frozenset({_S.LOADING, _S.READY, _S.STOPPING, _S.STOPPED, _S.FAILED}),
        _S.LOADING: frozenset({_S.READY, _S.STOPPING, _S.STOPPED, _S.FAILED}),
        _S.READY: frozenset({_S.DRAINING, _S.STOPPING, _S.STOPPED, _S.FAILED}),
        _S.DRAINING: frozenset({_S.STOPPING, _S.STOPPED, _S.FAILED}),
        _S.STOPPING: frozenset({_S.STOPPED, _S.FAILED}),
        _S.STOPPED: frozenset(),
        _S.FAILED: frozenset(),
    }
)
"""Which state may follow which."""


@frozen
class Shard:
    """Where a shard is: its state, since when, why, and what happens next.

    ``deadline`` is when the present state has taken too long: while loading that moves on with every step that was
    not seen before, and ``phases`` are those that were. In a ready engine ``idle_since`` says since when requests run
    and ``work`` does not grow. ``doomed`` is the reason of a failure whose engine is still being ended.
    """

    state: ShardState
    since: float
    reason: str
    next: str
    deadline: float | None = None
    progress: float | None = None
    phases: frozenset[str] = field(default=frozenset(), eq=False)
    work: float | None = field(default=None, eq=False)
    idle_since: float | None = field(default=None, eq=False)
    doomed: str | None = None
    exit: Exit | None = None
    diagnosis: Diagnosis | None = None


@frozen
class Probed:
    """What the engine answered: to ``/health``, and whether ``/v1/models`` lists the model."""

    healthy: bool
    listed: bool
    said: str


@frozen
class Worked:
    """The engine's metrics: how many requests run, and a number that grows with what it gets done."""

    running: int
    work: float


@frozen
class Progressed:
    """The engine's log shows that it gets on."""

    phase: str
    fraction: float | None


@frozen
class Ended:
    """The engine and everything it started is gone.

    ``error`` says why it could not be started at all, ``left`` what could not be killed, ``last`` is the last line of
    its log, and ``diagnosis`` what its log says went wrong.
    """

    exit: Exit
    error: str = ""
    left: tuple[int, ...] = ()
    last: str = ""
    diagnosis: Diagnosis | None = None


@frozen
class DrainAsked:
    """The router sends nothing new here."""

    reason: str


@frozen
class StopAsked:
    """Stop, with ``grace_s`` between SIGTERM and SIGKILL."""

    reason: str
    grace_s: float


@frozen
class Tick:
    """Time has passed."""


Observation = Probed | Worked | Progressed | Ended | DrainAsked | StopAsked | Tick


@frozen
class Terminate:
    """Send SIGTERM to the engine's group."""


@frozen
class Kill:
    """Kill everything that the engine started."""


Action = Terminate | Kill


def begin(model: str, limits: Limits, now: float) -> Shard:
    """A shard whose process has just been started."""
    return Shard(
        _S.STARTING,
        now,
        "process started, does not answer yet",
        f"loading once it answers or logs progress; fails after {limits.start_s:g} s without that ({model})",
        deadline=now + limits.start_s,
    )


def adopted(state: ShardState, model: str, limits: Limits, now: float, since: float) -> Shard:
    """A shard that an earlier agent started: it keeps its state until a probe says otherwise."""
    if state in (_S.READY, _S.DRAINING):
        shard = _ready(model, since)
        return evolve(shard, state=state, reason="adopted, serving", since=since)
    return evolve(begin(model, limits, now), reason="adopted, not known to be ready", since=since)


def step(
    shard: Shard, observation: Observation, model: str, limits: Limits, now: float
) -> tuple[Shard, tuple[Action, ...]]:
    """What the shard becomes, and what to do. Total: every observation is possible in every state."""
    if shard.state.ended:
        return shard, ()
    match observation:
        case Ended():
            return _ended(shard, observation, now), ()
        case StopAsked(reason=reason, grace_s=grace_s):
            return _stop(shard, reason, grace_s, now)
        case DrainAsked(reason=reason):
            if shard.state is not _S.READY:
                return shard, ()
            return Shard(_S.DRAINING, now, reason, "stopped when its requests have ended"), ()
        case Probed():
            return _probed(shard, observation, model, limits, now), ()
        case Worked(running=running, work=work):
            return _worked(shard, running, work, limits, now)
        case Progressed(phase=phase, fraction=fraction):
            return _progressed(shard, phase, fraction, model, limits, now), ()
        case Tick():
            return _tick(shard, limits, now)


def _ready(model: str, now: float) -> Shard:
    return Shard(_S.READY, now, f"/v1/models lists {model}", "")


def _loading(phase: str, fraction: float | None, model: str, limits: Limits, now: float) -> Shard:
    return Shard(
        _S.LOADING,
        now,
        phase,
        f"ready once /v1/models lists {model}; fails after {limits.load_s:g} s without a step forward",
        deadline=now + limits.load_s,
        progress=fraction,
        phases=frozenset({phase}),
    )


def _probed(shard: Shard, seen: Probed, model: str, limits: Limits, now: float) -> Shard:
    if shard.state in (_S.STARTING, _S.LOADING):
        if seen.healthy and seen.listed:
            return _ready(model, now)
        if shard.state is _S.STARTING and seen.healthy:
            return _loading("/health answers, the model is not listed yet", None, model, limits, now)
        return shard
    if shard.state is _S.READY:
        fine = f"/v1/models lists {model}"
        reason = fine if seen.healthy else f"was ready, but /health fails now: {seen.said}"
        return shard if reason == shard.reason else evolve(shard, reason=reason)
    return shard


def _progressed(shard: Shard, phase: str, fraction: float | None, model: str, limits: Limits, now: float) -> Shard:
    if shard.state is _S.STARTING:
        return _loading(phase, fraction, model, limits, now)
    if shard.state is not _S.LOADING:
        return shard
    # What goes round in circles does not move: only a phase that is new counts, or more of the present one.
    moved = phase not in shard.phases or (phase == shard.reason and (fraction or 0.0) > (shard.progress or 0.0))
    deadline = now + limits.load_s if moved else shard.deadline
    return evolve(shard, reason=phase, progress=fraction, deadline=deadline, phases=shard.phases | {phase})


def _worked(shard: Shard, running: int, work: float, limits: Limits, now: float) -> tuple[Shard, tuple[Action, ...]]:
    """A ready engine that answers /health may hang all the same: then requests run and nothing comes of them.

    Only what it says of itself counts: an engine that does not show its metrics for a while is not taken to hang.
    """
    if shard.state not in (_S.READY, _S.DRAINING):
        return shard, ()
    if running == 0 or work != shard.work or shard.idle_since is None:
        return evolve(shard, work=work, idle_since=None if running == 0 else now), ()
    if now - shard.idle_since < limits.hang_s:
        return shard, ()
    many = f"{running} request{'s run' if running > 1 else ' runs'}"
    return _doom(f"hung: {many} and no token came for {now - shard.idle_since:.0f} s", limits, now)


def _doom(doomed: str, limits: Limits, now: float) -> tuple[Shard, tuple[Action, ...]]:
    """End an engine that failed although its process lives."""
    stopping = Shard(
        _S.STOPPING, now, doomed, f"SIGTERM was sent; SIGKILL in {limits.stop_s:g} s",
        deadline=now + limits.stop_s, doomed=doomed,
    )  # fmt: skip
    return stopping, (Terminate(),)


def _stop(shard: Shard, reason: str, grace_s: float, now: float) -> tuple[Shard, tuple[Action, ...]]:
    if shard.state is _S.STOPPING:
        if shard.deadline is not None and now + grace_s < shard.deadline:
            return evolve(shard, deadline=now + grace_s), ()
        return shard, ()
    stopping = Shard(_S.STOPPING, now, reason, f"SIGTERM was sent; SIGKILL in {grace_s:g} s", deadline=now + grace_s)
    return stopping, (Terminate(),)


def _tick(shard: Shard, limits: Limits, now: float) -> tuple[Shard, tuple[Action, ...]]:
    if shard.deadline is None or now < shard.deadline:
        return shard, ()
    if shard.state is _S.STOPPING:
        # Asked again each second: something in the kernel may hold a process that was killed already.
        told = evolve(shard, next="SIGKILL was sent; stopped when no process is left", deadline=now + 1.0)
        return told, (Kill(),)
    if shard.state is _S.STARTING:
        doomed = f"starting for {limits.start_s:g} s, waited for an answer or a line of progress; last: {shard.reason}"
    else:
        doomed = (
            f"stood still for {limits.load_s:g} s at: {shard.reason} (loading for {now - shard.since:.0f} s, "
            "waited for the model to be listed)"
        )
    return _doom(doomed, limits, now)


def _ended(shard: Shard, end: Ended, now: float) -> Shard:
    left = f"; pids {', '.join(map(str, end.left))} cannot be killed" if end.left else ""
    last = f"; its last line: {end.last[:_LAST_LINE]}" if end.last and end.diagnosis is None else ""
    because = f"{end.diagnosis.cause}; " if end.diagnosis is not None else ""
    if end.error:
        return Shard(_S.FAILED, now, end.error, "", exit=end.exit)
    if shard.state is _S.STOPPING and shard.doomed is None:
        if end.left:
            return Shard(_S.FAILED, now, f"{shard.reason}{left}", "", exit=end.exit)
        return Shard(_S.STOPPED, now, f"{shard.reason}; {end.exit}", "", exit=end.exit)
    if shard.doomed is not None:
        return Shard(_S.FAILED, now, f"{because}{shard.doomed}{last}{left}", "", exit=end.exit, diagnosis=end.diagnosis)
    reason = f"{because}the engine ended without being asked while {shard.state.value}: {end.exit}{last}{left}"
    return Shard(_S.FAILED, now, reason, "", exit=end.exit, diagnosis=end.diagnosis)
