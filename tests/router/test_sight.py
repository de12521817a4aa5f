from __future__ import annotations

from llmgw.router.sight import LATELY_S, EngineSight, RefusalBook, Refusals, Sight, together


def test_who_was_turned_away_is_known_for_some_minutes() -> None:
    now = [1000.0]
    book = RefusalBook(lambda: now[0])
    for _ in range(3):
        book.add("m", "overloaded", "full")
    now[0] += 100
    book.add("m", "overloaded", "x" * 1000)
    book.add("n", "engine_failed", "gone")
    assert book.lately() == {
        "m": {"overloaded": Refusals(4, 1100, "x" * 300)},
        "n": {"engine_failed": Refusals(1, 1100, "gone")},
    }
    now[0] = 1000 + LATELY_S + 30
    assert book.lately()["m"] == {"overloaded": Refusals(1, 1100, "x" * 300)}, "the first three are too long ago"
    now[0] += LATELY_S
    assert book.lately() == {}


def test_all_workers_see_what_each_does() -> None:
    one = Sight(
        {"a": EngineSight(5), "b": EngineSight(0, 1, 70, "errors")},
        {"m": {"affinity": 2}},
        {"m": {"c": Refusals(2, 9, "later"), "d": Refusals(1, 1, "d")}},
    )
    two = Sight(
        {"a": EngineSight(7), "b": EngineSight(3, 1, 60, "silent")},
        {"m": {"affinity": 1, "room": 4}, "n": {"only": 1}},
        {"m": {"c": Refusals(3, 8, "sooner")}},
    )
    assert together([one, two]) == Sight(
        {"a": EngineSight(12), "b": EngineSight(3, 2, 70, "silent")},
        {"m": {"affinity": 3, "room": 4}, "n": {"only": 1}},
        {"m": {"c": Refusals(5, 9, "later"), "d": Refusals(1, 1, "d")}},
    )
    assert together([]) == Sight()
