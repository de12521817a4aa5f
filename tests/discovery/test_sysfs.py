from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.discovery.sysfs import DiskReader, adapter_warnings, read_adapters
from llmgw.hardware.fabric import FabricRule, LinkLayer, hca_list, natural, resolve
from llmgw.hardware.inventory import Adapter, AdapterKind, Gid
from tests.discovery.trees import ROOT, Tree, adapter, gids, local, mapped, port, usual

FABRIC = Path(__file__).resolve().parents[3] / "shared" / "fixtures" / "fabric"
CAPTURES = FABRIC / "sysfs"
Entry = tuple[int, str, str | None, str | None]


def read(
    *files: Mapping[str, str | bytes], links: dict[str, str] | None = None, **addresses: str
) -> tuple[Adapter, ...]:
    tree = Tree({k: v for some in files for k, v in some.items()}, links)
    return read_adapters(ROOT, tree, {netdev: (address,) for netdev, address in addresses.items()})


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({**port("mlx5_0"), **adapter("mlx5_0", node_type="1: CA", device__vendor="0x15b3")}, AdapterKind.INFINIBAND),
        ({**port("mlx5_0", "Ethernet"), **adapter("mlx5_0", device__vendor="0x15b3")}, AdapterKind.ROCE),
        (
            {**port("mlx5_0"), **adapter("mlx5_0", device__vpd=b"\x82junk SMDL=SW_MNG \xff")},
            AdapterKind.SWITCH_MANAGEMENT,
        ),
        (
            {**port("i40iw0", "Ethernet"), **adapter("i40iw0", node_type="4: RNIC", device__vendor="0x8086")},
            AdapterKind.IWARP,
        ),
        ({**port("rdmap85s0", "Unspecified"), **adapter("rdmap85s0", device__vendor="0x1d0f")}, AdapterKind.EFA),
        (port("rxe0", "Ethernet"), AdapterKind.SOFTWARE),
        (port("siw_lo", "Ethernet"), AdapterKind.SOFTWARE),
        ({**port("lab0", "Ethernet"), **adapter("lab0", parent="eth0")}, AdapterKind.SOFTWARE),
        ({**port("lab0", "Ethernet"), **adapter("lab0", fw_ver="0.0.0")}, AdapterKind.SOFTWARE),
        ({**port("mlx5_0"), **adapter("mlx5_0", fw_ver="0.0.0", device__vendor="0x15b3")}, AdapterKind.INFINIBAND),
        (port("i40iw0"), AdapterKind.IWARP),
        ({**port("usnic_0", "Ethernet"), **adapter("usnic_0", node_type="6: usNIC UDP")}, AdapterKind.UNKNOWN),
        ({**port("hfi1_0"), **adapter("hfi1_0", node_type="1: CA")}, AdapterKind.INFINIBAND),
        (adapter("mlx5_0", node_type="1: CA"), AdapterKind.UNKNOWN),
    ],
)
def test_kinds(files: dict[str, str | bytes], kind: AdapterKind) -> None:
    (found,) = read(files)
    assert found.kind is kind


def test_an_irdma_port_is_roce_though_it_has_a_lid_and_no_type() -> None:
    (found,) = read(
        port("rocep216s0f0", "Ethernet", "1: DOWN", rate="", physical="3: Disabled", lid="0x1"),
        adapter("rocep216s0f0", node_type="1: CA", device__vendor="0x8086"),
    )
    assert (found.kind, found.board) == (AdapterKind.ROCE, "")
    assert (found.ports[0].rate_gbps, found.ports[0].state, found.ports[0].physical_state) == (None, "down", "Disabled")


def test_the_link_layer_is_the_port_s() -> None:
    (found,) = read(port("mlx4_0", "Ethernet", "1: DOWN", rate="10 Gb/sec (4X)"), port("mlx4_0", number=2))
    assert [(p.number, p.link_layer, p.rate_gbps) for p in found.ports] == [
        (1, "ethernet", None),
        (2, "infiniband", 400),
    ]
    assert found.kind is AdapterKind.INFINIBAND


