"""How a shard ends: asked to, doomed, gone by itself; and what is waited for until nothing of it is left. Pure."""

from __future__ import annotations

from attrs import evolve

from llmgw.agent.events import Action, Ended, KeepStacks, Kill, KillRemains, Remains, Terminate
from llmgw.agent.shard import Shard
from llmgw.scheduler.state import ShardState
from llmgw.settings.catalog import Limits

_S = ShardState
_LAST_LINE = 200
_NAMED = 4

NOT_STARTED = "correct the engine's command in agent.yaml, or install the engine with llmgw ctl install"
"""What to do about an engine whose program could not be executed."""

CLEAR_S = 60.0
"""What is left of an engine after its exit is waited for so long: killed processes with much memory take seconds."""

STACKS_S = 20.0
"""Writing down where a hung engine stands may take so long before it is ended all the same."""

RANK_STOP_S = 5.0
"""Between SIGTERM and SIGKILL for a rank above 0, at most: it serves nobody, and there is nothing that it could finish.

A headless data-parallel rank of vLLM and every one of SGLang from 0.5.21 on never end by SIGTERM.
"""


def doom(
    shard: Shard, doomed: str, limits: Limits, now: float, *, remedy: str = "", final: bool = False
) -> tuple[Shard, tuple[Action, ...]]:
    """End an engine; ``final`` where its profile makes it do what it must not, so that the next would be no better."""
    stopping = Shard(
        _S.STOPPING, now, doomed, "", doomed=doomed, remedy=remedy, final=final, ended_at=now, rank=shard.rank
    )
    return _told(stopping, limits.stop_s, now), (Terminate(),)


def stuck(shard: Shard, doomed: str, now: float) -> tuple[Shard, tuple[Action, ...]]:
    """End an engine that does not move, after it was written down where it stands: once ended nobody can tell."""
    doomed = f"{doomed}; where it stood is in stacks.txt beside its log"
    stopping = Shard(
        _S.STOPPING, now, doomed, f"its stacks are written down, then SIGTERM, in {STACKS_S:g} s at most",
        deadline=now + STACKS_S, doomed=doomed, held=True, ended_at=now, rank=shard.rank,
    )  # fmt: skip
    return stopping, (KeepStacks(),)


def stop(shard: Shard, reason: str, grace_s: float, now: float) -> tuple[Shard, tuple[Action, ...]]:
    """Somebody wants it to end; a second time can only hurry."""
    if shard.fate is not None:
        return shard, ()
    if shard.held:
        return stacks_kept(shard, grace_s, now)
    if shard.state is _S.STOPPING:
        if shard.deadline is not None and now + grace_s < shard.deadline:
            return evolve(shard, deadline=now + grace_s), ()
        return shard, ()
    return _told(Shard(_S.STOPPING, now, reason, "", rank=shard.rank), grace_s, now), (Terminate(),)


def stacks_kept(shard: Shard, grace_s: float, now: float) -> tuple[Shard, tuple[Action, ...]]:
    """A hung engine was held back only so that it could be looked at: it is told to end now."""
    if not shard.held or shard.fate is not None:
        return shard, ()
    return _told(evolve(shard, held=False), grace_s, now), (Terminate(),)


def overdue(shard: Shard, limits: Limits, now: float) -> tuple[Shard, tuple[Action, ...]]:
    """A shard that is being ended has taken too long with what it waits for."""
    if shard.fate is not None:
        return _not_clear(shard, shard.fate, now), ()
    if shard.held:
        return stacks_kept(shard, limits.stop_s, now)
    # Asked again each second: something in the kernel may hold a process that was killed already.
    told = evolve(shard, next="SIGKILL was sent; stopped when no process is left", deadline=now + 1.0, killed=True)
    return told, (Kill(),)


def _told(shard: Shard, grace_s: float, now: float) -> Shard:
    """SIGTERM is sent now."""
    if shard.rank > 0:
        grace_s = min(grace_s, RANK_STOP_S)
    return evolve(shard, next=f"SIGTERM was sent; SIGKILL in {grace_s:g} s", deadline=now + grace_s)


def gone(shard: Shard, now: float) -> Shard:
    """Its first process ended by itself: the rest is being ended, and it serves nobody."""
    if shard.state is _S.STOPPING:
        return shard
    return Shard(
        _S.STOPPING, now, f"the engine ended without being asked while {shard.state.value}",
        f"failed when what it started has ended too; SIGKILL in {CLEAR_S:g} s",
        deadline=now + CLEAR_S, ended_while=shard.state, rank=shard.rank, ended_at=now,
    )  # fmt: skip


def ended(shard: Shard, end: Ended, now: float) -> Shard:
    """Nothing of it is left: what it becomes, and why."""
    if shard.fate is not None:
        return evolve(shard.fate, since=now)
    at = shard.ended_at if shard.doomed is not None else end.at or shard.ended_at
    return evolve(_fate(shard, end, now), ended_at=now if at is None else at)


def _fate(shard: Shard, end: Ended, now: float) -> Shard:
    left = f"; pids {', '.join(map(str, end.left))} cannot be killed" if end.left else ""
    last = f"; its last line: {end.last[:_LAST_LINE]}" if end.last and end.diagnosis is None else ""
    because = f"{end.diagnosis.cause}; " if end.diagnosis is not None else ""
    if end.error:
        return Shard(_S.FAILED, now, end.error, "", exit=end.exit, remedy=NOT_STARTED)
    if shard.state is _S.STOPPING and shard.doomed is None and shard.ended_while is None:
        if end.left:
            return Shard(_S.FAILED, now, f"{shard.reason}{left}", "", exit=end.exit)
        how = f"it did not end by SIGTERM, {end.exit}" if shard.killed else str(end.exit)
        return Shard(_S.STOPPED, now, f"{shard.reason}; {how}", "", exit=end.exit)
    if shard.doomed is not None:
        return Shard(
            _S.FAILED, now, f"{because}{shard.doomed}{last}{left}", "",
            exit=end.exit, diagnosis=end.diagnosis, remedy=shard.remedy, final=shard.final,
        )  # fmt: skip
    was = shard.ended_while or shard.state
    reason = f"{because}the engine ended without being asked while {was.value}: {end.exit}{last}{left}"
    return Shard(_S.FAILED, now, reason, "", exit=end.exit, diagnosis=end.diagnosis)


def remaining(fate: Shard, now: float) -> Shard:
    """A shard whose engine ended while nobody watched, and of which something is left."""
    return _clearing(fate, (), (), now, now + CLEAR_S)


def remains(shard: Shard, found: Remains, now: float) -> tuple[Shard, tuple[Action, ...]]:
    """Its engine has ended, and this was found of it: that is what is waited for, in words."""
    fate = shard.fate if shard.fate is not None else ended(shard, found.end, now)
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
