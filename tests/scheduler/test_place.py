from __future__ import annotations

import itertools
from collections.abc import Mapping

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.hardware.health import stranger
from llmgw.hardware.inventory import AdapterPath, MigInstance, Relation
from llmgw.scheduler.fleet import Fleet
from llmgw.scheduler.place import NoPlace, Part, Placement, place
from llmgw.scheduler.state import Node, NodeState
from llmgw.settings.catalog import Model, Packing, PlacementRules, Profile
from tests.scheduler.clusters import device, devices, fabric, model, node, profile, wide


def eight(name: str) -> tuple:
    return tuple(device(n) for n in range(8))


def put(
    of: Model, nodes: tuple[Node, ...], taken: Mapping[str, Mapping[int, str]] | None = None
) -> Placement | NoPlace:
    return place(of, Fleet(nodes, taken or {}), {}, {}, {})


def test_packs_where_least_is_left() -> None:
    nodes = (node("big", eight("big")), node("small", (device(0), device(1))))
    found = put(model(), nodes, {})
    assert isinstance(found, Placement)
    assert found.parts == (Part("small", (0,)),)
    assert found.reason.endswith("of 2 nodes that could")


def test_a_group_stays_in_one_nvlink_domain_and_takes_the_smallest() -> None:
    here = node("n1", tuple(device(n) for n in range(6)), domains=((0, 1, 2, 3), (4, 5)))
    found = put(model("m", 1, profile(gpus=2)), (here,), {})
    assert isinstance(found, Placement)
    assert found.parts[0].devices == (4, 5)
    nowhere = put(model("m", 1, profile(gpus=3)), (here,), {"n1": {0: "x", 1: "x"}})
    assert isinstance(nowhere, NoPlace)
    assert nowhere.candidates[0].refusals[0].reason == (
        "3 devices of one NVLink domain needed, domains have 2 free of 4, 2 free of 2"
    )


def test_a_group_that_no_domain_can_hold_takes_whole_domains() -> None:
    pairs = node("n1", tuple(device(n) for n in range(6)), domains=((0, 1), (2, 3), (4, 5)))
    found = put(model("m", 1, profile(gpus=4)), (pairs,), {"n1": {0: "x"}})
    assert isinstance(found, Placement)
    assert found.parts[0].devices == (2, 3, 4, 5)


def test_whole_domains_and_whole_nodes_are_kept_for_large_models() -> None:
    here = node("n1", tuple(device(n) for n in range(6)), domains=((0, 1, 2, 3),))
    found = put(model(), (here,))
    assert isinstance(found, Placement)
    assert found.parts[0].devices == (4,), "a card without NVLink does for one GPU"
    nvlink = node("a", tuple(device(n) for n in range(4)), domains=((0, 1, 2, 3),))
    pcie = node("b", tuple(device(n) for n in range(8)))
    assert put(model(), (nvlink, pcie)).parts[0].node == "b"
    begun = put(model(), (nvlink, pcie), {"a": {0: "x"}})
    assert begun.parts == (Part("a", (1,)),)


def test_spread_and_per_node() -> None:
    nodes = (node("a", eight("a")), node("b", eight("b")), node("c", (device(0),)))
    spread = evolve(model(), placement=PlacementRules(policy=Packing.SPREAD))
    fleet = Fleet(nodes, {})
    here: dict[str, int] = {}
    order = []
    for _ in range(5):
        found = place(spread, fleet, here, {}, {})
        assert isinstance(found, Placement)
        (part,) = found.parts
        order.append(part.node)
        here[part.node] = here.get(part.node, 0) + 1
        fleet.take(part.node, part.devices, "x")
    assert order == ["a", "b", "c", "a", "b"]
    one = evolve(model(), placement=PlacementRules(per_node=1))
    full = place(one, Fleet(nodes[:1], {}), {"a": 1}, {}, {})
    assert isinstance(full, NoPlace)
    assert full.candidates[0].refusals[0].reason == "a has 1 of m, placement.per_node allows 1"


def test_of_nodes_that_are_alike_the_one_with_fewer_of_the_model_is_taken() -> None:
    nodes = (node("a", eight("a")), node("b", eight("b")), node("c", eight("c")))
    found = place(model(), Fleet(nodes, {}), {"a": 3, "b": 2, "c": 1}, {}, {})
    assert isinstance(found, Placement)
    assert found.parts[0].node == "c"