def test_switch_management_is_told_before_its_ports_are_read() -> None:
    tree = Tree({**port("mlx5_0", "Ethernet"), **gids("mlx5_0", (0, local(1), "RoCE v2", "x")),
                 **adapter("mlx5_0", device__vpd=b"SMDL=SW_MNG", ports__1__counters__symbol_error="0")})  # fmt: skip
    (found,) = read_adapters(ROOT, tree)
    assert found.ports[0].gids == ()
    assert tree.read[0].endswith("device/vpd")
    assert not any("/gids/" in path or "/counters/" in path for path in tree.read)
    assert [w.reason for w in adapter_warnings((found,))] == ["mlx5_0 manages the NVLink switches and is no fabric"]
    (both,) = adapter_warnings((found, evolve(found, name="mlx5_1")))
    assert both.reason == "mlx5_0, mlx5_1 manage the NVLink switches and are no fabric"


def test_counters_that_refuse_cost_nothing_as_they_are_not_read() -> None:
    tree = Tree(
        {**usual("mlx5_0", "10.0.0.1", "e0"), **adapter("mlx5_0", ports__1__counters__symbol_error="N/A (no PMA)")}
    )
    (found,) = read_adapters(ROOT, tree)
    assert found.ports[0].gids
    assert not any("counters" in path for path in tree.read)


def test_values_and_order() -> None:
    second, tenth = read(
        port("mlx5_10", lid="0x3a4"),
        port("mlx5_2", state="1: DOWN", rate="10 Gb/sec (4X)", lid="0xffff"),
        adapter("mlx5_2", device__numa_node="-1", fw_ver="28.1", hca_type="MT4129"),
        links={"sys/class/infiniband/mlx5_2/device": "/r/sys/devices/pci0000:10/0000:1a:00.0"},
    )
    assert (second.name, tenth.name) == ("mlx5_2", "mlx5_10")
    assert (second.ports[0].state, second.ports[0].lid, second.numa_node) == ("down", None, None)
    assert (second.firmware, second.board, second.pci_address) == ("28.1", "MT4129", "0000:1a:00.0")
    assert (tenth.ports[0].rate_gbps, tenth.ports[0].lid) == (400.0, 0x3A4)


def test_what_cannot_be_read_is_absent() -> None:
    (found,) = read(adapter("mlx5_0", ports__1__state=b"\xff", ports__x__state="4: ACTIVE"))
    assert [p.number for p in found.ports] == [1]
    assert (found.ports[0].state, found.ports[0].rate_gbps, found.ports[0].physical_state) == ("unknown", None, "")


@pytest.mark.parametrize(
    ("said", "rate"),
    [("25 Gb/sec (1X EDR)", 25), ("2.5 Gb/sec (1X)", 2.5), ("9" * 400 + " Gb/sec (4X)", None), ("N/A", None)],
)
def test_rates(said: str, rate: float | None) -> None:
    assert read(port("mlx5_0", rate=said))[0].ports[0].rate_gbps == rate


def test_an_adapter_that_vanishes_while_it_is_read_is_left_out() -> None:
    assert [a.name for a in read(port("mlx5_1"), adapter("mlx5_0", other=""))] == ["mlx5_1"]


def test_natural_order() -> None:
    assert sorted(["mlx5_10", "mlx5_2", "efa_0"], key=natural) == ["efa_0", "mlx5_2", "mlx5_10"]


def test_no_rdma_driver(tmp_path: Path) -> None:
    assert read_adapters(tmp_path) == ()


def gid_of(*files: Mapping[str, str | bytes]) -> tuple[list[Gid], str]:
    (found,) = read(*files)
    return list(found.ports[0].gids), found.ports[0].gid_trouble


def test_the_usual_gid() -> None:
    assert gid_of(usual("mlx5_0", "10.0.0.2", "e0")) == ([Gid(3, "10.0.0.2", "e0")], "")


def test_each_adapter_has_an_index_of_its_own() -> None:
    b = gids(
        "roceB",
        (0, local(2), "IB/RoCE v1", "e1"),
        (1, local(2), "RoCE v2", "e1"),
        (4, mapped("10.0.1.2"), "RoCE v2", "e1"),
    )
    first, second = read(usual("roceA", "10.0.0.2", "e0"), port("roceB", "Ethernet"), b)
    assert [g.index for a in (first, second) for g in a.ports[0].gids] == [3, 4]


