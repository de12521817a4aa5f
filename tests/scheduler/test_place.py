from __future__ import annotations

from attrs import evolve

from llmgw.hardware.inventory import MigInstance
from llmgw.scheduler.place import NoPlace, Part, Placement, place, views
from tests.scheduler.clusters import device, fabric, model, node, profile, wide


def eight(name: str) -> tuple:
    return tuple(device(n) for n in range(8))


def test_packs_where_least_is_left() -> None:
    nodes = (node("big", eight("big")), node("small", (device(0), device(1))))
    found = place(model(), views(nodes, {}), {})
    assert isinstance(found, Placement)
    assert found.parts == (Part("small", (0,)),)
    assert found.reason.endswith("of 2 nodes that could")


def test_a_group_stays_in_one_nvlink_domain_and_takes_the_smallest() -> None:
    here = node("n1", tuple(device(n) for n in range(6)), domains=((0, 1, 2, 3), (4, 5)))
    found = place(model("m", 1, profile(gpus=2)), views((here,), {}), {})
    assert isinstance(found, Placement)
    assert found.parts[0].devices == (4, 5)
    nowhere = place(model("m", 1, profile(gpus=5)), views((here,), {}), {})
    assert isinstance(nowhere, NoPlace)
    assert nowhere.candidates[0].refusals[0].reason == (
        "5 devices of one NVLink domain needed, domains have 4 free of 4, 2 free of 2"
    )


def test_an_earlier_profile_wins_and_classes_are_not_mixed() -> None:
    here = node("n1", (device(0, "l40s-45g"), device(1), device(2)))
    first = profile("big", 2, ("l40s-45g", "h100-80g"))
    found = place(model("m", 1, first, profile("small")), views((here,), {}), {})
    assert isinstance(found, Placement)
    assert (found.profile.name, found.parts[0].devices) == ("big", (1, 2))


def test_memory_and_fp8_are_looked_at() -> None:
    here = node("n1", (device(0, "a100-80g"),))
    for wanted, said in (
        (profile(classes=("a100-80g",), quantization="fp8"), "fp8 needs compute capability 8.9, gpu-0 has 8.0"),
        (profile(classes=("a100-80g",), memory_gib=90.0), "gpu-0 has 79.6 GiB, 90 GiB are needed"),
    ):
        found = place(model("m", 1, wanted), views((here,), {}), {})
        assert isinstance(found, NoPlace)
        assert said in found.candidates[0].refusals[0].reason


def test_a_mig_replica_gets_exactly_one_instance() -> None:
    name = "a100-80g-mig-3g.40gb"
    here = node("n1", (device(1000, name), device(1001, name)))
    found = place(model("m", 1, profile(classes=(name,))), views((here,), {"n1": {1000: "x"}}), {})
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
    found = place(model("m", 1, profile(classes=(name,))), views((here,), {"n1": {1000: "x"}}), {})
    assert isinstance(found, Placement)
    assert found.parts[0].devices == (1002,)
    none = place(model("m", 1, profile(classes=(name,))), views((here,), {"n1": {1000: "x", 1002: "y"}}), {})
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
    found = place(model("m", 1, wide(gpus=2)), views(nodes, {}), {})
    assert isinstance(found, Placement)
    assert (found.parts, found.fabric) == ((Part("n2", (0, 1)), Part("n4", (0, 1))), "rack-2")
    assert found.reason == "profile wide on n2: gpu-0, gpu-1; n4: gpu-0, gpu-1 (h100-80g) over fabric rack-2"


def test_no_fabric_over_enough_nodes_names_who_is_where() -> None:
    nodes = (
        node("n1", fabrics=(fabric("rack-1", 2),)),
        node("n2", fabrics=(fabric("rack-1", 1),)),
        node("n3", fabrics=(fabric("rack-1", fault="mlx5_1 port 1 is down"),)),
        node("n4"),
        node("n5", (device(0, "l40s-45g"),), fabrics=(fabric("rack-1", 2),)),
    )
    found = place(model("m", 1, wide()), views(nodes, {}), {})
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
    found = place(model("m", 1, wide()), views(nodes, {}), {})
    assert isinstance(found, Placement)
    assert (found.fabric, [p.node for p in found.parts]) == ("small", ["z0", "z1"])
    mixed = (node("n1", fabrics=(fabric(),)), node("n2", (device(0, "l40s-45g"),), fabrics=(fabric(),)))
    both = wide(device_class=("h100-80g", "l40s-45g"))
    assert isinstance(place(model("m", 1, both), views(mixed, {}), {}), NoPlace)
