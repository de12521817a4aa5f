from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from attrs import evolve

from fakes.machines import MACHINES, render, write_state
from llmgw.agent.hardware import Hardware, Known
from llmgw.discovery.faults import DiscoveryError
from llmgw.discovery.machine import LiveMachine
from llmgw.errors import OperatorError
from llmgw.hardware.known import known_cards
from llmgw.settings.daemon import Discovery, GpuSource


class Node:
    """A node's hardware as its agent holds it, with every change that was told."""

    def __init__(self, folder: Path, machine: str, interval_s: float, quiet_s: float = 0.01) -> None:
        self.root = folder / "machine"
        render(MACHINES[machine], self.root)
        self.changes = 0
        self._changed = trio.Event()
        discovery = Discovery(GpuSource.NVIDIA_SMI, str(self.root), interval_s=interval_s)
        self.hardware = Hardware(discovery, (), folder, self._count, quiet_s=quiet_s)

    def _count(self) -> None:
        self.changes += 1
        self._changed.set()

    async def change(self) -> None:
        with trio.fail_after(30):
            await self._changed.wait()
        self._changed = trio.Event()


@asynccontextmanager
async def node(
    folder: Path, machine: str = "l40s-2", interval_s: float = 1000, quiet_s: float = 0.01
) -> AsyncIterator[Node]:
    made = Node(folder, machine, interval_s, quiet_s)
    await made.hardware.read()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.hardware.run)
        yield made
        nursery.cancel_scope.cancel()


async def test_it_is_read_again_on_a_timer(tmp_path: Path) -> None:
    async with node(tmp_path, interval_s=0.05) as it:
        write_state(it.root, {0: {"ecc": 1}})
        await it.change()
        assert [f.code for f in it.hardware.inventory.devices[0].faults] == ["ecc-uncorrected"]


async def test_an_event_reads_it_soon(tmp_path: Path) -> None:
    async with node(tmp_path) as it:
        write_state(it.root, {1: {"lost": True}})
        it.hardware.look_again()
        await it.change()
        assert [f.code for f in it.hardware.inventory.devices[1].faults] == ["failed"]


async def test_what_is_as_it_was_is_not_told(tmp_path: Path) -> None:
    async with node(tmp_path, interval_s=0.05) as it:
        first = it.hardware.inventory
        with trio.fail_after(30):
            while it.hardware.inventory is first:
                await trio.sleep(0.01)
        assert it.hardware.inventory == first
        assert it.changes == 0


async def test_a_card_that_vanished_is_missing_over_restarts_until_it_is_accepted(tmp_path: Path) -> None:
    both = Node(tmp_path, "l40s-2", 1000)
    assert (await both.hardware.read()).warnings == ()
    assert (tmp_path / "hardware.json").stat().st_mode & 0o777 == 0o600
    fewer = evolve(MACHINES["l40s-2"], cards=MACHINES["l40s-2"].cards[:1])
    for path in (both.root / "sys/bus/pci/devices").iterdir():
        path.unlink()
    render(fewer, both.root)
    for _restart in range(2):
        again = Hardware(Discovery(GpuSource.NVIDIA_SMI, str(both.root)), (), tmp_path, lambda: None)
        found = await again.read()
        assert [(w.code, w.reason) for w in found.warnings] == [
            ("gpu-missing", "NVIDIA L40S at 0000:f1:00.0 was here and is missing")
        ]
    Known(tmp_path).write(known_cards(found))
    assert (await again.read()).warnings == ()


async def test_a_class_that_changed_is_said(tmp_path: Path) -> None:
    it = Node(tmp_path, "l40s-2", 1000)
    await it.hardware.read()
    changed = evolve(
        MACHINES["l40s-2"], driver="580.1.1", cards=tuple(evolve(c, total_mib=47000) for c in MACHINES["l40s-2"].cards)
    )
    render(changed, it.root)
    assert [w.code for w in (await it.hardware.read()).warnings] == ["class-changed"] * 2


async def test_a_driver_that_broke_makes_no_card_missing(tmp_path: Path) -> None:
    it = Node(tmp_path, "l40s-2", 1000)
    await it.hardware.read()
    write_state(it.root, program="mismatch")
    found = await it.hardware.read()
    assert [w.code for w in found.warnings] == ["driver-mismatch"]
    assert len(Known(tmp_path).read()) == 2


async def test_a_file_of_known_cards_that_is_none_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "hardware.json").write_text("[{")
    found = await Node(tmp_path, "l40s-2", 1000).hardware.read()
    assert [w.code for w in found.warnings] == ["known-hardware"]
    with pytest.raises(OperatorError, match=r"hardware\.json"):
        Known(tmp_path).read()
    assert (tmp_path / "hardware.json").read_text() == "[{"


def kernel_log(folder: Path) -> tuple[Path, int]:
    path = folder / "kmsg"
    os.mkfifo(path)
    return path, os.open(path, os.O_RDWR | os.O_NONBLOCK)


XID = b"3,1,1,-;NVRM: Xid (PCI:0000:e1:00): 79, GPU has fallen off the bus.\n"


async def test_what_the_kernel_writes_makes_it_look_again(tmp_path: Path) -> None:
    path, log = kernel_log(tmp_path)
    hardware = Hardware(Discovery(GpuSource.NONE), (), tmp_path, lambda: None, path, quiet_s=0.01)
    first = await hardware.read()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hardware.run)
        await trio.testing.wait_all_tasks_blocked()
        os.write(log, XID)
        with trio.fail_after(30):
            while hardware.inventory is first:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    os.close(log)


async def test_the_kernel_log_of_another_machine_is_not_listened_to(tmp_path: Path) -> None:
    path, log = kernel_log(tmp_path)
    it = Node(tmp_path, "l40s-2", 1000)
    hardware = Hardware(Discovery(GpuSource.NVIDIA_SMI, str(it.root)), (), tmp_path, lambda: None, path)
    await hardware.read()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hardware.run)
        await trio.testing.wait_all_tasks_blocked()
        os.write(log, XID)
        await trio.testing.wait_all_tasks_blocked()
        assert os.read(log, 4096) == XID, "nobody took it"
        nursery.cancel_scope.cancel()
    os.close(log)


async def test_between_two_readings_there_is_time(tmp_path: Path) -> None:
    """A reading that makes the kernel write about it must not lead to reading without end; no event is lost."""
    async with node(tmp_path, quiet_s=0.1) as it:
        read_at = [trio.current_time()]
        for n in range(3):
            write_state(it.root, {0: {"ecc": n + 1}})
            it.hardware.look_again()
            await it.change()
            read_at.append(trio.current_time())
        # As long as between two readings, and then as long again for what may come with the event.
        assert all(b - a >= 0.2 for a, b in itertools.pairwise(read_at))


async def test_while_a_program_cannot_be_ended_no_other_is_started(tmp_path: Path) -> None:
    """Processes that hang in the kernel survive SIGKILL; one that merely lives stands in for them."""
    it = Node(tmp_path, "l40s-2", 1000)
    machine = LiveMachine(Discovery(GpuSource.NVIDIA_SMI, str(it.root)))
    assert (await machine.ask("nvidia-smi", "-L")).code == 0
    process = await trio.lowlevel.open_process(["sleep", "1000"])
    machine.left("nvidia-smi", process)
    with pytest.raises(DiscoveryError, match=f"pid {process.pid}"):
        await machine.ask("nvidia-smi", "-L")
    assert (await machine.ask("ip", "-j", "addr", "show")).code == 0
    process.kill()
    await process.wait()
    assert (await machine.ask("nvidia-smi", "-L")).code == 0