def test_what_turned_a_node_down_is_what_does_so_now() -> None:
    pairs = node("a", tuple(device(n) for n in range(4)), domains=((0, 1), (2, 3)))
    fleet = Fleet((pairs, node("b", eight("b"))), {"a": {0: "x", 2: "x"}})
    of = model("m", 1, profile(gpus=2))
    said = []
    for taken in ((), (1,)):
        fleet.take("a", taken, "y")
        found = place(of, fleet, {}, {}, {})
        assert isinstance(found, Placement)
        said.append(found.against)
    assert said[0].startswith("other nodes could not (1 by nvlink, such as a: 2 devices of one NVLink domain needed")
    assert said[1] == (
        "other nodes could not (1 by devices, such as a: 1 of 2 devices short: gpu-0 runs x, gpu-1 runs y, gpu-2 runs x)"
    )


def test_a_node_is_asked_for_the_classes_that_it_has() -> None:
    either = model("m", 1, profile(classes=("h100-80g", "l40s-45g")))
    here = node("n1", (device(0, "l40s-45g", fault="fell off the bus"), device(1, "l40s-45g")))
    found = put(either, (here,), {"n1": {1: "x"}})
    assert isinstance(found, NoPlace)
    (refusal,) = found.candidates[0].refusals
    assert refusal.reason == "1 of 1 devices short: gpu-0 fell off the bus, gpu-1 runs x"
    assert refusal.remedy == "wait for a device, lower the replicas of what runs there, or add a node"


def test_a_fabric_whose_nodes_have_enough_of_the_model_says_so() -> None:
    nodes = (node("n1", fabrics=(fabric(),)), node("n2", fabrics=(fabric(),)))
    one = evolve(model("m", 1, wide()), placement=PlacementRules(per_node=1))
    found = place(one, Fleet(nodes, {}), {"n1": 1}, {}, {})
    assert isinstance(found, NoPlace)
    assert found.candidates[0].refusals[0].reason == (
        "needs one fabric over 2 nodes of h100-80g: rack-1 has 1 (n2, 1 x infiniband); "
        "n1 has 1 of m, placement.per_node allows 1"
    )


def test_the_remedy_is_for_what_keeps_the_devices() -> None:
    old = (device(0, "a100-80g"),)
    for devices_, of, said in (
        ((device(0, used_mib=50_000),), profile(), "stop the process that holds the memory"),
        ((device(0, fault="fell off the bus"),), profile(), "repair the device (see llmgw agent inventory), or add"),
        (old, profile(classes=("a100-80g",), quantization="fp8"), "drop quantization fp8, or use newer devices"),
        (old, profile(gpus=2, classes=("a100-80g",)), "add devices, or use a smaller profile"),
    ):
        found = put(model("m", 1, of), (node("n1", devices_),))
        assert isinstance(found, NoPlace)
        assert found.candidates[0].refusals[0].remedy.startswith(said)


def test_labels_and_taints() -> None:
    nodes = (
        evolve(node("a"), labels={"zone": "east"}),
        evolve(node("b"), labels={"zone": "west"}, taints=("lab",)),
    )
    west = evolve(model(), placement=PlacementRules(nodes={"zone": "west"}, tolerate=("lab",)))
    found = put(west, nodes)
    assert isinstance(found, Placement)
    assert found.parts[0].node == "b"
    strict = put(evolve(west, placement=PlacementRules(nodes={"zone": "west"})), nodes)
    assert isinstance(strict, NoPlace)
    assert [(c.node, c.refusals[0].filter, c.refusals[0].reason) for c in strict.candidates] == [
        ("a", "labels", "wants zone=west, a has zone=east"),
        ("b", "taints", "b has the taint lab"),
    ]


def test_a_quota_names_the_group_and_what_it_has() -> None:
    mine = evolve(model("m", 1, profile(gpus=2)), group="research")
    found = place(mine, Fleet((node(),), {}), {}, {"h100-80g": 3}, {"h100-80g": 4})
    assert isinstance(found, NoPlace)
    assert found.candidates[0].refusals[0].reason == "group research has 3 of its 4 h100-80g, 2 more are needed"
    assert isinstance(place(mine, Fleet((node(),), {}), {}, {"h100-80g": 2}, {"h100-80g": 4}), Placement)


