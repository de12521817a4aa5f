from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.discovery.sysfs import DiskReader, adapter_warnings, natural, read_adapters
from llmgw.hardware.inventory import Adapter, AdapterKind, Gid
from tests.discovery.trees import ROOT, Tree, adapter, gids, local, mapped, port, usual

FABRIC = Path(__file__).resolve().parents[3] / "shared" / "fixtures" / "fabric"
CAPTURES = FABRIC / "sysfs"


def read(*files: dict[str, str | bytes], links: dict[str, str] | None = None) -> tuple[Adapter, ...]:
    return read_adapters(ROOT, Tree({k: v for some in files for k, v in some.items()}, links))


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
    assert (found.ports[0].rate_gbps, found.ports[0].state, found.ports[0].physical_state) == (None, "down", "disabled")


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
    assert [w.code for w in adapter_warnings((found,))] == ["switch-management"]


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
    assert (found.ports[0].state, found.ports[0].rate_gbps) == ("unknown", None)


def test_an_adapter_that_vanishes_while_it_is_read_is_left_out() -> None:
    assert [a.name for a in read(port("mlx5_1"), adapter("mlx5_0", other=""))] == ["mlx5_1"]


def test_natural_order() -> None:
    assert sorted(["mlx5_10", "mlx5_2", "efa_0"], key=natural) == ["efa_0", "mlx5_2", "mlx5_10"]


def test_no_rdma_driver(tmp_path: Path) -> None:
    assert read_adapters(tmp_path) == ()


def gid_of(*files: dict[str, str | bytes]) -> tuple[list[Gid], str]:
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
    found, trouble = gid_of(port("mlx5_0", "Ethernet"), table, elsewhere)
    assert found == []
    assert "another network namespace (net1)" in trouble


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ((), "no address on e0: all are empty"),
        (((0, local(1), "IB/RoCE v1", "e0"), (1, local(1), "RoCE v2", "e0")), "no address on e0: only link-local GIDs"),
        (((3, mapped("169.254.7.9"), "RoCE v2", "e0"),), "self-assigned address 169.254.7.9 on e0"),
        (((2, mapped("10.0.0.1"), "IB/RoCE v1", "e0"),), "no address on e0: only RoCE v1 GIDs"),
        (((2, mapped("10.0.0.1"), None, None),), "no address on e0: the kernel does not say which GIDs are RoCE v2"),
        (((2, "2001:0db8:0000:0000:0000:0000:0000:0001", "RoCE v2", "e0"),), "no address on e0: only IPv6 GIDs"),
        (((2, mapped("127.0.0.1"), "RoCE v2", "e0"),), "no address on e0: unusable address 127.0.0.1 on e0"),
    ],
)
def test_no_usable_gid_says_why(entries: tuple[tuple[int, str, str | None, str | None], ...], said: str) -> None:
    own = adapter("mlx5_0", device__net__e0__mtu="9000")
    assert gid_of(port("mlx5_0", "Ethernet"), gids("mlx5_0", *entries), own) == ([], said)


def test_no_table() -> None:
    assert gid_of(port("mlx5_0", "Ethernet")) == ([], "it has no GID table")


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


def test_what_sysfs_shows_and_verbs_cannot_open() -> None:
    dev = {"dev/null": ""}
    (found,) = read(port("mlx5_0"), dev)
    assert [f.code for f in found.faults] == ["no-verbs"]
    assert "mlx5_0: sysfs shows it" in adapter_warnings((found,))[0].reason
    verbs = {"sys/class/infiniband_verbs/uverbs3/ibdev": "mlx5_0"}
    assert read(port("mlx5_0"), dev, verbs)[0].faults != ()
    assert read(port("mlx5_0"), dev, verbs, {"dev/infiniband/uverbs3": ""})[0].faults == ()
    assert read(port("mlx5_0"))[0].faults == ()


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
     "x", "", "-1", "99999999999999999999", "1: CA"]
)  # fmt: skip
paths = st.sampled_from(
    ["ports/1/state", "ports/1/link_layer", "ports/2/rate", "ports/1/lid", "ports/1/gids/0", "ports/1/gids/x",
     "ports/1/gid_attrs/types/0", "ports/1/gid_attrs/ndevs/0", "device/vendor", "device/vpd", "device/numa_node",
     "device/net/e0/x", "node_type", "fw_ver", "device/physfn/x"]
)  # fmt: skip


