from __future__ import annotations

from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from llmgw.router.choose import choose


@frozen
class Engine:
    outstanding: int = 0
    draining: bool = False
    ejected_until: float = 0.0


def test_fewest_outstanding_and_ties_go_round() -> None:
    engines = [Engine(3), Engine(1), Engine(1)]
    assert {choose(engines, (), turn, 0) for turn in range(6)} == {1, 2}


def test_draining_and_tried_are_out_ejected_ones_come_last() -> None:
    assert choose([Engine(draining=True), Engine(9)], (), 0, 0) == 1
    assert choose([Engine(), Engine(9)], {0}, 0, 0) == 1
    assert choose([Engine(ejected_until=5), Engine(9)], (), 0, 1) == 1
    assert choose([Engine(ejected_until=5)], (), 0, 1) == 0, "never the last one"
    assert choose([Engine(ejected_until=5), Engine(9)], (), 0, 6) == 0
    assert choose([], (), 0, 0) is None
    assert choose([Engine()], {0}, 0, 0) is None


engines = st.lists(st.builds(Engine, st.integers(0, 5), st.booleans(), st.sampled_from([0.0, 10.0])), max_size=6)


@given(engines, st.sets(st.integers(0, 5)), st.integers(0, 1000))
def test_no_better_one_is_passed_over(them: list[Engine], tried: set[int], turn: int) -> None:
    index = choose(them, tried, turn, 5.0)
    fit = [e for at, e in enumerate(them) if at not in tried and not e.draining]
    if index is None:
        assert not fit
        return
    best = min((e.ejected_until > 5.0, e.outstanding) for e in fit)
    assert (them[index].ejected_until > 5.0, them[index].outstanding) == best
    assert index not in tried
