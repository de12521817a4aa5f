"""How many replicas a model has by its load."""

from __future__ import annotations

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.scheduler.decide import decide
from llmgw.scheduler.explain import DecisionKind
from llmgw.scheduler.scale import Demand, Scale, scale, scaled
from llmgw.scheduler.state import ClusterState
from llmgw.settings.catalog import Scaling
from tests.scheduler.clusters import NOW, device, model, node
from tests.scheduler.test_decide import obey

RULES = Scaling(min=1, max=8, target=10, up_s=15, down_s=300, cooldown_s=60, idle_s=900)
ZERO = evolve(RULES, min=0)


def at(number: int, changed: float = 0.0) -> Scale:
    return Scale(number, number, changed, number, changed, "")


def after(rules: Scaling, before: Scale, *said: tuple[float, Demand | None]) -> Scale:
    for now, demand in said:
        before, _ = scale(rules, demand, before, now)
    return before


def test_more_only_when_the_load_asked_for_it_long_enough_and_not_soon_after_a_change() -> None:
    busy = Demand(running=25, asked=1000)
    first, due = scale(RULES, busy, at(1), 1000)
    assert (first.number, first.want, due) == (1, 3, 1015)
    assert first.reason == "25 running and 0 waiting, for 10 each; that makes 3 in 15 s if it stays so (up_s)"
    assert after(RULES, at(1), (1000, busy), (1014, busy)).number == 1
    assert after(RULES, at(1), (1000, busy), (1015, busy)).number == 3
    assert after(RULES, at(1), (1000, busy), (1010, Demand(5)), (1015, busy)).number == 1, "it was interrupted"
    assert after(RULES, at(1), (1000, busy), (1010, Demand(5)), (1015, busy), (1029, busy)).number == 1
    cooling, due = scale(RULES, busy, at(1, changed=990), 1010)
    assert (cooling.number, due) == (1, 1050)
    assert cooling.reason.endswith("(cooldown_s after the last change)")
    assert scale(RULES, busy, at(1, changed=945), 1000)[0].reason.endswith("(up_s)"), "what ends later is waited for"
    assert scaled((model("m", 2),), {"m": at(5)}) == (model("m", 2),), "it follows its load no more"


def test_the_mildest_of_what_was_asked_for_counts() -> None:
    up = after(RULES, at(1), (1000, Demand(75)), (1008, Demand(15)), (1015, Demand(75)))
    assert up.number == 2
    down = after(RULES, at(6), (1000, Demand(1)), (1100, Demand(30)), (1300, Demand(1)))
    assert down.number == 4, "30 would have needed 4 at 8 each"


def test_fewer_only_with_room_to_spare_and_nobody_waiting() -> None:
    assert after(RULES, at(3), (1000, Demand(20)), (1300, Demand(20))).number == 3, "20 of 20 is no room"
    assert after(RULES, at(3), (1000, Demand(16)), (1300, Demand(16))).number == 2
    assert after(RULES, at(3), (1000, Demand(5, waiting=1)), (1300, Demand(5, waiting=1))).number == 3


def test_full_kv_caches_ask_for_one_more() -> None:
    full = Demand(running=4, waiting=2, kv_usage=0.95)
    assert after(RULES, at(2), (1000, full), (1015, full)).number == 3
    roomy = evolve(full, kv_usage=0.5)
    assert after(RULES, at(2), (1000, roomy), (1015, roomy)).number == 2
    assert "95% of KV cache in use" in after(RULES, at(2), (1000, full)).reason


def test_zero_after_idle_time_and_back_at_once() -> None:
    idle, wake = scale(ZERO, Demand(asked=1000), at(1), 1500)
    assert (idle.number, wake) == (1, 1900)
    assert idle.reason.endswith("; that makes 0 in 400 s if nobody asks (idle_s)")
    used, wake = scale(ZERO, Demand(running=5, asked=1000), at(1), 1500)
    assert (wake, "idle_s" in used.reason) == (None, False)
    gone = after(ZERO, at(1), (1900, Demand(asked=1000)))
    assert (gone.number, gone.reason) == (0, "1 was too many: no request for 900 s")
    assert after(RULES, at(1), (1900, Demand(asked=1000))).number == 1, "min is 1"
    still, _ = scale(ZERO, Demand(asked=1000), gone, 9000)
    assert (still.number, still.reason) == (0, "no request for 8000 s")
    back, _ = scale(ZERO, Demand(waiting=1, asked=9001), gone, 1901)
    assert (back.number, back.reason) == (1, "1 waiting, and no replica"), "no cooldown for who waits already"
    long = Demand(running=1, asked=1000)
    assert after(ZERO, at(1), (9000, long)).number == 1, "its one request takes longer than idle_s"
    assert after(ZERO, gone, (1901, long)).number == 0, "what runs is in an engine that is drained"


