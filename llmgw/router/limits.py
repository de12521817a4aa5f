"""What a key may use, counted in cells that several workers share. Pure: cells, times and wishes come in.

A minute is a ring of 31 spans of two seconds: a span counts until all of it is more than 60 s ago, so that no window of
60 s, wherever it begins, holds more than the limit. Whoever uses the cells of a slot has its lock.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import msgspec
from attrs import frozen

from llmgw.settings.keys import Limits, Period, Spent, period_end, period_start

LANES = 16
"""So many workers can share the cells, one that still drains included. A lane is what one worker has under way."""

SPAN_S = 2
SPANS = 31
SLOT_CELLS = 128

_HEAD, _REQUESTS, _TOKENS, _SINCE, _SPENT_TOKENS, _SPENT_COST, _FLIGHT_ALL, _PERIOD = range(8)
_FLIGHT = 8
_HELD_TOKENS = _FLIGHT + LANES
_HELD_COST = _HELD_TOKENS + LANES
_RING_REQUESTS = _HELD_COST + LANES
_RING_TOKENS = _RING_REQUESTS + SPANS
_HELD_TOKENS_ALL = _RING_TOKENS + SPANS
_HELD_COST_ALL = _HELD_TOKENS_ALL + 1
assert _HELD_COST_ALL < SLOT_CELLS
_PERIODS = {period: number for number, period in enumerate(Period, 1)}
"""What stands in the cells for the budget's period; 0: nobody has said."""


class Cells(Protocol):
    """Whole numbers by position: a list, or a memory that processes share."""

    def __getitem__(self, at: int, /) -> int: ...

    def __setitem__(self, at: int, value: int, /) -> None: ...


@frozen
class Refused:
    """A limit that would be exceeded: ``what`` is ``requests``, ``tokens``, ``concurrent`` or ``budget``.

    ``after_s`` is when it can be granted (``None``: never as it is), ``limit`` the figure, ``asked`` the wish.
    """

    what: str
    limit: int
    used: int
    asked: int
    after_s: float | None


class Grant(msgspec.Struct, frozen=True, gc=False):
    """What was reserved, and in which span; -1 tokens where no tokens are counted, ``held`` where there is a budget."""

    span: int
    tokens: int
    held: tuple[int, int] | None


def reserve(
    cells: Cells, base: int, lane: int, limits: Limits, now: float, wall: float, tokens: int, cost: int
) -> Grant | Refused:
    """Reserve one request with so many tokens, or say what stands against it; nothing is changed then.

    ``now`` is on a clock that all workers share and that never goes back, ``wall`` in epoch seconds.
    """
    head = _advance(cells, base, now)
    flight, requests = cells[base + _FLIGHT_ALL], cells[base + _REQUESTS]
    most = limits.concurrent
    if most is not None and flight >= most:
        return Refused("concurrent", most, flight, 1, 1.0)
    most = limits.requests_per_minute
    if most is not None and requests >= most:
        after = _free_s(cells, base, _RING_REQUESTS, requests + 1 - most, now) if most else None
        return Refused("requests", most, requests, 1, after)
    most = limits.tokens_per_minute
    if most is not None and (used := cells[base + _TOKENS]) + tokens > most:
        after = None if tokens > most else _free_s(cells, base, _RING_TOKENS, used + tokens - most, now)
        return Refused("tokens", most, used, tokens, after)
    held = None
    if limits.budget_tokens is not None or limits.budget_cost is not None:
        if (short := _short(cells, base, limits, wall, tokens, cost)) is not None:
            return short
        held = tokens, cost
        cells[base + _HELD_TOKENS_ALL] += tokens
        cells[base + _HELD_TOKENS + lane] += tokens
        if cost:
            cells[base + _HELD_COST_ALL] += cost
            cells[base + _HELD_COST + lane] += cost
    place = base + head % SPANS
    cells[base + _FLIGHT_ALL] = flight + 1
    cells[base + _FLIGHT + lane] += 1
    cells[base + _REQUESTS] = requests + 1
    cells[place + _RING_REQUESTS] += 1
    if most is None:
        return Grant(head, -1, held)
    cells[base + _TOKENS] += tokens
    cells[place + _RING_TOKENS] += tokens
    return Grant(head, tokens, held)


def _short(cells: Cells, base: int, limits: Limits, wall: float, tokens: int, cost: int) -> Refused | None:
    """What of the budget does not suffice."""
    _roll(cells, base, limits.budget_period, wall)
    most = limits.budget_tokens
    if most is not None:
        used = cells[base + _SPENT_TOKENS] + cells[base + _HELD_TOKENS_ALL]
        if used + tokens > most:
            return _over(limits, most, used, tokens, wall)
    most = limits.budget_cost
    if most is not None:
        used = cells[base + _SPENT_COST] + cells[base + _HELD_COST_ALL]
        if used + cost > most:
            return _over(limits, most, used, cost, wall)
    return None


def _over(limits: Limits, most: int, used: int, asked: int, wall: float) -> Refused:
    end = period_end(limits.budget_period, wall)
    return Refused("budget", most, used, asked, None if end is None or asked > most else end - wall)


