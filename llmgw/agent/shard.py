"""A shard as a value: its state, since when, why, and what happens next. Pure.

``starting`` (process up, not answering) → ``loading`` (``/health`` answers or the log shows progress) → ``ready``
(``/v1/models`` lists the model) → ``draining`` → ``stopping`` → ``stopped`` or ``failed``. The last two are ends: no
process is left. An exit that nobody asked for is a failure whatever its code, because engines exit with 0 when they
crash. Between the engine's exit and the end it is ``stopping`` for as long as anything of it lives or holds memory:
from its first process's end on it serves nobody.

How one state follows another is in :mod:`llmgw.agent.lifecycle` up to ``draining``, and in :mod:`llmgw.agent.ending`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attrs import evolve, field, frozen

from llmgw.engines.diagnosis import Diagnosis
from llmgw.scheduler.state import Exit, ShardState
from llmgw.settings.catalog import Limits

_S = ShardState

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
class Doom:
    """What went wrong with an engine that is therefore ended, and when; ``final`` as in :class:`Shard`."""

    reason: str
    at: float
    remedy: str = ""
    final: bool = False


@frozen
class Shard:
    """Where a shard is: its state, since when, why, and what happens next.

    ``deadline`` is when the present state has taken too long: while loading that moves on with every step that was not
    seen before, and ``phases`` are those that were; ``read`` is the most that was seen read from disk. In a ready
    engine ``idle_since`` says since when requests run and ``work`` does not grow, ``silent_since`` since when
    ``/health`` fails and it does not either. ``doomed`` is the reason of a failure whose engine is still being ended,
    ``held`` says that SIGTERM is yet to be sent, once its stacks are written, ``killed`` that SIGKILL was, and ``fate``
    is what the shard becomes once nothing is left of an engine that has ended; ``left`` says what still is.
    ``ended_while`` is the state in which its first process ended, when nobody had asked for that. A ``rank`` above 0
    serves nothing itself: its log says that it has loaded, and the time that all of them may take is rank 0's.
    ``ended_at`` is when it went wrong or was over, however long it took after that until nothing was left.
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
    silent_since: float | None = field(default=None, eq=False)
    read: int | None = field(default=0, eq=False)
    doomed: str | None = None
    held: bool = False
    killed: bool = False
    remedy: str = ""
    final: bool = False
    fate: Shard | None = None
    left: str = ""
    ended_while: ShardState | None = None
    exit: Exit | None = None
    diagnosis: Diagnosis | None = None
    rank: int = 0
    ended_at: float | None = None

    def shifted(self, by_s: float) -> Shard:
        """The same after the clock was set by so much: no time has passed."""
        ended_at = None if self.ended_at is None else self.ended_at + by_s
        fate = None if self.fate is None else self.fate.shifted(by_s)
        return evolve(self.unwatched(by_s), since=self.since + by_s, ended_at=ended_at, fate=fate)

    def unwatched(self, for_s: float) -> Shard:
        """The same after nobody looked for so long: what it did meanwhile is yet to be seen."""

        def later(at: float | None) -> float | None:
            return None if at is None else at + for_s

        return evolve(
            self,
            deadline=later(self.deadline),
            idle_since=later(self.idle_since),
            silent_since=later(self.silent_since),
        )

    @property
    def doom(self) -> Doom | None:
        """Why it is being ended, where nobody asked for that."""
        if self.doomed is None:
            return None
        return Doom(self.doomed, self.since if self.ended_at is None else self.ended_at, self.remedy, self.final)


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


def adopted(
    state: ShardState, model: str, limits: Limits, now: float, since: float, rank: int = 0, doom: Doom | None = None
) -> Shard:
    """A shard that an earlier agent started: it keeps its state until a probe says otherwise.

    One that was being ended goes on ending: whoever answers still is not to be sent requests. It is told again, as the
    last agent may have died before it told it. With ``doom`` it was ended because of that, and fails.
    """
    if state is _S.STOPPING:
        ending = Shard(state, since, "adopted while it was being ended", "SIGTERM is sent again",
                       deadline=now, held=True, rank=rank)  # fmt: skip
        if doom is None:
            return ending
        return evolve(ending, reason=doom.reason, doomed=doom.reason, remedy=doom.remedy, final=doom.final,
                      ended_at=doom.at)  # fmt: skip
    if state in (_S.READY, _S.DRAINING):
        return evolve(ready(model, since), state=state, reason="adopted, serving", rank=rank)
    begun = begin(model, limits, now, rank)
    return evolve(begun, reason="adopted, not known to be ready", since=since, read=None)


def ready(model: str, now: float) -> Shard:
    """A shard that serves."""
    return Shard(_S.READY, now, f"/v1/models lists {model}", "")
