from __future__ import annotations

import itertools
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.hardware.health import stranger
from llmgw.hardware.inventory import Device, MigInstance
from llmgw.scheduler.carry_out import DRAIN_SETTLE_S
from llmgw.scheduler.decide import decide
from llmgw.scheduler.explain import DecisionKind, DrainCommand, Outcome, StartCommand, StopCommand
from llmgw.scheduler.follow import BACKOFF_FIRST_S, BACKOFF_LONGEST_S, CRASH_LOOP, FINAL_S
from llmgw.scheduler.state import (
    Assignment,
    ClusterState,
    Exit,
    Goal,
    Node,
    NodeState,
    Replica,
    ShardReport,
    ShardState,
    WaitsFor,
)
from llmgw.settings.daemon import Address
from tests.scheduler.clusters import (
    CLUSTER,
    NOW,
    cluster,
    device,
    fabric,
    model,
    node,
    profile,
    report,
    row,
    states,
    wide,
)


def after(state: ClusterState, outcome: Outcome, **more: object) -> ClusterState:
    return evolve(state, replicas=outcome.replicas, next_serial=outcome.next_serial, **more)


def kinds(outcome: Outcome) -> list[DecisionKind]:
    return [d.kind for d in outcome.decisions]


# What a pass does.


def test_places_and_starts() -> None:
    outcome = decide(cluster((node(),), (model(replicas=2),)), NOW)
    assert [r.id for r in outcome.replicas] == ["m-100", "m-101"]
    assert outcome.next_serial == 102
    assert {s.devices for r in outcome.replicas for s in r.shards} == {(0,), (1,)}
    assert [type(c) for c in outcome.commands] == [StartCommand, StartCommand]
    assert kinds(outcome) == [DecisionKind.PLACE, DecisionKind.PLACE]
    assert outcome.decisions[0].reason == "profile p on n1: gpu-0 (h100-80g)"


def test_a_start_is_repeated_until_it_is_reported() -> None:
    replica = row()
    state = cluster((node(),), (model(),), (replica,))
    assert decide(state, NOW).commands == (StartCommand(replica, replica.shards[0]),)
    told = evolve(state, nodes=(node(reports=(report(replica, ShardState.STARTING),)),))
    assert decide(told, NOW).commands == ()


def test_unplaced_names_every_candidate_and_what_would_help() -> None:
    nodes = (
        node("n1", (device(0, fault="has 2 uncorrected ECC errors"), device(1, used_mib=11_000))),
        node("n2", (device(0, "l40s-45g"), device(1, "l40s-45g"))),
        node("n3", state=NodeState.UNREACHABLE),
        node("n4", engines=()),
    )
    outcome = decide(cluster(nodes, (model("m", 1, profile(gpus=2)),)), NOW)
    (unplaced,) = outcome.unplaced
    assert (unplaced.wanted, unplaced.running) == (1, 0)
    said = {c.node: [(r.filter, r.reason, r.remedy) for r in c.refusals] for c in unplaced.candidates}
    assert said["n1"] == [
        (
            "devices",
            "2 of 2 devices short: gpu-0 has 2 uncorrected ECC errors, gpu-1 holds 11 GiB by pid 4711 python",
            "stop the process that holds the memory",
        )
    ]
    assert said["n2"][0][1] == "class h100-80g wanted, node has 2 x l40s-45g"
    assert said["n3"][0][1] == "n3 is unreachable: its agent is not heard"
    assert said["n4"][0][1] == "needs engine vllm, n4 has none"
    assert unplaced.reason == (
        "no node can take it: 4 candidates turned down (1 by device-class, 1 by devices, 1 by engine, 1 by node-state)"
    )


def test_since_when_there_is_no_place_is_kept_from_pass_to_pass() -> None:
    state = cluster((), (model(),))
    assert decide(state, NOW).unplaced[0].since == NOW
    later = decide(evolve(state, unplaced_since={"m": NOW - 70}), NOW)
    assert later.unplaced[0].since == NOW - 70


def test_no_node_at_all() -> None:
    (unplaced,) = decide(cluster((), (model(),)), NOW).unplaced
    assert unplaced.reason == "no node has registered; start llmgw agent on a node"


