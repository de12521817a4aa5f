"""When many nodes fall silent together: what the brake holds back, what takes it off, and what holds throughout."""

from __future__ import annotations

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.scheduler.brake import HELD, brake
from llmgw.scheduler.decide import decide
from llmgw.scheduler.explain import DecisionKind
from llmgw.scheduler.state import ClusterState, Goal, Node, NodeState, Replica, ShardState
from llmgw.scheduler.summary import model_views, replica_views
from llmgw.settings.document import Liveness
from tests.scheduler.clusters import NOW, cluster, model, node, report, row, states

LIVENESS = Liveness()


def at(name: str, heard: float, state: NodeState = NodeState.LOST, **more: object) -> Node:
    return evolve(node(name, state=state), heard=NOW - heard, **more)


def test_many_together_and_not_few_or_one_after_the_other() -> None:
    here = [at(f"c{n}", 1, NodeState.CONNECTED) for n in range(5)]
    found = brake([*here, at("a", 100), at("b", 90), at("c", 80, NodeState.UNREACHABLE)], LIVENESS, 0.0)
    assert found is not None
    assert (found.nodes, found.of, found.since) == (("a", "b", "c"), 8, NOW - 80)
    assert brake([*here, at("a", 100), at("b", 90)], LIVENESS, 0.0) is None, "two are fewer than brake_nodes"
    assert brake([*here, at("a", 300), at("b", 190), at("c", 80)], LIVENESS, 0.0) is None, "not at one time"
    many = [at(f"d{n}", 1, NodeState.CONNECTED) for n in range(6)]
    assert brake([*many, at("a", 90), at("b", 90), at("c", 90)], LIVENESS, 0.0) is None, "a third is not more than that"


def test_those_who_are_gone_for_good_do_not_count_and_later_ones_count_anew() -> None:
    nodes = [at("a", 100), at("b", 90), at("c", 80), at("d", 1, NodeState.CONNECTED)]
    assert brake(nodes, LIVENESS, NOW - 80) is None
    assert brake([*nodes, at("e", 70), at("f", 60)], LIVENESS, NOW - 80) is None
    again = brake([*nodes, at("e", 70), at("f", 60), at("g", 50)], LIVENESS, NOW - 80)
    assert again is not None
    assert again.nodes == ("e", "f", "g")


def test_those_who_were_silent_before_are_no_part_of_what_the_others_are_a_share_of() -> None:
    """Ten nodes, five of them switched off one by one long ago: three of five that fall silent are many."""
    off = [at(f"o{n}", 10_000 + 1000 * n) for n in range(5)]
    here = [at(f"c{n}", 1, NodeState.CONNECTED) for n in range(2)]
    found = brake([*off, *here, at("a", 90), at("b", 90), at("c", 80)], LIVENESS, 0.0)
    assert found is not None
    assert (found.nodes, found.of) == (("a", "b", "c"), 5)
    more = [at(f"d{n}", 1, NodeState.CONNECTED) for n in range(4)]
    assert brake([*off, *here, *more, at("a", 90), at("b", 90), at("c", 80)], LIVENESS, 0.0) is None
    then = [at(name, 90) for name in "xyz"]
    later = brake([*off, *here, *more[:3], *(at(name, 190) for name in "abc"), *then], LIVENESS, 0.0)
    assert later is not None, "three of eleven were few, three of the eight that were left are not"
    assert (later.nodes, later.of) == (("x", "y", "z"), 8)


def test_of_several_times_the_worst_is_told_and_not_every_name() -> None:
    first = [at(f"a{n}", 500) for n in range(6)]
    later = [at(name, 90) for name in "xyz"]
    found = brake([*first, *later, at("c", 1, NodeState.CONNECTED)], LIVENESS, 0.0)
    assert found is not None
    assert found.nodes == tuple(f"a{n}" for n in range(6))
    assert "6 of 10 nodes fell silent together (a0, a1, a2, a3, a4 and 1 more), so" in found.reason
    five = brake(first[:5], LIVENESS, 0.0)
    assert five is not None
    assert "(a0, a1, a2, a3, a4), so" in five.reason
    third = brake([at("c", 1, NodeState.CONNECTED), *first[:3], *(at(f"e{n}", 300) for n in range(3))], LIVENESS, 0.0)
    assert third is not None
    assert third.nodes == ("a0", "a1", "a2"), "the first of equals"


