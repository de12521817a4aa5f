"""Whose devices and quota a model gets: what is leaving anyway, then the least important, and no more than it needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.hardware.inventory import MigInstance
from llmgw.scheduler.decide import decide
from llmgw.scheduler.explain import DecisionKind, Outcome, StartCommand
from llmgw.scheduler.state import Assignment, ClusterState, Goal, Node, NodeState, Replica, ShardState
from llmgw.scheduler.working import Working
from llmgw.settings.catalog import PlacementRules, Update
from tests.scheduler.clusters import NOW, cluster, device, model, node, profile, report, row, states
from tests.scheduler.test_decide import after, obey


def run(state: ClusterState, now: float = NOW, passes: int = 8) -> ClusterState:
    for step in range(passes):
        state = obey(state, decide(state, now + 2 * step))
    return evolve(state, replicas=tuple(evolve(r, placed=min(r.placed, NOW - 10_000)) for r in state.replicas))


def of_kind(outcome: Outcome, *kinds: DecisionKind) -> list[tuple[str, str]]:
    return [(d.kind.value, d.replica) for d in outcome.decisions if d.kind in kinds]


def cards(name: str, count: int) -> Node:
    return node(name, tuple(device(n) for n in range(count)))


LOW = model("low", 2)
MID = evolve(model("mid", 2), priority=5)
HIGH = evolve(model("high"), priority=10)


def test_what_leaves_the_catalog_is_not_worth_more_than_what_stays() -> None:
    state = run(cluster((cards("n1", 4),), (LOW, MID)))
    outcome = decide(evolve(state, models=(LOW, HIGH)), NOW)
    assert of_kind(outcome, DecisionKind.PREEMPT) == []
    assert [u.reason.split(";")[0] for u in outcome.unplaced] == ["it gets what is being stopped"]


def test_what_is_one_too_many_goes_before_anything_is_taken() -> None:
    state = run(cluster((cards("n1", 4),), (LOW, MID)))
    outcome = decide(evolve(state, models=(LOW, evolve(MID, replicas=1), HIGH)), NOW)
    assert of_kind(outcome, DecisionKind.PREEMPT, DecisionKind.DRAIN) == [("drain", "mid-101")]


def test_what_is_being_stopped_is_kept_from_who_has_nothing_yet() -> None:
    """``big`` waits for both devices; ``low`` has none, and must not settle on the one that is free already."""
    big = evolve(model("big", 1, profile("two", 2)), priority=10)
    going = row(1, devices=(0,), of=model("gone"), goal=Goal.STOP)
    here = node(reports=(report(going, ShardState.STOPPING),))
    outcome = decide(cluster((here,), (model("low"), big), (going,)), NOW)
    assert of_kind(outcome, DecisionKind.PLACE) == []
    assert "kept for big (priority 10)" in outcome.unplaced[0].candidates[0].refusals[0].reason


def test_what_will_be_taken_is_kept_while_who_has_it_may_still_have_it() -> None:
    big = evolve(model("big", 1, profile("two", 2)), priority=10)
    low = evolve(model("low", 2), min_run_s=300)
    young = row(1, of=low, placed=NOW - 100)
    here = node(reports=(report(young, ShardState.READY),))
    outcome = decide(cluster((here,), (low, big), (young,)), NOW)
    assert of_kind(outcome, DecisionKind.PLACE, DecisionKind.PREEMPT) == [], "low does not get the other device"
    assert outcome.wake_at == NOW + 200
    elsewhere = decide(cluster((cards("n1", 1),), (low, big), (young,)), NOW)
    assert "min_run_s" not in elsewhere.unplaced[0].reason, "one device would not help"
    assert elsewhere.wake_at is None


def test_of_those_who_may_have_theirs_yet_the_first_that_may_not_gives_way() -> None:
    low = evolve(LOW, min_run_s=300)
    rows = (row(1, devices=(0,), of=low, placed=NOW - 200), row(2, devices=(1,), of=low, placed=NOW - 100))
    here = node(reports=tuple(report(r, ShardState.READY) for r in rows))
    outcome = decide(cluster((here,), (low, HIGH), rows), NOW)
    assert outcome.wake_at == NOW + 100
    assert outcome.unplaced[0].reason.startswith("it takes the devices of low-1 once that had them for 300 s")


def test_nobody_gives_way_where_there_are_as_many_of_the_model_as_may_be() -> None:
    high = evolve(model("high", 2), priority=10, placement=PlacementRules(per_node=1))
    rows = (row(1, devices=(0,), of=high), row(2, devices=(1,), of=LOW, placed=0.0))
    here = node(reports=tuple(report(r, ShardState.READY) for r in rows))
    outcome = decide(cluster((here,), (evolve(LOW, replicas=1), high), rows), NOW)
    assert of_kind(outcome, DecisionKind.PREEMPT) == []


def test_what_has_ended_holds_no_device() -> None:
    other = report(row(7, of=model("other")), ShardState.FAILED, cluster="another")
    outcome = decide(cluster((node(devices=(device(0),), reports=(other,)),), (model(),)), NOW)
    assert of_kind(outcome, DecisionKind.PLACE) == [("place", "m-100")]


def test_who_need_not_give_way_stays_and_of_equals_who_has_served_longest() -> None:
    """Any two of the four would do: two of the least important, the newest."""
    rows = (
        row(1, devices=(0,), of=LOW, placed=NOW - 9000), row(2, devices=(1,), of=MID, placed=NOW - 1000),
        row(3, devices=(2,), of=LOW, placed=NOW - 8000), row(4, devices=(3,), of=LOW, placed=NOW - 7000),
    )  # fmt: skip
    reports = tuple(report(r, ShardState.READY) for r in rows)
    pair = evolve(model("pair", 1, profile("two", 2)), priority=10)
    here = evolve(cards("n1", 4), reports=reports)
    outcome = decide(cluster((here,), (evolve(LOW, replicas=3), evolve(MID, replicas=1), pair), rows), NOW)
    assert of_kind(outcome, DecisionKind.PREEMPT) == [("preempt", "low-3"), ("preempt", "low-4")]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_nobody_gives_way_needlessly(data: st.DataObject) -> None:
    """Without any one of those who give way there would be no place, by what is free; and only the less important do."""
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    least = {n: model(f"m{n}", 1, profile(f"p{n}", gpus)) for n, gpus in enumerate(sizes)}
    some = [evolve(m, priority=data.draw(st.sampled_from((0, 5)))) for m in least.values()]
    nodes = tuple(
        evolve(cards(f"n{n}", data.draw(st.integers(2, 5))), reports=()) for n in range(data.draw(st.integers(1, 3)))
    )
    domains = data.draw(st.sampled_from(((), ((0, 1), (2, 3)))))
    nodes = tuple(evolve(n, inventory=evolve(n.inventory, nvlink_domains=domains)) for n in nodes)
    state = run(cluster(nodes, tuple(some)), passes=3)
    high = evolve(model("high", 1, profile("p", data.draw(st.integers(1, 4)))), priority=data.draw(st.integers(1, 9)))
    outcome = decide(evolve(state, models=(*some, high)), NOW)
    given_up = {d.replica for d in outcome.decisions if d.kind is DecisionKind.PREEMPT}
    priority = {m.name: m.priority for m in some}
    rows = {r.id: r for r in state.replicas}
    assert all(priority[rows[name].model] < high.priority for name in given_up)
    for kept in given_up:
        others = tuple(r for r in state.replicas if r.id not in given_up or r.id == kept)
        gone = evolve(
            state, replicas=others, models=(high,),
            nodes=tuple(evolve(n, reports=tuple(r for r in n.reports if r.replica in {o.id for o in others}))
                        for n in state.nodes),
        )  # fmt: skip
        assert any(u.model == "high" for u in decide(gone, NOW).unplaced), f"{kept} need not have given way"


def test_what_a_fleet_says_of_a_node_is_said_of_who_would_leave_it() -> None:
    """The memory of the one that would leave is no stranger's, that of the other one is."""
    devices = (device(0, used_mib=50_000), device(1, used_mib=50_000))
    held = row(1, devices=(0,), of=LOW, placed=0.0)
    here = node(devices=devices, reports=(report(held, ShardState.READY),))
    pair = evolve(model("pair", 1, profile("two", 2)), priority=10)
    assert of_kind(decide(cluster((here,), (LOW, pair), (held,)), NOW), DecisionKind.PREEMPT) == []
    assert of_kind(decide(cluster((here,), (LOW, HIGH), (held,)), NOW), DecisionKind.PREEMPT) == [("preempt", "low-1")]