def test_devices_that_another_replica_has_are_named() -> None:
    replica = row(devices=(0, 1))
    state = cluster((node(reports=(report(replica, ShardState.READY),)),), (model(replicas=2),), (replica,))
    (unplaced,) = decide(state, NOW).unplaced
    assert unplaced.candidates[0].refusals[0].reason == "1 of 1 devices short: gpu-0 runs m-1.0, gpu-1 runs m-1.0"


def test_an_unreachable_node_moves_nothing() -> None:
    replica = row()
    away = node(state=NodeState.UNREACHABLE, reports=(report(replica, ShardState.READY),))
    outcome = decide(cluster((away, node("n2")), (model(),), (replica,)), NOW)
    assert (outcome.commands, outcome.decisions, outcome.unplaced) == ((), (), ())
    assert outcome.replicas == (replica,)


def test_a_lost_node_is_replaced_and_reaped_when_it_returns() -> None:
    old = row()
    lost = node(state=NodeState.LOST, reports=(report(old, ShardState.READY),))
    state = cluster((lost, node("n2")), (model(),), (old,))
    outcome = decide(state, NOW)
    assert kinds(outcome) == [DecisionKind.PLACE, DecisionKind.EVICT]
    new = next(r for r in outcome.replicas if r.id != old.id)
    assert next(r for r in outcome.replicas if r.id == old.id).superseded_by == new.id

    back = node(reports=(report(old, ShardState.READY),))
    loading = node("n2", reports=(report(new, ShardState.LOADING),))
    waiting = decide(after(state, outcome, nodes=(back, loading)), NOW)
    assert waiting.commands == (), "the old engine serves until the new one is ready"

    ready = node("n2", reports=(report(new, ShardState.READY),))
    outcome = decide(after(state, outcome, nodes=(back, ready)), NOW)
    assert next(r for r in outcome.replicas if r.id == old.id).goal is Goal.DRAIN
    later = decide(after(state, outcome, nodes=(back, ready), in_flight={"m-1.0": 0}), NOW + DRAIN_SETTLE_S)
    assert next(c for c in later.commands if isinstance(c, StopCommand)).shard == "m-1.0"


def test_what_a_renamed_node_brought_along_is_reaped_once_its_old_name_is_lost() -> None:
    old = row()
    said = (report(old, ShardState.READY),)
    renamed = node("n9", (device(0),), reports=said)
    both = cluster((node("n1", (device(0),), reports=said), renamed), (model(),), (old,))
    assert decide(both, NOW).commands == (), "its old name may only be away, and the router goes by that"
    state = evolve(both, nodes=(evolve(both.nodes[0], state=NodeState.LOST), renamed))
    outcome = decide(state, NOW)
    (stop,) = outcome.commands
    assert isinstance(stop, StopCommand)
    assert (stop.node, stop.shard, stop.generation) == ("n9", "m-1.0", 1)
    assert outcome.decisions[0].kind is DecisionKind.REAP
    assert (
        outcome.decisions[0].reason == "it runs under another name of its node: n1 is lost, and nothing is sent to it"
    )
    state = obey(state, outcome)
    outcome = decide(state, NOW + 1)
    assert [(d.kind, d.node) for d in outcome.decisions] == [(DecisionKind.PLACE, "n9"), (DecisionKind.EVICT, "n1")]
    state = obey(after(state, outcome), outcome)
    assert decide(state, NOW + 2).decisions == ()


def test_a_node_that_returns_before_a_replacement_keeps_its_engine() -> None:
    replica = row()
    lost = node(state=NodeState.LOST, reports=(report(replica, ShardState.READY),))
    state = cluster((lost,), (model(),), (replica,))
    outcome = decide(state, NOW)
    assert outcome.unplaced[0].reason.startswith("1 on a lost node; ")
    back = after(state, outcome, nodes=(node(reports=(report(replica, ShardState.READY),)),))
    outcome = decide(back, NOW)
    assert outcome.replicas == (replica,)
    assert (outcome.commands, outcome.decisions, outcome.unplaced) == ((), (), ())