def test_a_table_without_v1_entries() -> None:
    table = gids("hrn3_0", (0, local(1), "RoCE v2", "e0"), (1, mapped("10.9.0.7"), "RoCE v2", "e0"))
    assert gid_of(port("hrn3_0", "Ethernet"), table)[0] == [Gid(1, "10.9.0.7", "e0")]


def test_in_a_pod_the_first_entries_belong_to_somebody_else() -> None:
    table = gids("mlx5_0", (4, local(1), "IB/RoCE v1", "net1"), (5, local(1), "RoCE v2", "net1"),
                 (6, mapped("10.152.0.12"), "IB/RoCE v1", "net1"), (7, mapped("10.152.0.12"), "RoCE v2", "net1"))  # fmt: skip
    assert gid_of(port("mlx5_0", "Ethernet"), table)[0] == [Gid(7, "10.152.0.12", "net1")]
    elsewhere = {"sys/class/net/eth0/mtu": "1500"}
    trouble = "its GIDs belong to another network namespace"
    assert gid_of(port("mlx5_0", "Ethernet"), table, elsewhere) == ([], f"{trouble} (net1)")
    # Neither is an address that nobody here has, nor one that somebody there gave itself.
    nobody = gids("mlx5_0", (3, mapped("10.0.0.1"), "RoCE v2", None), (5, mapped("169.254.1.1"), "RoCE v2", "net1"))
    assert gid_of(port("mlx5_0", "Ethernet"), nobody, elsewhere) == ([], trouble)
    assert gid_of(port("mlx5_0", "Ethernet"), gids("mlx5_0"), elsewhere) == ([], f"{trouble}, as its interface does")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ((), "no address on e0: all GIDs are empty"),
        (((0, local(1), "IB/RoCE v1", "e0"), (1, local(1), "RoCE v2", "e0")), "no address on e0: only link-local GIDs"),
        (((3, mapped("169.254.7.9"), "RoCE v2", "e0"),), "self-assigned address 169.254.7.9 on e0"),
        (((2, mapped("10.0.0.1"), "IB/RoCE v1", "e0"),), "10.0.0.1 on e0 has no RoCE v2 GID"),
        (((2, mapped("10.0.0.1"), None, None),), "the kernel does not say GID types"),
        (((2, "2001:0db8:0000:0000:0000:0000:0000:0001", "RoCE v2", "e0"),), "no IPv4 address on e0: only IPv6 GIDs"),
        (((2, mapped("127.0.0.1"), "RoCE v2", "e0"),), "unusable address 127.0.0.1 on e0"),
        (((2, mapped("0.0.0.0"), "RoCE v2", "e0"),), "unusable address 0.0.0.0 on e0"),
        (
            ((0, mapped("10.0.0.1"), None, None), (1, mapped("10.0.0.2"), "IB/RoCE v1", "e0")),
            "the kernel does not say the type of GID 0 (10.0.0.1)",
        ),
        (
            (
                (1, local(1), "RoCE v2", "e0"),
                (2, mapped("169.254.7.9"), "IB/RoCE v1", "e0"),
                (3, mapped("169.254.7.9"), "RoCE v2", "e0"),
            ),
            "self-assigned address 169.254.7.9 on e0",
        ),
    ],
)
def test_no_usable_gid_says_why(entries: tuple[Entry, ...], said: str) -> None:
    own = adapter("mlx5_0", device__net__e0__mtu="9000")
    assert gid_of(port("mlx5_0", "Ethernet"), gids("mlx5_0", *entries), own) == ([], said)


def test_no_table() -> None:
    assert gid_of(port("mlx5_0", "Ethernet")) == ([], "no GID table")


def test_the_adapter_s_own_interface_comes_first() -> None:
    table = gids("mlx5_0", (3, mapped("10.1.0.1"), "RoCE v2", "e0.100"), (5, mapped("10.0.0.1"), "RoCE v2", "e0"))
    own = adapter("mlx5_0", device__net__e0__mtu="9000")
    assert [g.index for g in gid_of(port("mlx5_0", "Ethernet"), table, own)[0]] == [5, 3]


