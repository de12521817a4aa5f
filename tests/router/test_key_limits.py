"""Nothing is ever granted beyond a limit, whatever the order of workers, times, settlements and deaths."""

from __future__ import annotations

import math

import pytest
from attrs import define, evolve
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llmgw.router import limits as rules
from llmgw.router.limits import LANES, SLOT_CELLS, Grant, Refused
from llmgw.settings.keys import Limits, Period, Spent, period_start

BASE = SLOT_CELLS  # the second slot: nothing may touch the first, nor the third
SLACK_S = rules.SPANS * rules.SPAN_S


@define(eq=False)
class Request:
    lane: int
    at: float
    grant: Grant
    tokens: int
    cost: int
    counts: bool = True


@define
class Charge:
    """Tokens of the window, and when they were charged."""

    at: float
    tokens: int
    request: Request | None = None


class Shared(RuleBasedStateMachine):
    """One key under several workers; the model remembers every grant."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = [0] * (3 * SLOT_CELLS)
        self.now = 1000.0
        self.wall = 1_800_000_000.0
        self.open: list[Request] = []
        self.all: list[Request] = []
        self.charges: list[Charge] = []
        self.spent_tokens = self.spent_cost = 0
        self.since = 0
        self.period: Period | None = None

    @initialize(
        rpm=st.none() | st.integers(0, 6), tpm=st.none() | st.integers(0, 60), concurrent=st.none() | st.integers(0, 4),
        tokens=st.none() | st.integers(0, 150), cost=st.none() | st.integers(0, 300), period=st.sampled_from(Period),
    )  # fmt: skip
    def begin(
        self, rpm: int | None, tpm: int | None, concurrent: int | None, tokens: int | None, cost: int | None,
        period: Period,
    ) -> None:  # fmt: skip
        self.limits = Limits(rpm, tpm, concurrent, tokens, cost, period)

    @rule(
        seconds=st.sampled_from(
            [0.0, 0.001, 0.5, 1.999, 2.0, 7.3, 31.0, 58.5, 59.999, 60.0, 61.999, 62.0, 90.0, 122.0, 4000.0]
        )
    )
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds

    @rule(days=st.integers(1, 40))
    def sleep(self, days: int) -> None:
        self.now += days * 86400
        self.wall += days * 86400

    def held(self) -> tuple[int, int]:
        held = [r.grant.held for r in self.open if r.grant.held is not None]
        return sum(tokens for tokens, _ in held), sum(cost for _, cost in held)

    def roll(self) -> None:
        since = period_start(self.limits.budget_period, self.wall)
        if since > self.since and self.period in (None, self.limits.budget_period):
            self.since, self.spent_tokens, self.spent_cost = since, 0, 0

    def window(self, seconds: float) -> tuple[int, int]:
        """Requests and tokens that were charged in the last so many seconds."""
        requests = sum(r.counts for r in self.all if r.at > self.now - seconds)
        return requests, sum(c.tokens for c in self.charges if c.at > self.now - seconds)

    @rule(lane=st.integers(0, LANES - 1), tokens=st.integers(0, 40), cost=st.integers(0, 80))
    def ask(self, lane: int, tokens: int, cost: int) -> None:
        before = list(self.cells)
        found = rules.reserve(self.cells, BASE, lane, self.limits, self.now, self.wall, tokens, cost)
        most = self.limits
        self.roll()
        first = self.now // rules.SPAN_S - rules.SPANS  # the newest span that does not count any more
        granted = isinstance(found, Grant)
        old = sum(r.counts for r in self.all if r.at // rules.SPAN_S > first)
        assert self.cells[BASE + 1] == old + granted
        charged = sum(c.tokens for c in self.charges if c.at // rules.SPAN_S > first)
        assert self.cells[BASE + 2] == charged + (granted and most.tokens_per_minute is not None) * tokens
        held_tokens, held_cost = self.held()
        if isinstance(found, Refused):
            self.refused(found, before, tokens, cost)
            return
        request = Request(lane, self.now, found, tokens, cost)
        self.open.append(request)
        self.all.append(request)
        if most.tokens_per_minute is not None:
            self.charges.append(Charge(self.now, tokens, request))
        requests, in_window = self.window(60)
        assert most.requests_per_minute is None or requests <= most.requests_per_minute
        assert most.tokens_per_minute is None or in_window <= most.tokens_per_minute
        assert most.concurrent is None or len(self.open) <= most.concurrent
        if most.budget_tokens is not None:
            assert self.spent_tokens + held_tokens + tokens <= most.budget_tokens
        if most.budget_cost is not None:
            assert self.spent_cost + held_cost + cost <= most.budget_cost

    def refused(self, found: Refused, before: list[int], tokens: int, cost: int) -> None:
        """With good reason, and what it says of later is true."""
        requests, in_window = self.window(SLACK_S)
        held_tokens, held_cost = self.held()
        match found.what:
            case "requests":
                assert requests + 1 > found.limit
            case "tokens":
                assert in_window + tokens > found.limit
            case "concurrent":
                assert len(self.open) + 1 > found.limit
            case "budget":
                over_tokens = self.spent_tokens + held_tokens + tokens > (self.limits.budget_tokens or math.inf)
                over_cost = self.spent_cost + held_cost + cost > (self.limits.budget_cost or math.inf)
                assert over_tokens or over_cost or 0 in (self.limits.budget_tokens, self.limits.budget_cost)
        if found.what in ("requests", "tokens") and found.after_s is not None:
            assert 0 <= found.after_s <= SLACK_S
            later = self.now + found.after_s
            only = evolve(self.limits, concurrent=None, budget_tokens=None, budget_cost=None)
            only = evolve(only, **{("tokens" if found.what == "requests" else "requests") + "_per_minute": None})
            cells = list(self.cells)
            again = rules.reserve(cells, BASE, 0, only, later, self.wall + found.after_s, tokens, cost)
            assert isinstance(again, Grant)
        assert len(before) == len(self.cells)

    @rule(data=st.data(), used=st.integers(0, 100), cost=st.integers(0, 200), counts=st.booleans())
    def settle(self, data: st.DataObject, used: int, cost: int, counts: bool) -> None:
        assume(self.open)
        request = data.draw(st.sampled_from(self.open))
        if not counts:
            used = cost = 0
        rules.settle(
            self.cells, BASE, request.lane, request.grant, self.limits, self.now, self.wall, used, cost, counts=counts
        )
        self.open.remove(request)
        self.roll()
        if self.limits.budget:
            self.spent_tokens += used
            self.spent_cost += cost
        inside = self.now // rules.SPAN_S - request.grant.span < rules.SPANS
        if inside:
            for charge in self.charges:
                if charge.request is request:
                    charge.tokens = used
            request.counts = counts
        elif used > request.grant.tokens >= 0:
            self.charges.append(Charge(self.now, used - request.grant.tokens))

    @rule(period=st.sampled_from(Period))
    def change(self, period: Period) -> None:
        """An operator wants another period; what was used in it is said a moment later."""
        self.limits = evolve(self.limits, budget_period=period)

    @rule(lane=st.integers(0, LANES - 1))
    def die(self, lane: int) -> None:
        """A worker is killed, and another takes its lane: what was under way is forgotten, what was granted is not."""
        rules.clear_lane(self.cells, BASE, lane)
        self.open = [r for r in self.open if r.lane != lane]

    @rule(back=st.integers(0, 1), tokens=st.integers(0, 60), cost=st.integers(0, 60))
    def learn(self, back: int, tokens: int, cost: int) -> None:
        """The store says what it knows; that may be old, and is never more than the truth of these cells unless others
        used the key as well. What is known of another period is no part of it."""
        period = self.limits.budget_period
        since = period_start(period, self.wall - back * 86400 * 32)
        rules.learn(self.cells, BASE, Spent(1, since, tokens, cost, period))
        before, self.period = self.period, period
        if since > self.since or before not in (None, period):
            self.since, self.spent_tokens, self.spent_cost = since, tokens, cost
        elif since == self.since:
            self.spent_tokens, self.spent_cost = max(self.spent_tokens, tokens), max(self.spent_cost, cost)

    @invariant()
    def others_are_untouched(self) -> None:
        assert not any(self.cells[:BASE])
        assert not any(self.cells[BASE + SLOT_CELLS :])

    @invariant()
    def nothing_is_lost(self) -> None:
        """What is reserved is exactly what is open, so every reservation was settled exactly once."""
        flight = self.cells[BASE + 8 : BASE + 8 + LANES]
        assert flight == [sum(r.lane == lane for r in self.open) for lane in range(LANES)]
        assert self.cells[BASE + 6] == len(self.open)
        held_tokens, held_cost = self.held()
        assert sum(self.cells[BASE + 8 + LANES : BASE + 8 + 2 * LANES]) == held_tokens
        assert sum(self.cells[BASE + 8 + 2 * LANES : BASE + 8 + 3 * LANES]) == held_cost
        assert self.cells[BASE + 8 + 3 * LANES + 2 * rules.SPANS :][:2] == [held_tokens, held_cost]
        requests = self.cells[BASE + 8 + 3 * LANES : BASE + 8 + 3 * LANES + rules.SPANS]
        assert sum(requests) == self.cells[BASE + 1]
        assert min(requests) >= 0
        assert min(self.cells) >= 0


TestShared = Shared.TestCase


def test_sixty_seconds_wherever_they_begin() -> None:
    cells = [0] * SLOT_CELLS
    most = Limits(requests_per_minute=2)
    assert isinstance(rules.reserve(cells, 0, 0, most, 101.9, 0, 0, 0), Grant)
    assert isinstance(rules.reserve(cells, 0, 3, most, 130.0, 0, 0, 0), Grant)
    for now in (131.0, 161.8):
        found = rules.reserve(cells, 0, 1, most, now, 0, 0, 0)
        assert isinstance(found, Refused)
        assert (found.what, found.limit, found.used) == ("requests", 2, 2)
        assert found.after_s == pytest.approx(162.0 - now)
    assert rules.left(cells, 0, most, 161.8) == (0, -1, pytest.approx(160 + 62 - 161.8))
    assert isinstance(rules.reserve(cells, 0, 1, most, 162.0, 0, 0, 0), Grant)


def test_what_can_never_be_granted_says_so() -> None:
    for most, what in ((Limits(tokens_per_minute=10), "tokens"), (Limits(requests_per_minute=0), "requests"),
                       (Limits(budget_tokens=10), "budget"), (Limits(budget_cost=10), "budget")):  # fmt: skip
        found = rules.reserve([0] * SLOT_CELLS, 0, 0, most, 100, 1e9, 11, 11)
        assert isinstance(found, Refused)
        assert (found.what, found.after_s) == (what, None)


def test_a_budget_that_is_used_up_says_when_it_begins_anew() -> None:
    cells = [0] * SLOT_CELLS
    most = Limits(budget_tokens=10, budget_period=Period.DAY)
    granted = rules.reserve(cells, 0, 0, most, 100, 86400.0 * 50, 6, 0)
    assert isinstance(granted, Grant)
    rules.settle(cells, 0, 0, granted, most, 100, 86400.0 * 50, 8, 0)
    found = rules.reserve(cells, 0, 0, most, 100, 86400.0 * 50 + 400, 6, 0)
    assert isinstance(found, Refused)
    assert (found.used, found.after_s) == (8, 86000.0)
    assert isinstance(rules.reserve(cells, 0, 0, most, 100, 86400.0 * 51, 6, 0), Grant)


def test_another_period_is_another_budget() -> None:
    """A day's budget becomes a month's, and then a day's again: what the store has of it holds, not what is here."""
    cells, noon = [0] * SLOT_CELLS, 86400.0 * 20_003.5
    day, month = (Limits(budget_tokens=100, budget_period=period) for period in (Period.DAY, Period.MONTH))
    today, first = 20_003 * 86400, 19_997 * 86400

    def left(most: Limits, wall: float = noon) -> int:
        """What can still be asked for."""
        found = rules.reserve(list(cells), 0, 0, most, 100, wall, 101, 0)
        assert isinstance(found, Refused)
        return found.limit - found.used

    rules.learn(cells, 0, Spent(1, today, 10, 0, Period.DAY))
    assert left(day) == 90
    assert left(month) == 90, "of this nobody has said anything yet"
    rules.learn(cells, 0, Spent(1, first, 70, 0, Period.MONTH))
    assert left(month) == 30
    assert left(day) == 30, "a worker that has not heard of it begins no new day"
    assert left(month, 86400.0 * 20_028) == 100, "the next month"
    rules.learn(cells, 0, Spent(1, today, 12, 0, Period.DAY))
    assert left(day) == 88
    assert left(day, noon + 43200) == 100, "the next day"