def test_a_failure_is_started_again_with_backoff() -> None:
    replica = row()
    state = cluster((node(reports=(report(replica, ShardState.FAILED),)),), (model(),), (replica,))
    outcome = decide(state, NOW)
    (again,) = outcome.replicas
    assert (again.generation, again.failures, again.not_before) == (2, 1, NOW + BACKOFF_FIRST_S)
    assert outcome.commands == ()
    assert outcome.wake_at == again.not_before
    assert outcome.decisions[0].reason == "killed by signal 9; started again in 5 s (failure 1)"
    later = decide(after(state, outcome), NOW + BACKOFF_FIRST_S)
    assert later.commands == (StartCommand(again, again.shards[0]),)


def test_backoff_grows_to_its_limit_and_is_forgiven() -> None:
    tired = row(failures=CRASH_LOOP - 2)
    state = cluster((node(reports=(report(tired, ShardState.FAILED),)),), (model(),), (tired,))
    assert decide(state, NOW).replicas[0].not_before == NOW + BACKOFF_LONGEST_S
    looping = evolve(state, replicas=(evolve(tired, failures=CRASH_LOOP - 1),))
    assert decide(looping, NOW).replicas[0].not_before == NOW + FINAL_S
    assert decide(looping, NOW).decisions[0].reason.endswith("crash loop; started again in 1800 s (failure 8)")
    steady = evolve(state, nodes=(node(reports=(evolve(report(tired, ShardState.READY), since=NOW - 601),)),))
    assert decide(steady, NOW).replicas[0].failures == 0


def test_a_failure_on_a_device_that_broke_is_placed_anew() -> None:
    replica = row()
    broken = node(devices=(device(0, fault="GPU is lost"), device(1)), reports=(report(replica, ShardState.FAILED),))
    state = cluster((broken,), (model(),), (replica,))
    outcome = decide(state, NOW)
    assert kinds(outcome) == [DecisionKind.EVICT, DecisionKind.PLACE, DecisionKind.FORGET]
    assert [s.devices for r in outcome.replicas for s in r.shards] == [(1,)]


def test_scale_down_drains_then_stops_then_forgets() -> None:
    rows = (row(1, devices=(0,)), row(2, devices=(1,)))
    reports = tuple(report(r, ShardState.READY) for r in rows)
    state = cluster((node(reports=reports),), (model(replicas=1),), rows, in_flight={"m-1.0": 0, "m-2.0": 3})
    outcome = decide(state, NOW)
    drained = next(r for r in outcome.replicas if r.goal is Goal.DRAIN)
    assert drained.id == "m-2", "the newest of equals"
    assert outcome.commands == (DrainCommand("n1", "m-2.0", 1, "1 replica is wanted, this is one too many"),)

    busy = decide(after(state, outcome), NOW + 10)
    assert not [c for c in busy.commands if isinstance(c, StopCommand)]
    over = decide(after(state, busy), NOW + drained.profile.limits.drain_s)
    assert [c.shard for c in over.commands if isinstance(c, StopCommand)] == ["m-2.0"]
    assert over.decisions[0].reason.endswith("drained for 60 s")
    gone = node(reports=(reports[0], evolve(report(rows[1], ShardState.STOPPED), exit=Exit(0))))
    done = decide(after(state, over, nodes=(gone,)), NOW + 100)
    assert [r.id for r in done.replicas] == ["m-1"]
    assert [(d.kind, d.reason) for d in done.decisions] == [(DecisionKind.FORGET, "its engine has ended: exit code 0")]


def test_an_edited_profile_rolls_over_where_there_is_room() -> None:
    old = row()
    edited = model("m", 1, profile(context_length=4096))
    state = cluster((node(reports=(report(old, ShardState.READY),)),), (edited,), (old,))
    outcome = decide(state, NOW)
    new = next(r for r in outcome.replicas if r.id != "m-1")
    assert new.reason.startswith("profile p was changed: replaces m-1")
    assert next(r for r in outcome.replicas if r.id == "m-1").superseded_by == new.id


