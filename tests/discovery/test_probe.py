from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import trio
from attrs import evolve

from fakes.machines import MACHINES, render, write_state
from llmgw.discovery.command import run
from llmgw.discovery.probe import discover
from llmgw.hardware.fabric import FabricRule, LinkLayer
from llmgw.hardware.inventory import AdapterKind, AdapterPath, Inventory, Relation
from llmgw.settings.daemon import Discovery, GpuSource

IB = FabricRule("ib", link_layer=LinkLayer.INFINIBAND)
SOURCES = [GpuSource.NVML, GpuSource.NVIDIA_SMI]


async def read(
    folder: Path, source: GpuSource = GpuSource.AUTO, timeout_s: float = 10.0, rules: tuple[FabricRule, ...] = ()
) -> Inventory:
    return await discover(Discovery(root=str(folder), timeout_s=timeout_s, source=source), rules)


def codes(found: Inventory) -> list[str]:
    return [w.code for w in found.warnings]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("name", "classes", "adapters", "domains", "warnings"),
    [
        ("dgx-a100", ["a100-80g"] * 8, 10, [8], []),
        ("hgx-h100", ["h100-80g"] * 8, 9, [8], []),
        ("hgx-b200", ["b200-179g"] * 8, 12, [8], ["switch-management"]),
        ("a100-mig", ["a100-80g-mig-4g.40gb", "a100-80g-mig-3g.40gb", "a100-80g"], 0, [], []),
        ("h100-7x1g", ["h100-80g-mig-1g.10gb"] * 7, 0, [], []),
        ("l40s-2", ["l40s-45g"] * 2, 0, [], []),
        ("rtx-4090-4", ["rtx-4090-24g"] * 4, 0, [], []),
        ("gb10", ["gb10-122g"], 2, [], []),
        ("t4-vm", ["t4-15g"], 0, [], []),
    ],
)
async def test_fake_machines(
    name: str,
    classes: list[str],
    adapters: int,
    domains: list[int],
    warnings: list[str],
    source: GpuSource,
    tmp_path: Path,
) -> None:
    render(MACHINES[name], tmp_path)
    found = await read(tmp_path, source)
    assert [d.device_class for d in found.devices] == classes
    assert all(not d.faults and d.uuid for d in found.devices)
    assert len({d.number for d in found.devices}) == len(classes)
    assert len(found.adapters) == adapters
    assert [len(d) for d in found.nvlink_domains] == domains
    assert found.simulated == MACHINES[name].label
    assert found.host.hostname
    assert (found.source, codes(found)) == (source.value, warnings)


@pytest.mark.parametrize("name", [n for n, m in MACHINES.items() if m.driver])
async def test_both_sources_make_the_same_inventory(name: str, tmp_path: Path) -> None:
    render(MACHINES[name], tmp_path)
    one, other = (
        await read(tmp_path, GpuSource.NVML, rules=(IB,)),
        await read(tmp_path, GpuSource.NVIDIA_SMI, rules=(IB,)),
    )
    # Of a card with instances nvidia-smi says how far it is from its neighbours, NVML is not asked.
    assert evolve(one, source="") == evolve(other, source="", links=one.links if "mig" in name else other.links)


async def test_details(tmp_path: Path) -> None:
    render(MACHINES["hgx-h100"], tmp_path)
    found = await read(tmp_path)
    assert found.driver is not None
    assert (found.driver.version, found.driver.cuda_version) == ("570.148.08", "12.8")
    third = found.devices[2]
    assert (third.pci_address, third.compute_capability, third.numa_node, third.cpus) == ("0000:33:00.0", 90, 0, "0-31")
    assert third.adapters[0] == AdapterPath("mlx5_2", Relation.PIX)
    assert {p.relation for p in third.adapters[1:]} == {Relation.NODE}
    assert len(third.adapters) == 5
    assert [a.kind for a in found.adapters].count(AdapterKind.INFINIBAND) == 8
    assert found.adapters[0].netdevs == ("ib0",)
    assert {(link.relation, link.nvlinks) for link in found.links} == {(Relation.NVLINK, 18)}


async def test_fabrics_are_resolved_on_the_node(tmp_path: Path) -> None:
    render(MACHINES["hgx-h100"], tmp_path)
    rules = (IB, FabricRule("eth", subnets=("10.20.0.0/16",)), FabricRule("gone", adapters=("mlx5_99",)))
    ib, eth, gone = (await read(tmp_path, rules=rules)).fabrics
    assert ([p.adapter for p in ib.ports], ib.kind, ib.faults) == (
        [f"mlx5_{n}" for n in range(8)],
        AdapterKind.INFINIBAND,
        (),
    )
    assert [(p.adapter, p.gid and p.gid.address) for p in eth.ports] == [("mlx5_8", "10.20.0.11")]
    assert [f.code for f in gone.faults] == ["adapter-missing"]


