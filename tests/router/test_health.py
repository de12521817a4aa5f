from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.router.health import (
    CONNECT_FAILURES,
    ERRORS,
    ERRORS_S,
    OUT_FIRST_S,
    OUT_MOST_S,
    RETRIES_SAVED,
    SILENT_S,
    Health,
    RetryBudget,
)


def out(now: float = 0.0) -> Health:
    health = Health()
    for _ in range(CONNECT_FAILURES):
        health.failed(now)
    return health


def test_failures_in_a_row() -> None:
    health = Health()
    for _ in range(3):
        for _ in range(CONNECT_FAILURES - 1):
            health.failed(0)
        health.worked(0)
    assert not health.out(0)
    assert out().out(OUT_FIRST_S - 0.1)
    assert not out().out(OUT_FIRST_S)


def test_answers_with_5xx_within_a_time() -> None:
    health = Health()
    for n in range(ERRORS):
        assert not health.out(n)
        health.erred(n)
    assert health.out(ERRORS - 1)
    slow = Health()
    for n in range(20):
        slow.erred(n * ERRORS_S / (ERRORS - 1) * 1.01)
        assert not slow.out(n * ERRORS_S)


def test_one_request_tries_it_and_its_answer_decides() -> None:
    health = out()
    later = OUT_FIRST_S
    assert not health.out(later)
    health.asked()
    assert health.out(later), "one at a time"
    health.worked(0)
    assert not health.out(later)
    health.failed(later)
    assert not health.out(later), "forgiven: it needs as many failures as at first"

    health = out()
    health.asked()
    health.failed(later)
    assert health.out(later + 2 * OUT_FIRST_S - 0.1), "twice as long"
    assert not health.out(later + 2 * OUT_FIRST_S)


def test_a_trial_whose_client_leaves_is_somebody_else_s() -> None:
    health = out()
    health.asked()
    health.left()
    assert not health.out(OUT_FIRST_S)


def test_clients_that_leave_without_a_byte_say_that_it_is_silent() -> None:
    def left_by(*, asked: float, left: float, answered: float) -> bool:
        health = Health()
        health.worked(answered)
        for _ in range(CONNECT_FAILURES):
            health.abandoned(asked, left)
        return health.out(left)

    assert left_by(asked=10, left=10 + SILENT_S, answered=9)
    assert not left_by(asked=10, left=10 + SILENT_S - 0.1, answered=9), "it was in a hurry"
    assert not left_by(asked=10, left=10 + SILENT_S, answered=10), "others had answers meanwhile"
    health = Health()
    for _ in range(CONNECT_FAILURES):
        health.failed(0, silent=True)
    assert health.out(OUT_FIRST_S), "no client tries it"
    health.failed(OUT_FIRST_S, silent=True)
    assert health.until == 3 * OUT_FIRST_S, "whoever asked it waits twice as long"
    health.heard()
    assert not health.out(3 * OUT_FIRST_S)
    health.asked()
    health.worked(20)
    assert not health.troubled


def test_what_was_under_way_when_it_went_out_says_nothing_new() -> None:
    health = out()
    for _ in range(100):
        health.failed(1)
        health.erred(1)
    assert not health.out(OUT_FIRST_S)


def test_it_is_never_left_alone_for_longer_than_a_minute() -> None:
    health, now = out(), 0.0
    for _ in range(20):
        now = health.until
        health.asked()
        health.failed(now)
    assert health.until - now == OUT_MOST_S


@given(st.lists(st.tuples(st.sampled_from(["asked", "failed", "erred", "worked", "left"]), st.floats(0, 5))))
def test_whatever_happens_it_is_tried_again(steps: list[tuple[str, float]]) -> None:
    health, now = Health(), 0.0
    for what, passed in steps:
        now += passed
        if what in ("failed", "erred", "worked"):
            getattr(health, what)(now)
        else:
            getattr(health, what)()
    health.left()
    assert not health.out(now + OUT_MOST_S)


def test_a_tenth_is_tried_again() -> None:
    budget = RetryBudget()
    assert sum(budget.retry() for _ in range(100)) == RETRIES_SAVED
    retried = 0
    for _ in range(1000):
        budget.request()
        retried += budget.retry()
    assert 95 <= retried <= 101