def test_an_edited_profile_without_room_drains_first() -> None:
    old = row()
    edited = model("m", 1, profile(context_length=4096))
    full = node(devices=(device(0),), reports=(report(old, ShardState.READY),))
    outcome = decide(cluster((full,), (edited,), (old,)), NOW)
    assert outcome.replicas[0].goal is Goal.DRAIN
    assert outcome.decisions[0].reason == "profile p was changed, and there is no room for both the old and the new one"


def test_limits_alone_restart_nothing() -> None:
    old = row()
    patient = profile(limits=evolve(profile().limits, load_s=7200))
    state = cluster((node(reports=(report(old, ShardState.READY),)),), (model("m", 1, patient),), (old,))
    outcome = decide(state, NOW)
    assert outcome.replicas == (evolve(old, profile=patient),)
    assert (outcome.commands, outcome.decisions) == ((), ())


def test_strangers_are_reaped_but_not_those_of_another_cluster() -> None:
    ghost, foreign = row(7), row(8, devices=(1,))
    reports = (report(ghost, ShardState.READY), report(foreign, ShardState.READY, cluster="other"))
    outcome = decide(cluster((node(reports=reports),), ()), NOW)
    assert [c.shard for c in outcome.commands if isinstance(c, StopCommand)] == ["m-7.0"]
    assert outcome.decisions[0].reason == "no replica wants this shard"


def test_an_earlier_start_that_still_runs_is_stopped() -> None:
    replica = row(generation=2)
    state = cluster((node(reports=(report(replica, ShardState.READY, generation=1),)),), (model(),), (replica,))
    stops = [c for c in decide(state, NOW).commands if isinstance(c, StopCommand)]
    assert [(c.shard, c.generation) for c in stops] == [("m-1.0", 1)]


def test_a_row_on_a_silent_node_keeps_its_devices_until_the_node_says_that_they_are_free() -> None:
    leaving = row(goal=Goal.STOP)
    for away in (NodeState.UNREACHABLE, NodeState.LOST):
        outcome = decide(cluster((node(state=away),), (), (leaving,)), NOW)
        assert outcome.replicas == (leaving,)
        assert outcome.commands == ()
    assert decide(cluster((node(),), (), (leaving,)), NOW).replicas == ()


def test_devices_are_followed_to_the_numbers_that_they_have_now() -> None:
    name = "a30-24g-mig-1g.6gb"

    def instance(number: int, uuid: str) -> Device:
        return evolve(device(number, name), uuid=uuid, mig=MigInstance(0, number - 1000, "1g.6gb", number, 0))

    wanted = model("m", 2, profile(classes=(name,)))
    first = decide(cluster((node(devices=(instance(1000, "MIG-a"), instance(1001, "MIG-b"))),), (wanted,)), NOW)
    assert [(s.devices, s.uuids) for r in first.replicas for s in r.shards] == [
        ((1000,), ("MIG-a",)),
        ((1001,), ("MIG-b",)),
    ]
    # Another instance is made: the two have other numbers, and theirs is a third one's.
    reports = tuple(
        evolve(report(r, ShardState.READY), devices=r.shards[0].devices, uuids=r.shards[0].uuids)
        for r in first.replicas
    )
    now = node(devices=(instance(1000, "MIG-new"), instance(1001, "MIG-a"), instance(1002, "MIG-b")), reports=reports)
    state = cluster((now,), (evolve(wanted, replicas=3),), first.replicas, next_serial=first.next_serial)
    second = decide(state, NOW)
    assert {s.uuids: s.devices for r in second.replicas for s in r.shards} == {
        ("MIG-a",): (1001,), ("MIG-b",): (1002,), ("MIG-new",): (1000,),
    }  # fmt: skip
    assert not any(isinstance(c, StopCommand) for c in second.commands)


def test_a_device_that_is_gone_is_not_taken_for_the_one_that_has_its_number() -> None:
    gone = evolve(row(), shards=(Assignment("m-1.0", 0, "n1", (0,), ("GPU-gone",)),))
    failed = evolve(report(gone, ShardState.FAILED), uuids=("GPU-gone",))
    outcome = decide(cluster((node(reports=(failed,)),), (model(),), (gone,)), NOW)
    evicted = next(d for d in outcome.decisions if d.kind is DecisionKind.EVICT)
    assert "device 0 is not there any more" in evicted.reason