def test_who_sees_the_same_memory_gives_way_too() -> None:
    name = "h100-80g-mig-1c.3g.40gb"
    devices = tuple(
        evolve(device(1000 + n, name), uuid=f"MIG-{n}", mig=MigInstance(0, n, "1c.3g.40gb", 1, n)) for n in range(2)
    )
    low = model("low", 1, profile(classes=(name,)))
    held = row(1, devices=(1001,), of=low, placed=0.0)
    here = evolve(node("n1", devices), reports=(report(held, ShardState.READY),))
    high = evolve(model("high", 1, profile(classes=(name,))), priority=10)
    outcome = decide(cluster((here,), (low, high), (held,)), NOW)
    assert of_kind(outcome, DecisionKind.PREEMPT) == [("preempt", "low-1")]


# Quotas.

QUOTA: Mapping[str, Mapping[str, int]] = {"g": {"h100-80g": 2}}


def test_the_important_take_their_groups_quota_from_the_less_important() -> None:
    low, high = evolve(LOW, group="g"), evolve(HIGH, group="g")
    state = run(cluster((cards("n1", 4),), (low,), quotas=QUOTA))
    outcome = decide(evolve(state, models=(low, high)), NOW)
    assert of_kind(outcome, DecisionKind.PREEMPT) == [("preempt", "low-101")]
    assert of_kind(outcome, DecisionKind.PLACE) == [], "who gives way does not get it again"
    state = run(after(state, outcome, models=(low, high)))
    assert sorted(r.model for r in state.replicas) == ["high", "low"]
    assert decide(state, NOW + 9000).decisions == ()
    apart = run(cluster((cards("n1", 2), cards("n2", 4)), (low,), quotas=QUOTA))
    outcome = decide(evolve(apart, models=(low, MID, high)), NOW)
    assert of_kind(outcome, DecisionKind.PREEMPT) == [("preempt", "low-101")], "wherever it is"
    other = evolve(HIGH, group="h")
    outcome = decide(evolve(state, models=(low, other), quotas={**QUOTA, "h": {"h100-80g": 0}}), NOW)
    assert of_kind(outcome, DecisionKind.PREEMPT) == [], "another group's quota is no help"


