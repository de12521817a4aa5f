from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.link.messages import Refused
from llmgw.link.repeats import Repeats, gist


def test_what_stays_is_said_now_and_then_with_how_often_it_was_so() -> None:
    repeats = Repeats(again_s=600)
    assert [repeats.times("a", "x", now) for now in (0, 1, 599)] == [1, 0, 0]
    assert repeats.times("b", "x", 599) == 1, "another subject"
    assert repeats.times("a", "x", 600) == 3
    assert [repeats.times("a", what, 601) for what in "yyx"] == [1, 0, 2], "back to what it was is a change"
    repeats.over("a")
    assert repeats.times("a", "x", 602) == 1


def test_a_change_that_came_after_too_many_is_kept_back_and_not_lost() -> None:
    repeats = Repeats(changes=3)
    assert [repeats.times("a", what, 0) for what in "wxyz"] == [1, 1, 1, 0]
    assert [repeats.times("a", "z", now) for now in (59, 60, 61)] == [0, 3, 0]


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.floats(0, 5)), max_size=80))
def test_whatever_a_subject_does_it_is_heard_of_no_more_often(tries: list[tuple[str, float]]) -> None:
    repeats, now, said = Repeats(changes=3), 0.0, list[float]()
    for what, wait_s in tries:
        now += wait_s
        if repeats.times("a", what, now):
            said.append(now)
        repeats.over("a")
    assert all(fourth - first >= 60 - 1e-6 for first, fourth in zip(said, said[3:], strict=False))


def test_many_subjects_cost_little_and_those_heard_of_are_kept() -> None:
    repeats = Repeats()
    for number in range(10_000):
        repeats.times(str(number), "x", 0.0)
        assert repeats.times("always", "x", 0.0) == (not number)
    assert len(repeats._said) <= 4096


def test_the_same_refusal_at_another_time_of_day_is_the_same() -> None:
    one = Refused("validity", "valid at 12:00", "a day behind", "serial 1", "")
    assert gist(one) == gist(Refused("validity", "valid at 12:01", "a day and 1 s behind", "serial 1", ""))
    assert gist(one) != gist(Refused("node id", "n1", "n2", "serial 1", ""))
