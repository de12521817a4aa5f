"""The life of a shard as a pure state machine: what was observed goes in, what to do comes out.

``starting`` (process up, not answering) → ``loading`` (``/health`` answers or the log shows progress) → ``ready``
(``/v1/models`` lists the model) → ``draining`` → ``stopping`` → ``stopped`` or ``failed``. The last two are ends: no
process is left. An exit that nobody asked for is a failure whatever its code, because engines exit with 0 when they
crash. Between the engine's exit and the end it is ``stopping`` for as long as anything of it lives or holds memory:
from its first process's end on it serves nobody.
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

CLEAR_S = 60.0
"""What is left of an engine after its exit is waited for so long: killed processes with much memory take seconds."""

STACKS_S = 20.0
"""Writing down where a hung engine stands may take so long before it is ended all the same."""

READ_STEP = 1024 * 1024
"""Reading less than this from disk is no progress: an engine that hangs still reads a configuration now and then."""

_NAMED = 4

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
    not seen before, and ``phases`` are those that were; ``read`` is the most that was seen read from disk. In a ready
    engine ``idle_since`` says since when requests run and ``work`` does not grow. ``doomed`` is the reason of a failure
    whose engine is still being ended, ``held`` says that SIGTERM is yet to be sent, once its stacks are written, and
    ``fate`` is what the shard becomes once nothing is left of an engine that has ended; ``left`` says what still is.
    ``ended_while`` is the state in which its first process ended, when nobody had asked for that. A ``rank`` above 0
    serves nothing itself: its log says that it has loaded, and the time that all of them may take is rank 0's.
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
    read: int | None = field(default=0, eq=False)
    doomed: str | None = None
    held: bool = False
    remedy: str = ""
    final: bool = False
    fate: Shard | None = None
    left: str = ""
    ended_while: ShardState | None = None
    exit: Exit | None = None
    diagnosis: Diagnosis | None = None
    rank: int = 0


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
    """The engine's log shows that it gets on; ``loaded`` says that what this rank has to load is there."""

    phase: str
    fraction: float | None
    loaded: bool = False


@frozen
class Read:
    """So many bytes the engine's processes read from disk so far: weights that are mapped leave no line in a log."""

    total: int


@frozen
class Exposed:
    """Its API can be reached where it should not: what is wrong, and what to do about it."""

    reason: str
    remedy: str


@frozen
class Crippled:
    """A process without which it cannot work has ended, and the rest stays."""

    reason: str


@frozen
class StacksKept:
    """Where the processes of a hung engine stood was written down, or could not be."""


@frozen
class Gone:
    """The engine's first process has ended; what it started is being ended."""


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
class Remains:
    """The engine ended as ``end`` says, and this was found of it afterwards: processes, and memory of its devices.

    Each is told in words. With neither, its devices are still being read. When nothing is left, :class:`Ended` comes.
    """

    end: Ended
    alive: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()


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


Observation = (
    Probed
    | Worked
    | Progressed
    | Read
    | Exposed
    | Crippled
    | StacksKept
    | Gone
    | Ended
    | Remains
    | DrainAsked
    | StopAsked
    | Tick
)


@frozen
class Terminate:
    """Send SIGTERM to the engine's group."""


@frozen
class Kill:
    """Kill everything that the engine started."""


@frozen
class KeepStacks:
    """Write down where every thread of the engine stands, and say :class:`StacksKept`."""


@frozen
class KillRemains:
    """Kill the processes that were found after the engine's end."""


Action = Terminate | Kill | KeepStacks | KillRemains


def begin(model: str, limits: Limits, now: float, rank: int = 0) -> Shard:
    """A shard whose process has just been started."""
    if rank > 0:
        return Shard(_S.STARTING, now, "process started, joins rank 0", "loading once it logs progress", rank=rank)
    return Shard(
        _S.STARTING,
        now,
        "process started, does not answer yet",
        f"loading once it answers or logs progress; fails after {limits.start_s:g} s without that ({model})",
        deadline=now + limits.start_s,
    )


def adopted(state: ShardState, model: str, limits: Limits, now: float, since: float, rank: int = 0) -> Shard:
    """A shard that an earlier agent started: it keeps its state until a probe says otherwise.

    One that was being ended goes on ending: whoever answers still is not to be sent requests. It is told again, as the
    last agent may have died before it told it.
    """
    if state is _S.STOPPING:
        reason = "adopted while it was being ended"
        return Shard(state, since, reason, "SIGTERM is sent again", deadline=now, held=True, rank=rank)
    if state in (_S.READY, _S.DRAINING):
        return evolve(_ready(model, since), state=state, reason="adopted, serving", rank=rank)
    begun = begin(model, limits, now, rank)
    return evolve(begun, reason="adopted, not known to be ready", since=since, read=None)


