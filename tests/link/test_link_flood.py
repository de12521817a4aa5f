"""What one peer may cost, as numbers: time, frames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.link.flood import FrameMeter, Pace


def test_a_burst_is_free_and_what_follows_is_paid_for() -> None:
    pace = Pace(0, share=0.1, burst_s=0.25)
    assert pace.spent(0.2, 0) == 0
    assert pace.spent(0.15, 0) == pytest.approx(1.0)  # 0.1 s too much, at a tenth of the time
    assert pace.spent(0.0, 1.0) == pytest.approx(0.0)
    assert pace.spent(0.25, 1000) == 0, "a long rest earns one burst, not more"
    assert pace.spent(0.01, 1000) == pytest.approx(0.1)


def test_no_wait_is_so_long_that_the_peer_looks_dead() -> None:
    assert Pace(0).spent(1000, 0) == 5.0


@given(st.lists(st.floats(0.0001, 0.05), min_size=20, max_size=60))
def test_whoever_waits_as_told_gets_no_more_than_the_share(costs: list[float]) -> None:
    pace, now = Pace(0, share=0.1, burst_s=0.25), 0.0
    for cost in costs:
        now += pace.spent(cost, now)
    assert sum(costs) <= 0.25 + 0.1 * now + 1e-6


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=30), st.data())
def test_frames_are_counted_the_same_however_they_are_cut(frames: list[tuple[int, int]], data: st.DataObject) -> None:
    stream = b"".join(n.to_bytes(3, "big") + bytes([kind, 0, 0, 0, 0, 1]) + bytes(n) for kind, n in frames)
    whole, cut = FrameMeter(0, 16384), FrameMeter(0, 16384)
    said = whole.feed(stream, 0)
    told = None
    while stream and told is None:
        size = data.draw(st.integers(1, len(stream)))
        told, stream = cut.feed(stream[:size], 0), stream[size:]
    assert told == said