def test_what_can_never_run_waits_long_and_says_what_to_do() -> None:
    broken = row()
    failed = evolve(
        report(broken, ShardState.FAILED),
        reason="tp 3 does not divide",
        remedy="choose a tp that divides 4",
        final=True,
    )
    outcome = decide(cluster((node(reports=(failed,)),), (model(),), (broken,)), NOW)
    (now,) = outcome.replicas
    assert now.not_before == NOW + FINAL_S
    assert now.reason.endswith("last: tp 3 does not divide; choose a tp that divides 4")
    assert outcome.decisions[0].reason == (
        "tp 3 does not divide; choose a tp that divides 4; cannot run like this; started again in 1800 s (failure 1)"
    )


# Replicas over several nodes.


def pair(**more: object) -> tuple[ClusterState, Replica]:
    """Two nodes on one fabric, and a replica over both whose first generation has not been started."""
    of = model("m", 1, wide())
    shards = (Assignment("m-1.0", 0, "n1", (0,)), Assignment("m-1.1", 1, "n2", (0,)))
    replica = evolve(row(of=of), shards=shards, fabric="rack-1", **more)
    nodes = (node("n1", fabrics=(fabric(),)), node("n2", fabrics=(fabric(),)))
    return cluster(nodes, (of,), (replica,)), replica


def told(state: ClusterState, *reports: ShardReport) -> ClusterState:
    """The same with these reports, each by the node that it is about."""
    places = {s.shard: s.node for r in state.replicas for s in r.shards}

    def of(here: Node) -> Node:
        return evolve(here, reports=tuple(r for r in reports if places[r.shard] == here.id))

    return evolve(state, nodes=tuple(of(n) for n in state.nodes))


def test_a_decision_names_every_node_of_a_replica() -> None:
    state, replica = pair()
    (placed,) = decide(evolve(state, replicas=()), NOW).decisions
    assert (placed.node, placed.others, placed.nodes) == ("n1", ("n2",), ("n1", "n2"))
    (again,) = decide(told(state, report(replica, ShardState.FAILED, rank=1)), NOW).decisions
    assert (again.kind, again.node, again.others) == (DecisionKind.RESTART, "n2", ("n1",)), "where it happened first"
    (alone,) = decide(cluster((node(),), (model(),)), NOW).decisions
    assert alone.others == ()


def test_other_ranks_start_once_rank_0_says_where_to_meet() -> None:
    state, replica = pair()
    addresses = ("10.0.0.1", "10.0.0.1")
    assert decide(state, NOW).commands == (StartCommand(replica, replica.shards[0], None, addresses),)
    head = report(replica, ShardState.STARTING)
    meeting = Address("10.0.0.1", 20500)
    assert decide(told(state, head), NOW).commands == (StartCommand(replica, replica.shards[1], meeting, addresses),)
    assert decide(told(state, evolve(head, rendezvous=None)), NOW).commands == ()
    assert decide(told(state, head, report(replica, ShardState.LOADING, rank=1)), NOW).commands == ()


def test_ranks_that_fetch_are_held_until_all_have_their_weights() -> None:
    """Rank 0 would wait for the others at its rendezvous for as long as they fetch, and time out."""
    state, replica = pair()
    of = evolve(replica.profile, weights="hf:org/tiny@main")
    replica = evolve(replica, profile=of)
    state = evolve(state, replicas=(replica,), models=(evolve(state.models[0], profiles=(of,)),))

    def started(*reports: ShardReport) -> list[tuple[int, bool]]:
        return [
            (c.assignment.rank, c.hold)
            for c in decide(told(state, *reports), NOW).commands
            if isinstance(c, StartCommand)
        ]

    fetches = evolve(report(replica, ShardState.STARTING), waits_for=WaitsFor.WEIGHTS)
    waits = evolve(fetches, waits_for=WaitsFor.RANKS)
    other = evolve(report(replica, ShardState.STARTING, rank=1), waits_for=WaitsFor.WEIGHTS)
    assert started() == [(0, True)]
    assert started(fetches) == [(1, True)]
    assert started(waits) == [(1, True)], "its other rank is not even told"
    assert started(waits, other) == started(fetches, evolve(other, waits_for=WaitsFor.RANKS)) == []
    assert started(waits, evolve(other, waits_for=WaitsFor.RANKS)) == [(0, False), (1, False)]
    launched = evolve(other, waits_for=WaitsFor.NOTHING, state=ShardState.LOADING)
    assert started(waits, launched) == [(0, False)], "an agent that holds nobody, or one whose word was lost"
    assert started(waits, evolve(launched, state=ShardState.FAILED)) == []


