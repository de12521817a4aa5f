from __future__ import annotations

import re
from collections.abc import Iterator

from attrs import evolve
from hypothesis import given, settings

from llmgw.scheduler.decide import decide
from llmgw.scheduler.scale import Demand, Scale, scaled
from llmgw.scheduler.state import ClusterState, Goal, NodeState, Replica, ShardState
from llmgw.scheduler.summary import model_views, replica_view, replica_views
from llmgw.settings.catalog import Scaling
from tests.scheduler.clusters import NOW, cluster, device, model, node, profile, report, row, states


def test_each_state_says_why_and_what_next() -> None:
    replica = row()
    bare = cluster((node(),), (model(),), (replica,))
    assert replica_view(replica, bare, NOW).next == "its agent starts it"
    waiting = evolve(replica, not_before=NOW + 30)
    assert replica_view(waiting, bare, NOW).next == "started again in 30 s"
    lost = cluster((node(state=NodeState.LOST, reports=(report(replica, ShardState.READY),)),), (model(),), (replica,))
    view = replica_view(replica, lost, NOW)
    assert (view.state, view.reason) == ("lost", "node n1 is lost; its engine was ready")
    draining = evolve(replica, goal=Goal.DRAIN, since=NOW - 20)
    assert replica_view(draining, bare, NOW).next == "stopped when nothing is in flight, in 40 s at most"


def test_models() -> None:
    replica = row()
    state = cluster((node(reports=(report(replica, ShardState.READY),)),), (model(replicas=2),), (replica,))
    outcome = decide(state, NOW)
    (view,) = model_views(evolve(state, replicas=outcome.replicas), outcome.unplaced, NOW)
    assert (view.state, view.ready, view.wanted) == ("degraded", 1, 2)
    (off,) = model_views(cluster((), (model(replicas=0),)), (), NOW)
    assert (off.state, off.next) == ("off", "set replicas in the settings")


def test_a_model_at_zero_by_its_load_is_not_switched_off() -> None:
    zero = evolve(model(), scaling=Scaling(min=0, max=2))
    state = cluster((node(),), (zero,), scales={"m": Scale(0, 0, NOW, 0, NOW - 90, "no request for 900 s")})
    outcome = decide(evolve(state, demands={"m": Demand(asked=NOW - 900)}), NOW)
    asleep = evolve(state, replicas=outcome.replicas, scales=outcome.scales, models=scaled((zero,), outcome.scales))
    (view,) = model_views(asleep, outcome.unplaced, NOW)
    assert (view.state, view.wanted, view.since) == ("idle", 0, NOW - 90)
    assert view.reason == "scaled to zero: no request for 900 s"
    assert view.next == "the first request starts a replica, and waits for it"
    assert view.public == "starts with the first request"
    assert view.scale == outcome.scales["m"]
    (off,) = model_views(cluster((), (model(replicas=0),), scales=asleep.scales), (), NOW)
    assert (off.state, off.scale) == ("off", None), "its number follows the settings by now"


@given(states())
@settings(max_examples=150, deadline=None)
def test_whatever_the_state_everything_has_a_reason(state: ClusterState) -> None:
    outcome = decide(state, NOW)
    state = evolve(state, replicas=outcome.replicas)
    for view in replica_views(state, NOW):
        assert view.state
        assert view.reason
    for shown in model_views(state, outcome.unplaced, NOW):
        assert shown.state
        assert shown.reason
        assert shown.ready <= shown.wanted or shown.state in ("ready", "off")


def public(state: ClusterState) -> str:
    outcome = decide(state, NOW)
    (view,) = model_views(evolve(state, replicas=outcome.replicas), outcome.unplaced, NOW)
    return view.public


def test_what_a_models_users_are_told() -> None:
    replica = row()

    def with_(state: ShardState, *, of: Replica = replica, **more: object) -> ClusterState:
        return cluster((node(reports=(evolve(report(of, state), **more),)),), (model(),), (of,))

    assert public(with_(ShardState.READY)) == "is ready"
    assert public(with_(ShardState.STARTING)) == "is starting"
    assert public(with_(ShardState.LOADING, progress=0.479)) == "is loading (45 %)"
    assert public(with_(ShardState.LOADING, progress=7.0)) == "is loading (100 %)"
    assert public(with_(ShardState.LOADING)) == "is loading"
    assert public(with_(ShardState.FAILED)) == "failed and is started again"
    assert public(cluster((node(),), (model(),))) == "is starting"
    assert public(cluster((), (model(),))) == "has no place at present"
    assert public(cluster((), (model(replicas=0),))) == "is switched off"
    assert public(evolve(with_(ShardState.READY), models=(model(replicas=9),))) == "is ready with 1 of 9 replicas"
    lost = evolve(with_(ShardState.READY), nodes=(node(state=NodeState.LOST),))
    assert public(lost) == "has no place at present"
    edited = evolve(with_(ShardState.READY), models=(model("m", 1, profile(context_length=4096)),))
    assert public(evolve(edited, nodes=(node(devices=(device(0),), reports=edited.nodes[0].reports),))) == (
        "is being updated"
    )


_WORDS = re.compile(r"(is|has|it|waits|failed|and|with|of|no|to|be|place|placed|replicas|at|present|started|again|ready|"
                    r"starting|loading|stopping|switched|off|being|updated|not|reachable|\d+|%)*")  # fmt: skip


@given(states())
@settings(max_examples=150, deadline=None)
def test_users_are_told_nothing_but_the_state_of_their_own_model(state: ClusterState) -> None:
    outcome = decide(state, NOW)
    for seen in (state, evolve(state, replicas=outcome.replicas)):
        for view in model_views(seen, outcome.unplaced, NOW):
            assert _WORDS.fullmatch(re.sub(r"[ ()]", "", view.public)), view.public
            assert view.public


def test_many_rows_are_no_burden() -> None:
    models = tuple(model(f"m{n}", 20) for n in range(100))
    nodes = tuple(node(f"n{n}", tuple(device(d) for d in range(8))) for n in range(250))
    state = cluster(nodes, models)
    rows = decide(state, NOW).replicas
    assert len(rows) == 2000
    asked = 0

    class Counting(tuple[Replica, ...]):
        def __iter__(self) -> Iterator[Replica]:
            nonlocal asked
            for one in super().__iter__():
                asked += 1
                yield one

    model_views(evolve(state, replicas=Counting(rows)), (), NOW)
    assert asked == 2000, "each row is looked at once, not once a model"