def away(released: float = 0.0) -> tuple[ClusterState, tuple[Replica, ...]]:
    """A replica on each of three nodes that fell silent together, and a fourth that would have room for all."""
    of = model(replicas=3)
    rows = tuple(row(n, f"n{n}", of=of) for n in (1, 2, 3))
    lost = tuple(at(f"n{r.id[-1]}", 90, reports=(report(r, ShardState.READY),)) for r in rows)
    spare = evolve(
        node("n4", tuple(evolve(d, number=n) for n, d in enumerate(node().inventory.devices * 2))), heard=NOW
    )
    return cluster((*lost, spare), (of,), rows, brake_released=released), rows


def test_nothing_is_replaced_until_the_nodes_are_back() -> None:
    state, rows = away()
    outcome = decide(state, NOW)
    assert outcome.brake is not None
    assert (outcome.replicas, outcome.commands, outcome.decisions, outcome.unplaced) == (rows, (), (), ())
    back = evolve(state, nodes=tuple(evolve(n, state=NodeState.CONNECTED, heard=NOW) for n in state.nodes))
    outcome = decide(back, NOW)
    assert (outcome.brake, outcome.replicas, outcome.commands) == (None, rows, ())


def test_more_replicas_are_still_placed_where_somebody_answers() -> None:
    state, _ = away()
    outcome = decide(evolve(state, models=(model(replicas=4),)), NOW)
    assert outcome.brake is not None
    assert [(d.kind, d.node) for d in outcome.decisions] == [(DecisionKind.PLACE, "n4")]


def test_once_released_everything_is_replaced() -> None:
    state, rows = away(released=NOW - 90)
    outcome = decide(state, NOW)
    assert outcome.brake is None
    assert [d.kind for d in outcome.decisions].count(DecisionKind.EVICT) == 3
    old = {r.id: r for r in outcome.replicas if r.id in {x.id for x in rows}}
    assert all(r.superseded_by is not None for r in old.values())


def test_who_looks_is_told() -> None:
    state, _ = away()
    assert {v.next for v in replica_views(state, NOW)} == {HELD}
    (view,) = model_views(state, (), NOW)
    assert (view.state, view.next, view.public) == ("lost", HELD, "is not reachable at present")
    unreachable = evolve(
        state, nodes=tuple(evolve(n, state=NodeState.UNREACHABLE) if n.id != "n4" else n for n in state.nodes)
    )
    assert {v.next for v in replica_views(unreachable, NOW)} == {HELD}


@given(states(), st.data())
@settings(max_examples=200, deadline=None)
def test_under_the_brake_no_row_of_a_silent_node_is_superseded(state: ClusterState, data: st.DataObject) -> None:
    heard = {n.id: NOW if n.state is NodeState.CONNECTED else NOW - data.draw(st.integers(20, 80)) for n in state.nodes}
    state = evolve(
        state,
        nodes=tuple(evolve(n, heard=heard[n.id]) for n in state.nodes),
        liveness=Liveness(brake_nodes=1, brake_share=0.0),
    )
    silent = {n.id for n in state.nodes if n.state is not NodeState.CONNECTED}
    outcome = decide(state, NOW)
    assert (outcome.brake is not None) == bool(silent)
    if outcome.brake is None:
        return
    after = {r.id: r for r in outcome.replicas}
    for before in state.replicas:
        places = {s.node for s in before.shards}
        known = places <= {n.id for n in state.nodes}
        if known and places & silent and before.goal is Goal.RUN:
            assert before.id in after, "it is kept"
            assert after[before.id].superseded_by in (before.superseded_by, None)
    for decision in outcome.decisions:
        assert decision.kind is not DecisionKind.EVICT or not any(
            f"node {n} is lost" in decision.reason for n in silent
        )