async def test_members_of_a_bond_are_no_rails(tmp_path: Path) -> None:
    render(MACHINES["dgx-a100"], tmp_path)
    found = await read(tmp_path, rules=(FabricRule("eth", link_layer=LinkLayer.ETHERNET),))
    assert [a.bond for a in found.adapters[-2:]] == ["bond0", "bond0"]
    assert found.fabrics[0].ports == ()


@pytest.mark.parametrize("source", SOURCES)
async def test_faults_as_they_come_and_go(source: GpuSource, tmp_path: Path) -> None:
    render(MACHINES["hgx-h100"], tmp_path)
    write_state(
        tmp_path,
        {1: {"ecc": 2}, 2: {"processes": [[4711, "python", 11264]]}, 3: {"lost": True}, 4: {"needs_reset": True},
         6: {"links_down": 18}, 7: {"links_down": 2}},
    )  # fmt: skip
    found = await read(tmp_path, source)
    assert [[f.code for f in d.faults] for d in found.devices] == [
        [], ["ecc-uncorrected"], [], ["failed"], ["needs-reset"], [], [], [],
    ]  # fmt: skip
    assert (found.devices[2].used_mib, found.devices[2].processes[0].pid) == (11264, 4711)
    # The lost card is told by its place on the bus and by what the kernel module knows of it.
    assert (found.devices[3].name, found.devices[3].pci_address) == ("NVIDIA H100 80GB HBM3", "0000:43:00.0")
    assert found.devices[3].uuid.startswith("GPU-")
    assert found.nvlink_domains == ((0, 1, 2, 4, 5, 7),)
    assert codes(found) == ["nvlink-down", "nvlink-degraded"]
    write_state(tmp_path)
    assert not any(d.faults for d in (await read(tmp_path, source)).devices)


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("mismatch", "driver-mismatch", "the driver was upgraded under the loaded module"),
        ("no-driver", "driver-missing", "8 NVIDIA GPUs are on the PCI bus"),
    ],
)
async def test_a_broken_driver_is_a_reason_not_no_gpus(program: str, code: str, said: str, tmp_path: Path) -> None:
    render(MACHINES["hgx-h100"], tmp_path)
    write_state(tmp_path, program=program)
    found = await read(tmp_path)
    (warning,) = found.warnings
    assert warning.code == code
    assert said in warning.reason
    assert warning.remedy
    assert (found.devices, found.source) == ((), "none")
    assert len(found.adapters) == 9


async def test_a_lost_card_that_makes_nvidia_smi_fail_hides_no_other(tmp_path: Path) -> None:
    render(MACHINES["hgx-h100"], tmp_path)
    write_state(tmp_path, program="lost")
    found = await read(tmp_path, GpuSource.NVIDIA_SMI)
    assert [bool(d.faults) for d in found.devices] == [True] + [False] * 7
    assert (found.devices[0].faults[0].code, found.devices[0].name) == ("failed", "NVIDIA H100 80GB HBM3")
    assert [d.device_class for d in found.devices[1:]] == ["h100-80g"] * 7
    assert codes(found) == ["gpu-lost", "topology-unknown"]
    through_nvml = await read(tmp_path, GpuSource.NVML)
    assert [bool(d.faults) for d in through_nvml.devices] == [True] + [False] * 7


async def test_falling_back_is_said_and_kept(tmp_path: Path) -> None:
    render(MACHINES["l40s-2"], tmp_path)
    write_state(tmp_path, program="nvml-broken")
    found = await read(tmp_path)
    assert (found.source, len(found.devices)) == ("nvidia-smi", 2)
    (warning,) = found.warnings
    assert warning.code == "nvml-unavailable"
    assert (
        "NVML does not work, the GPUs were read through nvidia-smi: NVML cannot be used (Unknown Error)"
        in warning.reason
    )


async def test_nvml_that_was_asked_for_and_fails_is_an_error(tmp_path: Path) -> None:
    render(MACHINES["l40s-2"], tmp_path)
    write_state(tmp_path, program="nvml-broken")
    found = await read(tmp_path, GpuSource.NVML)
    assert (found.source, found.devices, codes(found)) == ("none", (), ["nvml-failed"])


async def test_none_runs_nothing_and_says_nothing(tmp_path: Path) -> None:
    render(MACHINES["l40s-2"], tmp_path)
    write_state(tmp_path, program="hang")
    found = await read(tmp_path, GpuSource.NONE)
    assert (found.source, found.devices, found.warnings) == ("none", (), ())