def test_a_long_table_is_not_read_to_its_end_once_something_was_found() -> None:
    tree = Tree(
        {**usual("mlx5_0", "10.0.0.1", "e0"), **gids("mlx5_0", (3, mapped("10.0.0.1"), "RoCE v2", "e0"), size=255)}
    )
    assert read_adapters(ROOT, tree)[0].ports[0].gids
    assert sum("/gids/" in path for path in tree.read) < 80
    down = Tree({**port("mlx5_0", "Ethernet", "1: DOWN"), **gids("mlx5_0", size=255)})
    assert read_adapters(ROOT, down)[0].ports[0].gids == ()
    assert sum("/gids/" in path for path in down.read) == 64
    late = Tree({**port("mlx5_0", "Ethernet"), **gids("mlx5_0", (200, mapped("10.0.0.1"), "RoCE v2", "e0"), size=255)})
    assert read_adapters(ROOT, late)[0].ports[0].gids == (Gid(200, "10.0.0.1", "e0"),)


def test_bonds() -> None:
    bond = {"sys/class/net/bond0/bonding/mode": "802.3ad 4"}
    member, whole = read(
        usual("mlx5_0", "10.0.0.1", "e0"),
        usual("mlx5_bond_0", "10.0.0.2", "bond0"),
        bond,
        links={"sys/class/net/e0/master": "/r/sys/devices/virtual/net/bond0"},
    )
    assert (member.bond, whole.bond) == ("bond0", "bond0")


def test_the_bond_of_a_gid_and_its_addresses() -> None:
    lag = gids(
        "mlx5_bond_0", (3, mapped("10.1.0.1"), "RoCE v2", "bond0.7"), (5, mapped("10.0.0.1"), "RoCE v2", "bond0")
    )
    (found,) = read(
        port("mlx5_bond_0", "Ethernet"),
        lag,
        adapter("mlx5_bond_0", device__net__e0__mtu="9000"),
        {
            "sys/class/net/bond0/bonding/mode": "802.3ad 4",
            "sys/class/net/bond0.7/mtu": "9000",
            "sys/class/net/e0/mtu": "",
        },
        links={"sys/class/net/e0/master": "/r/sys/devices/virtual/net/bond0"},
        bond0="10.0.0.1/16",
    )
    assert (found.netdevs, found.bond, found.addresses) == (("e0",), "bond0", ("10.0.0.1/16",))
    assert [g.netdev for g in found.ports[0].gids] == ["bond0", "bond0.7"]


def test_an_interface_is_its_own_s_where_two_adapters_or_two_ports_are_on_one_function() -> None:
    first, second = (
        {**port(name, "Ethernet"), **gids(name, (0, local(1), "IB/RoCE v1", netdev))}
        for name, netdev in (("mlx5_0", "e0"), ("mlx5_1", "e1"))
    )
    function = {"sys/class/infiniband/mlx5_0/device/net/e0/mtu": "", "sys/class/infiniband/mlx5_0/device/net/e1/mtu": "",
                "sys/class/infiniband/mlx5_1/device/net/e0/mtu": "", "sys/class/infiniband/mlx5_1/device/net/e1/mtu": ""}  # fmt: skip
    links = {f"sys/class/infiniband/mlx5_{n}/device": "/r/sys/devices/0000:1a:00.0" for n in (0, 1)}
    assert [a.netdevs for a in read(first, second, function, links=links)] == [("e0",), ("e1",)]
    # Without links nobody can say what is on one function.
    copied = read(first, second, function)
    assert [(a.pci_address, a.netdevs) for a in copied] == [("", ("e0", "e1"))] * 2
    two = {**port("mlx5_0", "Ethernet", number=2), **adapter("mlx5_0", ports__2__gid_attrs__ndevs__0="e1")}
    (found,) = read(first, two, adapter("mlx5_0", device__net__e0__mtu="", ports__2__gids__0=local(2)))
    assert found.netdevs == ("e0", "e1")
    assert [p.gid_trouble for p in found.ports] == [f"no address on e{n}: only link-local GIDs" for n in (0, 1)]


def test_a_bridge_is_no_bond() -> None:
    (found,) = read(
        usual("mlx5_0", "10.0.0.1", "e0"), links={"sys/class/net/e0/master": "/r/sys/devices/virtual/net/br0"}
    )
    assert found.bond == ""


