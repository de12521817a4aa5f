"""What a model may take from others, and how an edited profile comes in and goes back."""

from __future__ import annotations

import pytest
from attrs import evolve

from llmgw.scheduler.carry_out import UNSEEN_S
from llmgw.scheduler.decide import decide
from llmgw.scheduler.explain import DecisionKind, Outcome, StopCommand
from llmgw.scheduler.follow import ROLLBACK_AFTER
from llmgw.scheduler.state import ClusterState, Goal, Replica, ShardState
from llmgw.settings.catalog import Model, Profile, Update
from tests.scheduler.clusters import NOW, cluster, device, model, node, profile, report, row
from tests.scheduler.test_decide import after, obey


def kinds(outcome: Outcome) -> list[tuple[DecisionKind, str]]:
    return [(d.kind, d.replica) for d in outcome.decisions]


def settled(state: ClusterState, now: float = NOW) -> ClusterState:
    """After passes whose commands are all obeyed."""
    for step in range(6):
        state = obey(state, decide(state, now + 2 * step))
    return state


def running(*models: Model, gpus: int = 2, placed: float = NOW - 10_000) -> ClusterState:
    """One node on which all of them are ready, or as many as fit."""
    state = settled(cluster((node("n1", tuple(device(n) for n in range(gpus))),), models))
    return evolve(state, replicas=tuple(evolve(r, placed=placed) for r in state.replicas))


LOW, MID, HIGH = model("low", 2), evolve(model("mid"), priority=5), evolve(model("high"), priority=10)


def test_the_important_take_from_the_least_important_and_drain_first() -> None:
    state = evolve(running(LOW), models=(LOW, HIGH))
    outcome = decide(state, NOW)
    assert kinds(outcome) == [(DecisionKind.PREEMPT, "low-101")]
    assert outcome.decisions[0].reason == "high (priority 10) takes its devices, it has priority 0"
    assert [r.goal for r in outcome.replicas] == [Goal.RUN, Goal.DRAIN]
    short = {u.model: u.reason for u in outcome.unplaced}
    assert "devices are taken from models of a lower priority" in short["high"]
    # While it drains nothing more is taken, and what comes free is not given back to who had it.
    outcome = decide(after(state, outcome), NOW + 1)
    assert kinds(outcome) == [(DecisionKind.STOP, "low-101")]
    assert "it gets what is being stopped" in {u.model: u.reason for u in outcome.unplaced}["high"]
    state = settled(after(state, outcome), NOW + 2)
    assert sorted((r.model, r.goal) for r in state.replicas) == [("high", Goal.RUN), ("low", Goal.RUN)]


def test_nobody_takes_from_an_equal_or_a_more_important_one() -> None:
    equal = evolve(model("equal", 2), priority=10)
    state = evolve(running(equal), models=(equal, HIGH, MID))
    outcome = decide(state, NOW)
    assert kinds(outcome) == []
    assert {u.model for u in outcome.unplaced} == {"high", "mid"}


def test_no_more_is_taken_than_is_needed_and_from_the_lowest() -> None:
    low = model("low", 1)
    state = evolve(running(evolve(model("mid", 1), priority=5), low), models=(evolve(MID, replicas=1), low, HIGH))
    assert kinds(decide(state, NOW)) == [(DecisionKind.PREEMPT, "low-101")]
    pair = evolve(model("pair", 1, profile("two", 2)), priority=10)
    outcome = decide(evolve(state, models=(MID, low, pair)), NOW)
    assert sorted(kinds(outcome)) == [(DecisionKind.PREEMPT, "low-101"), (DecisionKind.PREEMPT, "mid-100")]


def test_nothing_is_taken_that_would_not_help() -> None:
    state = evolve(running(LOW), models=(LOW, evolve(model("huge", 1, profile("four", 4)), priority=10)))
    outcome = decide(state, NOW)
    assert kinds(outcome) == []
    assert len(outcome.unplaced) == 1


def test_memory_of_who_gives_way_is_no_strangers() -> None:
    state = running(LOW)
    used = tuple(device(n, used_mib=60_000) for n in range(2))
    (here,) = state.nodes
    here = evolve(here, inventory=evolve(here.inventory, devices=used))
    state = evolve(state, nodes=(here,), models=(LOW, HIGH))
    outcome = decide(state, NOW)
    assert kinds(outcome) == [(DecisionKind.PREEMPT, "low-101")]
    short = {u.model: u.reason for u in decide(after(state, outcome), NOW + 1).unplaced}
    assert "it gets what is being stopped" in short["high"]


