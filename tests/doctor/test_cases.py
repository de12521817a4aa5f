"""Faults that people reported in public, as the smallest machine that shows each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from fakes.machines import Card, Hca, Machine, Mig, render
from fakes.patient import LIMITS, NOW, Laid, healthy, interface
from llmgw.doctor.checks import CHECKS
from llmgw.doctor.collect import collect
from llmgw.doctor.facts import Acs, Facts
from llmgw.doctor.gather import Asker
from llmgw.doctor.network import plans
from llmgw.doctor.verdict import Severity, Verdict, judge
from llmgw.hardware.fabric import FabricRule, LinkLayer
from llmgw.settings.daemon import Discovery
from tests.doctor.beds import AGENT

GPU = Card("NVIDIA L40S", 46068, "8.9", mig_capable=False)
ETHERNET = LinkLayer.ETHERNET


async def read(
    folder: Path,
    adapters: tuple[Hca, ...],
    rules: tuple[FabricRule, ...] = (),
    files: dict[str, Laid] | None = None,
    said: dict[str, Any] | None = None,
    cards: tuple[Card, ...] = (GPU,),
    **more: Any,
) -> tuple[Facts, dict[str, Verdict]]:
    render(Machine("a case", cards, adapters), folder)
    patient = healthy(folder).with_(files, said, **more)
    agent = evolve(AGENT, fabrics=rules)
    facts = await collect(Asker(patient, Discovery(root=str(folder)), agent, rules, wall=lambda: NOW, gap_s=0))
    return facts, {v.id: v for v in judge(facts, CHECKS)}


def spoken(verdicts: dict[str, Verdict]) -> set[str]:
    """Which checks speak, consequences left out."""
    return {v.id for v in verdicts.values() if v.severity in (Severity.FAIL, Severity.WARN) and not v.hidden_by}


def env(text: str) -> dict[str, Laid]:
    return {"proc/900/environ": "HOME=/root\0" + text}


def roce(name: str, address: str | None, **more: Any) -> Hca:
    return Hca(name, "Ethernet", netdev=f"net_{name}", address=address, **more)


async def test_a_prefix_takes_adapters_of_another_network(tmp_path: Path) -> None:
    adapters = (Hca("mlx5_1"), Hca("mlx5_2"), roce("mlx5_10", "10.9.0.1/24"), roce("mlx5_11", "10.9.0.2/24"))
    rule = FabricRule("compute", adapters=("mlx5_1", "mlx5_2"))
    facts, verdicts = await read(tmp_path, adapters, (rule,), env("NCCL_IB_HCA=mlx5_1"))
    said = verdicts["env.hca.syntax"]
    assert said.severity is Severity.FAIL
    assert "mlx5_1:1, mlx5_10:1, mlx5_11:1" in said.text
    assert said.remedy == "NCCL_IB_HCA==mlx5_1:1,mlx5_2:1"
    assert {v.name: v.value for v in plans(facts)[0].variables}["NCCL_IB_HCA"] == "=mlx5_1:1,mlx5_2:1"


async def test_one_index_does_not_serve_all(tmp_path: Path) -> None:
    adapters = (roce("roceA", "10.0.0.2/24"), roce("roceB", "10.0.1.2/24"))
    base = "sys/class/infiniband/roceB/ports/1"
    moved: dict[str, Laid] = {
        f"{base}/gid_attrs/types/3": None, f"{base}/gids/3": ":".join(["0000"] * 8),
        f"{base}/gids/4": "0000:0000:0000:0000:0000:ffff:0a00:0102", f"{base}/gid_attrs/types/4": "RoCE v2",
        f"{base}/gids/2": ":".join(["0000"] * 8), f"{base}/gid_attrs/ndevs/4": "net_roceB",
    }  # fmt: skip
    facts, verdicts = await read(tmp_path, adapters, (FabricRule("r", link_layer=ETHERNET),), moved)
    assert "roceA 3, roceB 4" in verdicts["roce.gid.index-differs"].text
    assert "may move again" in verdicts["roce.gid.index-differs"].remedy
    variables = {v.name: v.value for v in plans(facts)[0].variables}
    assert "NCCL_IB_GID_INDEX" not in variables
    assert variables["NCCL_IB_ADDR_RANGE"] == "10.0.0.0/23"


@pytest.mark.parametrize(("address", "check"), [(None, "roce.gid.none"), ("169.254.7.9/16", "roce.gid.linklocal-ipv4")])
async def test_an_address_that_reaches_nobody(address: str | None, check: str, tmp_path: Path) -> None:
    facts, verdicts = await read(tmp_path, (roce("mlx5_0", address),), (FabricRule("r", link_layer=ETHERNET),))
    assert verdicts[check].severity is Severity.FAIL
    assert "net_mlx5_0" in verdicts[check].text
    assert plans(facts)[0].meant == ()


async def test_ipoib_that_is_down_does_not_lower_the_port(tmp_path: Path) -> None:
    adapters = tuple(Hca(f"mlx5_{n}", netdev=f"ib{n}") for n in range(8))
    links = [interface("mgmt0", "10.1.0.5/24"), *(interface(f"ib{n}", state="DOWN") for n in range(8))]
    rules = (FabricRule("ib", link_layer=LinkLayer.INFINIBAND),)
    facts, verdicts = await read(tmp_path, adapters, rules, said={"ip": json.dumps(links)})
    assert spoken(verdicts) == set()
    assert facts.interface == "mgmt0"


async def test_a_list_of_another_node(tmp_path: Path) -> None:
    adapters = (roce("mlx5_0", "10.0.0.2/24"), roce("mlx5_2", None, state="1: DOWN", physical="2: Polling"))
    rule = FabricRule("eth", adapters=("mlx5_0", "mlx5_2", "mlx5_7"))
    _, verdicts = await read(tmp_path, adapters, (rule,))
    assert {"fabric.declared.absent", "port.down"} <= spoken(verdicts)
    assert "mlx5_0, mlx5_2" in verdicts["fabric.declared.absent"].text


async def test_the_list_that_would_be_right_on_a_node_numbered_differently(tmp_path: Path) -> None:
    rails = (0, 3, 4, 5, 6, 9, 10, 11)
    adapters = tuple(
        roce(f"mlx5_{n}", f"10.99.{90 + n}.63/31") if n in rails
        else roce(f"mlx5_{n}", None, bond="bond0") if n in (1, 7)
        else roce(f"mlx5_{n}", None, state="1: DOWN", physical="3: Disabled") if n in (2, 8)
        else roce(f"mlx5_{n}", "10.73.175.138/29")
        for n in range(13)
    )  # fmt: skip
    listed = FabricRule("r", adapters=tuple(f"mlx5_{n}" for n in (0, 1, 2, 5, 6, 7, 8, 11)))
    _, verdicts = await read(tmp_path / "a", adapters, (listed,))
    right = f"fabrics: {{r: {{adapters: [{', '.join(f'mlx5_{n}' for n in rails)}]}}}}"
    wrong = verdicts["fabric.declared.wrong-type"]
    assert wrong.severity is Severity.FAIL
    assert ("mlx5_1, a member of bond0" in wrong.text, "mlx5_7, a member of bond0" in wrong.text) == (True, True)
    assert "mlx5_0" not in wrong.text
    assert right in wrong.remedy
    assert all(f"mlx5_{n}" in verdicts["port.down"].text for n in (2, 8))
    _, verdicts = await read(tmp_path / "b", adapters, (FabricRule("r", adapters=("mlx5_3", "mlx5_99")),))
    assert right in verdicts["fabric.declared.absent"].remedy
    _, verdicts = await read(tmp_path / "c", adapters, (FabricRule("r", adapters=("mlx5_99",)),))
    assert "fabrics:" not in verdicts["fabric.declared.absent"].remedy
    _, verdicts = await read(tmp_path / "d", adapters, (FabricRule("r", adapters=("mlx5_1", "mlx5_7")),))
    assert verdicts["fabric.declared.wrong-type"].severity is not Severity.FAIL


async def test_ports_that_nobody_declared_are_not_judged(tmp_path: Path) -> None:
    adapters = (Hca("mlx5_0"), Hca("mlx5_1", state="1: DOWN", physical="3: Disabled", rate="40 Gb/sec (4X QDR)"))
    _, verdicts = await read(tmp_path, adapters, (FabricRule("ib", adapters=("mlx5_0",)),))
    assert not spoken(verdicts) & {"port.down", "port.rate.low"}


async def test_counters_that_are_text_refused_or_full(tmp_path: Path) -> None:
    base = "sys/class/infiniband/mlx5_0/ports/1/counters"
    files: dict[str, Laid] = {
        f"{base}/symbol_error": "N/A (no PMA)",
        f"{base}/link_downed": "255",
        f"{base}/port_rcv_errors": None,
    }
    facts, verdicts = await read(tmp_path, (Hca("mlx5_0"),), (FabricRule("ib", adapters=("mlx5_0",)),), files)
    assert verdicts["counters.unreadable"].severity is Severity.INFO
    assert verdicts["port.flap"].severity is Severity.OK
    assert all(
        said in verdicts["counters.unreadable"].text for said in ("symbol_error: N/A (no PMA)", "link_downed has run")
    )
    assert any(c.trouble == "symbol_error: N/A (no PMA)" for c in facts.counters)


async def test_a_flood_of_virtual_functions(tmp_path: Path) -> None:
    physical = tuple(Hca(f"mlx5_{n}") for n in range(2))
    functions = tuple(
        Hca(f"mlx5_{n}", virtual=True, state="4: ACTIVE" if n < 5 else "1: DOWN", physical="2: Polling")
        for n in range(2, 20)
    )
    _, verdicts = await read(tmp_path, (*physical, *functions), (FabricRule("ib", link_layer=LinkLayer.INFINIBAND),))
    assert not spoken(verdicts) & {"port.down", "port.rails.count", "unknown.adapter"}


async def test_software_rdma_is_no_fabric(tmp_path: Path) -> None:
    base = "sys/class/infiniband/rxe0"
    files: dict[str, Laid] = {
        f"{base}/node_type": "1: CA", f"{base}/fw_ver": "0.0.0", f"{base}/ports/1/state": "4: ACTIVE",
        f"{base}/ports/1/link_layer": "Ethernet", f"{base}/ports/1/rate": "2.5 Gb/sec (1X SDR)",
    }  # fmt: skip
    down = roce("mlx5_0", None, state="1: DOWN", physical="3: Disabled")
    _, verdicts = await read(tmp_path, (down,), (FabricRule("r", link_layer=ETHERNET),), files)
    assert {"soft.rdma", "fabric.no-usable-port"} <= spoken(verdicts)


async def test_a_disabled_port_has_its_own_remedy(tmp_path: Path) -> None:
    adapter = roce("rocep216s0f0", None, state="1: DOWN", physical="3: Disabled")
    files: dict[str, Laid] = {
        "sys/class/infiniband/rocep216s0f0/hca_type": None,
        "sys/class/infiniband/rocep216s0f0/ports/1/lid": "0x1",
    }
    _, verdicts = await read(tmp_path, (adapter,), (FabricRule("r", adapters=("rocep216s0f0",)),), files)
    assert "ip link set net_rocep216s0f0 up" in verdicts["port.down"].remedy


@pytest.mark.parametrize(("driver", "manager"), [("550.120", "550.127.05"), ("530.41.03", "530.30.02")])
async def test_a_fabric_manager_of_another_version(driver: str, manager: str, tmp_path: Path) -> None:
    files: dict[str, Laid] = {
        "proc/driver/nvidia/version": f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Fri\n",
        "sys/bus/pci/devices/0000:07:00.0/vendor": "0x10de", "sys/bus/pci/devices/0000:07:00.0/class": "0x068000",
        "sys/bus/pci/devices/0000:07:00.0/device": "0x22a3",
    }  # fmt: skip
    said = {"nv-fabricmanager": f"Fabric Manager version is : {manager}\n"}
    _, verdicts = await read(tmp_path, (), files=files, said=said)
    assert verdicts["nvswitch.fm.version"].severity is Severity.FAIL
    assert driver in verdicts["nvswitch.fm.version"].text
    assert verdicts["nvswitch.fm.not-running"].severity is Severity.OK


@pytest.mark.parametrize(("limit", "fails"), [("8388608", True), ("18446744073708503040", False)])
async def test_memlock_that_is_good_on_paper(limit: str, fails: bool, tmp_path: Path) -> None:
    files: dict[str, Laid] = {"proc/900/limits": re.sub(r"(memory +)unlimited", rf"\g<1>{limit}", LIMITS)}
    said = {
        "systemctl show llmgw-agent.service": "LoadState=loaded\nLimitMEMLOCK=infinity\nNeedDaemonReload=yes\nMainPID=900\n"
    }
    facts, verdicts = await read(tmp_path, (), files=files, said=said)
    found = verdicts["agent.memlock.running"]
    assert facts.limits.memlock_bytes == (int(limit) if fails else None)
    assert (found.severity is Severity.FAIL) is fails
    if fails:
        assert "running agent" in found.text
        assert "daemon-reload" in found.remedy
        assert "restart" in found.remedy


BOND = [
    interface("lo", "127.0.0.1/8"), interface("bond0", "10.1.0.5/29"), interface("bond0.2973", "10.9.0.2/24"),
    *(interface(f"rail{n}", f"10.30.{n}.2/31") for n in range(8)), interface("docker0", "172.17.0.1/16"), interface("veth1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "checks"),
    [
        ("bond0", {"mgmt.ifname.ambiguous"}),
        ("^lo,docker,veth", {"mgmt.gloo.syntax"}),
        ("10.1.0.5", {"mgmt.gloo.syntax", "mgmt.ifname.missing"}),
        ("eth2", {"mgmt.gloo.syntax", "mgmt.ifname.missing"}),
    ],
)
async def test_the_interface_where_ranks_meet(value: str, checks: set[str], tmp_path: Path) -> None:
    files = env(f"NCCL_SOCKET_IFNAME={value}\0GLOO_SOCKET_IFNAME={value}\0")
    rules = (FabricRule("r", link_layer=ETHERNET),)
    facts, verdicts = await read(tmp_path, (roce("mlx5_0", "10.30.0.2/31"),), rules, files, {"ip": json.dumps(BOND)})
    assert spoken(verdicts) == checks
    told = {v.name: v.value for v in plans(facts)[0].variables}
    assert (told["NCCL_SOCKET_IFNAME"], told["GLOO_SOCKET_IFNAME"]) == ("=bond0", "bond0")
    assert plans(facts)[0].interfaces == ("bond0",)


async def test_adapters_that_cannot_be_opened(tmp_path: Path) -> None:
    rules = (FabricRule("ib", link_layer=LinkLayer.INFINIBAND),)
    _, verdicts = await read(tmp_path, (Hca("mlx5_0"),), rules, shut=frozenset({"dev/infiniband/uverbs0"}))
    assert verdicts["rdma.verbs.no-device-node"].severity is Severity.FAIL
    assert "may not be opened" in verdicts["rdma.verbs.no-device-node"].text


async def test_names_of_another_vendor(tmp_path: Path) -> None:
    files = env("NCCL_IB_HCA=rdma0,rdma1")
    _, verdicts = await read(
        tmp_path, (roce("bnxt_re0", "10.0.0.2/24"),), (FabricRule("r", link_layer=ETHERNET),), files
    )
    assert "rdma0, rdma1 is not here" in verdicts["env.hca.syntax"].text
    assert "speak TCP" in verdicts["env.hca.syntax"].text


async def test_two_fabrics_and_an_adapter_in_front_that_are_all_close(tmp_path: Path) -> None:
    names = [f"mlx5_{n}" for n in range(12)]
    ethernet, dead = {"mlx5_7", "mlx5_8"}, {"mlx5_1", "mlx5_2"}
    adapters = tuple(
        roce(name, None) if name in ethernet
        else Hca(name, state="1: DOWN", physical="3: Disabled", rate="40 Gb/sec (4X QDR)") if name in dead
        else Hca(name, rate="400 Gb/sec (4X NDR)")
        for name in names
    )  # fmt: skip
    rules = (FabricRule("ib", link_layer=LinkLayer.INFINIBAND), FabricRule("eth", adapters=("mlx5_7", "mlx5_8")))
    facts, verdicts = await read(tmp_path, adapters, rules)
    ib = [n for n in names if n not in ethernet | dead]
    assert [p.adapter for p in facts.fabrics[0].ports] == ib
    assert plans(facts)[0].meant == tuple(f"{n}:1" for n in ib)
    assert "mlx5_7" in verdicts["roce.gid.none"].text
    assert "mlx5_8" in verdicts["roce.gid.none"].text
    assert "port.down" not in spoken(verdicts)
    assert "port.rate.low" not in spoken(verdicts)
    named = (FabricRule("ib", adapters=(*ib, *sorted(dead))), rules[1])
    _, verdicts = await read(tmp_path / "named", adapters, named)
    assert verdicts["port.down"].text.count("Disabled") == 2
    assert "port.rate.low" not in spoken(verdicts)


async def test_a_matrix_in_which_one_card_reaches_its_peers_over_pcie(tmp_path: Path) -> None:
    base = Card("NVIDIA H100 80GB HBM3", 81559, "9.0", mig_capable=False)
    rows = "\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\n" + "".join(
        "\t".join(
            [f"GPU{a}", *(" X " if a == b else "NODE" if 2 in (a, b) else "NV18" for b in range(4)), "4,6,8,10", "0"]
        )
        + "\n"
        for a in range(4)
    )
    facts, verdicts = await read(tmp_path, (), said={"nvidia-smi topo -m": rows}, cards=(base,) * 4)
    assert facts.nvlink_domains == ((0, 1, 3),)
    assert "GPU 2 reaches none of 3 that reach each other" in verdicts["nvlink.down"].text


async def test_compatibility_libraries_stand_in_for_a_driver(tmp_path: Path) -> None:
    torch = "opt/vllm/lib/python3.12/site-packages/torch-2.8.0+cu126.dist-info"
    files: dict[str, Laid] = {torch: None, f"{torch.replace('cu126', 'cu130')}/METADATA": "x"}
    driver = "<nvidia_smi_log><driver_version>570.1</driver_version><attached_gpus>0</attached_gpus></nvidia_smi_log>"
    said = {"nvidia-smi -q -x": driver}
    _, verdicts = await read(tmp_path / "a", (), files=files, said=said)
    assert verdicts["engine.cuda-driver"].severity is Severity.FAIL
    files["usr/local/cuda-13.0/compat/libcuda.so.580.65.06"] = "x"
    facts, verdicts = await read(tmp_path / "b", (), files=files, said=said)
    assert facts.compat == ("580.65.06",)
    assert verdicts["engine.cuda-driver"].severity is Severity.WARN


async def test_a_cache_on_a_disk_that_is_mounted_read_only(tmp_path: Path) -> None:
    files: dict[str, Laid] = {"proc/mounts": "/dev/a / ext4 rw 0 0\nnas:/w /var/lib/llmgw-agent/hub nfs ro 0 0\n"}
    _, verdicts = await read(tmp_path, (), files=files)
    assert verdicts["disk.model-cache"].severity is Severity.FAIL
    assert "/var/lib/llmgw-agent/hub (weights) cannot be written" in verdicts["disk.model-cache"].text


async def test_access_control_with_an_iommu_that_translates(tmp_path: Path) -> None:
    files: dict[str, Laid] = {"sys/class/iommu/dmar0": "", "sys/kernel/iommu_groups/0/type": "DMA-FQ\n"}
    facts, _ = await read(tmp_path, (), files=files)
    assert facts.iommu == "translating"
    (found,) = judge(evolve(facts, acs=(Acs("0000:12:00.0", True),)), [c for c in CHECKS if c.id == "pci.acs"])
    assert "iommu=pt" in found.remedy


async def test_a_driver_that_was_upgraded_is_no_machine_without_gpus(tmp_path: Path) -> None:
    _, verdicts = await read(tmp_path, (), program="mismatch")
    assert spoken(verdicts) == {"gpu.driver.library-mismatch"}
    assert verdicts["gpu.none"].severity is Severity.OK


async def test_a_remap_that_the_card_does_not_tell_is_no_failure(tmp_path: Path) -> None:
    xml = "<nvidia_smi_log><driver_version>570.1</driver_version><attached_gpus>1</attached_gpus><gpu id='00000000:E1:00.0'>"
    xml += "<product_name>NVIDIA L40S</product_name><uuid>GPU-1</uuid><remapped_rows>N/A</remapped_rows></gpu></nvidia_smi_log>"
    _, verdicts = await read(tmp_path, (), said={"nvidia-smi -q -x": xml})
    assert not spoken(verdicts) & {"gpu.remap.failed", "gpu.remap.pending"}


async def test_a_card_that_vanished_counts_against_what_the_node_had(tmp_path: Path) -> None:
    files: dict[str, Laid] = {"var/lib/llmgw-agent/hardware.json": '[{"uuid": "GPU-a"}, {"uuid": "GPU-b"}]'}
    _, verdicts = await read(tmp_path, (), files=files)
    assert "known to have 2 GPUs" in verdicts["gpu.count.expected"].text


async def test_gpu_instances_that_may_not_be_listed_hide_no_device(tmp_path: Path) -> None:
    card = Card("NVIDIA A100-SXM4-80GB", 81920, "8.0", mig=(Mig("3g.40gb", 40192, 1), Mig("1g.10gb", 9728, 9)))
    said = {"nvidia-smi mig -lgi": (4, "Insufficient Permissions\n")}
    facts, verdicts = await read(tmp_path, (), said=said, cards=(card,))
    assert [d.device_class for d in facts.devices] == ["a100-80g-mig-3g.40gb", "a100-80g-mig-1g.10gb"]
    assert not spoken(verdicts)
    assert verdicts["mig.no-compute"].severity is Severity.UNKNOWN
    assert verdicts["mig.no-compute"].remedy == "run it as root"


async def test_memory_of_gpus_that_is_a_numa_node_is_no_socket(tmp_path: Path) -> None:
    nodes: dict[str, Laid] = {f"sys/devices/system/node/node{n}/cpulist": "\n" for n in range(2, 18)}
    facts, _ = await read(tmp_path, (), files=nodes)
    assert facts.sockets == 2