def test_an_earlier_class_anywhere_is_better_than_a_later_one() -> None:
    nodes = (node("a", (device(0, "l40s-45g"),)), node("b", eight("b")))
    found = put(model("m", 1, profile(classes=("h100-80g", "l40s-45g"))), nodes)
    assert isinstance(found, Placement)
    assert (found.device_class, found.parts[0].node) == ("h100-80g", "b")


def test_on_mig_the_card_that_is_in_use_comes_first() -> None:
    name = "h100-80g-mig-1g.10gb"
    instances = tuple(
        evolve(device(1000 + 100 * card + n, name), mig=MigInstance(card, n, "1g.10gb", n, 0))
        for card in (0, 1)
        for n in range(2)
    )
    found = put(model("m", 1, profile(classes=(name,))), (node("n1", instances),), {"n1": {1100: "x"}})
    assert isinstance(found, Placement)
    assert found.parts[0].devices == (1101,)


def test_devices_near_the_fabric_are_taken_for_several_nodes() -> None:
    def nodes() -> tuple[Node, ...]:
        near = (AdapterPath("mlx5_0", Relation.PIX),)
        devices = (device(0), device(1), evolve(device(2), adapters=near), evolve(device(3), adapters=near))
        return tuple(node(name, devices, fabrics=(fabric(),)) for name in ("a", "b"))

    found = put(model("m", 1, wide(gpus=2)), nodes())
    assert isinstance(found, Placement)
    assert [p.devices for p in found.parts] == [(2, 3), (2, 3)]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_kept_up_is_what_a_fresh_look_would_find(data: st.DataObject) -> None:
    nodes = tuple(
        node(f"n{n}", data.draw(devices()), domains=data.draw(st.sampled_from(((), ((0, 1), (2, 3))))),
             fabrics=data.draw(st.sampled_from(((fabric(),), (fabric(), fabric("rack-2")), (fabric(ports=2),)))))
        for n in range(data.draw(st.integers(1, 5)))
    )  # fmt: skip
    rules = PlacementRules(policy=data.draw(st.sampled_from(Packing)))
    kept, taken, here = Fleet(nodes, {}), {n.id: {} for n in nodes}, {}
    for serial in range(8):
        gpus = data.draw(st.integers(1, 3))
        some = data.draw(st.sampled_from((profile(gpus=gpus), wide(2, gpus))))
        of = evolve(model("m", 1, some), placement=rules)
        found = place(of, kept, here, {}, {})
        assert found == place(of, Fleet(nodes, taken), here, {}, {})
        if isinstance(found, Placement):
            for part in found.parts:
                kept.take(part.node, part.devices, f"s{serial}")
                taken[part.node] |= dict.fromkeys(part.devices, f"s{serial}")
                here[part.node] = here.get(part.node, 0) + 1


def test_an_earlier_profile_wins_and_classes_are_not_mixed() -> None:
    here = node("n1", (device(0, "l40s-45g"), device(1), device(2)))
    first = profile("big", 2, ("l40s-45g", "h100-80g"))
    found = put(model("m", 1, first, profile("small")), (here,), {})
    assert isinstance(found, Placement)
    assert (found.profile.name, found.parts[0].devices) == ("big", (1, 2))


def test_memory_and_fp8_are_looked_at() -> None:
    here = node("n1", (device(0, "a100-80g"),))
    for wanted, said in (
        (profile(classes=("a100-80g",), quantization="fp8"), "fp8 needs compute capability 8.9, gpu-0 has 8.0"),
        (profile(classes=("a100-80g",), memory_gib=90.0), "gpu-0 has 79.6 GiB, 90 GiB are needed"),
    ):
        found = put(model("m", 1, wanted), (here,), {})
        assert isinstance(found, NoPlace)
        assert said in found.candidates[0].refusals[0].reason