def remaining(fate: Shard, now: float) -> Shard:
    """A shard whose engine ended while nobody watched, and of which something is left."""
    return _clearing(fate, (), (), now, now + CLEAR_S)


def step(
    shard: Shard, observation: Observation, model: str, limits: Limits, now: float
) -> tuple[Shard, tuple[Action, ...]]:
    """What the shard becomes, and what to do. Total: every observation is possible in every state."""
    if shard.state.ended:
        return shard, ()
    match observation:
        case Gone():
            return _gone(shard, now), ()
        case Ended():
            return _ended(shard, observation, now), ()
        case Remains():
            return _remains(shard, observation, now)
        case StacksKept():
            return _stacks_kept(shard, limits.stop_s, now)
        case Exposed(reason=reason, remedy=remedy):
            if shard.state not in (_S.READY, _S.DRAINING):
                return shard, ()
            return _doom(reason, limits, now, remedy=remedy, final=True)
        case Crippled(reason=reason):
            if shard.state is _S.STOPPING:
                return shard, ()
            return _doom(reason, limits, now)
        case Read(total=total):
            return _read(shard, total, limits, now), ()
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
        case Progressed() if shard.rank > 0:
            return _joined(shard, observation, now), ()
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


def _joined(shard: Shard, seen: Progressed, now: float) -> Shard:
    """A rank above 0 has nobody to ask: what it logs is all there is."""
    if shard.state not in (_S.STARTING, _S.LOADING):
        return shard
    if seen.loaded:
        return Shard(_S.READY, now, "loaded, serves through rank 0", "", rank=shard.rank)
    since = shard.since if shard.state is _S.LOADING else now
    then = "serves through rank 0 once that is ready, whose time limits hold for all ranks"
    return Shard(_S.LOADING, since, seen.phase, then, progress=seen.fraction, rank=shard.rank)


def _read(shard: Shard, total: int, limits: Limits, now: float) -> Shard:
    """Only more than ever before counts: processes that end and come again start from nothing."""
    if shard.state not in (_S.STARTING, _S.LOADING) or shard.rank > 0:
        return shard
    if shard.read is None:
        return evolve(shard, read=total)
    if total < shard.read + READ_STEP:
        return shard
    limit = limits.start_s if shard.state is _S.STARTING else limits.load_s
    # What the log says of its way is better news, as long as it says how far it got.
    reason = shard.reason if shard.progress is not None else f"read {_size(total)} of weights so far"
    return evolve(shard, read=total, reason=reason, deadline=now + limit)


def _size(count: int) -> str:
    return f"{count / 1024**3:.1f} GiB" if count >= 1024**3 else f"{count / 1024**2:.0f} MiB"


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
    return _stuck(f"hung: {many} and no token came for {now - shard.idle_since:.0f} s", now)


def _stuck(doomed: str, now: float) -> tuple[Shard, tuple[Action, ...]]:
    """End an engine that does not move, after it was written down where it stands: once ended nobody can tell."""
    doomed = f"{doomed}; where it stood is in stacks.txt beside its log"
    stopping = Shard(
        _S.STOPPING, now, doomed, f"its stacks are written down, then SIGTERM, in {STACKS_S:g} s at most",
        deadline=now + STACKS_S, doomed=doomed, held=True,
    )  # fmt: skip
    return stopping, (KeepStacks(),)


def _stacks_kept(shard: Shard, grace_s: float, now: float) -> tuple[Shard, tuple[Action, ...]]:
    if not shard.held or shard.fate is not None:
        return shard, ()
    told = evolve(shard, held=False, next=_told(grace_s), deadline=now + grace_s)
    return told, (Terminate(),)


def _told(grace_s: float) -> str:
    return f"SIGTERM was sent; SIGKILL in {grace_s:g} s"


def _doom(
    doomed: str, limits: Limits, now: float, *, remedy: str = "", final: bool = False
) -> tuple[Shard, tuple[Action, ...]]:
    """End an engine; ``final`` where its profile makes it do what it must not, so that the next would be no better."""
    stopping = Shard(
        _S.STOPPING, now, doomed, _told(limits.stop_s),
        deadline=now + limits.stop_s, doomed=doomed, remedy=remedy, final=final,
    )  # fmt: skip
    return stopping, (Terminate(),)


def _stop(shard: Shard, reason: str, grace_s: float, now: float) -> tuple[Shard, tuple[Action, ...]]:
    if shard.fate is not None:
        return shard, ()
    if shard.held:
        return _stacks_kept(shard, grace_s, now)
    if shard.state is _S.STOPPING:
        if shard.deadline is not None and now + grace_s < shard.deadline:
            return evolve(shard, deadline=now + grace_s), ()
        return shard, ()
    stopping = Shard(_S.STOPPING, now, reason, _told(grace_s), deadline=now + grace_s)
    return stopping, (Terminate(),)