def test_one_rank_that_ends_ends_all_and_they_start_again_together() -> None:
    state, replica = pair()
    dead = report(replica, ShardState.FAILED, rank=1)
    broken = told(state, report(replica, ShardState.READY), dead)
    outcome = decide(broken, NOW)
    (again,) = outcome.replicas
    assert (again.generation, again.failures) == (2, 1)
    assert outcome.decisions[0].node == "n2"
    assert outcome.decisions[0].reason == "rank 1 on n2: killed by signal 9; started again in 5 s (failure 1)"
    (stop,) = outcome.commands
    assert isinstance(stop, StopCommand)
    assert (stop.shard, stop.generation) == ("m-1.0", 1)
    assert "rank 1 on n2: killed by signal 9" in stop.reason
    # Nothing starts while the other rank's engine is still being stopped, however long that takes.
    stopping = evolve(report(replica, ShardState.STOPPING), generation=1)
    later = decide(evolve(told(after(broken, outcome), stopping)), NOW + 60)
    assert [type(c) for c in later.commands] == [StopCommand]
    gone = told(after(broken, outcome), evolve(stopping, state=ShardState.STOPPED))
    assert [c.assignment.rank for c in decide(gone, NOW + 60).commands if isinstance(c, StartCommand)] == [0]


@pytest.mark.parametrize(
    ("head", "other", "blamed"),
    [
        ({"ended": 20.0}, {"ended": 19.0, "since": NOW + 9}, 1),
        ({"ended": 19.0, "since": NOW + 9}, {"ended": 20.0}, 0),
        ({"ended": 19.0, "lost_peer": True}, {"ended": 20.0}, 1),
        ({"ended": 19.0, "state": ShardState.STOPPED}, {"ended": 20.0}, 1),
        ({}, {"since": NOW - 11}, 1),
    ],
    ids=["first", "it was cleared late", "lost its peer", "stopped", "an older agent"],
)
def test_of_ranks_that_ended_together_the_one_that_did_so_first_of_itself_is_blamed(
    head: dict[str, Any], other: dict[str, Any], blamed: int
) -> None:
    state, replica = pair()
    reports = [
        evolve(report(replica, ShardState.FAILED, rank=rank), **{"reason": f"end of {rank}", **more})
        for rank, more in enumerate((head, other))
    ]
    outcome = decide(told(state, *reports), NOW)
    said = f"rank {blamed} on n{blamed + 1}: end of {blamed}"
    assert outcome.decisions[0].reason.startswith(said)
    assert outcome.decisions[0].node == f"n{blamed + 1}"
    assert said in outcome.replicas[0].reason


def test_ready_is_rank_0_s_word_while_all_live() -> None:
    state, replica = pair(failures=3)
    old = NOW - 700
    head = evolve(report(replica, ShardState.READY), since=old)
    other = evolve(report(replica, ShardState.LOADING, rank=1), since=old)
    assert decide(told(state, head, other), NOW).replicas[0].failures == 0
    assert decide(told(state, head), NOW).replicas[0].failures == 3


