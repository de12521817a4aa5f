"""What is seen of a shard, and what to do about it: the two sides of :func:`llmgw.agent.lifecycle.step`. Pure."""

from __future__ import annotations

from attrs import frozen

from llmgw.engines.diagnosis import Diagnosis
from llmgw.scheduler.state import Exit


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
    its log, and ``diagnosis`` what its log says went wrong. ``at`` is when its first process ended, if that is known.
    """

    exit: Exit
    error: str = ""
    left: tuple[int, ...] = ()
    last: str = ""
    diagnosis: Diagnosis | None = None
    at: float | None = None


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
