"""What is seen of engines from outside, with real engines, a fake machine's memory, and a made-up /proc."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from attrs import evolve

from fakes.machines import MACHINES, render, write_state
from llmgw.agent import records
from llmgw.agent.events import Crippled, Observation, Read
from llmgw.agent.hardware import Hardware
from llmgw.agent.stop import stop_engines
from llmgw.agent.tracking import Tracking
from llmgw.cli.demo_files import fakes_dir
from llmgw.hardware.inventory import Inventory
from llmgw.link.messages import StartShard
from llmgw.scheduler.state import ShardState
from llmgw.settings.daemon import Discovery, GpuSource
from tests.agent.test_attempts import ended
from tests.agent.test_proctree import made
from tests.agent.test_shards import INVENTORY, Node, alive, config, running, shim_of, soon, start

S = ShardState


class Machine:
    """Two cards, and what the driver lists on them."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "machine"
        render(MACHINES["l40s-2"], self.root)
        discovery = Discovery(GpuSource.NVML, str(self.root), interval_s=1000)
        self.hardware = Hardware(discovery, (), folder, lambda: None, quiet_s=0.05)

    def lists(self, *processes: tuple[int | None, str, int]) -> None:
        write_state(self.root, {0: {"processes": [list(p) for p in processes]}})

    def command(self, inventory: Inventory, **engine: Any) -> StartShard:
        made = start(**engine)
        profile = evolve(made.profile, device_class=("l40s-45g",))
        return evolve(made, profile=profile, uuids=(inventory.devices[0].uuid,))


@asynccontextmanager
async def loaded(folder: Path, **engine: Any) -> AsyncIterator[tuple[Node, Machine]]:
    """An agent with hardware and one engine of it that was started."""
    machine = Machine(folder)
    inventory = await machine.hardware.read()
    async with running(config(folder), hardware=machine.hardware) as node, trio.open_nursery() as nursery:
        nursery.start_soon(machine.hardware.run)
        await node.shards.start(machine.command(inventory, **engine), inventory)
        yield node, machine
        nursery.cancel_scope.cancel()


async def test_memory_that_is_held_after_the_end_keeps_the_shard_stopping(folder: Path) -> None:
    async with loaded(folder) as (node, machine):
        pid = (await node.until(S.READY)).pid
        machine.lists((pid, "VLLM::Worker_TP1", 30000))
        node.get().stop("enough", 1)
        with trio.fail_after(15):
            while " holds " not in node.get().shard.reason:
                await trio.sleep(0.02)
        assert not alive(pid), "the process is gone, and the driver has not freed its memory yet"
        report = node.get().report()
        assert (report.state, report.pid) == (S.STOPPING, None)
        assert report.reason == f"pid {pid} VLLM::Worker_TP1 holds 29 GiB on gpu-0; enough; exit code 0"
        assert report.next == "stopped once nothing of it is left, failed if that takes more than 60 s"
        machine.lists((1, "a stranger", 30000))
        assert (await node.until(S.STOPPED)).reason == "enough; exit code 0"


async def test_a_crash_is_told_at_once_and_ended_when_its_memory_is_free(folder: Path) -> None:
    async with loaded(folder) as (node, machine):
        pid = (await node.until(S.READY)).pid
        assert pid is not None
        machine.lists((pid, "VLLM::EngineCore", 500))
        os.kill(pid, signal.SIGKILL)
        stopping = await node.until(S.STOPPING)
        assert "without being asked while ready" in stopping.reason
        assert stopping.endpoint is None
        machine.lists()
        failed = await node.until(S.FAILED)
        assert failed.reason.startswith("the engine ended without being asked while ready: killed by signal 9")


async def test_the_most_memory_is_remembered_while_it_loads_and_while_it_serves(folder: Path) -> None:
    async with loaded(folder, start_s=0.2, load_s=3600) as (node, machine):
        await node.until(S.LOADING)
        pid = node.get().pid

        async def seen(loading: int | None, serving: int | None) -> None:
            machine.hardware.look_again()
            with trio.fail_after(15):
                while True:
                    said = node.get().report()
                    if (said.load_mib, said.serving_mib) == (
                        None if loading is None else (loading,), None if serving is None else (serving,)
                    ):  # fmt: skip
                        return
                    await trio.sleep(0.02)

        assert node.get().report().load_mib is None
        machine.lists((pid, "python", 20000), (1, "a stranger", 9000))
        await seen(20000, None)
        machine.lists((pid, "python", 30000))
        await seen(30000, None)
        machine.lists((pid, "python", 10000))
        await machine.hardware.anew()
        await seen(30000, None)
    assert any(report.load_mib == (30000,) for report in node.said), "it is reported without a change of state"


