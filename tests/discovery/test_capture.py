from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import trio
from attrs import evolve

from fakes.machines import MACHINES, render, write_state
from llmgw.discovery.capture import HIDDEN, MARK, CapturedMachine, Recorder
from llmgw.discovery.command import Ran
from llmgw.discovery.faults import DiscoveryError
from llmgw.discovery.machine import LiveMachine
from llmgw.discovery.probe import discover
from llmgw.discovery.sysfs import DiskReader, Reader
from llmgw.hardware.fabric import FabricRule, LinkLayer
from llmgw.hardware.inventory import Host, Inventory
from llmgw.settings.daemon import Discovery, GpuSource

RULES = (FabricRule("ib", link_layer=LinkLayer.INFINIBAND), FabricRule("eth", subnets=("10.0.0.0/8",)))


async def captured(folder: Path, source: GpuSource, root: Path | None = None) -> tuple[Inventory, Inventory]:
    """What is read of a machine, and what is read of its capture."""
    config = Discovery(source, str(root or folder / "machine"))
    recorder = Recorder(LiveMachine(config), socket.gethostname())
    live = await discover(config, RULES, recorder)
    await trio.to_thread.run_sync(recorder.save, folder / "capture", live.host, RULES, {"source": live.source})
    machine = CapturedMachine(folder / "capture")
    assert machine.rules == RULES
    return live, await discover(evolve(config, root="/"), machine.rules, machine)


@pytest.mark.parametrize("source", [GpuSource.AUTO, GpuSource.NVIDIA_SMI])
@pytest.mark.parametrize("name", sorted(MACHINES))
async def test_a_capture_reads_back_to_the_same_inventory(name: str, source: GpuSource, tmp_path: Path) -> None:
    render(MACHINES[name], tmp_path / "machine")
    live, again = await captured(tmp_path, source)
    assert again == live
    assert (live.host.hostname, live.host.boot_id) == (HIDDEN, "")
    # The same is read when the machine is gone and the capture lies elsewhere.
    (tmp_path / "machine").rename(tmp_path / "gone")
    (tmp_path / "capture").rename(tmp_path / "moved")
    machine = CapturedMachine(tmp_path / "moved")
    assert await discover(Discovery(source), machine.rules, machine) == live


async def test_faults_are_captured_too(tmp_path: Path) -> None:
    render(MACHINES["hgx-h100"], tmp_path / "machine")
    write_state(tmp_path / "machine", {2: {"lost": True}, 4: {"links_down": 18}})
    live, again = await captured(tmp_path, GpuSource.AUTO)
    assert again == live
    assert live.warnings


@pytest.mark.parametrize("program", ["mismatch", "no-driver", "lost", "nvml-broken"])
async def test_a_broken_driver_is_captured_too(program: str, tmp_path: Path) -> None:
    render(MACHINES["l40s-2"], tmp_path / "machine")
    write_state(tmp_path / "machine", program=program)
    live, again = await captured(tmp_path, GpuSource.AUTO)
    assert again == live


async def test_the_machine_that_this_runs_on(tmp_path: Path) -> None:
    live, again = await captured(tmp_path, GpuSource.AUTO, Path("/"))
    assert again == live


class Telling:
    """A machine that says names and serials everywhere."""

    root = Path("/nowhere")

    @property
    def reader(self) -> Reader:
        return DiskReader()

    def host(self) -> Host:
        return Host("node-17.cluster.example", "boot")

    async def ask(self, program: str, *args: str) -> Ran:
        said = "<serial>1650522003820</serial><board_serial_number>7</board_serial_number> node-17 node-17.cluster.example:x node-170"
        return Ran((program, *args), 0, said, "node-17 failed")


async def test_serials_and_the_host_s_name_are_blanked(tmp_path: Path) -> None:
    recorder = Recorder(Telling(), "node-17.cluster.example")
    await recorder.ask("nvidia-smi", "-q", "-x")
    recorder.save(tmp_path / "c", recorder.host(), (), {})
    everything = "".join(p.read_text() for p in (tmp_path / "c").rglob("*") if p.is_file())
    assert "1650522003820" not in everything
    assert ">7<" not in everything
    assert "node-17 " not in everything
    assert "node-17." not in everything
    assert "node-170" in everything
    assert "boot" not in json.loads((tmp_path / "c" / MARK).read_text())["host"]["boot_id"]