@given(
    st.dictionaries(
        st.tuples(st.sampled_from(["mlx5_0", "rxe1", "", "a b", "mlx5_²"]), paths), words | st.binary(max_size=40)
    )
)
def test_any_tree_can_be_read(files: dict[tuple[str, str], str | bytes]) -> None:
    found = read({f"sys/class/infiniband/{name}/{path}": value for (name, path), value in files.items()})
    adapter_warnings(found)
    for one in found:
        assert one.ports or one.kind is AdapterKind.UNKNOWN or one.firmware or one.kind


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
        tree: read_adapters(unpacked(CAPTURES / tree, tmp_path / tree))
        for tree in ("h100_gpud", "hwloc_mlx4_fdr", "hwloc_qib_qdr", "node_exporter_fixture", "procfs_fixture")
    }
    kinds = {tree: {a.name: a.kind.value for a in adapters} for tree, adapters in found.items()}
    assert set(kinds["h100_gpud"].values()) == {"infiniband", "roce"}
    assert [a.name for a in found["h100_gpud"]] == sorted(kinds["h100_gpud"], key=natural)
    assert kinds["hwloc_mlx4_fdr"]["mlx4_0"] == "infiniband"
    assert kinds["hwloc_qib_qdr"] == {"qib0": "infiniband"}
    assert kinds["node_exporter_fixture"]["mlx4_0"] == "infiniband"
    assert kinds["procfs_fixture"]["mlx5_0"] == "infiniband"
    real = next(a for a in found["hwloc_mlx4_fdr"] if a.name == "mlx4_0")
    assert (real.pci_address, real.netdevs, real.board) == ("0000:82:00.0", ("ib0",), "MT4099")
    assert real.ports[0].rate_gbps == 56


SHOWN = re.compile(r"^(\S+)\t(\d+)\t(\d+)\t([0-9a-f:]{39})\t+(?:[0-9.]+ *)?\t+(v[12])(?:\t(\S+))?\s*$", re.MULTILINE)


@pytest.mark.skipif(not CAPTURES.exists(), reason="no captures here")
@pytest.mark.parametrize(
    ("file", "indices"),
    [
        ("roce-3nic.txt", {"mlx5_0": 3, "mlx5_1": 3, "mlx5_2": 3}),
        ("hiroce3-no-v1.txt", None),
        ("k8s-macvlan-pod-index7.txt", {"mlx5_0": 7, "mlx5_1": 7}),
        ("bond.txt", {"mlx5_bond_0": 3}),
        ("gb10-two-domains.txt", {"rocep1s0f0": 3, "roceP2p1s0f0": 3, "rocep1s0f1": None, "roceP2p1s0f1": None}),
    ],
)
def test_captured_gid_tables(file: str, indices: dict[str, int | None] | None) -> None:
    rows = SHOWN.findall((FABRIC / "show_gids" / file).read_text())
    assert rows
    files: dict[str, str | bytes] = {}
    for name, _, _, _, _, netdev in rows:
        files |= port(name, "Ethernet")
        files |= adapter(name, **{f"device__net__{netdev}__mtu": "9000"})
    tables: dict[str, list[tuple[int, str, str | None, str | None]]] = {}
    for name, _, index, gid, version, netdev in rows:
        tables.setdefault(name, []).append((int(index), gid, "RoCE v2" if version == "v2" else "IB/RoCE v1", netdev))
    for name, entries in tables.items():
        files |= gids(name, *entries)
    found = {a.name: (a.ports[0].gids[0].index if a.ports[0].gids else None) for a in read(files)}
    if indices is None:
        assert 1 in found.values()
        assert None in found.values()
    else:
        assert found == indices


def test_the_reader_of_the_disk(tmp_path: Path) -> None:
    reader = DiskReader()
    (tmp_path / "a").write_bytes(b" x\xff \n")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "c").symlink_to("c")
    assert reader.text(tmp_path / "a") == "x\N{REPLACEMENT CHARACTER}"
    assert reader.text(tmp_path) is None
    assert reader.target(tmp_path / "b") == "a"
    assert reader.target(tmp_path / "c") is None
    assert reader.names(tmp_path / "none") == ()