async def test_when_it_gets_ready_the_hardware_is_read(folder: Path) -> None:
    async with loaded(folder, load_s=0.3) as (node, machine):
        machine.lists((node.get().pid, "python", 7000))
        await node.until(S.READY)
        with trio.fail_after(15):
            while node.get().report().serving_mib != (7000,):
                await trio.sleep(0.02)


async def test_what_escaped_its_group_and_its_shim_is_killed(folder: Path) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(start(daemon=True, escaped_worker=True), INVENTORY)
        pid = (await node.until(S.READY)).pid
        found = node.get().tracking.members()
        assert len(found) == 3
        os.kill(shim_of(folder), signal.SIGKILL)
        node.get().stop("enough", 1)
        stopped = await node.until(S.STOPPED)
        assert stopped.reason == "enough; exit code unknown"
        assert not any(alive(m.pid) for m in found)
        assert pid in {m.pid for m in found}
    assert any("still run" in report.reason and "SIGKILL" in report.next for report in node.said)


async def test_what_was_left_while_no_agent_ran_is_killed_by_the_next(folder: Path) -> None:
    settings = config(folder)
    async with running(settings) as node:
        await node.shards.start(start(daemon=True), INVENTORY)
        pid = (await node.until(S.READY)).pid
        assert pid is not None
        left = [m for m in node.get().tracking.members() if m.pid != pid]
    assert len(left) == 1
    os.kill(shim_of(folder), signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    assert soon(lambda: not alive(pid))
    assert alive(left[0].pid)
    async with running(settings) as node:
        failed = await node.until(S.FAILED) if not node.get().shard.state.ended else node.get().report()
        assert failed.reason == "the engine ended while neither agent nor shim ran"
        assert not alive(left[0].pid)


async def test_stop_engines_finds_what_escaped_too(folder: Path) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(start(daemon=True), INVENTORY)
        pid = (await node.until(S.READY)).pid
        assert pid is not None
        found = node.get().tracking.members()
        os.kill(shim_of(folder), signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    assert stop_engines(folder, 0.1) == ("m-1.0-g1",)
    assert not any(alive(m.pid) for m in found)


async def test_an_engine_that_listens_for_everybody_is_ended(folder: Path) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(start(listen="0.0.0.0"), INVENTORY)
        failed = await node.until(S.FAILED)
        port = node.get().record.port
        assert failed.reason.startswith(
            f"its API listens on 0.0.0.0:{port}, and was told 127.0.0.1:{port}: anybody who reaches this node can use it"
        )
        assert failed.final
        assert failed.remedy == "look for --host in the profile's args, or for a proxy in the engine's image"


async def test_other_ports_are_a_warning_of_a_shard_that_serves(folder: Path) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(start(listen_too="0.0.0.0 127.0.0.1"), INVENTORY)
        await node.until(S.READY)
        with trio.fail_after(10):
            while not node.get().report().warnings:
                await trio.sleep(0.02)
        (warning,) = node.get().report().warnings
        assert warning.startswith("listens for its own processes on 0.0.0.0:")
        assert "127.0.0.1" not in warning
        assert any(report.warnings == (warning,) for report in node.said)
        assert node.get().shard.state is S.READY
        node.get().stop("x", 1)
        assert (await node.until(S.STOPPED)).warnings == ()


async def test_an_engine_that_speaks_tcp_in_its_fabric_s_place_is_told_while_it_serves(folder: Path) -> None:
    said = "n:7:9 [0] NCCL INFO NCCL_IB_HCA set by environment to =mlx5_0:1\\nn:7:9 [0] NCCL INFO Using network Socket"
    engine = (sys.executable, str(fakes_dir() / "engine.py"), "serve")
    script = f"import os, sys; print('{said}', flush=True); os.execv({sys.executable!r}, [*{engine!r}, *sys.argv[1:]])"
    settings = config(folder, (sys.executable, "-c", script))
    told = "NCCL speaks TCP although it was given the fabric =mlx5_0:1: run llmgw doctor on this node"
    async with running(settings) as node:
        await node.shards.start(start(), INVENTORY)
        await node.until(S.READY)
        with trio.fail_after(10):
            while not node.get().report().warnings:
                await trio.sleep(0.02)
        assert node.get().report().warnings[0].startswith(told)
        assert any(report.warnings for report in node.said)
        assert node.get().shard.state is S.READY
    with (folder / "shards/m-1.0-g1/engine.log").open("a") as log:
        log.write(f"{'much later':<199}\n" * 2000)
    async with running(settings) as node:
        with trio.fail_after(10):
            while not node.get().report().warnings:
                await trio.sleep(0.02)
        node.get().stop("x", 1)
        assert (await node.until(S.STOPPED)).warnings == ()


async def test_a_hung_engine_is_written_down_and_its_log_kept(folder: Path) -> None:
    async with running(config(folder)) as node:
        command = start(never_ready=True, workers=1)
        limits = evolve(command.profile.limits, load_s=0.5)
        await node.shards.start(evolve(command, profile=evolve(command.profile, limits=limits)), INVENTORY)
        failed = await node.until(S.FAILED)
        assert failed.reason.startswith("stood still for 0.5 s at: ")
        assert "where it stood is in stacks.txt beside its log" in failed.reason
        assert Path(failed.log_path) == folder / "shards/m-1.0-g1/engine.log"
        said = (folder / "shards/m-1.0-g1/stacks.txt").read_text()
        assert len([line for line in said.splitlines() if line.startswith("== pid ")]) >= 2
        await node.shards.forget("m-1.0", 1)
    kept = folder / "logs/m-1.0-g1"
    assert (kept / "stacks.txt").read_text() == said
    assert b"fake engine" in (kept / "engine.log").read_bytes()
    assert json.loads((kept / "summary.json").read_text())["reason"] == failed.reason
    assert not (folder / "shards/m-1.0-g1").exists()


async def test_a_folder_that_was_being_moved_when_the_agent_died(folder: Path) -> None:
    (ended(folder, "m-1.0", 1) / "record.json").unlink()
    async with running(config(folder)) as node:
        assert node.shards.reports() == ()
    assert (folder / "logs/m-1.0-g1/summary.json").exists()


async def test_bytes_read_are_observed_while_it_loads(tmp_path: Path, mock_clock: trio.testing.MockClock) -> None:
    mock_clock.rate = 100
    proc = tmp_path / "proc"
    place = ended(tmp_path, "m-1.0", 1)
    record = evolve(records.read(place), launch="abc")
    seen: list[Observation] = []

    def observe(observation: Observation) -> None:
        seen.append(observation)
        made(proc, 10, environ=b"LLMGW_LAUNCH=abc\0", read=1000 * len(seen))
        made(proc, 11, environ=b"LLMGW_LAUNCH=another\0", read=7)
        if len(seen) == 3:
            tracking.became(S.READY)

    tracking = Tracking(place, record, S.STARTING, observe, lambda: None, proc=proc)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tracking.run)
            while len(seen) < 3:
                await trio.sleep(1)
            await trio.sleep(10)
            nursery.cancel_scope.cancel()
    assert seen == [Read(0), Read(1000), Read(2000)]


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_above_0_without_its_worker_is_told(
    tmp_path: Path, mock_clock: trio.testing.MockClock, rank: int
) -> None:
    mock_clock.autojump_threshold = 0.001
    proc = tmp_path / "proc"
    record = evolve(records.read(ended(tmp_path, "m-1.1", 1)), launch="abc", rank=rank)
    worker = made(proc, 10, environ=b"LLMGW_LAUNCH=abc\0")
    seen: list[Observation] = []
    tracking = Tracking(tmp_path / "none", record, S.LOADING, seen.append, lambda: None, proc=proc)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tracking.run)
        await trio.sleep(5)
        tracking.became(S.READY)
        await trio.sleep(5)
        told = [one for one in seen if isinstance(one, Crippled)]
        assert told == [], "its worker is there"
        shutil.rmtree(worker)
        await trio.sleep(5)
        nursery.cancel_scope.cancel()
    told = [one for one in seen if isinstance(one, Crippled)]
    gone = Crippled("pid 10 VLLM::Worker_TP1 ended without being asked, and the rest of the rank stayed")
    assert told == ([gone] if rank else []), "rank 0 sees to itself"