def test_a_mig_replica_gets_exactly_one_instance() -> None:
    name = "a100-80g-mig-3g.40gb"
    here = node("n1", (device(1000, name), device(1001, name)))
    found = put(model("m", 1, profile(classes=(name,))), (here,), {"n1": {1000: "x"}})
    assert isinstance(found, Placement)
    assert found.parts[0].devices == (1001,)


def test_compute_instances_of_one_gpu_instance_are_not_given_to_two() -> None:
    name = "h100-80g-mig-1c.3g.40gb"
    here = node(
        "n1",
        tuple(
            evolve(device(1000 + n, name), mig=MigInstance(0, n, "1c.3g.40gb", gi, n)) for n, gi in enumerate((1, 1, 2))
        ),
    )
    found = put(model("m", 1, profile(classes=(name,))), (here,), {"n1": {1000: "x"}})
    assert isinstance(found, Placement)
    assert found.parts[0].devices == (1002,)
    none = put(model("m", 1, profile(classes=(name,))), (here,), {"n1": {1000: "x", 1002: "y"}})
    assert isinstance(none, NoPlace)
    assert "gpu-0/mig1 shares its memory with gpu-0/mig0, which runs x" in none.candidates[0].refusals[0].reason


def test_several_nodes_are_on_one_fabric_with_as_many_ports() -> None:
    nodes = (
        node("n1", fabrics=(fabric("rack-1", 2),)),
        node("n2", fabrics=(fabric("rack-2", 2),)),
        node("n3", fabrics=(fabric("rack-2", 1),)),
        node("n4", fabrics=(fabric("rack-1", 1), fabric("rack-2", 2))),
        node("n5"),
    )
    found = put(model("m", 1, wide(gpus=2)), nodes, {})
    assert isinstance(found, Placement)
    assert (found.parts, found.fabric) == ((Part("n2", (0, 1)), Part("n4", (0, 1))), "rack-2")
    assert found.reason == "profile wide on n2: gpu-0, gpu-1; n4: gpu-0, gpu-1 (h100-80g) over fabric rack-2"


def test_a_class_by_the_size_on_the_box_is_told_the_driver_s() -> None:
    asked = model("m", 1, profile(device_class=("h100-94g",)))
    found = put(asked, (node("n1"),), {})
    assert isinstance(found, NoPlace)
    (refusal,) = found.candidates[0].refusals
    assert refusal.filter == "device-class"
    assert refusal.remedy.startswith(
        "if h100-80g is meant, name that: classes count the memory that the driver reports"
    )


def test_no_fabric_over_enough_nodes_names_who_is_where() -> None:
    nodes = (
        node("n1", fabrics=(fabric("rack-1", 2),)),
        node("n2", fabrics=(fabric("rack-1", 1),)),
        node("n3", fabrics=(fabric("rack-1", fault="mlx5_1 port 1 is down"),)),
        node("n4"),
        node("n5", (device(0, "l40s-45g"),), fabrics=(fabric("rack-1", 2),)),
    )
    found = put(model("m", 1, wide()), nodes, {})
    assert isinstance(found, NoPlace)
    alone, together = found.candidates
    assert alone.node == "n5"
    assert alone.refusals[0].reason == "class h100-80g wanted, node has 1 x l40s-45g"
    assert together.node == "n1+n2+n3+n4"
    assert together.refusals[0].reason == (
        "needs one fabric over 2 nodes of h100-80g: rack-1 has 1 (n2, 1 x infiniband); rack-1 has 1 (n1, 2 x infiniband); "
        "n3 is on no fabric that works (rack-1: mlx5_1 port 1 is down); n4 is on no fabric"
    )


def test_the_smallest_fabric_that_is_big_enough_and_one_class() -> None:
    nodes = (
        *(node(f"a{n}", fabrics=(fabric("big"),)) for n in range(4)),
        *(node(f"z{n}", fabrics=(fabric("small"),)) for n in range(2)),
    )
    found = put(model("m", 1, wide()), nodes, {})
    assert isinstance(found, Placement)
    assert (found.fabric, [p.node for p in found.parts]) == ("small", ["z0", "z1"])
    mixed = (node("n1", fabrics=(fabric(),)), node("n2", (device(0, "l40s-45g"),), fabrics=(fabric(),)))
    both = wide(device_class=("h100-80g", "l40s-45g"))
    assert isinstance(put(model("m", 1, both), mixed, {}), NoPlace)


