"""What came of a run, and how it is told."""

from __future__ import annotations

import time
from collections.abc import Iterable

from attrs import frozen

_TOLD = 5


@frozen
class Outcome:
    """How a run went: ``failure`` names the invariant and what broke it, and is empty when all held.

    ``digest`` is the same for two runs that were the same. Times are virtual seconds; ``settled_s`` is how long after
    the last fault all was as it is wanted, if it ever was.
    """

    seed: int
    failure: str
    digest: str
    events: int
    launches: int
    passes: int
    length_s: float
    settled_s: float | None
    last: tuple[str, ...]


def tell(outcomes: Iterable[Outcome], hours: float | None, *, told: bool = False) -> int:
    """Print what failed, as it comes, and what it was in all; returns the exit code.

    ``hours`` is what the runs were given, and ``told`` says that their traces were printed already.
    """
    began = time.monotonic()
    failed: list[int] = []
    count, seconds, launches, events = 0, 0.0, 0, 0
    slowest: tuple[int, float] | None = None
    for outcome in outcomes:
        count += 1
        seconds += outcome.length_s
        launches += outcome.launches
        events += outcome.events
        if outcome.failure:
            failed.append(outcome.seed)
            if len(failed) <= _TOLD:
                _tell(outcome, hours, trace=not told)
        elif outcome.settled_s is not None and (slowest is None or outcome.settled_s > slowest[1]):
            slowest = outcome.seed, outcome.settled_s
    took = time.monotonic() - began
    many = f"{count} seed{'s' if count != 1 else ''}"
    print(f"{many}, {seconds / 86400:.1f} days of faults, {launches} engines started, {events} events, in {took:.1f} s")
    if slowest is not None:
        print(f"slowest to settle after the faults: seed {slowest[0]}, {slowest[1] / 60:.0f} min")
    more = f" and {len(failed) - 20} more" if len(failed) > 20 else ""
    print(f"{len(failed)} failed: {', '.join(map(str, failed[:20]))}{more}" if failed else "everything held")
    return 1 if failed else 0


def _tell(outcome: Outcome, hours: float | None, *, trace: bool) -> None:
    if trace:
        print("\n".join(outcome.last))
    again = "" if hours is None else f" --hours {hours:g}"
    print(f"seed {outcome.seed} failed: {outcome.failure}")
    print(f"see all of it with: python -m fakes.fleet --seed {outcome.seed}{again} -v\n", flush=True)
