from __future__ import annotations

from attrs import evolve
from hypothesis import given, settings

from llmgw.scheduler.decide import decide
from llmgw.scheduler.state import ClusterState, Goal, NodeState, ShardState
from llmgw.scheduler.summary import model_views, replica_view, replica_views
from tests.scheduler.clusters import NOW, cluster, model, node, report, row, states


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