def test_half_an_engine_makes_room_once_it_says_that_it_is_dead() -> None:
    state, replica = pair()
    spare = node("n3", fabrics=(fabric(),))
    alive = told(state, report(replica, ShardState.READY), report(replica, ShardState.READY, rank=1))
    away = evolve(alive, nodes=(alive.nodes[0], evolve(alive.nodes[1], state=NodeState.LOST), spare))
    # It may still serve, and there are two devices on n1: the new one is placed beside it.
    outcome = decide(away, NOW)
    assert kinds(outcome) == [DecisionKind.PLACE, DecisionKind.EVICT]
    assert outcome.decisions[1].reason == "node n2 is lost; m-100 replaces it"
    full = evolve(away, nodes=(evolve(away.nodes[0], inventory=node(devices=(device(0),)).inventory), *away.nodes[1:]))
    assert decide(full, NOW).commands == ()
    dead = told(full, report(replica, ShardState.FAILED))
    outcome = decide(dead, NOW)
    assert outcome.decisions[0].kind is DecisionKind.EVICT
    assert outcome.decisions[0].reason == "node n2 is lost and m-1.0 ended: killed by signal 9"


def test_a_drain_waits_for_what_rank_0_has_in_flight_only() -> None:
    state, replica = pair(goal=Goal.DRAIN, since=NOW - 5)
    ready = told(state, report(replica, ShardState.READY), report(replica, ShardState.READY, rank=1))
    outcome = decide(evolve(ready, in_flight={"m-1.0": 0}), NOW)
    assert [c.shard for c in outcome.commands if isinstance(c, StopCommand)] == ["m-1.0", "m-1.1"]
    assert not [c for c in decide(evolve(ready, in_flight={"m-1.0": 1}), NOW).commands if isinstance(c, StopCommand)]


# What holds for every state there can be.


def _given(state: ClusterState, place: Assignment) -> list[Device]:
    here = state.node(place.node)
    return [] if here is None else [d for d in here.inventory.devices if d.number in place.devices]


def usable(state: ClusterState, name: str, number: int) -> bool:
    found = state.node(name)
    assert found is not None
    this = found.inventory.device(number)
    return this is not None and not this.faults and stranger(this, ours=False) is None


@given(states())
@settings(max_examples=300, deadline=None)
def test_never(state: ClusterState) -> None:
    outcome = decide(state, NOW)
    before = {r.id for r in state.replicas}
    new = [r for r in outcome.replicas if r.id not in before]
    taken = {(s.node, d) for r in outcome.replicas if r.id in before for s in r.shards for d in s.devices} | {
        (n.id, d) for n in state.nodes for r in n.reports if not r.state.ended for d in r.devices
    }
    for replica in new:
        assert len(replica.shards) == len({s.node for s in replica.shards}) == replica.profile.nodes
        assert (replica.fabric is not None) == (replica.profile.nodes > 1)
        if replica.fabric is not None:
            rails = [
                {(f.kind, len(f.ports)) for f in found.inventory.fabrics if f.label == replica.fabric and not f.faults}
                for s in replica.shards
                if (found := state.node(s.node)) is not None
            ]
            assert rails[0]
            assert all(r == rails[0] for r in rails)
            assert len({d.device_class for s in replica.shards for d in _given(state, s)}) == 1
        for shard in replica.shards:
            here = state.node(shard.node)
            assert here is not None
            assert here.state is NodeState.CONNECTED
            assert len(shard.devices) == replica.profile.gpus
            classes = set()
            for number in shard.devices:
                assert (shard.node, number) not in taken, "given out twice"
                taken.add((shard.node, number))
                assert usable(state, shard.node, number)
                found = here.inventory.device(number)
                assert found is not None
                classes.add(found.device_class)
            assert len(classes) == 1
            assert classes <= set(replica.profile.device_class)
            if replica.profile.tp > 1:
                (name,) = classes
                large = [
                    d
                    for d in here.inventory.nvlink_domains
                    if sum(x.device_class == name and x.number in d for x in here.inventory.devices)
                    >= len(shard.devices)
                ]
                assert not large or any(set(shard.devices) <= set(d) for d in here.inventory.nvlink_domains)
    wanted = {(s.node, s.shard, r.generation) for r in outcome.replicas if r.goal is Goal.RUN for s in r.shards}
    for command in outcome.commands:
        if isinstance(command, StopCommand):
            # Elsewhere it may well be stopped: it runs under another name of its node.
            assert (command.node, command.shard, command.generation) not in wanted
        if isinstance(command, StopCommand | DrainCommand):
            where = state.node(command.node)
            assert where is not None
            assert where.state is NodeState.CONNECTED
    for missing in outcome.unplaced:
        assert missing.reason
        if state.nodes:
            of = state.model(missing.model)
            assert of is not None
            # Every node has its reason, alone or together with others.
            said = {(name, c.profile) for c in missing.candidates for name in c.node.split("+")}
            assert said == {(n.id, p.name) for n in state.nodes for p in of.profiles}
            assert all(c.refusals for c in missing.candidates)