def test_virtual_functions_are_one_line() -> None:
    many = [port(f"mlx5_{n}", state="4: ACTIVE" if n < 5 else "1: DOWN") for n in range(36)]
    links = {f"sys/class/infiniband/mlx5_{n}/device/physfn": "/r/sys/devices/x" for n in range(2, 36)}
    found = read(*many, links=links)
    assert sum(a.virtual for a in found) == 34
    (warning,) = adapter_warnings(found)
    assert warning.reason == "34 virtual functions, 3 active; used for a fabric only when named"
    # Nor is each of them complained of where programs can open none.
    unopened = adapter_warnings(read(*many, {"dev/null": ""}, links=links))
    assert [(w.code, w.reason.split(":")[0]) for w in unopened[1:]] == [("no-verbs", "mlx5_0"), ("no-verbs", "mlx5_1")]


def test_what_sysfs_shows_and_verbs_cannot_open() -> None:
    dev: dict[str, str | bytes] = {"dev/null": ""}
    (found,) = read(port("mlx5_0"), dev)
    assert [f.code for f in found.faults] == ["no-verbs"]
    assert "mlx5_0: sysfs shows it" in adapter_warnings((found,))[0].reason
    verbs = {"sys/class/infiniband_verbs/uverbs3/ibdev": "mlx5_0"}
    assert read(port("mlx5_0"), dev, verbs)[0].faults != ()
    assert read(port("mlx5_0"), dev, verbs, {"dev/infiniband/uverbs3": ""})[0].faults == ()
    assert read(port("mlx5_0"))[0].faults == ()
    # Old kernels tell it at the device alone; and what is no fabric anyway is not complained of.
    at_device = adapter("mlx5_0", device__infiniband_verbs__uverbs3__abi="1")
    assert read(port("mlx5_0"), dev, at_device, {"dev/infiniband/uverbs3": ""})[0].faults == ()
    assert read(port("mlx5_0"), dev, verbs, at_device, {"dev/infiniband/uverbs4": ""})[0].faults != ()
    assert read(port("rxe0", "Ethernet"), dev)[0].faults == ()


def test_what_verbs_has_and_this_user_may_not_open() -> None:
    files = {
        **port("mlx5_0"), "dev/null": "", "dev/infiniband/uverbs3": "",
        "sys/class/infiniband_verbs/uverbs3/ibdev": "mlx5_0",
    }  # fmt: skip
    assert read_adapters(ROOT, Tree(files))[0].faults == ()
    (fault,) = read_adapters(ROOT, Tree(files, shut=("dev/infiniband/uverbs3",)))[0].faults
    assert (fault.code, fault.reason) == ("no-verbs", "/dev/infiniband/uverbs3 may not be opened by this user")


def test_addresses_of_the_interfaces() -> None:
    tree = Tree({**port("mlx5_0"), **adapter("mlx5_0", device__net__ib0__mtu="2044")})
    (found,) = read_adapters(ROOT, tree, {"ib0": ("10.7.0.1/16",), "eth0": ("10.0.0.1/8",)})
    assert found.addresses == ("10.7.0.1/16",)


words = st.sampled_from(
    ["4: ACTIVE", "1: DOWN", "Ethernet", "InfiniBand", "0x3a4", "400 Gb/sec (4X NDR)", local(1), mapped("10.0.0.1"), "RoCE v2",
     "x", "", "-1", "9" * 400, "0x" + "f" * 400, "1: CA", "/etc", "../..", "e\0"]
)  # fmt: skip
paths = st.sampled_from(
    ["ports/1/state", "ports/1/link_layer", "ports/2/rate", "ports/1/lid", "ports/1/gids/0", "ports/1/gids/x",
     "ports/1/gid_attrs/types/0", "ports/1/gid_attrs/ndevs/0", f"ports/{'9' * 200}/state", f"ports/1/gids/{'9' * 200}", "device/vendor", "device/vpd", "device/numa_node",
     "device/net/e0/x", "node_type", "fw_ver", "device/physfn/x"]
)  # fmt: skip


trees = st.dictionaries(
    st.tuples(st.sampled_from(["mlx5_0", "rxe1", "", "a b", "mlx5_²"]), paths), words | st.binary(max_size=40)
)


