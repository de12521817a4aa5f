"""What a token looks like, which models a pattern means, and when a budget begins anew."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.settings.document import Price
from llmgw.settings.keys import (
    ALPHABET,
    ApiKey,
    Period,
    digest_of,
    id_in,
    is_pattern,
    matcher,
    period_end,
    period_start,
    token_of,
)


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@given(st.text(ALPHABET, min_size=12, max_size=12), st.text(ALPHABET, min_size=40, max_size=40))
def test_the_id_is_found_in_a_token(ident: str, secret: str) -> None:
    token = token_of(ident, secret).encode()
    assert id_in(token) == ident.encode()
    assert digest_of(token) != digest_of(token[:-1] + b"A")


@pytest.mark.parametrize(
    "token",
    [b"", b"sk-abc", b"llmgw_admin_" + b"x" * 40, b"llmgw_aaaaaaaaaaaa_short", b"llmgw_AAAAAAAAAAAA_" + b"a" * 40,
     b"llmgw_aaaaaaaaaaaa_" + b"a" * 40 + b"\n", b"_aaaaaaaaaaaa_" + b"a" * 40],
)  # fmt: skip
def test_what_is_no_token(token: bytes) -> None:
    assert id_in(token) is None


def test_patterns() -> None:
    match = matcher(("llama-*", "org/one", "a.c"))
    for name in ("llama-3.1-8b", "llama-", "org/one", "a.c"):
        assert match.fullmatch(name)
    for name in ("my-llama-3", "org/one:sql", "abc", "", "llama"):
        assert not match.fullmatch(name)
    assert matcher(("*",)).fullmatch("anything/at:all")
    assert not matcher(()).fullmatch("")
    assert is_pattern("org/*:sql")
    assert not any(map(is_pattern, ("", "a b", "a\n", "[a-z]", "x" * 129)))


def test_periods() -> None:
    now = at("2026-12-02T09:30:15")  # a Wednesday
    assert period_start(Period.DAY, now) == at("2026-12-02")
    assert period_end(Period.DAY, now) == at("2026-12-03")
    assert period_start(Period.WEEK, now) == at("2026-11-30")
    assert period_end(Period.WEEK, now) == at("2026-12-07")
    assert period_start(Period.MONTH, now) == at("2026-12-01")
    assert period_end(Period.MONTH, now) == at("2027-01-01")
    assert period_end(Period.MONTH, at("2028-02-29T23:59:59")) == at("2028-03-01")
    assert (period_start(Period.TOTAL, now), period_end(Period.TOTAL, now)) == (0, None)


@given(st.sampled_from([Period.DAY, Period.WEEK, Period.MONTH]), st.integers(0, 4_000_000_000))
def test_periods_follow_one_another(period: Period, now: int) -> None:
    start, end = period_start(period, now), period_end(period, now)
    assert end is not None
    assert start <= now < end
    assert start % 60 == 0, "a minute is never in two"
    assert period_start(period, end) == end
    assert period_start(period, end - 1) == start
    assert period_start(period, start) == start


def test_states() -> None:
    key = ApiKey("a", 1, 1, "", 0.0)
    assert key.state(5) == "active"
    assert ApiKey("a", 1, 1, "", 0.0, expires=5.0).state(5) == "expired"
    assert ApiKey("a", 1, 1, "", 0.0, expires=5.0, revoked=1.0).state(0) == "revoked"


def test_prices() -> None:
    assert Price(0.15, 0.6).of(1_000_000, 500_000) == 450_000, "45 hundredths"
    assert Price().of(10**9, 10**9) == 0
