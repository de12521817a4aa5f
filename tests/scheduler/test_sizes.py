from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.scheduler.decide import decide
from llmgw.scheduler.explain import DecisionKind
from llmgw.scheduler.learn import lesson
from llmgw.scheduler.memory import MOST_DOWN, MOST_UP, Learned, Sizes, absorbed, corrected
from llmgw.scheduler.state import ClusterState, NodeState, ShardState
from llmgw.settings.catalog import EngineKind, Model, Profile, Update
from llmgw.settings.digest import profile_digest
from llmgw.settings.memory import GIB, Amount, Estimate
from llmgw.settings.weight_facts import CacheShape, WeightFacts
from tests.scheduler.clusters import NOW, cluster, device, model, node, profile, report, row

SHAPE = CacheShape(80, 80, 8, 128, 128)
LARGE = WeightFacts("/w", 141_107_412_992, "model.safetensors.index.json", None, "bfloat16", "", SHAPE, 131_072)
L40S = evolve(device(0, "l40s-45g"), total_mib=46_068)


def eight(*more: str) -> tuple:
    return tuple(device(n) for n in range(8))


def seventy(gpus: int = 1, **more: object) -> Model:
    return model("m", 1, profile(gpus=gpus, context_length=8192, **more))


def refusals(state: ClusterState) -> dict[str, list[tuple[str, str]]]:
    outcome = decide(state, NOW)
    assert outcome.replicas == ()
    (unplaced,) = outcome.unplaced
    return {c.node: [(r.filter, r.reason) for r in c.refusals] for c in unplaced.candidates}


# Through a whole pass.


def test_what_cannot_fit_is_refused_with_the_arithmetic_and_a_remedy() -> None:
    nodes = (evolve(node("n1", eight()), weights=(LARGE,)), node("n2", (device(0),)))
    outcome = decide(cluster(nodes, (seventy(),)), NOW)
    assert outcome.replicas == ()
    (unplaced,) = outcome.unplaced
    assert unplaced.reason == "no node can take it: 2 candidates turned down (2 by memory)"
    for candidate in unplaced.candidates:  # n2 has no weights, and would have to load the same
        (refusal,) = candidate.refusals
        assert refusal.filter == "memory"
        assert refusal.reason == (
            "needs 136.4 GiB on each device: weights 131.4 (131.4 GiB by model.safetensors.index.json)"
            " + KV cache 2.5 (8192 tokens x 320 KiB in 16 bits) + overhead 2.5 (vllm: context, graphs, activations);"
            " a device has 79.6 GiB x 0.92 (vllm's own share) = 73.3 usable"
        )
        assert refusal.remedy.startswith("raise tp, use quantized weights, use a device class with more memory; if you")


def test_what_fits_is_placed_and_says_what_it_needs() -> None:
    nodes = (evolve(node("n1", eight()), weights=(LARGE,)),)
    outcome = decide(cluster(nodes, (seventy(2),)), NOW)
    assert outcome.decisions[0].kind is DecisionKind.PLACE
    assert outcome.decisions[0].reason == (
        "profile p on n1: gpu-0, gpu-1 (h100-80g);"
        " needs 69.5 GiB on each device (weights 65.7, KV cache 1.2, overhead 2.5)"
    )
    unknown = decide(cluster((node("n1", eight()),), (seventy(),)), NOW)
    assert unknown.decisions[0].reason == "profile p on n1: gpu-0 (h100-80g)", "what nobody knows refuses nothing"


def test_memory_is_said_before_what_will_pass() -> None:
    """A device that is busy is worth waiting for; one that is too small never is."""
    busy = row(1, devices=(0,), of=model("other"))
    nodes = (
        evolve(node("n1", (device(0),), reports=(report(busy, ShardState.READY),)), weights=(LARGE,)),
        node("n2", state=NodeState.UNREACHABLE),
        node("n3", (L40S,)),
    )
    state = cluster(nodes, (model("other"), seventy()), (busy,))
    (unplaced,) = decide(state, NOW).unplaced
    said = {c.node: [r.filter for r in c.refusals] for c in unplaced.candidates}
    assert said == {"n1": ["memory", "devices"], "n2": ["memory", "node-state"], "n3": ["device-class"]}