@given(trees, st.booleans())
def test_any_tree_can_be_read(files: dict[tuple[str, str], str | bytes], interfaces: bool) -> None:
    there: dict[str, str | bytes] = {"dev/null": "", **({"sys/class/net/e0/mtu": ""} if interfaces else {})}
    found = read({f"sys/class/infiniband/{name}/{path}": value for (name, path), value in files.items()}, there)
    adapter_warnings(found)
    for layer in LinkLayer:
        resolve(FabricRule("f", link_layer=layer), found)
    for one in (p for a in found for p in a.ports):
        assert one.number < 100_000
        assert one.rate_gbps is None or (one.state == "active" and one.rate_gbps < 1e6)
        assert one.lid is None or 0 < one.lid < 2**32
        assert not one.gids or one.link_layer == "ethernet"
        assert not (one.gids and one.gid_trouble)


def unpacked(tree: Path, into: Path) -> Path:
    """A captured tree below a root of its own; some keep their symbolic links as text."""
    base = into / "sys" if (tree / "class").is_dir() else into / "sys/class/infiniband"
    for path in sorted(tree.rglob("*")):
        there = base / path.relative_to(tree)
        if path.is_dir():
            there.mkdir(parents=True, exist_ok=True)
        elif (data := path.read_bytes()).startswith(b"../"):
            there.symlink_to(data.decode().strip())
        else:
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(data)
    return into


@pytest.mark.skipif(not CAPTURES.exists(), reason="no captures here")
def test_captured_trees(tmp_path: Path) -> None:
    found = {
        tree.name: {a.name: a for a in read_adapters(unpacked(tree, tmp_path / tree.name))}
        for tree in sorted(CAPTURES.iterdir())
        if tree.is_dir() and tree.name not in ("azure_endure", "gcm_dgx_a100")
    }
    kinds = {tree: {name: a.kind.value for name, a in adapters.items()} for tree, adapters in found.items()}
    numbers = (0, 1, 4, 5, 6, 7, 8, 9)
    assert kinds.pop("h100_gpud") == {**{f"mlx5_{n}": "infiniband" for n in numbers}, "mlx5_bond_0": "roce"}
    # A link that leads nowhere (scif0) is a device that went away.
    assert kinds == {
        "hwloc_mlx4_fdr": {"mlx4_0": "infiniband"},
        "hwloc_qib_qdr": {"qib0": "infiniband"},
        "node_exporter_fixture": {"i40iw0": "iwarp", "mlx4_0": "infiniband"},
        "procfs_fixture": {"hfi1_0": "infiniband", "mlx4_0": "infiniband", "mlx5_0": "infiniband"},
    }
    assert found["h100_gpud"]["mlx5_bond_0"].ports[0].gid_trouble == "no GID table"
    real = found["hwloc_mlx4_fdr"]["mlx4_0"]
    assert (real.pci_address, real.netdevs, real.board) == ("0000:82:00.0", ("ib0",), "MT4099")
    assert real.ports[0].rate_gbps == 56
    assert [p.physical_state for p in found["procfs_fixture"]["mlx5_0"].ports] == ["ACTIVE"]


@pytest.mark.skipif(not CAPTURES.exists(), reason="no captures here")
def test_a_captured_adapter_without_a_link_layer(tmp_path: Path) -> None:
    shutil.copytree(CAPTURES / "azure_endure/ports", tmp_path / "sys/class/infiniband/mlx5_an0/ports")
    (found,) = read_adapters(tmp_path)
    assert (found.kind, found.ports[0].state, found.ports[0].physical_state) == ("unknown", "active", "<unknown>")


SHOWN = re.compile(r"^(\S+)\t(\d+)\t(\d+)\t([0-9a-f:]{39})\t+(?:[0-9.]+ *)?\t+(v[12])\t?(\S+)?\s*$", re.MULTILINE)