def _tick(shard: Shard, limits: Limits, now: float) -> tuple[Shard, tuple[Action, ...]]:
    if shard.deadline is None or now < shard.deadline:
        return shard, ()
    if shard.fate is not None:
        return _not_clear(shard, shard.fate, now), ()
    if shard.held:
        return _stacks_kept(shard, limits.stop_s, now)
    if shard.state is _S.STOPPING:
        # Asked again each second: something in the kernel may hold a process that was killed already.
        told = evolve(shard, next="SIGKILL was sent; stopped when no process is left", deadline=now + 1.0)
        return told, (Kill(),)
    if shard.state is _S.STARTING:
        doomed = (
            f"starting for {now - shard.since:.0f} s, waited for an answer or a line of progress; last: {shard.reason}"
        )
    else:
        doomed = (
            f"stood still for {limits.load_s:g} s at: {shard.reason} (loading for {now - shard.since:.0f} s, "
            "waited for the model to be listed)"
        )
    return _stuck(doomed, now)


def _remains(shard: Shard, found: Remains, now: float) -> tuple[Shard, tuple[Action, ...]]:
    fate = shard.fate if shard.fate is not None else _ended(shard, found.end, now)
    deadline = shard.deadline if shard.fate is not None and shard.deadline is not None else now + CLEAR_S
    told = _clearing(fate, found.alive, found.holds, shard.since if shard.state is _S.STOPPING else now, deadline)
    if now >= deadline:
        return _not_clear(told, fate, now), ()
    return told, (KillRemains(),) if found.alive else ()


def _clearing(fate: Shard, alive: tuple[str, ...], holds: tuple[str, ...], since: float, deadline: float) -> Shard:
    lives = f"{_some(alive)} still run{'' if len(alive) > 1 else 's'}" if alive and not holds else ""
    found = "; ".join(part for part in (lives, _some(holds)) if part)
    what = "SIGKILL was sent; " if alive else ""
    waits = "nothing of it is left" if found else "its devices were read again"
    return Shard(
        _S.STOPPING, since, f"{found}; {fate.reason}" if found else fate.reason,
        f"{what}{fate.state.value} once {waits}, failed if that takes more than {CLEAR_S:g} s",
        deadline=deadline, fate=fate, left=found,
    )  # fmt: skip


def _not_clear(shard: Shard, fate: Shard, now: float) -> Shard:
    """What is left stays: that is said, and whoever holds a device keeps it out of use until it is gone."""
    if not shard.left:
        return evolve(fate, since=now, reason=f"{fate.reason}; its devices could not be read again since")
    reason = f"{fate.reason}; {shard.left}, {CLEAR_S:g} s after its end"
    return evolve(fate, state=_S.FAILED, since=now, reason=reason)


def _some(words: tuple[str, ...]) -> str:
    more = f" and {len(words) - _NAMED} more" if len(words) > _NAMED else ""
    return ", ".join(words[:_NAMED]) + more


def _gone(shard: Shard, now: float) -> Shard:
    if shard.state is _S.STOPPING:
        return shard
    return Shard(
        _S.STOPPING, now, f"the engine ended without being asked while {shard.state.value}",
        f"failed when what it started has ended too; SIGKILL in {CLEAR_S:g} s",
        deadline=now + CLEAR_S, ended_while=shard.state, rank=shard.rank,
    )  # fmt: skip


def _ended(shard: Shard, end: Ended, now: float) -> Shard:
    if shard.fate is not None:
        return evolve(shard.fate, since=now)
    left = f"; pids {', '.join(map(str, end.left))} cannot be killed" if end.left else ""
    last = f"; its last line: {end.last[:_LAST_LINE]}" if end.last and end.diagnosis is None else ""
    because = f"{end.diagnosis.cause}; " if end.diagnosis is not None else ""
    if end.error:
        return Shard(_S.FAILED, now, end.error, "", exit=end.exit)
    if shard.state is _S.STOPPING and shard.doomed is None and shard.ended_while is None:
        if end.left:
            return Shard(_S.FAILED, now, f"{shard.reason}{left}", "", exit=end.exit)
        return Shard(_S.STOPPED, now, f"{shard.reason}; {end.exit}", "", exit=end.exit)
    if shard.doomed is not None:
        return Shard(
            _S.FAILED, now, f"{because}{shard.doomed}{last}{left}", "",
            exit=end.exit, diagnosis=end.diagnosis, remedy=shard.remedy, final=shard.final,
        )  # fmt: skip
    was = shard.ended_while or shard.state
    reason = f"{because}the engine ended without being asked while {was.value}: {end.exit}{last}{left}"
    return Shard(_S.FAILED, now, reason, "", exit=end.exit, diagnosis=end.diagnosis)
