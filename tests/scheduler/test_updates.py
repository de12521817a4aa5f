"""Edited profiles while engines take their time or do not come up: who serves meanwhile, and what is gone back to."""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.scheduler.carry_out import DRAIN_SETTLE_S
from llmgw.scheduler.decide import decide
from llmgw.scheduler.explain import DecisionKind, Outcome, StopCommand
from llmgw.scheduler.follow import ROLLBACK_AFTER, STEADY_S
from llmgw.scheduler.state import ClusterState, Exit, Goal, NodeState, Replica, ShardReport, ShardState
from llmgw.settings.catalog import Model, Profile, Update
from llmgw.settings.digest import profile_digest
from tests.scheduler.clusters import NOW, cluster, device, model, node, profile, report, row
from tests.scheduler.test_decide import after, obey

EDIT = {"context_length": 512}
OLD = profile()
NEW = evolve(OLD, **EDIT)


def serving(state: ClusterState) -> int:
    """Replicas that serve, by what the nodes say."""
    return sum(
        1
        for r in state.replicas
        if r.goal is Goal.RUN and r.shards
        and (said := state.report(r.shards[0], r.generation)) is not None and said.state is ShardState.READY
    )  # fmt: skip


def obeyed(state: ClusterState, outcome: Outcome, becomes: Callable[[Replica], ShardState]) -> ClusterState:
    """Agents do as they are told, and each engine that runs by now is as ``becomes`` says."""
    state = obey(state, outcome)
    rows = {r.id: r for r in state.replicas}

    def told(said: ShardReport) -> ShardReport:
        here = rows.get(said.replica)
        return said if here is None or said.generation != here.generation else evolve(said, state=becomes(here))

    return evolve(state, nodes=tuple(evolve(n, reports=tuple(told(r) for r in n.reports)) for n in state.nodes))


@given(st.integers(1, 3), st.integers(0, 2), st.integers(1, 5), st.sampled_from(Update))
@settings(max_examples=40, deadline=None)
def test_no_more_than_one_is_away_however_long_engines_take(
    replicas: int, spare: int, takes: int, update: Update
) -> None:
    of = evolve(model("m", replicas), update=update)
    state = cluster((node("n1", tuple(device(n) for n in range(replicas + spare))),), (of,))
    state = obey(state, decide(state, NOW))
    state = evolve(state, models=(evolve(of, profiles=(NEW,)),))
    least, ages, first = replicas, {r.id: takes for r in state.replicas}, {r.id for r in state.replicas}
    for step in range(12 * replicas * takes):
        outcome = decide(state, NOW + 2 * step)
        ages = {r.id: ages.get(r.id, -1) + 1 for r in outcome.replicas}
        now = dict(ages)
        state = obeyed(
            state, outcome, lambda r, now=now: ShardState.READY if now[r.id] >= takes else ShardState.LOADING
        )
        least = min(least, serving(state))
    assert [r.profile for r in state.replicas] == [NEW] * replicas
    assert first.isdisjoint(r.id for r in state.replicas), "a start of another profile is another replica"
    assert least >= replicas - 1
    if update is Update.SURGE and spare:
        assert least == replicas, "with room for both nobody notices"


def test_what_serves_nothing_is_replaced_first_and_even_while_another_does_not_serve() -> None:
    of = evolve(model("m", 3), update=Update.REPLACE)
    rows = tuple(row(n, devices=(n,), of=of) for n in range(3))
    said = (ShardState.READY, ShardState.LOADING, ShardState.LOADING)
    here = node("n1", tuple(device(n) for n in range(3)),
                reports=tuple(report(r, s) for r, s in zip(rows, said, strict=True)))  # fmt: skip
    outcome = decide(cluster((here,), (evolve(of, profiles=(NEW,)),), rows), NOW)
    assert [r.id for r in outcome.replicas if r.goal is not Goal.RUN] == ["m-1"]


def test_nobody_is_drained_while_another_waits_for_a_place() -> None:
    of = evolve(model("m", 2, NEW), update=Update.REPLACE)
    waits = evolve(row(1, other=OLD), profile=NEW, shards=())
    serves = row(2, devices=(1,))
    here = node("n1", (device(0, used_mib=50_000), device(1)), reports=(report(serves, ShardState.READY),))
    outcome = decide(cluster((here,), (of,), (waits, serves)), NOW)
    assert outcome.replicas == (waits, serves)


def test_what_could_have_another_profile_serves_on_while_the_edited_one_fits_nowhere() -> None:
    of = evolve(model("m", 1, evolve(OLD, parameters=1e12, args=("--x",)), profile("q")), update=Update.REPLACE)
    serves = row()
    here = node(reports=(report(serves, ShardState.READY),))
    outcome = decide(cluster((here,), (of,), (serves,)), NOW)
    assert outcome.replicas == (serves,)
    assert "m-1 serves on as it was" in outcome.unplaced[0].reason


