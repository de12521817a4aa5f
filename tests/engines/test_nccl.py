from __future__ import annotations

import ipaddress

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.engines.nccl import VARIABLES, address_range, interfaces_selected, nccl_env, ports_selected
from llmgw.hardware.fabric import FabricRule, LinkLayer, gid_index, resolve
from llmgw.hardware.inventory import Adapter, AdapterKind, Fabric, FabricPort, Gid, Port


def adapter(name: str, *ports: tuple[int, str, str]) -> Adapter:
    return Adapter(name, AdapterKind.INFINIBAND, tuple(Port(*port) for port in ports or ((1, "active", "infiniband"),)))


def roce(*addresses: tuple[int, str]) -> Fabric:
    ports = tuple(FabricPort(f"m{n}", 1, Gid(index, text, "e")) for n, (index, text) in enumerate(addresses))
    return Fabric("f", AdapterKind.ROCE, ports)


THERE = [
    adapter("mlx5_1", (1, "active", "infiniband"), (2, "active", "ethernet")),
    adapter("mlx5_10"),
    adapter("mlx5_2"),
]


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, "mlx5_1:1 mlx5_1:2 mlx5_10:1 mlx5_2:1"),
        ("", "mlx5_1:1 mlx5_1:2 mlx5_10:1 mlx5_2:1"),
        ("=", "mlx5_1:1 mlx5_1:2 mlx5_10:1 mlx5_2:1"),  # nothing named is everything
        ("^", ""),
        ("mlx5_1", "mlx5_1:1 mlx5_1:2 mlx5_10:1"),
        ("mlx5_1:1", "mlx5_1:1 mlx5_10:1"),
        ("=mlx5_1", "mlx5_1:1 mlx5_1:2"),
        ("=mlx5_1:2", "mlx5_1:2"),
        ("=mlx5_1:2,mlx5_2", "mlx5_1:2 mlx5_2:1"),
        ("^mlx5_1", "mlx5_2:1"),
        ("^=mlx5_1:1", "mlx5_1:2 mlx5_10:1 mlx5_2:1"),
        ("=^mlx5_1", ""),
        ("=mlx5_1:1,=mlx5_2:1", "mlx5_1:1"),  # once at the front, not per item
        ("=mlx5_1:1, mlx5_2:1", "mlx5_1:1"),  # a space is part of the name
        ("=mlx5_1:x", ""),
        ("=mlx5_2:1:0:3,:1,,mlx5_10", "mlx5_10:1 mlx5_2:1"),
    ],
)
def test_what_nccl_makes_of_a_list_of_adapters(value: str | None, names: str) -> None:
    assert {f"{name}:{port}" for name, port in ports_selected(value, THERE)} == set(names.split())


def test_ports_that_nccl_never_takes() -> None:
    dead = adapter("a", (1, "down", "infiniband"), (2, "active", "unspecified"), (3, "init", "ethernet"))
    assert ports_selected(None, [dead]) == frozenset()


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, "eth0 bond0 bond0.2973 lo"),
        ("e", "eth0 bond0 bond0.2973 lo"),  # too short to be looked at
        ("eth", "eth0"),
        ("bond0", "bond0 bond0.2973"),
        ("=bond0", "bond0"),
        ("=bond0,lo", "bond0 lo"),
        ("^bond0,lo", "eth0"),
        ("=bond0:1", "bond0"),
    ],
)
def test_what_nccl_makes_of_interfaces(value: str | None, names: str) -> None:
    assert " ".join(interfaces_selected(value, ["eth0", "bond0", "bond0.2973", "lo"])) == names


def test_the_environment_of_infiniband() -> None:
    fabric = Fabric("f", AdapterKind.INFINIBAND, (FabricPort("mlx5_10", 1), FabricPort("mlx5_9", 1)))
    assert nccl_env(fabric, "eth0") == {
        "NCCL_IB_HCA": "=mlx5_9:1,mlx5_10:1", "NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_DEBUG": "INFO",
    }  # fmt: skip


