"""The life of a shard as a pure state machine: what was observed goes in, what to do comes out.

Up to ``draining`` the rules are here; those of the end are in :mod:`llmgw.agent.ending`.
"""

from __future__ import annotations

from attrs import evolve

from llmgw.agent import ending
from llmgw.agent.events import (
    Action,
    Crippled,
    DrainAsked,
    Ended,
    Exposed,
    Gone,
    Observation,
    Probed,
    Progressed,
    Read,
    Remains,
    StacksKept,
    StopAsked,
    Tick,
    Worked,
)
from llmgw.agent.shard import Shard, ready
from llmgw.scheduler.state import ShardState
from llmgw.settings.catalog import Limits

_S = ShardState

READ_STEP = 1024 * 1024
"""Reading less than this from disk is no progress: an engine that hangs still reads a configuration now and then."""


def step(
    shard: Shard, observation: Observation, model: str, limits: Limits, now: float
) -> tuple[Shard, tuple[Action, ...]]:
    """What the shard becomes, and what to do. Total: every observation is possible in every state."""
    if shard.state.ended:
        return shard, ()
    match observation:
        case Gone():
            return ending.gone(shard, now), ()
        case Ended():
            return ending.ended(shard, observation, now), ()
        case Remains():
            return ending.remains(shard, observation, now)
        case StacksKept():
            return ending.stacks_kept(shard, limits.stop_s, now)
        case Exposed(reason=reason, remedy=remedy):
            if shard.state not in (_S.READY, _S.DRAINING):
                return shard, ()
            return ending.doom(shard, reason, limits, now, remedy=remedy, final=True)
        case Crippled(reason=reason):
            if shard.state is _S.STOPPING:
                return shard, ()
            return ending.doom(shard, reason, limits, now)
        case Read(total=total):
            return _read(shard, total, limits, now), ()
        case StopAsked(reason=reason, grace_s=grace_s):
            return ending.stop(shard, reason, grace_s, now)
        case DrainAsked(reason=reason):
            if shard.state is not _S.READY:
                return shard, ()
            return Shard(_S.DRAINING, now, reason, "stopped when its requests have ended", rank=shard.rank), ()
        case Probed():
            return _probed(shard, observation, model, limits, now)
        case Worked(running=running, work=work):
            return _worked(shard, running, work, limits, now)
        case Progressed() if shard.rank > 0:
            return _joined(shard, observation, now), ()
        case Progressed(phase=phase, fraction=fraction):
            return _progressed(shard, phase, fraction, model, limits, now), ()
        case Tick():
            return _tick(shard, limits, now)


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


def _probed(shard: Shard, seen: Probed, model: str, limits: Limits, now: float) -> tuple[Shard, tuple[Action, ...]]:
    if shard.state in (_S.STARTING, _S.LOADING):
        if seen.healthy and seen.listed:
            return ready(model, now), ()
        if shard.state is _S.STARTING and seen.healthy:
            return _loading("/health answers, the model is not listed yet", None, model, limits, now), ()
        return shard, ()
    if shard.state not in (_S.READY, _S.DRAINING):
        return shard, ()
    since = None if seen.healthy else now if shard.silent_since is None else shard.silent_since
    if since is not None and now - since >= limits.hang_s:
        silent = f"hung: /health fails for {now - since:.0f} s and nothing else shows that it gets on: {seen.said}"
        return ending.stuck(shard, silent, now)
    shard = evolve(shard, silent_since=since)
    if shard.state is _S.DRAINING:
        return shard, ()
    fine = f"/v1/models lists {model}"
    reason = fine if seen.healthy else f"was ready, but /health fails now: {seen.said}"
    return evolve(shard, reason=reason), ()


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
    if work != shard.work:
        shard = evolve(shard, silent_since=None)  # SGLang's /health fails under load, while it works
    if running == 0 or work != shard.work or shard.idle_since is None:
        return evolve(shard, work=work, idle_since=None if running == 0 else now), ()
    if now - shard.idle_since < limits.hang_s:
        return shard, ()
    many = f"{running} request{'s run' if running > 1 else ' runs'}"
    return ending.stuck(shard, f"hung: {many} and no token came for {now - shard.idle_since:.0f} s", now)


def _tick(shard: Shard, limits: Limits, now: float) -> tuple[Shard, tuple[Action, ...]]:
    if shard.deadline is None or now < shard.deadline:
        return shard, ()
    if shard.state is _S.STOPPING:
        return ending.overdue(shard, limits, now)
    if shard.state is _S.STARTING:
        doomed = (
            f"starting for {now - shard.since:.0f} s, waited for an answer or a line of progress; last: {shard.reason}"
        )
    else:
        doomed = (
            f"stood still for {limits.load_s:g} s at: {shard.reason} (loading for {now - shard.since:.0f} s, "
            "waited for the model to be listed)"
        )
    return ending.stuck(shard, doomed, now)
