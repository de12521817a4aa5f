"""What a plan says, that it says what the live loop then does, and that nothing comes of it."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.errors import OperatorError
from llmgw.hardware.inventory import DeviceProcess
from llmgw.scheduler.decide import decide
from llmgw.scheduler.explain import DecisionKind
from llmgw.scheduler.plan import Move, Plan, plan
from llmgw.scheduler.simulate import ROUNDS, play
from llmgw.scheduler.state import ClusterState, NodeState, ShardState
from llmgw.scheduler.what_if import with_model, with_settings
from llmgw.settings.catalog import Model, PlacementRules, Scaling
from llmgw.settings.document import Liveness, NodeRules, Settings
from tests.scheduler.clusters import (
    NOW,
    cluster,
    device,
    devices,
    fabric,
    model,
    models,
    node,
    profile,
    report,
    row,
    states,
    wide,
)
from tests.scheduler.test_decide import obey


def moves(made: Plan) -> list[list[tuple[DecisionKind, str]]]:
    return [[(m.kind, m.replica) for m in step.moves] for step in made.steps]


def running(*nodes_: object, of: Model | None = None) -> ClusterState:
    """One ready replica on the first device of n1."""
    of = of or model()
    replica = row(of=of)
    here = node("n1", (device(0), device(1)), reports=(report(replica, ShardState.READY),))
    return cluster((here, *nodes_), (of,), (replica,))  # type: ignore[arg-type]


def test_a_number_that_is_asked_about_holds_whatever_the_load_says() -> None:
    of = evolve(model("m", 1), scaling=Scaling(1, 8, 10))
    state = cluster((node("n1", tuple(device(n) for n in range(4))),), (of,))
    assert with_model(state, "m", 3, None).models == (model("m", 3),)
    assert with_model(state, "m", None, None).models == (of,)


def test_more_replicas_where_and_why_not_elsewhere() -> None:
    state = running(
        node("n2", (device(0, "l40s-45g"),)),
        node("n3", (device(0, fault="has 2 uncorrected ECC errors"),)),
        node("n4", tuple(device(n) for n in range(8))),
    )
    made = plan(state, with_model(state, "m", 2, None), NOW)
    ((move,),) = (step.moves for step in made.steps)
    assert (move.kind, move.profile, move.device_class, move.anyway) == (DecisionKind.PLACE, "p", "h100-80g", False)
    assert [(p.node, p.devices) for p in move.places] == [("n1", ("gpu-1",))]
    assert made.short == ()
    (elsewhere,) = made.elsewhere
    assert {c.node: (c.refusals[0].filter, c.refusals[0].reason) for c in elsewhere.candidates} == {
        "n2": ("device-class", "class h100-80g wanted, node has 1 x l40s-45g"),
        "n3": ("devices", "1 of 1 devices short: gpu-0 has 2 uncorrected ECC errors"),
        "n4": ("preference", "could take it as well; pack takes n1 first"),
    }
    (count,) = made.models
    assert (count.change, count.wanted, count.placed, count.classes) == (
        "changed", (1, 2), (1, 2), (("h100-80g", 1, 2),),
    )  # fmt: skip
    assert [(c.device_class, c.total, c.before, c.after, c.free) for c in made.classes] == [
        ("h100-80g", 11, 1, 2, 8),
        ("l40s-45g", 1, 0, 0, 1),
    ]


def test_what_stays_without_a_place_names_every_candidate() -> None:
    state = running(node("n2", state=NodeState.LOST))
    made = plan(state, with_model(state, "m", 4, None), NOW)
    (short,) = made.short
    assert (short.unplaced.model, short.unplaced.running, short.anyway) == ("m", 2, False)
    assert [c.node for c in short.unplaced.candidates] == ["n1", "n2"]
    same = plan(state, state, NOW)
    assert (same.steps, same.short, same.complete) == ((), (), True)


def test_a_profile_alone_and_what_the_catalog_does_not_have() -> None:
    both = model("m", 1, profile("one"), profile("two", gpus=2))
    state = running(node("n2"), of=both)
    made = plan(state, with_model(state, "m", None, "two"), NOW)
    placed = next(m for s in made.steps for m in s.moves if m.kind is DecisionKind.PLACE)
    assert (placed.profile, placed.places[0].node) == ("two", "n2")
    with pytest.raises(OperatorError, match=r"model n: is not in the catalog. known here: m"):
        with_model(state, "n", 1, None)
    with pytest.raises(OperatorError, match=r"model m: has no profile tow. did you mean two\?"):
        with_model(state, "m", 1, "tow")


def test_devices_that_come_free_first_are_a_step_of_their_own() -> None:
    old = running()
    held = tuple(evolve(device(n), used_mib=70_000, processes=(DeviceProcess(42, "vllm", 70_000),)) for n in (0,))
    state = evolve(old, nodes=(node("n1", held, reports=old.nodes[0].reports),))
    made = plan(state, evolve(state, models=(model("m", 1, profile(context_length=4096)),)), NOW)
    assert moves(made) == [[(DecisionKind.DRAIN, "m-1")], [(DecisionKind.PLACE, "m-100")]]
    assert (made.steps[1].ended, made.steps[1].ready) == (("m-1",), ())
    assert (made.short, made.complete) == ((), True)


def test_a_rolling_update_goes_one_by_one() -> None:
    rows = (row(1, devices=(0,)), row(2, devices=(1,)))
    here = node("n1", tuple(device(n) for n in range(3)), reports=tuple(report(r, ShardState.READY) for r in rows))
    state = cluster((here,), (model(replicas=2),), rows)
    made = plan(state, evolve(state, models=(model("m", 2, profile(context_length=4096)),)), NOW)
    assert moves(made) == [
        [(DecisionKind.PLACE, "m-100")],
        [(DecisionKind.DRAIN, "m-1")],
        [(DecisionKind.PLACE, "m-101")],
        [(DecisionKind.DRAIN, "m-2")],
    ]
    assert [s.ready for s in made.steps] == [(), ("m-100",), (), ("m-101",)]
    assert made.models[0].placed == (2, 2)


def test_a_model_of_higher_priority_shows_whom_it_costs_and_when() -> None:
    low = evolve(model("low"), min_run_s=300)
    replica = row(of=low, placed=NOW - 100)
    state = cluster((node("n1", (device(0),), reports=(report(replica, ShardState.READY),)),), (low,), (replica,))
    made = plan(state, evolve(state, models=(low, evolve(model("high"), priority=5))), NOW)
    assert [(s.at_s, [m.kind for m in s.moves]) for s in made.steps] == [
        (200.0, [DecisionKind.PREEMPT]),
        (200.0, [DecisionKind.PLACE]),
    ]
    assert [(s.unplaced.model, s.anyway) for s in made.short] == [("low", False)]
    assert {c.model: (c.change, c.placed) for c in made.models} == {"low": ("same", (1, 0)), "high": ("added", (0, 1))}


def test_what_happens_anyway_is_told_apart() -> None:
    state = cluster((node("n1", tuple(device(n) for n in range(4))),), (model("a"), model("b")))
    made = plan(state, with_model(state, "b", 2, None), NOW)
    assert [(m.model, m.anyway) for m in made.steps[0].moves] == [("a", True), ("b", True), ("b", False)]
    without = plan(state, evolve(state, models=(model("b"),)), NOW)
    assert [(m.model, m.anyway) for m in without.steps[0].moves] == [("b", False)], "it goes to another device now"
    assert [(c.model, c.change) for c in without.models] == [("a", "removed"), ("b", "same")]


def test_a_whole_settings_document_with_labels_taints_quotas_and_liveness() -> None:
    state = running(node("n2"), node("n3", state=NodeState.LOST))
    state = evolve(state, nodes=tuple(evolve(n, heard=NOW - 90 if n.id == "n3" else NOW) for n in state.nodes))
    grown = evolve(model("m", 3), group="team", placement=PlacementRules(nodes={"zone": "a"}, tolerate=("slow",)))
    document = Settings(
        models=(grown, Model("static", endpoints=("http://h:1",))),
        liveness=Liveness(lost_s=600),
        nodes={"n2": NodeRules({"zone": "a"}, ("slow",))},
        quotas={"team": {"h100-80g": 2}},
    )
    then = with_settings(state, document, NOW)
    assert [m.name for m in then.models] == ["m"]
    assert [n.state for n in then.nodes] == [NodeState.CONNECTED, NodeState.CONNECTED, NodeState.UNREACHABLE]
    made = plan(state, then, NOW)
    (short,) = made.short
    assert {c.node: c.refusals[0].filter for c in short.unplaced.candidates} == {
        "n1": "labels", "n2": "quota", "n3": "node-state",
    }  # fmt: skip
    placed = [m for s in made.steps for m in s.moves if m.kind is DecisionKind.PLACE]
    assert [p.node for m in placed for p in m.places] == ["n2"]


def test_several_nodes_and_an_earlier_profile() -> None:
    of = model("m", 1, profile("huge", gpus=16), wide())
    nodes = (node("n1", fabrics=(fabric(),)), node("n2", fabrics=(fabric(),)), node("n3", fabrics=(fabric("rack-2"),)))
    empty = cluster(nodes, ())
    made = plan(empty, evolve(empty, models=(of,)), NOW)
    (move,) = made.steps[0].moves
    assert ([p.node for p in move.places], move.fabric) == (["n1", "n2"], "rack-1")
    (elsewhere,) = made.elsewhere
    said = {(c.profile, c.node): c.refusals[0].filter for c in elsewhere.candidates}
    assert said == {
        ("huge", "n1"): "devices", ("huge", "n2"): "devices", ("huge", "n3"): "devices", ("wide", "n3"): "fabric",
    }  # fmt: skip


def test_under_the_brake_a_plan_says_so() -> None:
    nodes = tuple(evolve(node(f"n{n}", state=NodeState.LOST), heard=NOW - 100) for n in range(4))
    made = plan(cluster(nodes, (model(),)), cluster(nodes, (model(replicas=2),)), NOW)
    assert made.brake is not None
    assert made.steps == ()


def test_a_plan_has_an_end() -> None:
    rows = tuple(row(n + 1, devices=(n,)) for n in range(40))
    here = node(devices=tuple(device(n) for n in range(41)), reports=tuple(report(r, ShardState.READY) for r in rows))
    state = cluster((here,), (model(replicas=40),), rows)
    played = play(evolve(state, models=(model("m", 40, profile(context_length=1)),)), NOW)
    assert (len(played.rounds), played.complete) == (ROUNDS, False)


# What holds for every state there can be.


@given(states(), models())
@settings(max_examples=150, deadline=None)
def test_nothing_comes_of_a_plan_and_its_first_pass_is_the_live_one(state: ClusterState, other: tuple) -> None:
    then = evolve(state, models=other)
    before = repr((state, then))
    made = plan(state, then, NOW)
    assert repr((state, then)) == before
    assert made == plan(state, then, NOW)
    live = [(d.kind, d.model, d.replica) for d in decide(then, NOW).decisions if d.kind is DecisionKind.PLACE]
    first = played_first(made)
    assert [(m.kind, m.model, m.replica) for m in first] == live
    for step in made.steps:
        assert step.moves
    for short in made.short:
        # As many as are wanted, where only an edit has no place.
        assert short.unplaced.running <= short.unplaced.wanted
    for told in made.elsewhere:
        assert all(c.refusals for c in told.candidates)
        of = then.model(told.model)
        assert of is not None
        # Every other node has its reason for this profile.
        said = {n for c in told.candidates if c.profile == told.profile for n in c.node.split("+")}
        assert said | set(told.nodes) == {n.id for n in state.nodes}


def played_first(made: Plan) -> list[Move]:
    return [m for s in made.steps if s.number == 1 for m in s.moves if m.kind is DecisionKind.PLACE]


def settled(state: ClusterState, now: float) -> ClusterState:
    """Where the live loop ends, with agents that do what they are told."""
    for _ in range(60):
        state = obey(state, decide(state, now))
        now += 2.0
    return state


def where(state: ClusterState) -> list[tuple[str, str, list[tuple[str, tuple[int, ...]]]]]:
    return sorted((r.model, r.profile.name, [(s.node, s.devices) for s in r.shards]) for r in state.replicas)


@given(st.lists(devices(), min_size=1, max_size=3), models(), models())
@settings(max_examples=60, deadline=None)
def test_the_live_loop_ends_where_the_plan_said(hardware: list, first: tuple, second: tuple) -> None:
    nodes = tuple(node(f"n{n}", some, fabrics=(fabric(),)) for n, some in enumerate(hardware))
    live = settled(cluster(nodes, first), NOW)
    then = evolve(live, models=second)
    played = play(then, NOW + 200)
    assert played.complete
    assert where(played.after) == where(settled(then, NOW + 200))