def test_a_placement_says_in_short_what_turned_the_others_down() -> None:
    nodes = (
        node("n1", (device(0), device(1))),
        node("n2", (device(0, fault="has 2 uncorrected ECC errors"),)),
        node("n3", (device(0, "l40s-45g"),)),
        node("n4", (device(0, "l40s-45g"),)),
    )
    found = put(model("m", 1, profile("four", gpus=4), profile("one")), nodes)
    assert isinstance(found, Placement)
    assert found.reason == "profile one on n1: gpu-0 (h100-80g)"
    assert found.against == (
        "profile four has no place (2 by device-class, such as n3: class h100-80g wanted, node has 1 x l40s-45g; "
        "2 by devices, such as n1: 2 of 4 devices short: node has 2 of class h100-80g); "
        "other nodes could not (2 by device-class, such as n3: class h100-80g wanted, node has 1 x l40s-45g; "
        "1 by devices, such as n2: 1 of 1 devices short: gpu-0 has 2 uncorrected ECC errors)"
    )


@given(st.integers(0, 40), st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_what_is_said_with_a_placement_stays_short(nodes: int, profiles: int) -> None:
    big = tuple(node(f"n{n}", tuple(device(d, fault="x" * 300) for d in range(8))) for n in range(nodes))
    found = put(
        model("m", 1, *(profile(f"p{n}", gpus=16) for n in range(profiles)), profile("last")), (*big, node("a"))
    )
    assert isinstance(found, Placement)
    assert len(found.against) < 2500


def _possible(of: Profile, there: Node, name: str, taken: Mapping[int, str]) -> bool:
    """Whether some set of a node's devices would do, by the rules as they are written and nothing cleverer."""
    free = [d for d in there.inventory.devices if d.device_class == name and not d.faults and d.number not in taken]
    free = [d for d in free if stranger(d, ours=False) is None]
    kin = [sum(x.device_class == name and x.number in domain for x in there.inventory.devices)
           for domain in there.inventory.nvlink_domains]  # fmt: skip
    one_domain = of.tp > 1 and any(count >= of.gpus for count in kin)
    return any(
        not one_domain or any({d.number for d in some} <= set(domain) for domain in there.inventory.nvlink_domains)
        for some in itertools.combinations(free, of.gpus)
    )


def _rails(there: Node) -> set[tuple[str, str, int]]:
    return {(f.label, f.kind.value, len(f.ports)) for f in there.inventory.fabrics if not f.faults}


@given(st.data())
@settings(max_examples=300)
def test_if_a_search_of_everything_finds_a_place_so_do_we(data: st.DataObject) -> None:
    fabrics = st.sampled_from(((), (fabric(),), (fabric(ports=2),), (fabric("rack-2"),), (fabric(fault="down"),)))
    domains = st.sampled_from(((), ((0, 1), (2, 3)), ((0, 1, 2, 3),), ((0, 1, 2),)))
    nodes = tuple(
        node(f"n{n}", data.draw(devices()), domains=data.draw(domains), fabrics=data.draw(fabrics),
             state=data.draw(st.sampled_from((NodeState.CONNECTED, NodeState.CONNECTED, NodeState.LOST))))
        for n in range(data.draw(st.integers(1, 4)))
    )  # fmt: skip
    taken = {n.id: dict.fromkeys(data.draw(st.sets(st.integers(0, 5), max_size=3)), "x") for n in nodes}
    count = data.draw(st.integers(1, 3))
    gpus = data.draw(st.integers(1, 4))
    classes = tuple(data.draw(st.lists(st.sampled_from(("h100-80g", "l40s-45g")), unique=True, min_size=1)))
    of = wide(count, gpus, device_class=classes) if count > 1 else profile("p", gpus, classes)
    able = {
        name: [n for n in nodes if n.state is NodeState.CONNECTED and _possible(of, n, name, taken[n.id])]
        for name in classes
    }
    possible = any(
        count == 1 or set.intersection(*(_rails(n) for n in some))
        for name in classes
        for some in itertools.combinations(able[name], count)
    )
    assert isinstance(put(model("m", 1, of), nodes, taken), Placement) == possible
