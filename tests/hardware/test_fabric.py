from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.hardware.fabric import (
    FabricRule,
    LinkLayer,
    fabric_warnings,
    gid_index,
    hca_list,
    natural,
    resolve,
    resolve_all,
)
from llmgw.hardware.inventory import Adapter, AdapterKind, Fault, Gid, Port

FABRIC = Path(__file__).resolve().parents[3] / "shared" / "fixtures" / "fabric"
IB, ETH = LinkLayer.INFINIBAND, LinkLayer.ETHERNET


def ib(name: str, state: str = "active", **said: Any) -> Adapter:
    port = Port(
        1, state, "infiniband", 400.0 if state == "active" else None, "LinkUp" if state == "active" else "Polling"
    )
    return evolve(Adapter(name, AdapterKind.INFINIBAND, (port,)), **said)


def roce(name: str, *addresses: str, state: str = "active", index: int = 3, trouble: str = "", **said: Any) -> Adapter:
    gids = tuple(Gid(index + n, address, f"{name}-if") for n, address in enumerate(addresses))
    port = Port(
        1, state, "ethernet", 400.0, "LinkUp" if state == "active" else "Disabled", gids=gids, gid_trouble=trouble
    )
    return evolve(Adapter(name, AdapterKind.ROCE, (port,), netdevs=(f"{name}-if",)), **said)


def names(rule: FabricRule, *adapters: Adapter) -> list[str]:
    return [p.adapter for p in resolve(rule, adapters).ports]


def faults(rule: FabricRule, *adapters: Adapter) -> list[tuple[str, str]]:
    return [(f.code, f.reason) for f in resolve(rule, adapters).faults]


def test_names_are_exact_and_a_prefix_drags_nothing_in() -> None:
    there = [ib(f"mlx5_{n}") for n in (1, 2, 10, 11)]
    found = resolve(FabricRule("compute", adapters=("mlx5_1", "mlx5_2")), there)
    assert hca_list(found) == ("mlx5_1:1", "mlx5_2:1")
    assert (found.kind, found.faults) == (AdapterKind.INFINIBAND, ())


def test_one_port_of_an_adapter() -> None:
    two = Adapter("mlx4_0", AdapterKind.INFINIBAND, (Port(1, "down", "ethernet"), Port(2, "active", "infiniband")))
    assert hca_list(resolve(FabricRule("f", adapters=("mlx4_0:2",)), [two])) == ("mlx4_0:2",)
    assert faults(FabricRule("f", adapters=("mlx4_0:7",)), two) == [("adapter-missing", "mlx4_0 has no port 7")]
    assert hca_list(resolve(FabricRule("f", link_layer=IB), [two])) == ("mlx4_0:2",)
    assert faults(FabricRule("f", adapters=("mlx4_0",), link_layer=IB), two) == []
    (fault,) = resolve(FabricRule("f", adapters=("mlx4_0",)), [two]).faults
    assert (fault.reason, "mlx4_0:2" in fault.remedy) == ("mlx4_0 port 1 is down", True)


def test_two_fabrics_and_a_front_end_that_are_all_near() -> None:
    there = [ib(f"mlx5_{n}") for n in (0, 3, 4, 5, 6, 9, 10, 11)]
    there += [roce(f"mlx5_{n}", state="down") for n in (1, 2)] + [
        roce("mlx5_7", trouble="no address on e7"),
        roce("mlx5_8", "10.0.0.8"),
    ]
    rules = (
        FabricRule("ib", link_layer=IB),
        FabricRule("eth", adapters=("mlx5_7", "mlx5_8")),
        FabricRule("all", link_layer=ETH),
    )
    first, second, third = resolve_all(rules, there)
    assert [p.adapter for p in first.ports] == [f"mlx5_{n}" for n in (0, 3, 4, 5, 6, 9, 10, 11)]
    assert first.faults == ()
    assert [p.adapter for p in second.ports] == ["mlx5_8"]
    assert [(f.code, f.reason) for f in second.faults] == [("no-gid", "mlx5_7 port 1: no address on e7")]
    # What is down is said where it was named, not where a link layer happens to match.
    assert [f.code for f in third.faults] == ["no-gid"]
    assert faults(FabricRule("f", adapters=("mlx5_1",)), *there) == [("port-down", "mlx5_1 port 1 is down (Disabled)")]