def test_what_replaces_a_lost_replica_has_its_quota() -> None:
    low = evolve(LOW, group="g")
    state = run(cluster((cards("n1", 2), cards("n2", 4)), (low,), quotas=QUOTA))
    assert {s.node for r in state.replicas for s in r.shards} == {"n1"}
    away = evolve(state, nodes=(evolve(state.nodes[0], state=NodeState.LOST), state.nodes[1]))
    outcome = decide(away, NOW)
    assert len(of_kind(outcome, DecisionKind.EVICT)) == 2
    more = decide(evolve(after(away, outcome), models=(evolve(low, replicas=3),)), NOW)
    assert of_kind(more, DecisionKind.PLACE) == [], "and no more than that"
    assert more.unplaced[0].candidates[-1].refusals[0].filter == "quota"


def test_what_is_wanted_no_more_on_a_lost_node_needs_no_quota() -> None:
    low, other = evolve(LOW, group="g"), evolve(model("other", 2), group="g")
    state = run(cluster((cards("n1", 2), cards("n2", 4)), (low,), quotas=QUOTA))
    away = evolve(state, nodes=(evolve(state.nodes[0], state=NodeState.LOST), state.nodes[1]), models=(other,))
    assert len(of_kind(decide(away, NOW), DecisionKind.PLACE)) == 2
    assert len(of_kind(decide(evolve(away, models=(low, other)), NOW), DecisionKind.PLACE)) == 2, "low keeps its own"
    there = evolve(state, models=(evolve(low, replicas=0), other))
    assert of_kind(decide(there, NOW), DecisionKind.PLACE) == [], "on a node that is there it still has its devices"


