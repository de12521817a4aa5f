"""What a worker's choices rest on, for people: what it knows of engines, whom it took, whom it turned away. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

from attrs import evolve, field, frozen

LATELY_S = 300
"""So far back goes what is said of requests that were turned away."""

_STEP_S = 30


@frozen
class EngineSight:
    """One engine: ``tokens`` outstanding at it, and how many workers leave it alone, ``until`` when (epoch seconds) and
    ``why`` (:attr:`llmgw.router.health.Health.why`)."""

    tokens: int = 0
    left_alone: int = 0
    until: float = 0.0
    why: str = ""


@frozen
class Refusals:
    """So many requests that ended with one code, the ``last`` of them then (epoch seconds), and what it was told."""

    count: int
    last: float
    message: str


@frozen
class Sight:
    """Worker: engines by endpoint id that have something to do or are left alone; how many choices were made for what
    reason, and who was turned away in the last minutes with which code, each by model."""

    engines: dict[str, EngineSight] = field(factory=dict)
    choices: dict[str, dict[str, int]] = field(factory=dict)
    refused: dict[str, dict[str, Refusals]] = field(factory=dict)


def together(sights: Iterable[Sight]) -> Sight:
    """What all of them see."""
    engines: dict[str, EngineSight] = {}
    choices: dict[str, Counter[str]] = {}
    refused: dict[str, dict[str, Refusals]] = {}
    for sight in sights:
        for name, seen in sight.engines.items():
            known = engines.get(name, EngineSight())
            engines[name] = EngineSight(
                known.tokens + seen.tokens, known.left_alone + seen.left_alone, max(known.until, seen.until),
                seen.why or known.why,
            )  # fmt: skip
        for model, counts in sight.choices.items():
            choices.setdefault(model, Counter()).update(counts)
        for model, codes in sight.refused.items():
            mine = refused.setdefault(model, {})
            for code, said in codes.items():
                mine[code] = _sum(mine[code], said) if code in mine else said
    return Sight(engines, {model: dict(counts) for model, counts in choices.items()}, refused)


def _sum(one: Refusals, other: Refusals) -> Refusals:
    newer = max(one, other, key=lambda r: r.last)
    return evolve(newer, count=one.count + other.count)


class RefusalBook:
    """Counts, by model and code, who was turned away in the last minutes. ``wall`` gives epoch seconds.

    Only for models that there are: what clients make up must not fill it.
    """

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._counts: dict[tuple[str, str], deque[tuple[int, int]]] = {}
        self._last: dict[tuple[str, str], tuple[float, str]] = {}

    def add(self, model: str, code: str, message: str) -> None:
        """One more."""
        now = self._wall()
        key, step = (model, code), int(now // _STEP_S)
        steps = self._counts.setdefault(key, deque(maxlen=LATELY_S // _STEP_S))
        if steps and steps[-1][0] == step:
            steps[-1] = step, steps[-1][1] + 1
        else:
            steps.append((step, 1))
        self._last[key] = now, message[:300]

    def lately(self) -> dict[str, dict[str, Refusals]]:
        """What is not too long ago, by model and code; the rest is forgotten."""
        first = int(self._wall() // _STEP_S) - LATELY_S // _STEP_S + 1
        found: dict[str, dict[str, Refusals]] = {}
        for key in list(self._counts):
            count = sum(n for step, n in self._counts[key] if step >= first)
            if not count:
                del self._counts[key], self._last[key]
                continue
            found.setdefault(key[0], {})[key[1]] = Refusals(count, *self._last[key])
        return found