def test_an_interface_that_is_down_says_nothing_of_an_infiniband_port() -> None:
    assert names(FabricRule("ib", link_layer=IB), *(ib(f"mlx5_{n}", netdevs=(f"ib{n}",)) for n in range(8))) == [
        f"mlx5_{n}" for n in range(8)
    ]


def test_sibling_nodes_are_resolved_each_for_itself() -> None:
    rule = FabricRule("rails", subnets=("10.30.0.0/16",))
    a = [roce(f"mlx5_{n}", f"10.30.{n}.1") for n in (0, 1, 2)] + [roce("mlx5_3", "192.168.1.1")]
    b = [roce("mlx5_0", "192.168.1.2"), *(roce(f"mlx5_{n}", f"10.30.{n}.2") for n in (1, 5, 7))]
    assert (names(rule, *a), names(rule, *b)) == (["mlx5_0", "mlx5_1", "mlx5_2"], ["mlx5_1", "mlx5_5", "mlx5_7"])


def test_the_gid_is_the_one_of_the_fabric_s_subnet() -> None:
    (port,) = resolve(FabricRule("f", subnets=("10.2.0.0/16",)), [roce("mlx5_0", "10.1.0.1", "10.2.0.1")]).ports
    assert port.gid == Gid(4, "10.2.0.1", "mlx5_0-if")


def test_an_infiniband_port_is_in_a_subnet_by_its_interface() -> None:
    rule = FabricRule("f", subnets=("10.7.0.0/16",))
    assert names(
        rule, ib("mlx5_0", addresses=("10.7.0.1/16",)), ib("mlx5_1", addresses=("10.8.0.1/16",)), ib("mlx5_2")
    ) == ["mlx5_0"]
    named = FabricRule("f", adapters=("mlx5_2",), subnets=("10.7.0.0/16",))
    assert [code for code, _ in faults(named, ib("mlx5_2"))] == ["no-port"]
    assert [code for code, _ in faults(named, ib("mlx5_2", "down"))] == ["port-down"]


def test_a_self_assigned_address_does_not_contribute() -> None:
    bad = roce("mlx5_1", trouble="self-assigned address 169.254.7.9 on e1")
    found = resolve(FabricRule("f", link_layer=ETH), [roce("mlx5_0", "10.0.0.1"), bad])
    assert hca_list(found) == ("mlx5_0:1",)
    assert found.faults[0].reason == "mlx5_1 port 1: self-assigned address 169.254.7.9 on e1"


def test_an_address_of_another_network_says_so() -> None:
    assert (
        faults(FabricRule("f", adapters=("mlx5_0",), subnets=("10.9.0.0/16",)), roce("mlx5_0", "10.1.0.1"))[0][0]
        == "no-port"
    )


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (AdapterKind.SWITCH_MANAGEMENT, "a bridge that manages the NVLink switches"),
        (AdapterKind.SOFTWARE, "software RDMA"),
        (AdapterKind.EFA, "an EFA adapter"),
        (AdapterKind.IWARP, "an iWARP adapter"),
        (AdapterKind.UNKNOWN, "of a kind that could not be told"),
    ],
)
def test_what_can_never_be_a_fabric(kind: AdapterKind, said: str) -> None:
    odd = evolve(ib("odd0"), kind=kind)
    assert names(FabricRule("f", link_layer=IB), odd) == []
    ((code, reason),) = faults(FabricRule("f", adapters=("odd0",)), odd)
    assert code == "not-a-fabric"
    assert said in reason


def test_software_rdma_does_not_stand_in_for_an_adapter_that_is_down() -> None:
    there = [evolve(roce("rxe0", "10.0.0.1"), kind=AdapterKind.SOFTWARE), roce("mlx5_0", state="down")]
    assert faults(FabricRule("f", link_layer=ETH), *there) == [
        ("no-port", "no active port matches (link layer ethernet); no port of this node is active")
    ]