def test_a_model_that_is_new_is_idle_from_then_on() -> None:
    nobody = Demand(asked=1000)  # the control plane's start, hours ago
    found, _ = scale(ZERO, nobody, None, 90_000)
    assert found.number == 1
    for now in (90_060, 90_899):
        found, wake = scale(ZERO, nobody, found, now)
        assert (found.number, wake) == (1, 90_900)
    found, _ = scale(ZERO, nobody, found, 90_900)
    assert (found.number, found.reason) == (0, "1 was too many: no request for 900 s")


def test_settings_and_ignorance() -> None:
    assert scale(RULES, None, None, 5)[0].number == 1
    assert scale(ZERO, None, None, 5)[0].number == 1, "it goes when nobody asks for it"
    assert scale(evolve(RULES, min=3), None, None, 5)[0].number == 3
    assert scale(evolve(RULES, max=2), Demand(500), at(5), 5)[0].number == 2
    kept = after(RULES, at(4), (1000, Demand(0)), (1200, None), (1400, Demand(0)))
    assert kept.number == 4, "while nobody knows the load nothing is given up"


@given(
    st.lists(st.tuples(st.floats(0, 400), st.integers(0, 200), st.integers(0, 50)), max_size=40),
    st.integers(0, 3),
    st.integers(1, 8),
)
def test_always_within_bounds_and_never_two_changes_in_a_cooldown(
    story: list[tuple[float, int, int]], least: int, most: int
) -> None:
    rules = evolve(RULES, min=least, max=max(least, most))
    now, found = 1000.0, at(max(1, least), 1000.0)
    for wait, running, waiting in story:
        now += wait
        before = found
        found, wake = scale(rules, Demand(running, waiting, asked=now), before, now)
        assert rules.min <= found.number <= rules.max
        assert wake is None or wake > now
        if found.number != before.number and before.number not in (0, *range(rules.max + 1, 100)):
            assert now - before.changed >= rules.cooldown_s


@given(st.integers(0, 300), st.integers(1, 8), st.integers(1, 5))
def test_a_steady_load_comes_to_rest(running: int, start: int, minutes: int) -> None:
    now, found, changes = 1000.0, at(start, 1000.0), 0
    for _ in range(400):
        now += 5.0 * minutes
        before, (found, _) = found, scale(RULES, Demand(running, asked=now), found, now)
        changes += before.number != found.number
    assert changes <= 1
    assert scale(RULES, Demand(running, asked=now), found, now + 5)[0].number == found.number


@given(st.integers(1, 6), st.floats(0.05, 5.9), st.integers(1, 30))
def test_what_long_requests_hold_is_no_reason_to_come_and_go(start: int, held: float, running: int) -> None:
    """``held`` replicas' worth of KV cache is in use however many there are; with a full one requests wait."""
    now, found, changes = 1000.0, at(start, 1000.0), []
    for _ in range(400):
        now += 60.0
        full = held / found.number >= 1.0
        load = Demand(running, 1 if full else 0, min(1.0, held / found.number), asked=now)
        before, (found, _) = found, scale(RULES, load, found, now)
        changes += [found.number > before.number] if found.number != before.number else []
    assert len(set(changes)) <= 1, "up and down again"


def test_no_request_holds_no_cache() -> None:
    """llama.cpp keeps what it computed, and says so, when nobody asks for it any more."""
    kept = Demand(kv_usage=1.0)
    assert after(RULES, at(3), (1000, kept), (1300, kept)).number == 1


def test_decide_follows_the_load_and_says_so() -> None:
    of = evolve(model(), scaling=ZERO)
    state = ClusterState("c", (of,), (node("n1", tuple(device(n) for n in range(4))),), (), 1)
    outcome = decide(state, NOW)
    assert len(outcome.replicas) == 1
    state = evolve(obey(state, outcome), scales=outcome.scales)
    busy = {of.name: Demand(running=25, asked=NOW)}
    outcome = decide(evolve(state, demands=busy), NOW + 61)
    assert outcome.wake_at == NOW + 76
    state = evolve(state, demands=busy, scales=outcome.scales)
    outcome = decide(state, NOW + 76)
    assert len(outcome.replicas) == 3
    said = [d for d in outcome.decisions if d.kind is DecisionKind.SCALE]
    assert [d.reason for d in said] == ["3 replicas instead of 1: 1 was too few: 25 running and 0 waiting, for 10 each"]
    assert decide(evolve(obey(state, outcome), scales=outcome.scales), NOW + 76).decisions == ()