@given(states(), st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_counted_is_kept_up_as_rows_change(state: ClusterState, data: st.DataObject) -> None:
    names = sorted({m.name for m in state.models} | {r.model for r in state.replicas} | {"a"})
    grouped = tuple(evolve(m, group=data.draw(st.sampled_from(("", "g", "h")))) for m in state.models)
    state = evolve(state, models=grouped, quotas={"g": {"h100-80g": 2}})
    pass_ = Working(state, NOW)
    for _ in range(data.draw(st.integers(1, 6))):
        for name in names:
            pass_.here(name)
        pass_.used("g")
        if not pass_.rows:
            break
        chosen = pass_.rows[data.draw(st.sampled_from(sorted(pass_.rows)))]
        change = data.draw(st.sampled_from(("drop", "goal", "superseded", "shards", "copy")))
        match change:
            case "drop":
                pass_.drop(chosen)
            case "goal":
                pass_.put(evolve(chosen, goal=data.draw(st.sampled_from(Goal))))
            case "superseded":
                pass_.put(evolve(chosen, superseded_by=data.draw(st.sampled_from((None, "a-1")))))
            case "shards":
                pass_.put(evolve(chosen, shards=(Assignment(f"{chosen.id}.0", 0, "n1", (0, 1)),)))
            case _:
                pass_.put(evolve(chosen, id=f"{chosen.id}0"))
    fresh = Working(evolve(state, replicas=tuple(pass_.rows.values())), NOW)
    for name in names:
        assert +pass_.here(name) == +fresh.here(name)
    assert +pass_.used("g") == +fresh.used("g")
    assert pass_.used("h") == Counter()


# Among equals.


def test_what_gave_its_device_up_for_an_update_gets_it_before_an_equal_that_waits() -> None:
    waits, of = model("a-waits"), model("m")
    state = run(cluster((cards("n1", 1),), (of,)))
    edited = evolve(of, profiles=(profile(context_length=512),), update=Update.REPLACE)
    state = run(evolve(state, models=(waits, edited)))
    assert [(r.model, r.profile) for r in state.replicas] == [("m", edited.profiles[0])]


def test_what_is_missing_goes_before_a_second_copy_for_an_update() -> None:
    of, missing = model("a"), model("m")
    state = run(cluster((cards("n1", 2),), (of,)))
    edited = evolve(of, profiles=(profile(context_length=512),))
    outcome = decide(evolve(state, models=(edited, missing)), NOW)
    assert [d.model for d in outcome.decisions if d.kind is DecisionKind.PLACE] == ["m"]


# Replicas over several nodes are one thing.


def wide_pair(other: NodeState) -> tuple[ClusterState, Replica]:
    of = model("m", 1, profile("wide", 1, nodes=2, tp=2))
    shards = (Assignment("m-1.0", 0, "n1", (0,)), Assignment("m-1.1", 1, "n2", (0,)))
    old = evolve(row(of=of), shards=shards, fabric="rack-1")
    nodes = (cards("n1", 1), evolve(cards("n2", 1), state=other))
    return cluster(nodes, (of,), (old,)), old


def test_no_rank_is_started_before_every_node_of_its_replica_is_there() -> None:
    for other in (NodeState.UNREACHABLE, NodeState.LOST):
        state, _ = wide_pair(other)
        assert decide(state, NOW).commands == ()
    state, _ = wide_pair(NodeState.CONNECTED)
    assert [type(c) for c in decide(state, NOW).commands] == [StartCommand]


def test_half_a_replica_waits_for_a_node_that_may_be_back() -> None:
    state, old = wide_pair(NodeState.UNREACHABLE)
    new = evolve(row(2, on="n3", of=state.models[0]), id="m-2")
    nodes = (*state.nodes, evolve(cards("n3", 1), reports=(report(new, ShardState.READY),)))
    old = evolve(old, superseded_by="m-2")
    outcome = decide(evolve(state, nodes=nodes, replicas=(old, new)), NOW)
    assert outcome.replicas == (old, new)


def test_half_a_replica_makes_room_once_its_replacement_is_ready() -> None:
    state, old = wide_pair(NodeState.LOST)
    new = evolve(row(2, on="n3", of=state.models[0]), id="m-2")
    old = evolve(old, superseded_by="m-2")
    nodes = (
        evolve(state.nodes[0], reports=(report(old, ShardState.READY),)), state.nodes[1],
        evolve(cards("n3", 1), reports=(report(new, ShardState.READY),)),
    )  # fmt: skip
    state = evolve(state, nodes=nodes, replicas=(old, new))
    outcome = decide(state, NOW)
    assert [(r.id, r.goal) for r in outcome.replicas] == [("m-1", Goal.DRAIN), ("m-2", Goal.RUN)]
    alone = evolve(old, shards=(evolve(old.shards[0], node="n2"),))
    assert decide(evolve(state, replicas=(alone, new)), NOW).replicas[0].goal is Goal.RUN, "nobody could be told"


def test_no_two_of_a_model_that_wants_nodes_of_its_own_are_on_one() -> None:
    of = evolve(model("m", 3), placement=PlacementRules(per_node=1))
    state = run(cluster((cards("n1", 4), cards("n2", 4)), (of,)))
    assert sorted(s.node for r in state.replicas for s in r.shards) == ["n1", "n2"]
    away = evolve(state, nodes=(evolve(state.nodes[0], state=NodeState.LOST), state.nodes[1]))
    assert of_kind(decide(away, NOW), DecisionKind.PLACE) == []