@pytest.mark.skipif(not CAPTURES.exists(), reason="no captures here")
@pytest.mark.parametrize(
    ("file", "indices"),
    [
        ("roce-3nic.txt", {"mlx5_0": 3, "mlx5_1": 3, "mlx5_2": 3}),
        ("hiroce3-no-v1.txt", {"hrn3_bond_0": 1, "mlx5_bond_0": "no address on bond1: only link-local GIDs"}),
        ("k8s-macvlan-pod-index7.txt", {"mlx5_0": 7, "mlx5_1": 7}),
        ("bond.txt", {"mlx5_bond_0": 3}),
        (
            "gb10-two-domains.txt",
            {
                "rocep1s0f0": 3,
                "roceP2p1s0f0": 3,
                "rocep1s0f1": "no address on enp1s0f1np1: only link-local GIDs",
                "roceP2p1s0f1": "no address on enP2p1s0f1np1: only link-local GIDs",
            },
        ),
        ("mixed-ib-port.txt", {"mlx5_0": "no address on ens11f0: only link-local GIDs", "mlx5_1": ""}),
    ],
)
def test_captured_gid_tables(file: str, indices: dict[str, int | str]) -> None:
    files: dict[str, str | bytes] = {}
    tables: dict[str, list[Entry]] = {}
    for name, _, index, gid, version, netdev in SHOWN.findall((FABRIC / "show_gids" / file).read_text()):
        files |= port(name, "Ethernet" if netdev else "InfiniBand")
        if netdev:
            files |= {f"sys/class/net/{netdev}/mtu": "9000"}
            if not file.startswith("k8s"):
                files |= adapter(name, **{f"device__net__{netdev}__mtu": "9000"})
        kind = "RoCE v2" if version == "v2" else "IB/RoCE v1"
        tables.setdefault(name, []).append((int(index), gid, kind, netdev or None))
    for name, entries in tables.items():
        files |= gids(name, *entries)
    found = {a.name: a.ports[0] for a in read(files)}
    assert {n: p.gids[0].index if p.gids else p.gid_trouble for n, p in found.items()} == indices


@pytest.mark.skipif(not CAPTURES.exists(), reason="no captures here")
def test_captured_siblings_are_resolved_each_for_itself_by_the_subnet_of_their_rails() -> None:
    rule = FabricRule("rails", subnets=("10.99.0.0/16",))
    copied = FabricRule("copied", adapters=tuple(f"mlx5_{n}" for n in (0, 1, 2, 5, 6, 7, 8, 11)))
    chosen = {}
    for node in ("lexical", "othernode"):
        text = (FABRIC / f"ibdev2netdev/roce-12nic-bond-{node}.txt").read_text()
        files: dict[str, str | bytes] = {"sys/class/net/bond0/bonding/mode": "802.3ad 4"}
        for number, netdev, state in re.findall(r"mlx5_(\d+) port 1 ==> (\S+) \((\w+)\)", text):
            name, address = f"mlx5_{number}", "10.73.0.1" if netdev == "bond0" else f"10.99.{number}.1"
            if state == "Up":
                files |= {**usual(name, address, netdev), f"sys/class/net/{netdev}/mtu": "9000"}
            else:
                files |= port(name, "Ethernet", "1: DOWN", physical="3: Disabled")
        found = read(files)
        assert len(found) == 12
        chosen[node] = hca_list(resolve(rule, found))
        assert resolve(rule, found).faults == ()
    assert chosen["lexical"] == tuple(f"mlx5_{n}:1" for n in (0, 1, 2, 5, 6, 7, 8, 11))
    assert chosen["othernode"] == tuple(f"mlx5_{n}:1" for n in (0, 3, 4, 5, 6, 9, 10, 11))
    assert [f.reason for f in resolve(copied, found).faults] == [
        "mlx5_2 port 1 is down (Disabled)",
        "mlx5_8 port 1 is down (Disabled)",
    ]


def test_the_reader_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = DiskReader()
    (tmp_path / "a").write_bytes(b" x\xff \n")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "c").symlink_to("c")
    assert reader.text(tmp_path / "a") == "x\N{REPLACEMENT CHARACTER}"
    assert reader.text(tmp_path) is None
    assert reader.target(tmp_path / "b") == "a"
    assert reader.target(tmp_path / "c") is None
    assert reader.names(tmp_path / "none") == ()
    assert reader.real(tmp_path / "b") == os.path.realpath(tmp_path / "a")
    page = os.read
    monkeypatch.setattr(os, "read", lambda file, limit: page(file, min(limit, 4096)))
    (tmp_path / "long").write_bytes(b"v" * 10_000)
    assert len(reader.raw(tmp_path / "long", 64 * 1024)) == 10_000
    assert len(reader.raw(tmp_path / "long", 9_000)) == 9_000
    assert reader.raw(tmp_path, 10) == reader.raw(tmp_path / "none", 10) == b""
