"""Which engine a request goes to. Pure: what is known of each engine goes in, the choice comes out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

EJECT_AFTER = 3
"""Failed connections in a row that take an engine out."""

EJECT_S = 5.0
"""How long it stays out before one request tries it again."""


class Load(Protocol):
    """What the choice looks at. ``ejected_until`` is on the same clock as ``now``."""

    @property
    def draining(self) -> bool: ...

    @property
    def outstanding(self) -> int: ...

    @property
    def ejected_until(self) -> float: ...


def choose(engines: Sequence[Load], tried: Collection[int], turn: int, now: float) -> int | None:
    """The index of the engine with the fewest requests outstanding, or ``None`` when none is left.

    Engines that drain or were ``tried`` are out. Ejected ones are out unless nothing else is left: a wrong guess
    costs one failed connection, no guess at all costs the request. Ties go round by ``turn``.
    """
    best: int | None = None
    best_key: tuple[bool, int] | None = None
    count = len(engines)
    for step in range(count):
        index = (turn + step) % count
        engine = engines[index]
        if engine.draining or index in tried:
            continue
        key = (engine.ejected_until > now, engine.outstanding)
        if best_key is None or key < best_key:
            best, best_key = index, key
    return best