def settle(
    cells: Cells, base: int, lane: int, grant: Grant, limits: Limits, now: float, wall: float,
    tokens: int, cost: int, *, counts: bool = True,
) -> None:  # fmt: skip
    """Put what was used in place of what was reserved. Without ``counts`` it was as if nothing had been asked.

    What went beyond the reservation is charged where the request began or, if that is more than a minute ago, now.
    """
    head = _advance(cells, base, now)
    cells[base + _FLIGHT_ALL] -= 1
    cells[base + _FLIGHT + lane] -= 1
    if grant.held is not None:
        held_tokens, held_cost = grant.held
        cells[base + _HELD_TOKENS_ALL] -= held_tokens
        cells[base + _HELD_TOKENS + lane] -= held_tokens
        if held_cost:
            cells[base + _HELD_COST_ALL] -= held_cost
            cells[base + _HELD_COST + lane] -= held_cost
    if limits.budget_tokens is not None or limits.budget_cost is not None:
        _roll(cells, base, limits.budget_period, wall)
        cells[base + _SPENT_TOKENS] += tokens
        cells[base + _SPENT_COST] += cost
    inside = head - grant.span < SPANS
    if grant.tokens >= 0:
        more = tokens - grant.tokens
        if more and (inside or more > 0):
            cells[base + _TOKENS] += more
            cells[base + _RING_TOKENS + (grant.span if inside else head) % SPANS] += more
    if not counts and inside:
        cells[base + _REQUESTS] -= 1
        cells[base + _RING_REQUESTS + grant.span % SPANS] -= 1


def left(cells: Cells, base: int, limits: Limits, now: float) -> tuple[int, int, float]:
    """Requests and tokens that are left (-1: no limit), and the seconds until all are free if nothing more comes."""
    requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
    return (
        -1 if requests is None else max(0, requests - cells[base + _REQUESTS]),
        -1 if tokens is None else max(0, tokens - cells[base + _TOKENS]),
        (cells[base + _HEAD] + SPANS) * SPAN_S - now,
    )


def learn(cells: Cells, base: int, spent: Spent) -> None:
    """Take over what is written down: it is the truth where these cells are new, and never more than it.

    A budget of another period is another one, and what is written down is all that is known of it.
    """
    since, period, said = cells[base + _SINCE], cells[base + _PERIOD], _PERIODS[spent.period]
    cells[base + _PERIOD] = said
    if spent.since > since or period not in (0, said):
        cells[base + _SINCE] = spent.since
        cells[base + _SPENT_TOKENS] = spent.tokens
        cells[base + _SPENT_COST] = spent.cost
    elif spent.since == since:
        cells[base + _SPENT_TOKENS] = max(cells[base + _SPENT_TOKENS], spent.tokens)
        cells[base + _SPENT_COST] = max(cells[base + _SPENT_COST], spent.cost)


def under_way(cells: Cells, base: int, lane: int) -> bool:
    """Whether a worker has anything of this key under way."""
    return cells[base + _FLIGHT + lane] != 0


def clear_lane(cells: Cells, base: int, lane: int) -> None:
    """Forget what a worker that is gone had under way."""
    cells[base + _FLIGHT_ALL] -= cells[base + _FLIGHT + lane]
    cells[base + _HELD_TOKENS_ALL] -= cells[base + _HELD_TOKENS + lane]
    cells[base + _HELD_COST_ALL] -= cells[base + _HELD_COST + lane]
    for of_lane in (_FLIGHT, _HELD_TOKENS, _HELD_COST):
        cells[base + of_lane + lane] = 0


def _roll(cells: Cells, base: int, period: Period, wall: float) -> None:
    """Begin a new budget if the old one's period is over. A worker that knows of another period than the cells has not
    heard yet that it was changed, or it is ahead of :func:`learn`."""
    since = _start(period, int(wall // 60))
    if since > cells[base + _SINCE] and cells[base + _PERIOD] in (0, _PERIODS[period]):
        cells[base + _SINCE] = since
        cells[base + _SPENT_TOKENS] = 0
        cells[base + _SPENT_COST] = 0


@lru_cache(64)
def _start(period: Period, minute: int) -> int:
    """Periods begin with a minute, so that one look at the calendar is enough for each."""
    return period_start(period, minute * 60)


def _advance(cells: Cells, base: int, now: float) -> int:
    """Drop what has slid out of the window. Returns the present span."""
    head, span = cells[base + _HEAD], int(now // SPAN_S)
    if span <= head:
        return head
    first = max(head + 1, span - SPANS + 1)
    for at in range(first, span + 1):
        place = at % SPANS
        cells[base + _REQUESTS] -= cells[base + _RING_REQUESTS + place]
        cells[base + _TOKENS] -= cells[base + _RING_TOKENS + place]
        cells[base + _RING_REQUESTS + place] = 0
        cells[base + _RING_TOKENS + place] = 0
    cells[base + _HEAD] = span
    return span


def _free_s(cells: Cells, base: int, ring: int, need: int, now: float) -> float:
    """Seconds until so much has slid out of the window."""
    head = cells[base + _HEAD]
    freed = 0
    for at in range(head - SPANS + 1, head + 1):
        freed += cells[base + ring + at % SPANS]
        if freed >= need:
            return float(max(0.0, (at + SPANS) * SPAN_S - now))
    return float(SPANS * SPAN_S)