def test_another_class_or_profile_takes_what_the_first_cannot() -> None:
    small = WeightFacts("/w", 40 * GIB, "f")
    here = evolve(node("n1", (L40S,)), weights=(small,))
    there = node("n2", (device(0),))
    both = model("m", 1, profile(classes=("l40s-45g", "h100-80g")))
    outcome = decide(cluster((here, there), (both,)), NOW)
    assert outcome.replicas[0].shards[0].node == "n2"
    second = model("m", 1, profile("one", classes=("l40s-45g",)), profile("two", classes=("h100-80g",)))
    outcome = decide(cluster((here, there), (second,)), NOW)
    assert outcome.replicas[0].profile.name == "two"


def test_a_class_is_rounded_and_each_device_has_its_own_size() -> None:
    facts = WeightFacts("/w", 70 * GIB + GIB // 2, "f")  # 73 GiB of 79.35 at least
    nodes = (
        evolve(node("n1", (evolve(device(0), total_mib=81_100), device(1))), weights=(facts,)),
        node("n2", (evolve(device(0), total_mib=81_100),)),
    )
    outcome = decide(cluster(nodes, (model("m", 2),)), NOW)
    assert [s.devices for r in outcome.replicas for s in r.shards] == [(1,)]
    reasons = {c.node: c.refusals[0].reason for c in outcome.unplaced[0].candidates}
    assert reasons["n2"] == "1 of 1 devices short: gpu-0 has 81100 MiB, 81253 are needed"


def test_the_operators_word_stands_in_for_the_estimate() -> None:
    nodes = (evolve(node("n1", eight()), weights=(LARGE,)),)
    assert decide(cluster(nodes, (seventy(memory_gib=70.0),)), NOW).replicas


def test_the_larger_of_two_that_have_one_name_is_the_whole_one() -> None:
    part = evolve(LARGE, weights_bytes=GIB, source="files")
    nodes = (evolve(node("n1", eight()), weights=(part,)), evolve(node("n2"), weights=(LARGE,)))
    assert "131.4 GiB by" in refusals(cluster(nodes, (seventy(),)))["n1"][0][1]


def test_editing_what_is_declared_restarts_nothing() -> None:
    replica = row(of=model())
    state = cluster(
        (node(reports=(report(replica, ShardState.READY),)),),
        (model("m", 1, profile(parameters=10**9, concurrency=4, memory_gib=3.0)),),
        (replica,),
    )
    outcome = decide(state, NOW)
    assert [(r.id, r.generation, r.profile.concurrency) for r in outcome.replicas] == [("m-1", 1, 4)]
    assert outcome.commands == ()


def test_nothing_gives_way_to_a_profile_that_cannot_fit() -> None:
    """Else a slip of the pen in the settings takes a model down that serves."""
    for update in Update:
        old = evolve(model("m", 1, profile(weights="/old")), update=update)
        replica = row(of=old, devices=(0,))
        nodes = (node(devices=(device(0),), reports=(report(replica, ShardState.READY),)),)
        nodes = (evolve(nodes[0], weights=(LARGE,)),)
        state = cluster(nodes, (evolve(seventy(), update=update),), (replica,))
        outcome = decide(state, NOW)
        assert (outcome.replicas, outcome.decisions, outcome.commands) == ((replica,), (), ())
        (unplaced,) = outcome.unplaced
        assert unplaced.reason == (
            "profile p was changed, m-1 serves on as it was: no node can take it: 1 candidate turned down (1 by memory)"
        )
        assert unplaced.candidates[0].refusals[0].reason.startswith("needs 136.4 GiB on each device")
        unlooked = evolve(nodes[0], weights=(), looking=frozenset({"/w"}))
        outcome = decide(evolve(state, nodes=(unlooked,)), NOW)
        assert outcome.replicas == (replica,)
        assert outcome.unplaced[0].reason == (
            "profile p was changed, m-1 serves on as it was:"
            " profile p: how large /w is, is not known yet: n1 may have it"
        )
        fits = evolve(nodes[0], weights=(evolve(LARGE, weights_bytes=GIB),))
        outcome = decide(evolve(state, nodes=(fits,)), NOW)
        assert [d.kind for d in outcome.decisions] == [DecisionKind.DRAIN]


# Before the weights were looked at.


def test_nothing_is_placed_while_somebody_may_say_how_large_it_is() -> None:
    nodes = (node("n1", eight()), evolve(node("n2"), looking=frozenset({"/w"})))
    low = model("low", 1, profile(context_length=1))
    busy = evolve(row(7, of=evolve(low, name="low")), model="low", placed=NOW - 1000)
    outcome = decide(cluster(nodes, (evolve(seventy(), priority=5), evolve(low, priority=0)), (busy,)), NOW)
    assert [r.id for r in outcome.replicas] == [busy.id]
    (unplaced,) = outcome.unplaced
    assert unplaced.reason == (
        "profile p: how large /w is, is not known yet: n2 may have it; wait: it is asked, for 10 s at most"
    )
    assert not any(d.kind is DecisionKind.PREEMPT for d in outcome.decisions)


def test_nobody_waits_for_what_is_known_or_declared() -> None:
    looking = evolve(node("n2"), looking=frozenset({"/w"}))
    known = (evolve(node("n1", eight()), weights=(evolve(LARGE, weights_bytes=GIB),)), looking)
    assert decide(cluster(known, (seventy(),)), NOW).replicas
    assert decide(cluster((looking,), (seventy(memory_gib=1.0),)), NOW).replicas
    other = evolve(looking, looking=frozenset({"/other"}))
    assert decide(cluster((other,), (seventy(),)), NOW).replicas


# What ran.


def learned(of: Profile, held_mib: int, device_class: str = "h100-80g") -> Learned:
    return Learned(profile_digest("m", of), device_class, held_mib, NOW)


def test_what_ran_on_a_class_fits_there_whatever_is_counted() -> None:
    one = seventy()
    nodes = (evolve(node("n1", eight()), weights=(LARGE,)),)
    state = cluster(nodes, (one,), learned=(learned(one.profiles[0], 75_000),))
    (decision,) = decide(state, NOW).decisions
    assert decision.reason.endswith(
        "needs 73.2 GiB on each device (weights 131.4, KV cache 2.5, overhead 2.5; learned: it ran in 73.2 on h100-80g)"
    )
    edited = evolve(state, models=(seventy(args=("--seed", "1")),))
    assert refusals(edited)["n1"][0][0] == "memory", "an edited profile begins anew"


def test_what_ran_somewhere_needs_no_more_elsewhere() -> None:
    one = model("m", 1, profile(classes=("l40s-45g", "h100-80g"), context_length=8192))
    facts = evolve(LARGE, weights_bytes=45 * GIB)
    nodes = (evolve(node("n1", (L40S,)), weights=(facts,)),)
    assert refusals(cluster(nodes, (one,)))["n1"][0][0] == "memory"
    ran = cluster(nodes, (one,), learned=(learned(one.profiles[0], 40_000),))
    (decision,) = decide(ran, NOW).decisions
    assert "learned: it ran in 39.1 on h100-80g" in decision.reason
    larger = cluster(nodes, (one,), learned=(learned(one.profiles[0], 75_000),))
    assert refusals(larger)["n1"][0][0] == "memory", "it took that much because it was there"


def counted(gib: int) -> Estimate:
    return Estimate(Amount(gib * GIB), Amount(0), Amount(0), 1.0, "all of it")


def test_an_odd_measurement_is_believed_by_a_quarter() -> None:
    llama = corrected(counted(20), EngineKind.LLAMACPP, "l40s-45g", (Learned("d", "h100-80g", 70 * 1024, NOW),))
    assert llama.needed == 25 * GIB
    assert llama.measured is not None
    assert llama.measured.how == "learned: it ran in 70.0 on h100-80g, of which 25.0 are believed"
    vllm = corrected(counted(20), EngineKind.VLLM, "l40s-45g", (Learned("d", "h100-80g", 70 * 1024, NOW),))
    assert vllm == counted(20), "an engine that takes its share of what is there says nothing of what it needs"


measured = st.builds(
    Learned, st.just("d"), st.sampled_from(("h100-80g", "l40s-45g", "l4-22g")), st.integers(1, 2**20), st.just(NOW)
)


@given(st.integers(1, 2**10), st.sampled_from(EngineKind), st.lists(measured, max_size=3))
def test_corrections_are_bounded(gib: int, kind: EngineKind, ran: list[Learned]) -> None:
    found = corrected(counted(gib), kind, "h100-80g", ran)
    assert int(gib * GIB * MOST_DOWN) <= found.needed <= gib * GIB * MOST_UP
    if any(r.device_class == "h100-80g" for r in ran):
        assert found.fits(0)
    elif kind is not EngineKind.LLAMACPP:
        assert found.needed <= gib * GIB


@given(st.integers(1, 2**10), st.sampled_from(EngineKind), measured, st.integers(0, 2**20))
def test_a_higher_measurement_never_lowers_the_need(gib: int, kind: EngineKind, one: Learned, more: int) -> None:
    other = evolve(one, held_mib=one.held_mib + more)
    at = "a10-22g"
    assert corrected(counted(gib), kind, at, (other,)).needed >= corrected(counted(gib), kind, at, (one,)).needed
    assert absorbed(one, other).held_mib >= one.held_mib
    assert absorbed(other, one) == other


def test_the_least_that_it_ran_in_counts_in_whatever_order_it_was_learned() -> None:
    more, less = Learned("d", "h100-80g", 19 * 1024, NOW), Learned("d", "a100-80g", 15 * 1024, NOW)
    for ran in ((more, less), (less, more)):
        assert corrected(counted(20), EngineKind.VLLM, "l40s-45g", ran).needed == 15 * GIB
        assert corrected(counted(20), EngineKind.LLAMACPP, "l40s-45g", ran).needed == 19 * GIB
    assert absorbed(None, less) is less
    assert absorbed(less, evolve(less, held_mib=less.held_mib + 1)) is less, "not worth writing down"


@pytest.mark.parametrize(
    ("load", "serving", "held"),
    [((0, 0), (0, 0), None), ((0, 1), (0, 0), 1), ((7, 0), None, 7), (None, (0, 9), 9), (None, None, None)],
)
def test_the_most_that_any_of_its_devices_held_is_the_lesson(
    load: tuple[int, ...] | None, serving: tuple[int, ...] | None, held: int | None
) -> None:
    served = evolve(report(row(devices=(0, 1)), ShardState.READY), load_mib=load, serving_mib=serving)
    found = lesson(served, node().inventory, NOW)
    assert (found.held_mib if found is not None else None) == held
    mixed = node(devices=(device(0), device(1, "l40s-45g"))).inventory
    assert lesson(served, mixed, NOW) is None


def test_lessons_are_of_shards_that_serve() -> None:
    replica = row(devices=(0, 1), of=model("m", 1, profile(gpus=2)))
    here = node().inventory
    served = evolve(report(replica, ShardState.READY), load_mib=(900, 1000), serving_mib=(950, 800))
    assert lesson(served, here, NOW) == Learned("d", "h100-80g", 1000, NOW)
    assert lesson(evolve(served, load_mib=None), here, NOW) == Learned("d", "h100-80g", 950, NOW)
    for other in (
        evolve(served, state=ShardState.LOADING),
        evolve(served, state=ShardState.FAILED),
        evolve(served, load_mib=None, serving_mib=None),
        evolve(served, load_mib=(0, 0), serving_mib=None),
        evolve(served, devices=(0, 7)),
    ):
        assert lesson(other, here, NOW) is None
    mixed = node(devices=(device(0), L40S)).inventory
    assert lesson(evolve(served, devices=(0,)), mixed, NOW) is not None


def test_each_profile_is_counted_once_in_a_pass() -> None:
    sizes = Sizes({"/w": LARGE})
    one = profile(context_length=8192)
    assert sizes.of("m", one) is sizes.of("m", evolve(one))
    assert sizes.of("m", one)["h100-80g"] is not None


class Untouched(tuple):
    def __iter__(self):
        raise AssertionError("a quiet pass looked at a node's weights")


def test_a_quiet_pass_looks_at_no_weights() -> None:
    here = evolve(node(), weights=Untouched((LARGE,)), looking=frozenset())
    replica = row(of=seventy())
    state = cluster((here,), (seventy(),), (replica,))
    assert decide(state, NOW).replicas == (replica,)
    with pytest.raises(AssertionError, match="quiet"):
        decide(evolve(state, replicas=()), NOW)