async def test_of_a_vpd_only_the_mark_is_kept(tmp_path: Path) -> None:
    vpd = tmp_path / "machine/sys/x/vpd"
    vpd.parent.mkdir(parents=True)
    vpd.write_bytes(b"\x82SN12345 SMDL=SW_MNG secret")
    recorder = Recorder(LiveMachine(Discovery(root=str(tmp_path / "machine"))), "h")
    assert b"SMDL=SW_MNG" in recorder.reader.raw(vpd, 100)
    recorder.save(tmp_path / "c", Host("h", "b"), (), {})
    assert (tmp_path / "c/sys/x/vpd").read_bytes() == b"SMDL=SW_MNG"


async def test_nothing_outside_of_a_capture_is_read(tmp_path: Path) -> None:
    render(MACHINES["hgx-h100"], tmp_path / "machine")
    await captured(tmp_path, GpuSource.AUTO)
    secret = tmp_path / "secret"
    secret.write_text("password\n")
    firmware = tmp_path / "capture/sys/class/infiniband/mlx5_0/fw_ver"
    firmware.unlink()
    firmware.symlink_to(secret)
    index = tmp_path / "capture/commands/index.json"
    said = json.loads(index.read_text())
    said["nvml"]["stdout"] = "../../secret"
    index.write_text(json.dumps(said))
    machine = CapturedMachine(tmp_path / "capture")
    assert (await machine.ask("nvml")).stdout == ""
    found = await discover(Discovery(), (), machine)
    assert found.adapters[0].firmware == ""


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda c: (c / MARK).unlink(), "not a whole capture"),
        (lambda c: (c / MARK).write_text("{"), "not a whole capture"),
        (lambda c: (c / MARK).write_text("[]"), "not a whole capture"),
        (
            lambda c: (c / MARK).write_text('{"format": 99, "host": {"hostname": "h", "boot_id": ""}, "fabrics": []}'),
            "has format 99",
        ),
        (lambda c: (c / "commands/index.json").write_text('{"nvml": 5}'), "not a whole capture"),
        (lambda c: (c / "commands/index.json").unlink(), "not a whole capture"),
    ],
)
async def test_what_is_no_capture_is_refused(damage, said: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    render(MACHINES["none"], tmp_path / "machine")
    await captured(tmp_path, GpuSource.AUTO)
    damage(tmp_path / "capture")
    with pytest.raises(DiscoveryError, match=said) as caught:
        CapturedMachine(tmp_path / "capture")
    assert str(tmp_path / "capture") in caught.value.thing


async def test_a_capture_without_an_answer(tmp_path: Path) -> None:
    render(MACHINES["l40s-2"], tmp_path / "machine")
    await captured(tmp_path, GpuSource.NVIDIA_SMI)
    for path in (tmp_path / "capture/commands").glob("*.out"):
        path.unlink()
    found = await discover(Discovery(GpuSource.NVIDIA_SMI), (), CapturedMachine(tmp_path / "capture"))
    assert found.devices == ()
    assert found.warnings


@pytest.mark.parametrize("hostname", ["gpu", "nvidia", "pci", "node", "", "localhost.localdomain"])
async def test_a_host_that_is_called_like_a_part_of_it_is_captured_all_the_same(hostname: str, tmp_path: Path) -> None:
    render(MACHINES["hgx-h100"], tmp_path / "machine")
    config = Discovery(GpuSource.NVIDIA_SMI, str(tmp_path / "machine"))
    recorder = Recorder(LiveMachine(config), hostname)
    live = await discover(config, (), recorder)
    assert len(live.devices) == 8
    await trio.to_thread.run_sync(recorder.save, tmp_path / "c", live.host, (), {})
    assert await discover(config, (), CapturedMachine(tmp_path / "c")) == live


class Shut(DiskReader):
    def usable(self, path: Path) -> bool:
        return False


class ShutMachine(LiveMachine):
    @property
    def reader(self) -> Reader:
        return Shut()


async def test_what_could_not_be_opened_then_cannot_be_opened_in_the_capture(tmp_path: Path) -> None:
    render(MACHINES["hgx-h100"], tmp_path / "machine")
    config = Discovery(root=str(tmp_path / "machine"))
    recorder = Recorder(ShutMachine(config), "h-o-s-t")
    live = await discover(config, RULES, recorder)
    assert {f.code for a in live.adapters for f in a.faults} == {"no-verbs"}
    assert {f.code for f in live.fabrics[0].faults} == {"no-verbs"}
    await trio.to_thread.run_sync(recorder.save, tmp_path / "c", live.host, RULES, {})
    machine = CapturedMachine(tmp_path / "c")
    assert await discover(config, machine.rules, machine) == live
