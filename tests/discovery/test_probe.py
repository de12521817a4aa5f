from __future__ import annotations

import time
from pathlib import Path

import pytest
import trio

from fakes.machine import MACHINES, render, write_state
from llmgw.discovery.command import run
from llmgw.discovery.probe import discover
from llmgw.hardware.inventory import AdapterKind, Inventory
from llmgw.settings.daemon import Discovery


async def read(folder: Path, timeout_s: float = 10.0) -> Inventory:
    return await discover(Discovery(root=str(folder), timeout_s=timeout_s))


@pytest.mark.parametrize(
    ("name", "classes", "adapters"),
    [
        ("hgx-h100", ["h100-80g"] * 8, 9),
        ("l40s-2", ["l40s-45g"] * 2, 0),
        ("a100-mig", ["a100-80g-mig-4g.40gb", "a100-80g-mig-3g.40gb", "a100-80g"], 0),
        ("t4-vm", ["t4-15g"], 0),
        ("none", [], 0),
    ],
)
async def test_fake_machines(name: str, classes: list[str], adapters: int, tmp_path: Path) -> None:
    render(MACHINES[name], tmp_path)
    found = await read(tmp_path)
    assert [d.device_class for d in found.devices] == classes
    assert all(not d.faults and d.uuid for d in found.devices)
    assert len({d.number for d in found.devices}) == len(classes)
    assert len(found.adapters) == adapters
    assert found.simulated == MACHINES[name].label
    assert found.host.hostname
    assert (found.source, len(found.warnings)) == (("nvidia-smi", 0) if classes else ("none", 1))


async def test_details(tmp_path: Path) -> None:
    render(MACHINES["hgx-h100"], tmp_path)
    found = await read(tmp_path)
    assert found.driver is not None
    assert (found.driver.version, found.driver.cuda_version) == ("570.148.08", "12.8")
    assert (found.devices[2].pci_address, found.devices[2].compute_capability) == ("0000:28:00.0", 90)
    assert [a.kind for a in found.adapters].count(AdapterKind.INFINIBAND) == 8
    assert found.adapters[0].netdevs == ("ib0",)


async def test_faults_as_they_come_and_go(tmp_path: Path) -> None:
    render(MACHINES["hgx-h100"], tmp_path)
    write_state(
        tmp_path,
        {1: {"ecc": 2}, 2: {"processes": [[4711, "python", 11264]]}, 3: {"lost": True}, 4: {"needs_reset": True}},
    )
    found = await read(tmp_path)
    assert [[f.code for f in d.faults] for d in found.devices[:6]] == [
        [], ["ecc-uncorrected"], [], ["failed"], ["needs-reset", "needs-reset"], [],
    ]  # fmt: skip
    assert (found.devices[2].used_mib, found.devices[2].processes[0].pid) == (11264, 4711)
    write_state(tmp_path)
    assert not any(d.faults for d in (await read(tmp_path)).devices)


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("mismatch", "driver-mismatch", "the driver was upgraded under the loaded module"),
        ("no-driver", "driver-missing", "the NVIDIA driver is not loaded"),
        ("lost", "gpu-lost", "a GPU fell off the bus"),
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
    assert found.devices == ()
    assert len(found.adapters) == 9


async def test_a_hanging_driver_is_left_behind(tmp_path: Path) -> None:
    render(MACHINES["l40s-2"], tmp_path)
    write_state(tmp_path, program="hang")
    began = time.monotonic()
    found = await read(tmp_path, 0.5)
    assert time.monotonic() - began < 5
    assert [w.code for w in found.warnings] == ["timeout"]


async def test_a_program_that_cannot_be_run(tmp_path: Path) -> None:
    found = await discover(Discovery(root=str(tmp_path), nvidia_smi=str(tmp_path / "nothing")))
    assert [w.code for w in found.warnings] == ["driver-missing"]


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
