"""What programs and files print, as the doctor takes it apart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmgw.doctor import texts
from llmgw.doctor.checks import CHECKS
from llmgw.doctor.facts import Acs, GpuInstance, LoadedModule, Netdev
from llmgw.doctor.node_facts import Firewall, Variable
from llmgw.doctor.verdict import anchor
from llmgw.hardware.reading import CardReading

PAGE = Path(__file__).resolve().parents[2] / "docs/doctor.md"


def test_every_check_has_its_words_and_its_place_in_the_documentation() -> None:
    places = {re.sub(r"[^a-z0-9 -]", "", line[4:].lower()).replace(" ", "-")
              for line in PAGE.read_text().splitlines() if line.startswith("### ")}  # fmt: skip
    for check in CHECKS:
        assert anchor(check.id) in places, check.id
        for words in (check.means, check.remedy):
            assert len(words) > 10, check.id
            assert not re.search(r"TODO|XXX|lorem|\{\w*\}(?!\})|\s\s", words), (check.id, words)
        assert check.reads
        assert set(check.because) <= {c.id for c in CHECKS}, check.id
        assert check.id not in check.because


def test_netdevs() -> None:
    said = """[{"ifname": "eth0", "operstate": "UP", "mtu": 9000, "addr_info": [
        {"family": "inet", "local": "10.0.0.1", "prefixlen": 24}, {"local": "x", "prefixlen": 1}, {}, 7]},
        {"ifname": "eth1", "operstate": "LOWERLAYERDOWN", "mtu": "x", "addr_info": 3}, {"mtu": 1}, 9]"""
    assert texts.netdevs(said) == (Netdev("eth0", True, 9000, ("10.0.0.1/24",)), Netdev("eth1", False))
    assert texts.netdevs("{}") is None
    assert texts.netdevs("eth0 UP") is None


def test_modules_limits_pairs_and_variables() -> None:
    lsmod = "Module Size Used by\nib_core 1 2 nvidia-peermem,mlx5_ib,\nnvidia_uvm 1 0 - Live 0x0\nx\n"
    assert texts.modules(lsmod) == (LoadedModule("ib_core", ("nvidia-peermem", "mlx5_ib")), LoadedModule("nvidia_uvm"))
    limits = "Max locked memory         65536                65536                bytes\nMax stack size unlimited x\n"
    assert texts.limit(limits, "Max locked memory") == 65536
    assert texts.limit(limits, "Max stack size") is None
    assert texts.limit("Max locked memory 18446744073708503040 x", "Max locked memory") is None
    assert texts.pairs("A=1=2\nnothing\nB= x \n") == {"A": "1=2", "B": "x"}
    conf = "# NCCL_DEBUG=INFO\n NCCL_IB_HCA = mlx5_0 # the first\nLD_PRELOAD=x\n"
    assert texts.variables(conf, "/etc/nccl.conf") == (Variable("NCCL_IB_HCA", " mlx5_0 ", "/etc/nccl.conf"),)
    assert texts.variables("NCCL_X=a#b\nHOME=/", "environment") == (Variable("NCCL_X", "a#b", "environment"),)


def test_kernel_and_manager_lines() -> None:
    log = "usb 1-1: new\nNVRM: GPU at PCI:0000:33:00\n          NVRM: GPU has fallen off\nmlx5_core: Link down\n"
    assert texts.kernel_lines(log) == ("NVRM: GPU at PCI:0000:33:00 GPU has fallen off", "mlx5_core: Link down")
    assert len(texts.kernel_lines("NVRM: x\n" * 900)) == 500
    said = "[Jan 01 2020 00:00:00] [ERROR] old\n[Jan 01 2099 00:00:00] [ERROR] new\n[INFO] fine\n[Foo 99 2099 00:00:00] error odd\n"
    assert [line[-3:] for line in texts.manager_lines(said, 1.7e9)] == ["new", "odd"]
    assert len(texts.manager_lines(said, None)) == 3


def test_bridges() -> None:
    said = (
        "0000:10:01.0 PCI bridge: root\n\tExpress Root Port\n\t\tACSCtl: SrcValid+\n"
        "12:00.0 PCI bridge: a\n\tExpress Downstream Port\n\t\tACSCtl: SrcValid- ReqRedir+\n"
        "13:00.0 PCI bridge: b\n\tExpress Upstream Port\n\t\tACSCtl: SrcValid- ReqRedir-\n14:00.0 3D controller: c\n"
    )
    assert texts.acs(said, frozenset()) == (Acs("0000:12:00.0", True), Acs("0000:13:00.0", False))
    assert texts.acs(said, frozenset({"0000:13:00.0"})) == (Acs("0000:13:00.0", False),)
    assert texts.acs("12:00.0 PCI bridge: a\n\tCapabilities: <access denied>\n", frozenset()) is None


def test_disks_and_mounts() -> None:
    space = "Filesystem blocks\n/dev/a b 4096 1024 3072 25% /\ngarbage\n"
    (disk,) = texts.disks(space, "Filesystem\n/dev/a 100 95 5 95% /\n", {"/": "system", "/x": "y"})
    assert (disk.path, disk.free_mib, disk.total_mib, disk.inodes_free_percent) == ("/", 3, 4, 5)
    mounts = "/dev/a / ext4 rw 0 0\n/dev/b /data ext4 rw,relatime 0 0\nx /data/hub nfs ro,hard 0 0\ny /my\\040disk xfs ro 0 0\n"
    assert [texts.read_only(mounts, path) for path in ("/data", "/data/hub", "/data/hub/x", "/data/hubs", "/my disk/a")] \
        == [False, True, True, False, True]  # fmt: skip
    assert not texts.read_only(f"{mounts}z /data/hub nfs rw 0 0\n", "/data/hub")
    assert not texts.read_only("", "/")


def test_firewalls() -> None:
    nft = "table inet f {\n\tchain i {\n\t\ttype filter hook input priority 0; policy %s;\n\t\tip saddr 10.0.0.0/8 accept\n\t}\n}\n"
    assert texts.nft(nft % "drop") == Firewall("nftables", True, ("ip saddr 10.0.0.0/8 accept",))
    assert not texts.nft(nft % "accept").drops
    said = "-P INPUT DROP\n-A INPUT -s 10.0.0.0/8 -j ACCEPT\n-A INPUT -j LOG\n"
    assert texts.iptables(said) == Firewall("iptables", True, ("-A INPUT -s 10.0.0.0/8 -j ACCEPT",))
    assert not texts.iptables("-P INPUT ACCEPT\n").drops


def test_gpu_instances() -> None:
    table = "| GPU   Name          Profile  Instance   Placement  |\n|   0  MIG 1g.10gb+me   20        9          6:1     |\n"
    assert texts.gpu_instances(table) == (GpuInstance(0, 9, "1g.10gb+me"),)


@pytest.mark.parametrize("group", ["clocks_event_reason", "clocks_throttle_reason"])
def test_what_slows_a_card_under_each_of_its_names(group: str) -> None:
    xml = (
        "<nvidia_smi_log><gpu><uuid>GPU-1</uuid>"
        f"<{group}s><{group}_hw_thermal_slowdown>Active</{group}_hw_thermal_slowdown>"
        f"<{group}_sw_power_cap>Active</{group}_sw_power_cap></{group}s></gpu></nvidia_smi_log>"
    )
    (card,) = texts.cards((CardReading(0, "GPU-1", "x"),), xml)
    assert len(card.slowed) == 1
    assert "heat" in card.slowed[0]


@pytest.mark.parametrize("xml", ["", "<nvidia_smi_log>", "no xml", "<nvidia_smi_log><gpu></nvidia_smi_log>"])
def test_cards_without_xml(xml: str) -> None:
    assert texts.cards((), xml) == ()