async def test_no_gpu_at_all(tmp_path: Path) -> None:
    render(MACHINES["none"], tmp_path)
    found = await read(tmp_path)
    assert (found.source, codes(found)) == ("none", ["no-gpu"])


async def test_gpus_without_a_driver(tmp_path: Path) -> None:
    render(evolve(MACHINES["l40s-2"], driver=None), tmp_path)
    (warning,) = (await read(tmp_path)).warnings
    assert (warning.code, warning.remedy) == ("driver-missing", "install the NVIDIA driver")
    assert warning.reason == (
        "2 NVIDIA GPUs are on the PCI bus (0000:e1:00.0, 0000:f1:00.0), and nvidia-smi was not found"
    )


async def test_a_card_that_the_driver_does_not_show(tmp_path: Path) -> None:
    render(MACHINES["l40s-2"], tmp_path)
    said = json.loads((tmp_path / "machine.json").read_text())
    said["cards"].pop()
    (tmp_path / "machine.json").write_text(json.dumps(said))
    found = await read(tmp_path)
    assert [(w.code, w.reason) for w in found.warnings] == [
        ("gpu-not-shown", "1 NVIDIA GPU on the PCI bus is not shown by the driver: 0000:f1:00.0")
    ]
    vfio = tmp_path / "sys/bus/pci/drivers/vfio-pci"
    vfio.mkdir()
    link = tmp_path / "sys/bus/pci/devices/0000:f1:00.0/driver"
    link.unlink()
    link.symlink_to(vfio)
    assert codes(await read(tmp_path)) == ["passthrough"]


@pytest.mark.parametrize("source", [GpuSource.AUTO, *SOURCES])
async def test_a_hanging_driver_is_left_behind(source: GpuSource, tmp_path: Path) -> None:
    render(MACHINES["l40s-2"], tmp_path)
    write_state(tmp_path, program="hang")
    began = time.monotonic()
    found = await read(tmp_path, source, 0.5)
    assert time.monotonic() - began < 5
    assert codes(found) == [{GpuSource.NVML: "nvml-failed"}.get(source, "timeout")]
    assert "did not answer within 0.5 s" in found.warnings[0].reason


async def test_a_program_that_cannot_be_run(tmp_path: Path) -> None:
    config = Discovery(root=str(tmp_path), nvidia_smi=str(tmp_path / "nothing"), source=GpuSource.NVIDIA_SMI)
    found = await discover(config)
    assert codes(found) == ["not-runnable"]
    assert str(tmp_path / "nothing") in found.warnings[0].reason


async def test_cancelling_leaves_no_process(tmp_path: Path) -> None:
    with trio.move_on_after(0.2):
        await run(("sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/pid; wait"), 60)
    pid = int((tmp_path / "pid").read_text())
    with trio.fail_after(2):
        while _alive(pid):
            await trio.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_flood_of_output_is_bounded() -> None:
    ran = await run(("sh", "-c", "yes | head -c 20000000; echo end >&2"), 20)
    assert ran.code == 0
    assert len(ran.stdout) == 16 * 1024 * 1024
    assert ran.stderr == "end\n"


async def test_a_program_gets_nothing_of_our_environment_but_where_things_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMGW_SECRET", "sk-1")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64")
    ran = await run(("/usr/bin/env",), 20)
    assert set(ran.stdout.splitlines()) == {
        f"PATH={os.environ['PATH']}",
        "LC_ALL=C",
        "LD_LIBRARY_PATH=/usr/local/nvidia/lib64",
    }


async def test_a_display_of_the_board_is_no_gpu(tmp_path: Path) -> None:
    """Servers have a VGA function of their management controller on the bus, and some have another vendor's GPU."""
    render(MACHINES["none"], tmp_path)
    for address, kind, vendor in (
        ("0000:03:00.0", "0x030000", "0x1a03"),
        ("0000:04:00.0", "0x030200", "0x1002"),
        ("0000:05:00.0", "0x020000", "0x10de"),
    ):
        function = tmp_path / "sys/bus/pci/devices" / address
        function.mkdir(parents=True)
        (function / "class").write_text(f"{kind}\n")
        (function / "vendor").write_text(f"{vendor}\n")
    assert codes(await read(tmp_path)) == ["no-gpu"]


async def test_a_child_that_keeps_the_pipes_is_not_waited_for_and_does_not_stay(tmp_path: Path) -> None:
    began = time.monotonic()
    ran = await run(("sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/pid; echo said; exit 3"), 60)
    assert time.monotonic() - began < 20
    assert (ran.code, ran.stdout, ran.left) == (3, "said\n", None)
    pid = int((tmp_path / "pid").read_text())
    with trio.fail_after(5):
        while _alive(pid):
            await trio.sleep(0.01)
