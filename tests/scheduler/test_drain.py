"""Drained nodes and replicas that are started anew or stopped: who serves meanwhile, what stays, what is said of it."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.scheduler.decide import decide
from llmgw.scheduler.drains import drain_effect
from llmgw.scheduler.explain import DecisionKind, StartCommand
from llmgw.scheduler.orders import Drained, Order, OrderKind
from llmgw.scheduler.state import ClusterState, Goal, NodeState, Replica, ShardState
from llmgw.settings.catalog import Model, PlacementRules, Update
from tests.scheduler.clusters import NOW, cluster, device, fabric, model, node, report, row, states, wide
from tests.scheduler.test_decide import after, obey
from tests.scheduler.test_updates import failing, obeyed, serving

BY = Drained("anna", NOW, "new fans")
FORCED = evolve(BY, force=True)


def cards(count: int) -> tuple[object, ...]:
    return tuple(device(n) for n in range(count))


def drained(state: ClusterState, name: str, how: Drained | None = BY) -> ClusterState:
    return evolve(state, nodes=tuple(evolve(n, drained=how) if n.id == name else n for n in state.nodes))


def ordered(state: ClusterState, of: Replica, kind: OrderKind = OrderKind.RESTART) -> ClusterState:
    order = Order(of.id, kind, of.generation, "anna", NOW, "it stutters")
    return evolve(state, orders={**state.orders, of.id: order})


def places(state: ClusterState) -> list[str]:
    return sorted(s.node for r in state.replicas for s in r.shards)


def settled(state: ClusterState, now: float = NOW, passes: int = 30) -> ClusterState:
    """Agents that do what they are told at once, until nothing changes."""
    for step in range(passes):
        outcome = decide(state, now + 2 * step)
        orders = {name: o for name, o in state.orders.items() if o not in outcome.over}
        state = evolve(obey(state, outcome), orders=orders)
    return state


def running(nodes: int, gpus: int, *models: Model) -> ClusterState:
    return settled(cluster(tuple(node(f"n{n}", cards(gpus)) for n in range(nodes)), models))


def ready_of(state: ClusterState, name: str) -> int:
    return serving(evolve(state, replicas=tuple(r for r in state.replicas if r.model == name)))


def all_in(state: ClusterState) -> bool:
    """Whether all that the drained nodes have would have room on the others: one GPU each."""
    free = sum(len(n.inventory.devices) for n in state.nodes if n.drained is None)
    return len(state.replicas) <= free


@given(
    st.integers(2, 4), st.integers(1, 3), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 4),
    st.sampled_from((BY, FORCED)), st.sampled_from(Update), st.data(),
)  # fmt: skip
@settings(max_examples=120, deadline=None)
def test_a_drain_takes_nothing_away_that_has_another_place(
    nodes: int, gpus: int, replicas: list[int], takes: int, how: Drained, update: Update, data: st.DataObject
) -> None:
    models = tuple(evolve(model(f"m{n}", count), update=update) for n, count in enumerate(replicas))
    state = running(nodes, gpus, *models)
    name = data.draw(st.sampled_from([n.id for n in state.nodes]))
    before = {m.name: ready_of(state, m.name) for m in models}
    state = drained(state, name, how)
    fits, ages = all_in(state), {r.id: takes for r in state.replicas}
    for step in range(12 * sum(replicas) * takes):
        outcome = decide(state, NOW + 2 * step)
        assert not [c for c in outcome.commands if isinstance(c, StartCommand) and c.assignment.node == name]
        ages = {r.id: ages.get(r.id, -1) + 1 for r in outcome.replicas}
        now = dict(ages)
        state = obeyed(
            state, outcome, lambda r, now=now: ShardState.READY if now[r.id] >= takes else ShardState.LOADING
        )
        if fits or not how.force:
            assert all(ready_of(state, name) >= count for name, count in before.items())
    if fits or how.force:
        assert name not in places(state)
    else:
        last = decide(state, NOW + 1e4)
        staying = {r.model for r in state.replicas if any(s.node == name for s in r.shards)}
        assert staying
        assert staying <= {u.model for u in last.unplaced}
        assert all({c.node for c in u.candidates} == {n.id for n in state.nodes} for u in last.unplaced)


@given(states(), st.sampled_from((BY, FORCED)))
@settings(max_examples=100, deadline=None)
def test_a_drain_that_is_taken_back_before_a_pass_changes_nothing(state: ClusterState, how: Drained) -> None:
    there = state
    for name in [n.id for n in state.nodes]:
        there = drained(there, name, how)
    for name in [n.id for n in state.nodes]:
        there = drained(there, name, None)
    assert decide(there, NOW) == decide(state, NOW)


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 4), st.sampled_from((BY, FORCED)))
@settings(max_examples=40, deadline=None)
def test_what_a_drain_moved_stays_where_it_is_when_the_drain_is_over(
    nodes: int, gpus: int, replicas: int, how: Drained
) -> None:
    state = running(nodes, gpus, model("m", replicas))
    there = settled(drained(state, "n0", how), NOW + 100)
    back = drained(there, "n0", None)
    if len(there.replicas) == replicas:
        outcome = decide(back, NOW + 1000)
        assert (outcome.replicas, outcome.commands, outcome.decisions) == (there.replicas, (), ())
    assert ready_of(settled(back, NOW + 1000), "m") == ready_of(state, "m")


def test_a_drained_node_says_so_and_what_to_do() -> None:
    (missing,) = decide(drained(cluster((node(),), (model(),)), "n1"), NOW).unplaced
    (refusal,) = missing.candidates[0].refusals
    assert (refusal.filter, refusal.reason, refusal.remedy) == (
        "drained", "n1 is drained by anna: new fans", "llmgw ctl node undrain n1",
    )  # fmt: skip


def test_made_before_broken() -> None:
    state = drained(running(2, 1, model()), "n0")
    first = decide(state, NOW)
    old, new = first.replicas
    assert (old.goal, old.superseded_by, new.shards[0].node) == (Goal.RUN, new.id, "n1")
    assert new.reason.startswith("n0 is drained by anna: new fans: replaces m-100; profile p on n1")
    loading = obeyed(state, first, lambda r: ShardState.READY if r.id == old.id else ShardState.LOADING)
    assert decide(loading, NOW + 2).replicas == first.replicas
    second = decide(obey(loading, decide(loading, NOW + 2)), NOW + 4)
    assert [(d.kind, d.replica) for d in second.decisions] == [(DecisionKind.DRAIN, "m-100")]


def test_what_has_no_other_place_serves_on_and_every_candidate_is_told() -> None:
    state = drained(running(1, 2, model("m", 2)), "n0")
    outcome = decide(state, NOW)
    assert outcome.replicas == state.replicas
    (told,) = outcome.unplaced
    assert (told.wanted, told.running) == (2, 2)
    assert told.reason.startswith("m-100, m-101 serve on, on n0, which is drained; no node can take it: 1 candidate")
    assert [c.node for c in told.candidates] == ["n0"]
    forced = decide(drained(state, "n0", FORCED), NOW)
    assert [r.goal for r in forced.replicas] == [Goal.DRAIN, Goal.DRAIN]
    assert "nothing else can take it: no node can take it" in forced.decisions[0].reason


def test_what_serves_nothing_goes_at_once_and_what_it_was_to_replace_counts_again() -> None:
    old, new = row(1, "n1", superseded_by="m-2"), row(2, "n2")
    nodes = (
        node("n1", reports=(report(old, ShardState.READY),)),
        evolve(node("n2", reports=(report(new, ShardState.LOADING),)), drained=BY),
    )
    outcome = decide(cluster(nodes, (model(),), (old, new)), NOW)
    assert [(r.id, r.goal, r.superseded_by) for r in outcome.replicas] == [
        ("m-1", Goal.RUN, None), ("m-2", Goal.STOP, None),
    ]  # fmt: skip
    assert "it serves nothing there" in outcome.decisions[0].reason


@pytest.mark.parametrize("state", [NodeState.UNREACHABLE, NodeState.LOST])
def test_nothing_is_moved_off_a_drained_node_that_is_not_heard_but_as_lost(state: NodeState) -> None:
    mine = row()
    gone = evolve(node("n1", state=state, reports=(report(mine, ShardState.READY),)), drained=FORCED)
    outcome = decide(cluster((gone, node("n2")), (model(),), (mine,)), NOW)
    kinds = {d.kind for d in outcome.decisions}
    assert kinds == (set() if state is NodeState.UNREACHABLE else {DecisionKind.PLACE, DecisionKind.EVICT})


def test_a_replica_over_several_nodes_leaves_as_a_whole() -> None:
    spans = model("m", 1, wide())
    state = settled(cluster(tuple(node(f"n{n}", cards(1), fabrics=(fabric(),)) for n in range(4)), (spans,)))
    assert places(state) == ["n0", "n1"]
    assert places(settled(drained(state, "n1"), NOW + 100)) == ["n2", "n3"]


def test_devices_of_a_lower_priority_are_a_place_to_go_to() -> None:
    high, low = evolve(model("high"), priority=5), model("low")
    there = settled(cluster((node("n0", cards(1)),), (high,)))
    state = settled(evolve(there, nodes=(*there.nodes, node("n1", cards(1))), models=(high, low)), NOW + 50)
    assert [(r.model, r.shards[0].node) for r in state.replicas] == [("high", "n0"), ("low", "n1")]
    moved = settled(drained(state, "n0"), NOW + 5000)
    assert [(r.model, r.shards[0].node) for r in moved.replicas] == [("high", "n1")]


def test_a_replacement_that_does_not_come_up_is_tried_on_and_the_old_one_serves() -> None:
    state = drained(running(2, 1, model()), "n0")
    state = obey(state, decide(state, NOW))
    new = next(r for r in state.replicas if r.shards[0].node == "n1")
    state, _ = failing(state, new, NOW + 2, final=True)
    assert {r.id: (r.goal, r.generation) for r in state.replicas} == {
        "m-100": (Goal.RUN, 1), new.id: (Goal.RUN, 2),
    }  # fmt: skip


# What is done to one replica.


def test_a_restart_is_made_before_the_old_one_goes() -> None:
    state = running(1, 2, model())
    (old,) = state.replicas
    first = decide(ordered(state, old), NOW + 100)
    assert [(r.id, r.superseded_by, r.shards[0].devices) for r in first.replicas] == [
        ("m-100", "m-101", (0,)), ("m-101", None, (1,)),
    ]  # fmt: skip
    assert first.over == (), "until the old one is on its way out"
    assert first.decisions[0].reason.startswith("restarted by anna: it stutters: replaces m-100")
    done = settled(ordered(state, old), NOW + 100)
    assert [r.id for r in done.replicas] == ["m-101"]
    assert not done.orders


@pytest.mark.parametrize("why", ["no room", "update: replace", "serves nothing"])
def test_else_it_starts_anew_where_it_is(why: str) -> None:
    of = model() if why == "no room" else evolve(model(), update=Update.REPLACE if "update" in why else Update.SURGE)
    state = running(1, 1 if why == "no room" else 2, of)
    (old,) = state.replicas
    if why == "serves nothing":
        nodes = tuple(evolve(n, reports=tuple(evolve(r, state=ShardState.LOADING) for r in n.reports))
                      for n in state.nodes)  # fmt: skip
        state = evolve(state, nodes=nodes)
    first = decide(ordered(state, old), NOW + 100)
    (row_,) = first.replicas
    assert (row_.id, row_.goal) == ("m-100", Goal.STOP if why == "serves nothing" else Goal.DRAIN)
    assert [o.replica for o in first.over] == ["m-100"]
    assert first.decisions[0].kind is DecisionKind.RESTART
    assert ("no room for both" in first.decisions[0].reason) is (why == "no room")
    done = settled(ordered(state, old), NOW + 100)
    assert [(r.id, r.generation, r.shards, r.other) for r in done.replicas] == [("m-100", 2, old.shards, None)]
    assert ready_of(done, "m") == 1


@pytest.mark.parametrize("nodes", [1, 2])
def test_what_starts_anew_on_a_node_that_is_drained_meanwhile_goes_elsewhere(nodes: int) -> None:
    state = running(nodes, 1, evolve(model(), update=Update.REPLACE))
    (old,) = state.replicas
    state = evolve(obey(state, decide(ordered(state, old), NOW + 100)), orders={})
    assert state.replicas[0].other == state.replicas[0].profile
    (fate,) = drain_effect(state, "n0", BY, NOW + 101).fates
    assert (fate.word, fate.to) == ("stops", ("n1",) if nodes == 2 else ())
    assert ("m-101 takes its place on n1" if nodes == 2 else "replaced once there is room") in fate.reason
    there = decide(drained(state, "n0"), NOW + 102)
    assert [u.model for u in there.unplaced] == ([] if nodes == 2 else ["m"])
    assert places(settled(drained(state, "n0"), NOW + 102)) == (["n1"] if nodes == 2 else [])
    # Another profile has no place yet, and is no reason to say that none is wanted.
    changing = evolve(state.replicas[0], other=evolve(state.replicas[0].profile, name="q"))
    (fate,) = drain_effect(evolve(state, replicas=(changing,)), "n0", BY, NOW + 101).fates
    assert "a place is looked for with profile q" in fate.reason


def test_a_restart_whose_replacement_does_not_come_up_is_given_up() -> None:
    state = running(1, 2, model())
    (old,) = state.replicas
    state = ordered(state, old)
    state = obey(state, decide(state, NOW))
    new = next(r for r in state.replicas if r.id != old.id)
    state, outcome = failing(state, new, NOW + 2, final=True)
    assert [o.replica for o in outcome.over] == ["m-100"]
    assert {r.id: (r.goal, r.superseded_by) for r in state.replicas}["m-100"] == (Goal.RUN, None)
    (said,) = [d for d in outcome.decisions if d.kind is DecisionKind.ROLLBACK]
    assert "what was to replace it does not come up, and m-100 stays" in said.reason
    assert [r.id for r in settled(evolve(state, orders={}), NOW + 100).replicas] == ["m-100"]


def test_a_restart_on_a_drained_node_waits_for_another_place() -> None:
    state = drained(running(1, 1, model()), "n0")
    outcome = decide(ordered(state, state.replicas[0]), NOW + 100)
    assert (outcome.replicas, outcome.over) == (state.replicas, ())


def test_what_is_stopped_is_replaced_while_the_model_wants_it() -> None:
    state = running(2, 1, model())
    old = state.replicas[0]
    outcome = decide(ordered(state, old, OrderKind.STOP), NOW + 100)
    assert [(r.goal, r.reason.partition(";")[0]) for r in outcome.replicas] == [
        (Goal.DRAIN, "stopped by anna: it stutters"), (Goal.RUN, "profile p on n1: gpu-0 (h100-80g)"),
    ]  # fmt: skip
    assert [o.replica for o in outcome.over] == [old.id]


def test_an_order_for_an_earlier_start_is_over() -> None:
    mine = row(generation=2)
    here = node(reports=(report(mine, ShardState.READY),))
    state = ordered(cluster((here,), (model(),), (mine,)), row(generation=1))
    outcome = decide(state, NOW)
    assert (outcome.replicas, [o.generation for o in outcome.over]) == ((mine,), [1])


def test_what_cannot_be_told_is_restarted_once_it_can() -> None:
    mine = row()
    silent = node("n1", state=NodeState.UNREACHABLE, reports=(report(mine, ShardState.READY),))
    outcome = decide(ordered(cluster((silent,), (model(),), (mine,)), mine), NOW)
    assert (outcome.replicas, outcome.over) == ((mine,), ())


def test_fewer_replicas_are_first_fewer_on_the_drained_node() -> None:
    of = evolve(model("m", 2), placement=PlacementRules(per_node=1))
    state = drained(running(2, 1, of), "n0")
    outcome = decide(evolve(state, models=(evolve(of, replicas=1),)), NOW)
    assert [r.shards[0].node for r in outcome.replicas if r.goal is not Goal.RUN] == ["n0"]


def test_on_its_own_result_a_pass_changes_nothing_more() -> None:
    state = ordered(drained(running(3, 2, model("m", 3)), "n0"), row(101))
    first = decide(state, NOW)
    assert decide(after(state, first), NOW).replicas == first.replicas