def test_virtual_functions_and_bond_members_only_when_named() -> None:
    there = [
        roce("mlx5_0", "10.0.0.1"),
        roce("mlx5_1", "10.0.0.2", virtual=True),
        roce("mlx5_2", "10.0.0.3", bond="bond0"),
        roce("mlx5_bond_0", "10.0.0.4", bond="bond1"),
        ib("mlx5_9", bond="bond2"),
    ]
    assert names(FabricRule("f", link_layer=ETH), *there) == ["mlx5_0", "mlx5_bond_0"]
    assert names(FabricRule("f", subnets=("10.0.0.0/8",)), *there) == ["mlx5_0", "mlx5_bond_0"]
    assert names(FabricRule("f", adapters=("mlx5_1", "mlx5_2")), *there) == ["mlx5_1", "mlx5_2"]
    # A bond of IPoIB interfaces is nothing to the ports below it.
    assert names(FabricRule("f", link_layer=IB), *there) == ["mlx5_9"]


def test_members_of_a_bond_beside_ports_of_none_are_said() -> None:
    there = [roce("mlx5_0", "10.0.0.1"), roce("mlx5_2", "10.0.0.3", bond="bond0")]
    found = resolve(FabricRule("f", adapters=("mlx5_0", "mlx5_2")), there)
    assert [(w.code, w.reason) for w in fabric_warnings([found], there)] == [
        ("bond-members", "fabric f: mlx5_2 are members of a bond, and others are not")
    ]
    # Of an adapter with a port of each kind, the port that the fabric has decides.
    both = Port(1, "active", "ethernet", 400.0, gids=(Gid(3, "10.0.0.1", "e"),)), Port(2, "active", "infiniband", 400.0)
    there = [Adapter("mlx4_0", AdapterKind.INFINIBAND, both, bond="bond0"), ib("mlx5_9")]
    found = resolve(FabricRule("f", adapters=("mlx4_0:2", "mlx5_9")), there)
    assert (len(found.ports), fabric_warnings([found], there)) == (2, ())


def test_a_flood_of_virtual_functions_is_in_no_fabric_and_no_fault() -> None:
    there = [ib("mlx5_0"), ib("mlx5_1")]
    there += [ib(f"mlx5_{n}", "active" if n < 5 else "down", virtual=True) for n in range(2, 36)]
    assert hca_list(resolve(FabricRule("f", link_layer=IB), there)) == ("mlx5_0:1", "mlx5_1:1")
    assert faults(FabricRule("f", link_layer=IB), *there) == []
    rule = FabricRule("f", adapters=("mlx5_2", "mlx5_7"))
    assert (names(rule, *there), [code for code, _ in faults(rule, *there)]) == (["mlx5_2"], ["port-down"])


def test_a_port_that_is_not_wholly_active_is_not_taken_as_nccl_does_not_take_it() -> None:
    there = [ib("mlx5_0", "active_defer"), ib("mlx5_1", "init")]
    assert names(FabricRule("f", link_layer=IB), *there) == []
    assert [reason for _, reason in faults(FabricRule("f", adapters=("mlx5_0", "mlx5_1")), *there)] == [
        "mlx5_0 port 1 is active_defer (Polling)",
        "mlx5_1 port 1 is init (Polling)",
    ]
    assert "subnet manager" in resolve(FabricRule("f", adapters=("mlx5_1",)), there).faults[0].remedy


def test_what_is_named_and_has_lost_its_address_is_missed_though_the_rule_has_subnets() -> None:
    rule = FabricRule("f", adapters=("mlx5_0", "mlx5_1", "mlx5_2"), subnets=("10.30.0.0/16",))
    down, bare = roce("mlx5_1", state="down"), roce("mlx5_2", trouble="no address on e2", addresses=("169.254.1.2/16",))
    found = resolve(rule, [roce("mlx5_0", "10.30.0.1"), down, bare])
    assert hca_list(found) == ("mlx5_0:1",)
    assert [f.reason for f in found.faults] == [
        "mlx5_1 port 1 is down (Disabled)",
        "mlx5_2 port 1: no address on e2",
    ]
    # What is known to be of another network is not missed.
    other = roce("mlx5_1", "192.168.0.1", state="down")
    assert faults(rule, roce("mlx5_0", "10.30.0.1"), other, roce("mlx5_2", "10.30.0.2")) == []