def test_whose_replacement_goes_away_counts_again() -> None:
    old = row(1, superseded_by="m-2")
    going = row(2, devices=(1,), goal=Goal.STOP)
    here = node(reports=(report(old, ShardState.READY), report(going, ShardState.STOPPING)))
    outcome = decide(cluster((here,), (model("m", 1),), (old, going)), NOW)
    assert [r.superseded_by for r in outcome.replicas if r.id == "m-1"] == [None]


def test_who_failed_where_its_engine_is_no_more_goes_where_there_is_one() -> None:
    mine = row()
    bare = node("n1", engines=(), reports=(report(mine, ShardState.FAILED),))
    outcome = decide(cluster((bare, node("n2")), (model(),), (mine,)), NOW)
    assert [(d.kind, d.reason.rpartition("and ")[2]) for d in outcome.decisions][:1] == [
        (DecisionKind.EVICT, "n1 has no engine vllm any more; placed anew")
    ]
    assert [r.shards[0].node for r in outcome.replicas] == ["n2"]


def test_a_device_that_is_gone_for_good_is_missed() -> None:
    mine = evolve(row(), shards=(evolve(row().shards[0], devices=(5,), uuids=("GPU-gone",)),))
    failed = evolve(report(mine, ShardState.FAILED), uuids=("GPU-gone",))
    outcome = decide(cluster((node(reports=(failed,)),), (model(),), (mine,)), NOW)
    assert "device 5 is not there any more" in outcome.decisions[0].reason


def test_a_drain_is_looked_at_when_it_may_end() -> None:
    going = row(goal=Goal.DRAIN, since=NOW)
    here = node(reports=(report(going, ShardState.READY),))
    state = cluster((here,), (), (going,), in_flight={"m-1.0": 2})
    assert decide(state, NOW).wake_at == NOW + DRAIN_SETTLE_S
    assert decide(state, NOW + DRAIN_SETTLE_S).wake_at == NOW + going.profile.limits.drain_s


def test_strangers_are_ended_the_newest_first() -> None:
    said = tuple(report(row(9), ShardState.READY, generation=n) for n in (1, 3, 2))
    outcome = decide(cluster((node(reports=said),), ()), NOW)
    assert [c.generation for c in outcome.commands if isinstance(c, StopCommand)] == [3, 2, 1]


def test_failures_are_forgiven_when_it_was_ready_for_long_enough() -> None:
    tired = row(failures=2)
    for ready, left in ((STEADY_S, 0), (STEADY_S - 1, 2)):
        here = node(reports=(evolve(report(tired, ShardState.READY), since=NOW - ready),))
        assert decide(cluster((here,), (model(),), (tired,)), NOW).replicas[0].failures == left


def test_what_ended_unseen_is_told_as_that() -> None:
    outcome = decide(cluster((node(),), (), (row(goal=Goal.STOP),)), NOW)
    assert [d.reason for d in outcome.decisions] == ["its engine has ended"]


def test_what_is_on_its_way_out_is_not_replaced() -> None:
    going = row(1, goal=Goal.DRAIN)
    kept = evolve(row(2, devices=(1,)), profile=NEW)
    reports = (report(going, ShardState.DRAINING), report(kept, ShardState.READY))
    here = node("n1", tuple(device(n) for n in range(4)), reports=reports)
    outcome = decide(cluster((here,), (model("m", 1, NEW),), (going, kept)), NOW)
    assert outcome.replicas == (going, kept)
    assert outcome.commands == (), "nor told again to drain"


def test_what_gave_its_devices_up_has_none_and_no_past() -> None:
    over = profile("wide", 1, nodes=2, tp=2)
    of = evolve(model("m", 1, evolve(over, **EDIT)), update=Update.REPLACE)
    going = row(1, goal=Goal.STOP, fabric="rack-1", failures=2, not_before=NOW + 9, superseded_by="m-9",
                other=of.profiles[0])  # fmt: skip
    going = evolve(going, profile=over)
    ended = evolve(report(going, ShardState.STOPPED), exit=Exit(0))
    another = evolve(ended, shard="m-7.0", replica="m-7", exit=Exit(7))
    outcome = decide(cluster((node(reports=(ended, another)),), (of,), (going,)), NOW)
    assert outcome.replicas == (
        Replica("m-1", "m", of.profiles[0], (), Goal.RUN, "r", NOW, other=over),
    )  # fmt: skip
    assert [d.reason for d in outcome.decisions] == ["its engine has ended: exit code 0"]


def test_who_is_replaced_by_what_waits_for_a_place_serves_on() -> None:
    old = row(1, superseded_by="m-2")
    waits = evolve(row(2, other=OLD), profile=NEW, shards=())
    here = node("n1", (device(0),), reports=(report(old, ShardState.READY),))
    assert decide(cluster((here,), (model("m", 1, NEW),), (old, waits)), NOW).replicas == (old, waits)