def test_who_gives_way_does_not_settle_on_what_is_waited_for() -> None:
    low = model("low")
    state = evolve(running(low, gpus=3), models=(low, evolve(model("all", 1, profile("three", 3)), priority=10)))
    outcome = decide(state, NOW)
    assert kinds(outcome) == [(DecisionKind.PREEMPT, "low-100")]
    refused = {u.model: u.candidates[0].refusals[0].reason for u in outcome.unplaced}
    assert "gpu-1 runs nothing yet, it is kept for all (priority 10)" in refused["low"]
    state = settled(after(state, outcome), NOW + 1)
    assert [r.model for r in state.replicas] == ["all"]


def test_who_has_devices_keeps_them_for_a_while() -> None:
    state = evolve(running(LOW, placed=NOW - 100), models=(evolve(LOW, min_run_s=300), HIGH))
    outcome = decide(state, NOW)
    assert kinds(outcome) == []
    assert outcome.wake_at == NOW + 200
    assert "it takes the devices of low-101 once that had them for 300 s (min_run_s)" in outcome.unplaced[0].reason
    assert kinds(decide(state, NOW + 200)) == [(DecisionKind.PREEMPT, "low-101")]


def edited(of: Model, **change: object) -> tuple[Model, Profile]:
    new = evolve(of.profiles[0], **change)
    return evolve(of, profiles=(new,)), new


def failing(state: ClusterState, who: Replica, *, final: bool = False) -> ClusterState:
    """The present start of a replica fails."""
    told = evolve(report(who, ShardState.FAILED), final=final)
    here = state.nodes[0]
    others = tuple(r for r in here.reports if (r.shard, r.generation) != (told.shard, told.generation))
    return evolve(state, nodes=(evolve(here, reports=(*others, told)),))


@pytest.mark.parametrize("final", [True, False])
def test_an_edited_profile_that_does_not_come_up_beside_the_old_one_is_taken_back(final: bool) -> None:
    of, new = edited(model("m"), context_length=99_999)
    state = evolve(running(model("m")), models=(of,))
    outcome = decide(state, NOW)
    old, fresh = outcome.replicas
    assert (old.superseded_by, fresh.profile) == (fresh.id, new)
    state = after(state, outcome)
    now = NOW
    for _ in range(1 if final else ROLLBACK_AFTER):
        now += 400
        fresh = next(r for r in state.replicas if r.id == fresh.id)
        outcome = decide(failing(state, fresh, final=final), now)
        state = after(state, outcome)
    assert (DecisionKind.ROLLBACK, fresh.id) in kinds(outcome)
    state = settled(state, now + 1)
    assert [(r.id, r.profile, r.superseded_by) for r in state.replicas] == [(old.id, model("m").profiles[0], None)]
    assert decide(state, now + 1000).decisions == (), "and not tried again"
    again, newer = edited(of, context_length=1000)
    state = settled(evolve(state, models=(again,)), now + 2000)
    assert [r.profile for r in state.replicas] == [newer], "until it is edited again"


@pytest.mark.parametrize("update", Update)
def test_where_there_is_room_for_one_only_the_old_profile_comes_back(update: Update) -> None:
    of, new = edited(evolve(model("m"), update=update), context_length=99_999)
    state = evolve(running(model("m"), gpus=1), models=(of,))
    now = NOW
    for step in range(12):
        now = NOW + 2 * step
        outcome = decide(state, now)
        state = obey(state, outcome)
        if [r.profile for r in state.replicas if r.shards] == [new]:
            break
    assert [r.profile for r in state.replicas] == [new], "the old one made room"
    outcome = decide(failing(state, state.replicas[0], final=True), now + 1)
    assert [k for k, _ in kinds(outcome)] == [DecisionKind.ROLLBACK, DecisionKind.STOP, DecisionKind.FORGET]
    state = settled(after(state, outcome), now + 2)
    assert [r.profile for r in state.replicas] == [model("m").profiles[0]]
    assert decide(state, now + 1000).decisions == ()
    back = settled(evolve(state, models=(model("m"),)), now + 2000)
    assert [r.id for r in back.replicas] == [r.id for r in state.replicas], "edited back: it is what runs"


def test_replace_takes_the_old_one_away_first_even_with_room() -> None:
    of, _ = edited(evolve(model("m", 2), update=Update.REPLACE), context_length=512)
    state = evolve(running(model("m", 2), gpus=4), models=(of,))
    away = []
    for step in range(20):
        outcome = decide(state, NOW + 2 * step)
        state = obey(state, outcome)
        serves = [r for r in state.replicas if r.goal is Goal.RUN and r.shards]
        ready = [r for r in serves if state.report(r.shards[0], r.generation) is not None]
        away.append(2 - len(ready))
    assert max(away) == 1, "one at a time"
    assert [r.profile for r in state.replicas] == [of.profiles[0]] * 2