def test_of_two_ports_the_gids_tell_which_is_of_the_subnet() -> None:
    ports = tuple(
        Port(n, "active", "ethernet", gids=(Gid(3, address, f"e{n}"),))
        for n, address in ((1, "10.30.0.1"), (2, "10.40.0.1"))
    )
    two = Adapter("mlx4_0", AdapterKind.ROCE, ports, addresses=("10.30.0.1/16", "10.40.0.1/16"))
    found = resolve(FabricRule("f", subnets=("10.40.0.0/16",)), [two])
    assert (hca_list(found), found.faults) == (("mlx4_0:2",), ())


def test_one_bad_subnet_does_not_hide_the_others() -> None:
    assert names(FabricRule("f", subnets=("x", "fd00::/8", "10.0.0.0/8")), roce("mlx5_0", "10.0.0.1")) == ["mlx5_0"]


def test_more_than_nccl_opens() -> None:
    assert faults(FabricRule("f", link_layer=IB), *(ib(f"mlx5_{n}") for n in range(33)))[0] == (
        "too-many-adapters", "33 ports match, NCCL opens 32",
    )  # fmt: skip
    assert faults(FabricRule("f", link_layer=IB), *(ib(f"mlx5_{n}") for n in range(32))) == []


def test_both_link_layers_at_once_are_none() -> None:
    found = resolve(FabricRule("f", adapters=("mlx5_0", "mlx5_1")), [ib("mlx5_0"), roce("mlx5_1", "10.0.0.1")])
    assert (found.ports, [f.code for f in found.faults]) == ((), ["mixed-link-layers"])
    bare = resolve(FabricRule("f", adapters=("mlx5_0", "mlx5_1")), [ib("mlx5_0"), roce("mlx5_1")])
    assert (bare.ports, [f.code for f in bare.faults]) == ((), ["mixed-link-layers"])


def test_a_missing_adapter_names_those_that_are_there() -> None:
    assert faults(FabricRule("f", adapters=("mlx5_9",)), ib("mlx5_0")) == [
        ("adapter-missing", "mlx5_9 is not on this node, there is mlx5_0")
    ]


def test_an_adapter_that_verbs_cannot_open() -> None:
    shut = ib("mlx5_0", faults=(Fault("no-verbs", "sysfs shows it", "load ib_uverbs"),))
    assert faults(FabricRule("f", adapters=("mlx5_0",)), shut) == [("no-verbs", "mlx5_0: sysfs shows it")]
    assert [f.code for f in resolve(FabricRule("f", link_layer=IB), [shut]).faults] == ["no-verbs"]


def test_indices_that_differ_are_no_index() -> None:
    same = resolve(FabricRule("f", link_layer=ETH), [roce("a", "10.0.0.1"), roce("b", "10.0.1.1")])
    assert gid_index(same) == 3
    there = [roce("a", "10.0.0.1"), roce("b", "10.0.1.1", index=4)]
    differing = resolve(FabricRule("f", link_layer=ETH), there)
    assert gid_index(differing) is None
    (warning,) = fabric_warnings([differing], there)
    assert (warning.code, "a 3, b 4" in warning.reason) == ("mixed-gid-index", True)


def test_ports_that_differ_are_said_and_allowed() -> None:
    slow = ib("mlx5_1", firmware="28.2", board="MT4129")
    slow = evolve(slow, ports=(evolve(slow.ports[0], rate_gbps=200.0),))
    there = [ib("mlx5_0", firmware="28.1", board="MT4129"), slow]
    found = resolve(FabricRule("f", link_layer=IB), there)
    assert (len(found.ports), found.faults) == (2, ())
    assert [(w.code, w.reason) for w in fabric_warnings([found], there)] == [
        ("mixed-rates", "fabric f: its ports run at 200 Gb/s and 400 Gb/s"),
        ("mixed-firmware", "fabric f: MT4129 adapters have firmware 28.1 and 28.2"),
    ]


