from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.router.queue import FairQueue


def test_tenants_in_turn() -> None:
    queue: FairQueue[str] = FairQueue()
    for n in range(5):
        queue.put("loud", f"loud-{n}")
    queue.put("quiet", "quiet-0")
    assert [queue.take() for _ in range(7)] == ["loud-0", "quiet-0", "loud-1", "loud-2", "loud-3", "loud-4", None]


def test_some_room_is_kept_for_others() -> None:
    queue: FairQueue[int] = FairQueue()
    while queue.room("loud", 16):
        queue.put("loud", 0)
    assert len(queue) == 14
    assert queue.room("quiet", 16)
    queue.put("quiet", 0)
    queue.put("third", 0)
    assert not queue.room("quiet", 16)
    assert FairQueue[int]().room("a", 1)
    assert not FairQueue[int]().room("a", 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["put", "take", "drop"]))))
def test_nothing_is_lost_and_nobody_is_served_twice_before_another(steps: list[tuple[str, str]]) -> None:
    queue: FairQueue[int] = FairQueue()
    model: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    last: dict[str, int] = {}
    waits: dict[str, int] = {}
    turn = 0
    for number, (tenant, what) in enumerate(steps):
        if what == "put":
            queue.put(tenant, number)
            if not model[tenant]:
                waits[tenant] = turn
            model[tenant].append(number)
        elif what == "drop" and model[tenant]:
            item = model[tenant].pop()
            assert queue.drop(tenant, item)
            assert not queue.drop(tenant, item)
        elif what == "take":
            item_ = queue.take()
            assert (item_ is None) == (not any(model.values()))
            if item_ is not None:
                turn += 1
                whose = next(t for t, mine in model.items() if mine and mine[0] == item_)
                model[whose].pop(0)
                last[whose] = turn
                waits[whose] = turn
                for other, mine in model.items():
                    assert not mine or turn - waits[other] <= len(model), "everybody comes within a round"
        assert len(queue) == sum(map(len, model.values()))