def failing(state: ClusterState, who: Replica, now: float, *, final: bool = False) -> tuple[ClusterState, Outcome]:
    """The present start of a replica fails, and a pass is made."""
    told = evolve(report(who, ShardState.FAILED), final=final)
    nodes = tuple(
        evolve(n, reports=(*(r for r in n.reports if r.replica != who.id), told)) if n.id == who.shards[0].node else n
        for n in state.nodes
    )
    outcome = decide(evolve(state, nodes=nodes), now)
    return after(evolve(state, nodes=nodes), outcome), outcome


def replaced(old_state: NodeState = NodeState.LOST) -> tuple[ClusterState, Replica, Replica]:
    """The node of a replica is lost, and another one took its place elsewhere."""
    old = row()
    lost = node("n1", state=NodeState.LOST, reports=(report(old, ShardState.READY),))
    state = cluster((lost, node("n2")), (model(),), (old,))
    state = after(state, decide(state, NOW))
    new = next(r for r in state.replicas if r.id != old.id)
    state = evolve(state, nodes=(evolve(lost, state=old_state), state.nodes[1]))
    return state, next(r for r in state.replicas if r.id == old.id), new


def test_a_replacement_that_fails_while_the_old_node_is_lost_tries_again_and_seldom() -> None:
    state, _, new = replaced()
    for count in range(1, ROLLBACK_AFTER + 2):
        new = next(r for r in state.replicas if r.id == new.id)
        state, outcome = failing(state, new, NOW + 400 * count)
        assert [d.kind for d in outcome.decisions] == [DecisionKind.RESTART]
        assert [r.failures for r in state.replicas if r.id == new.id] == [count]
    assert [r.rejected for r in state.replicas] == ["", ""]


def test_a_replacement_that_cannot_run_gives_way_to_the_old_one_that_is_back() -> None:
    state, _, new = replaced(NodeState.CONNECTED)
    state, outcome = failing(state, new, NOW, final=True)
    said, *others = outcome.decisions
    assert DecisionKind.RESTART not in {d.kind for d in others}
    assert said.reason.startswith("m-1, which it replaces, is back before it came up; m-1 stays: failed 1 time")
    assert [(r.id, r.superseded_by, r.rejected) for r in outcome.replicas if r.goal is Goal.RUN] == [("m-1", None, "")]


def test_what_is_added_meanwhile_is_not_what_did_not_come_up() -> None:
    edited = evolve(model("m", 2), profiles=(NEW,))
    kept = row(1, rejected=profile_digest("m", NEW))
    here = node("n1", reports=(report(kept, ShardState.READY),))
    outcome = decide(cluster((here,), (edited,), (kept,)), NOW)
    assert [(r.profile, r.rejected) for r in outcome.replicas] == [(OLD, kept.rejected)] * 2
    lost = evolve(here, state=NodeState.LOST)
    outcome = decide(cluster((lost, node("n2")), (evolve(edited, replicas=1),), (kept,)), NOW)
    new = next(r for r in outcome.replicas if r.id != kept.id)
    assert (new.profile, new.rejected) == (OLD, kept.rejected)
    again = evolve(edited, profiles=(evolve(OLD, context_length=1024),))
    outcome = decide(cluster((here,), (again,), (kept,)), NOW)
    assert {r.profile.context_length for r in outcome.replicas} == {None, 1024}, "edited again, it is tried"


def test_a_removed_profile_whose_successor_does_not_come_up_is_not_tried_for_ever() -> None:
    other = evolve(OLD, name="q")
    kept = row(1, rejected=profile_digest("m", other))
    state = cluster((node("n1", reports=(report(kept, ShardState.READY),)),), (model("m", 1, other),), (kept,))
    outcome = decide(state, NOW)
    assert (outcome.decisions, outcome.replicas) == ((), (kept,))


def test_while_it_is_taken_back_nothing_new_gets_it_either() -> None:
    going = row(1, devices=(0,), goal=Goal.STOP, rejected=profile_digest("m", NEW), other=OLD)
    going = evolve(going, profile=NEW)
    here = node("n1", reports=(report(going, ShardState.STOPPING),))
    outcome = decide(cluster((here,), (evolve(model("m", 2), profiles=(NEW,)),), (going,)), NOW)
    assert [r.profile for r in outcome.replicas if r.goal is Goal.RUN] == [OLD]


def test_who_is_evicted_is_placed_anew_at_once_and_not_with_what_it_had_before() -> None:
    """It came about by an edit, and its device breaks before it was ready for long."""
    young: Profile = NEW
    mine = evolve(row(1, other=OLD), profile=young)
    broken = (device(0, fault="fell off the bus"), device(1))
    here = node("n1", broken, reports=(report(mine, ShardState.FAILED),))
    of: Model = evolve(model(), profiles=(young,))
    outcome = decide(cluster((here,), (of,), (mine,)), NOW)
    assert [(r.profile, r.shards[0].devices, r.other) for r in outcome.replicas] == [(young, (1,), None)]