states = st.sampled_from(["active", "down", "init", "active_defer", "unknown"])
gids = st.lists(
    st.builds(Gid, st.integers(0, 9), st.sampled_from(["10.0.0.1", "10.30.0.1", "x"]), st.just("e")), max_size=3
)
ports = st.builds(
    Port, st.integers(1, 2), states, st.sampled_from(["infiniband", "ethernet", "unspecified", ""]), st.none() | st.just(400.0),
    gids=gids.map(tuple),
)  # fmt: skip
adapters = st.lists(
    st.builds(
        Adapter, st.sampled_from(["mlx5_0", "mlx5_1", "mlx5_10", "rxe0"]), st.sampled_from(AdapterKind),
        st.lists(ports, max_size=2, unique_by=lambda p: p.number).map(tuple), virtual=st.booleans(),
        bond=st.sampled_from(["", "bond0"]), addresses=st.sampled_from([(), ("10.30.0.9/16",)]),
    ),
    unique_by=lambda a: a.name,
)  # fmt: skip
rules = st.builds(
    FabricRule, st.just("f"), st.lists(st.sampled_from(["mlx5_0", "mlx5_1:1", "mlx5_9"]), max_size=2, unique=True).map(tuple),
    st.none() | st.sampled_from(LinkLayer), st.lists(st.sampled_from(["10.30.0.0/16", "10.0.0.0/8"]), max_size=1).map(tuple),
)  # fmt: skip


@given(rules, adapters.flatmap(lambda there: st.tuples(st.just(there), st.permutations(there))))
def test_a_fabric_has_only_ports_that_can_carry_it(rule: FabricRule, both: tuple[list[Adapter], list[Adapter]]) -> None:
    there, shuffled = both
    found = resolve(rule, there)
    fabric_warnings([found], there)
    by_name = {a.name: a for a in there}
    layers = set()
    for used in found.ports:
        adapter = by_name[used.adapter]
        port = next(p for p in adapter.ports if p.number == used.port)
        layers.add(port.link_layer)
        assert adapter.kind in (AdapterKind.INFINIBAND, AdapterKind.ROCE)
        assert port.state == "active"
        assert rule.link_layer is None or port.link_layer == rule.link_layer
        assert not rule.adapters or used.adapter in rule.adapters or f"{used.adapter}:{used.port}" in rule.adapters
        assert (used.gid in port.gids) if port.link_layer == "ethernet" else used.gid is None
        if adapter.virtual or (adapter.bond and port.link_layer == "ethernet"):
            assert rule.adapters
    assert len(layers) <= 1
    assert found.ports or found.faults
    assert hca_list(found) == tuple(f"{p.adapter}:{p.port}" for p in found.ports)
    assert resolve(rule, shuffled) == found


STATE = re.compile(r"CA '(\S+)'.*?State: (\w+).*?Physical state: (\w+).*?Rate: (\d+).*?Link layer: (\w+)", re.DOTALL)


@pytest.mark.skipif(not FABRIC.exists(), reason="no captures here")
def test_captured_mixed_machine() -> None:
    text = (FABRIC / "ibstat/h100-mixed-ib-eth.txt").read_text()
    there = []
    for name, state, physical, rate, layer in STATE.findall(text):
        kind = AdapterKind.INFINIBAND if layer == "InfiniBand" else AdapterKind.ROCE
        port = Port(
            1,
            state.lower(),
            layer.lower(),
            float(rate) if state == "Active" else None,
            physical,
            gid_trouble="no address",
        )
        there.append(Adapter(name, kind, (port,)))
    there.sort(key=lambda a: natural(a.name))
    assert len(there) == 12
    found, eth = resolve_all((FabricRule("ib", link_layer=IB), FabricRule("eth", adapters=("mlx5_7", "mlx5_8"))), there)
    assert [p.adapter for p in found.ports] == [f"mlx5_{n}" for n in (0, 3, 4, 5, 6, 9, 10, 11)]
    assert [f.reason for f in eth.faults] == ["mlx5_7 port 1: no address", "mlx5_8 port 1: no address"]
    assert faults(FabricRule("f", adapters=("mlx5_1",)), *there) == [("port-down", "mlx5_1 port 1 is down (Disabled)")]