@pytest.mark.parametrize("fabric", [None, Fabric("f", AdapterKind.UNKNOWN, ())])
def test_no_port_is_no_list_but_tcp(fabric: Fabric | None) -> None:
    assert nccl_env(fabric, "lo") == {
        "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"
    }  # fmt: skip
    assert nccl_env(fabric, "") == {"NCCL_IB_DISABLE": "1"}


def test_roce_addresses_by_index_where_one_fits_all_and_else_by_range() -> None:
    same, differ = roce((3, "10.30.0.1"), (3, "10.30.1.1")), roce((3, "10.30.0.1"), (5, "10.30.1.1"))
    assert nccl_env(same, "e0")["NCCL_IB_GID_INDEX"] == "3"
    assert "NCCL_IB_ADDR_RANGE" not in nccl_env(same, "e0")
    assert nccl_env(differ, "e0")["NCCL_IB_ADDR_RANGE"] == "10.30.0.0/23"
    assert "NCCL_IB_GID_INDEX" not in nccl_env(differ, "e0")
    assert address_range(roce((1, "10.0.0.1"))) == "10.0.0.1/32"
    assert address_range(roce((1, "x"))) is None
    assert address_range(Fabric("f", AdapterKind.ROCE, ())) is None


# Names of which some begin with others, as in real machines.
NAMES = st.sampled_from(
    ["mlx5_1", "mlx5_10", "mlx5_11", "mlx5_1x", "mlx5", "mlx5_bond_0", "rocep1s0", "rocep1s0f0", "ib0"]
)
GIDS = st.lists(
    st.builds(Gid, st.integers(0, 9), st.sampled_from(["10.0.0.1", "10.30.0.1", "10.31.7.1"]), st.just("e")), max_size=2
).map(tuple)
PORTS = st.builds(
    Port, st.just(1), st.sampled_from(["active", "active", "active", "down"]),
    st.sampled_from(["infiniband", "infiniband", "ethernet", "unspecified"]), gids=GIDS,
)  # fmt: skip
ADAPTERS = st.lists(
    st.builds(
        Adapter, NAMES, st.just(AdapterKind.INFINIBAND) | st.sampled_from(AdapterKind),
        st.lists(PORTS, min_size=1, max_size=2).map(lambda ports: tuple(evolve(p, number=n + 1) for n, p in enumerate(ports))),
        virtual=st.booleans(), bond=st.sampled_from(["", "", "bond0"]),
    ),
    min_size=2, max_size=8, unique_by=lambda a: a.name,
)  # fmt: skip
RULES = st.builds(
    FabricRule,
    st.just("f"),
    st.lists(NAMES | NAMES.map(lambda name: f"{name}:1"), max_size=3).map(tuple),
    st.none() | st.sampled_from(LinkLayer),
    st.sampled_from([(), ("10.30.0.0/16",)]),
)


@given(RULES, ADAPTERS)
def test_what_is_emitted_selects_exactly_the_fabric_s_ports(rule: FabricRule, adapters: list[Adapter]) -> None:
    fabric = resolve(rule, adapters)
    env = nccl_env(fabric, "eth0")
    assert set(env) <= VARIABLES
    assert ("NCCL_IB_HCA" in env) != ("NCCL_IB_DISABLE" in env)
    if fabric.ports:
        assert ports_selected(env["NCCL_IB_HCA"], adapters) == {(p.adapter, p.port) for p in fabric.ports}
        assert ("NCCL_IB_GID_INDEX" in env) == (gid_index(fabric) is not None)
    if (network := env.get("NCCL_IB_ADDR_RANGE")) is not None:
        inside = ipaddress.ip_network(network)
        assert all(ipaddress.ip_address(p.gid.address) in inside for p in fabric.ports if p.gid)
    assert interfaces_selected(env["NCCL_SOCKET_IFNAME"], ["eth", "eth0", "eth0.7", "eth01"]) == ("eth0",)


@given(st.text("mlx5_1,:^= 2", max_size=20), ADAPTERS)
def test_any_list_selects_among_what_is_active(value: str, adapters: list[Adapter]) -> None:
    everything = ports_selected(None, adapters)
    taken = ports_selected(value, adapters)
    assert taken <= everything
    if not value.startswith("^"):
        assert ports_selected(f"^{value}", adapters) == everything - taken