@given(states())
@settings(max_examples=200, deadline=None)
def test_a_pass_on_its_own_result_changes_nothing_more(state: ClusterState) -> None:
    first = decide(state, NOW)
    # Rows can take a second step at once (drained, so stopped; superseded, so retired): let them settle first.
    for _ in range(3):
        first = decide(after(state, first), NOW)
    second = decide(after(state, first), NOW)
    assert second.replicas == first.replicas
    assert second.commands == first.commands
    assert second.unplaced == first.unplaced
    assert [d for d in second.decisions if d.kind is not DecisionKind.REAP] == []


def obey(state: ClusterState, outcome: Outcome) -> ClusterState:
    """Agents that do what they are told at once."""
    nodes = []
    for here in state.nodes:
        reports: dict[tuple[str, int], ShardReport] = {}
        for said in here.reports:
            if said.state in (ShardState.STARTING, ShardState.LOADING):
                said = evolve(said, state=ShardState.READY)
            elif said.state is ShardState.STOPPING:
                said = evolve(said, state=ShardState.STOPPED)
            reports[said.shard, said.generation] = said
        for command in outcome.commands:
            if isinstance(command, StartCommand) and command.assignment.node == here.id:
                made = report(command.replica, ShardState.READY, rank=command.assignment.rank)
                reports[made.shard, made.generation] = evolve(made, devices=command.assignment.devices)
            elif isinstance(command, StopCommand) and command.node == here.id:
                reports.pop((command.shard, command.generation), None)
        wanted = {(s.shard, r.generation) for r in outcome.replicas for s in r.shards}
        kept = tuple(r for r in reports.values() if not r.state.ended or (r.shard, r.generation) in wanted)
        nodes.append(evolve(here, reports=kept))
    flights = {s.shard: 0 for r in outcome.replicas for s in r.shards}
    return after(state, outcome, nodes=tuple(nodes), in_flight=flights)


@given(states(), st.integers(0, 2))
@settings(max_examples=150, deadline=None)
def test_everything_wanted_and_placeable_is_ready_in_the_end(state: ClusterState, flap: int) -> None:
    now = NOW
    for step in itertools.count():
        outcome = decide(state, now)
        state = obey(state, outcome)
        now += 400.0
        if step == 2 and state.nodes:
            # Every node is back for good from here on; one was away in between.
            away = state.nodes[flap % len(state.nodes)].id
            state = evolve(
                state,
                nodes=tuple(
                    evolve(n, state=NodeState.LOST if n.id == away else NodeState.CONNECTED) for n in state.nodes
                ),
            )
        elif step >= 3:
            state = evolve(state, nodes=tuple(evolve(n, state=NodeState.CONNECTED) for n in state.nodes))
        if step > 20:
            break
    for of in state.models:
        rows = [r for r in state.replicas if r.model == of.name and r.goal is Goal.RUN and not r.superseded_by]
        ready = [r for r in rows if _ready(state, r)]
        short = next((u for u in outcome.unplaced if u.model == of.name), None)
        if short is None:
            assert len(ready) == of.replicas
        else:
            assert len(ready) == short.running < of.replicas
    assert not [r for r in state.replicas if r.goal is not Goal.RUN]
    foreign = [r for n in state.nodes for r in n.reports if r.cluster == CLUSTER and not r.state.ended]
    assert {r.replica for r in foreign} <= {r.id for r in state.replicas}


def _ready(state: ClusterState, replica: Replica) -> bool:
    return all(
        (said := state.report(s, replica.generation)) is not None and said.state is ShardState.READY
        for s in replica.shards
    )