def test_a_start_that_was_never_heard_of_keeps_its_devices_for_a_moment() -> None:
    begun = decide(cluster((node(devices=(device(0),)),), (model(),)), NOW)
    state = after(cluster((node(devices=(device(0),)),), ()), begun, models=(model("other"),))
    outcome = decide(state, NOW + 0.1)
    assert kinds(outcome) == [(DecisionKind.DRAIN, "m-100"), (DecisionKind.STOP, "m-100")]
    assert outcome.wake_at == NOW + 0.1 + UNSEEN_S
    state = after(state, outcome)
    # The agent had it begun: it is stopped, and the device is given away after that.
    late = evolve(state, nodes=(evolve(state.nodes[0], reports=(report(begun.replicas[0], ShardState.STARTING),)),))
    outcome = decide(late, NOW + 1)
    assert [type(c) for c in outcome.commands] == [StopCommand]
    assert [r.id for r in outcome.replicas] == ["m-100"]
    # Or it never came to that.
    assert decide(state, NOW + 1).decisions == ()
    outcome = decide(state, NOW + 0.1 + UNSEEN_S)
    assert kinds(outcome) == [(DecisionKind.FORGET, "m-100")]
    assert [r.model for r in decide(after(state, outcome), NOW + 6).replicas] == ["other"]


def test_a_row_that_is_wanted_but_was_drained_starts_again_after_its_earlier_start_ended() -> None:
    kept = row()
    state = cluster((node(reports=(report(kept, ShardState.DRAINING),)),), (model(),), (kept,))
    outcome = decide(state, NOW)
    assert kinds(outcome) == [(DecisionKind.RESTART, "m-1"), (DecisionKind.REAP, "m-1")]
    assert [type(c) for c in outcome.commands] == [StopCommand], "no start beside it"
    state = settled(after(state, outcome), NOW + 1)
    assert [(r.id, r.generation) for r in state.replicas] == [("m-1", 2)]


def loading(state: ClusterState, *ids: str) -> ClusterState:
    """The same, where these replicas still load."""
    nodes = tuple(
        evolve(n, reports=tuple(evolve(r, state=ShardState.LOADING) if r.replica in ids else r for r in n.reports))
        for n in state.nodes
    )
    return evolve(state, nodes=nodes)


@pytest.mark.parametrize("update", Update)
def test_the_next_one_gives_way_only_once_the_one_before_serves_again(update: Update) -> None:
    of, new = edited(evolve(model("m", 3), update=update), context_length=512)
    state = evolve(running(model("m", 3), gpus=3), models=(of,))
    for step in range(8):
        outcome = decide(state, NOW + 2 * step)
        state = obey(state, outcome)
        fresh = [r.id for r in state.replicas if r.profile == new]
        state = loading(state, *fresh)
    assert [r.profile == new for r in state.replicas] == [False, False, True], "the others serve while it loads"
    assert decide(state, NOW + 900).decisions == ()
    # It comes up, and the next one goes.
    outcome = decide(obey(state, decide(state, NOW + 16)), NOW + 18)
    state = settled(loading(state), NOW + 20)
    for step in range(30):
        state = obey(state, decide(state, NOW + 30 + 2 * step))
    assert [r.profile for r in state.replicas] == [new] * 3


@pytest.mark.parametrize("update", Update)
def test_a_profile_that_is_renamed_is_an_update_like_any_other(update: Update) -> None:
    of, new = edited(evolve(model("m", 2), update=update), name="renamed")
    state = evolve(running(model("m", 2)), models=(of,))
    for step in range(10):
        state = obey(state, decide(state, NOW + 2 * step))
        state = loading(state, *(r.id for r in state.replicas if r.profile == new))
    assert sorted(r.profile == new for r in state.replicas) == [False, True], "the other one serves while it loads"
    for step in range(30):
        state = obey(state, decide(state, NOW + 30 + 2 * step))
    assert [r.profile for r in state.replicas] == [new] * 2


def test_what_does_not_serve_is_replaced_before_what_does() -> None:
    of, new = edited(evolve(model("m", 2), update=Update.REPLACE), context_length=512)
    state = evolve(running(model("m", 2)), models=(of,))
    for step in range(6):
        if not any(r.profile == new and r.shards for r in state.replicas):
            state = obey(state, decide(state, NOW + 2 * step))
    (fresh,) = [r.id for r in state.replicas if r.profile == new]
    state = loading(state, fresh)
    (old,) = [r.id for r in state.replicas if r.id != fresh]
    again, _ = edited(of, context_length=256)
    outcome = decide(evolve(state, models=(again,)), NOW + 100)
    assert kinds(outcome) == [(DecisionKind.DRAIN, fresh), (DecisionKind.STOP, fresh)]
    assert next(r for r in outcome.replicas if r.id == old).goal is Goal.RUN
