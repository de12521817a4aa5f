from __future__ import annotations

from attrs import evolve

from llmgw.link.messages import PROTOCOL, Register
from llmgw.router.wire import Load
from llmgw.scheduler.scale import EngineLoad
from llmgw.scheduler.state import NodeState, ShardState
from llmgw.server.cluster import Cluster
from llmgw.settings.document import Settings
from llmgw.store.api import NodeRow
from tests.scheduler.clusters import NOW, model, node, report, row


def cluster(last_heard: float, started: float) -> tuple[Cluster, list[int]]:
    here = node(reports=(report(row(), ShardState.READY),))
    stored = NodeRow(here.id, here.address, "1", here.inventory, here.engines, here.reports, last_heard)
    woken: list[int] = []
    made = Cluster(
        cluster="c1", epoch=1, settings=Settings(models=(model(),)), nodes=(stored,), replicas=(row(),), next_serial=2,
        unplaced=(), started=started, woken=lambda: woken.append(1),
    )  # fmt: skip
    return made, woken


def state_of(it: Cluster, now: float) -> NodeState:
    found = it.state(now).node("n1")
    assert found is not None
    return found.state


def test_silence_counts_from_our_own_start_at_the_earliest() -> None:
    it, _ = cluster(NOW - 100_000, NOW)
    assert state_of(it, NOW + 1) is NodeState.CONNECTED, "while we were down nobody could be heard"
    assert state_of(it, NOW + 16) is NodeState.UNREACHABLE
    assert state_of(it, NOW + 61) is NodeState.LOST
    it.listens(NOW + 50)
    assert state_of(it, NOW + 61) is NodeState.CONNECTED, "nor while we were not listening yet"
    it.heard("n1", NOW + 70)
    assert state_of(it, NOW + 86) is NodeState.UNREACHABLE


def test_states_are_announced_once_each() -> None:
    it, _ = cluster(NOW, NOW)
    assert [c.before for c in it.changes(it.state(NOW))] == [None]
    assert it.changes(it.state(NOW + 1)) == ()
    (change,) = it.changes(it.state(NOW + 20))
    assert (change.before, change.node.state) == (NodeState.CONNECTED, NodeState.UNREACHABLE)


def test_reports_replace_each_other_by_start_and_wake_the_loop() -> None:
    it, woken = cluster(NOW, NOW)
    newer = evolve(report(row(), ShardState.FAILED), reason="died")
    it.report("n1", newer, NOW)
    it.report("n1", evolve(newer, generation=2, state=ShardState.STARTING), NOW)
    kept = it.row("n1")
    assert kept is not None
    assert {(r.generation, r.state) for r in kept.reports} == {(1, ShardState.FAILED), (2, ShardState.STARTING)}
    it.forgotten("n1", "m-1.0", 1)
    kept = it.row("n1")
    assert kept is not None
    assert [r.generation for r in kept.reports] == [2]
    assert len(woken) == 3


def test_what_the_router_does_not_name_has_nothing_in_flight_once_it_spoke() -> None:
    it, _ = cluster(NOW, NOW)
    assert it.state(NOW).in_flight == {}, "unknown"
    it.loaded(Load({"other.0": 3}), NOW)
    assert it.state(NOW).in_flight == {"m-1.0": 0}
    it.loaded(Load({"m-1.0": 2}), NOW)
    assert it.state(NOW).in_flight == {"m-1.0": 2}


def test_the_router_is_told_which_engines_are_full_when_that_changes() -> None:
    it, _ = cluster(NOW, NOW)
    told: list[tuple[str, ...]] = []
    it.full = told.append
    for waiting in (0, 1, 2, 0, 1):
        it.worked("n1", (EngineLoad("m-1.0", 1, 1, waiting),))
    it.disconnected("n1", "cut")
    assert told == [("m-1.0",), (), ("m-1.0",), ()]


def test_how_long_a_shard_is_in_its_state_is_counted_by_our_clock() -> None:
    it, _ = cluster(NOW, NOW)

    def since() -> float:
        kept = it.row("n1")
        assert kept is not None
        return kept.reports[0].since

    for off in (-86_400.0, 86_400.0):
        loads = evolve(report(row(), ShardState.LOADING), since=NOW + off, reason="file 0 of 4")
        it.report("n1", loads, NOW + 5)
        it.report("n1", evolve(loads, reason="file 1 of 4"), NOW + 7)
        assert since() == NOW + 5
        it.report("n1", evolve(loads, state=ShardState.READY), NOW + 9)
        assert since() == NOW + 9
    here = node(reports=(evolve(report(row(), ShardState.READY), since=NOW - 1e6),))
    again = Register(PROTOCOL, "n1", "1", "boot", here.address, here.inventory, here.engines, here.reports, 1)
    it.register(again, NOW + 50)
    assert since() == NOW + 9, "it said the same before it connected again"
    other = evolve(again, shards=(evolve(here.reports[0], generation=2),))
    it.register(other, NOW + 60)
    assert since() == NOW + 60


def test_why_a_link_ended_is_said() -> None:
    it, _ = cluster(NOW, NOW)
    it.disconnected("n1", "the connection was cut")
    found = it.state(NOW + 20).node("n1")
    assert found is not None
    assert found.reason == "no heartbeat for 20 s; the link ended: the connection was cut"
