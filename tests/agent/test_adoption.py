"""Agents that come after others: what runs is adopted, what ended is told, and nobody else is touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import orjson
import pytest
import trio
from attrs import evolve

from llmgw.agent import process, proctree, records
from llmgw.agent.stop import stop_engines
from llmgw.errors import OperatorError
from llmgw.scheduler.state import Exit, ShardState
from tests.agent.test_shards import (
    INVENTORY,
    alive,
    config,
    running,
    shim_of,
    soon,
    start,
)

S = ShardState


def _status(pid: int, what: str) -> str:
    """A line of the kernel's word on a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith(f"{what}:"))


async def test_an_agent_that_stops_leaves_its_engine_and_the_next_one_adopts_it(folder: Path) -> None:
    settings = config(folder)
    async with running(settings) as node:
        await node.shards.start(start(), INVENTORY)
        before = await node.until(S.READY)
        began = trio.current_time()
    assert trio.current_time() - began < 1
    assert alive(before.pid)
    async with running(settings) as node:
        after = node.get().report()
        assert (after.state, after.pid, after.endpoint) == (S.READY, before.pid, before.endpoint), "ready at once"
        assert after.api_key == before.api_key
        node.get().stop("enough", 1)
        stopped = await node.until(S.STOPPED)
        assert stopped.exit is not None
        assert stopped.exit.code == 0, "the shim knows how an adopted engine ended"


async def test_an_engine_whose_shim_is_killed_goes_on_and_is_stopped_all_the_same(folder: Path) -> None:
    settings = config(folder)
    async with running(settings) as node:
        await node.shards.start(start(workers=1), INVENTORY)
        pid = (await node.until(S.READY)).pid
        assert pid is not None
        worker = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        os.kill(shim_of(folder), signal.SIGKILL)
        with trio.move_on_after(0.3):
            await node.get().done.wait()
        assert (node.get().shard.state, alive(pid)) == (S.READY, True)
    async with running(settings) as node:
        assert node.get().report().pid == pid, "adopted without a shim"
        node.get().stop("enough", 1)
        stopped = await node.until(S.STOPPED)
        assert str(stopped.exit) == "exit code unknown"
        assert soon(lambda: not alive(pid) and not alive(worker))


async def test_engines_without_agent_and_shim_can_be_stopped_too(folder: Path) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(start(), INVENTORY)
        pid = (await node.until(S.READY)).pid
        os.kill(shim_of(folder), signal.SIGKILL)
    assert alive(pid)
    assert stop_engines(folder, 2.0) == ("m-1.0-g1",)
    assert not alive(pid)


async def test_one_that_is_being_ended_is_not_ready_again_for_the_next_agent(folder: Path) -> None:
    settings = config(folder)
    async with running(settings) as node:
        await node.shards.start(start(ignore_sigterm=True), INVENTORY)
        pid = (await node.until(S.READY)).pid
        node.get().stop("enough", 60)
        with trio.fail_after(5):
            while records.read(folder / "shards/m-1.0-g1").state is not S.STOPPING:
                await trio.sleep(0.01)
    async with running(settings) as node:
        said = node.get().report()
        assert (said.state, said.pid, said.endpoint) == (S.STOPPING, pid, None), "it answers, and is not to be asked"
        stopped = await node.until(S.STOPPED)
        assert stopped.reason == "adopted while it was being ended; it did not end by SIGTERM, killed by signal 9"


@pytest.mark.parametrize("lives", [True, False], ids=["adopted", "ended meanwhile"])
async def test_an_engine_that_was_ended_for_a_reason_keeps_it_though_its_agent_dies(folder: Path, lives: bool) -> None:
    settings = config(folder)
    place = folder / "shards/m-1.0-g1"
    async with running(settings) as node:
        command = start(load_s=0.2, hang_loading=True)
        limits = evolve(command.profile.limits, load_s=0.3, stop_s=60)
        await node.shards.start(evolve(command, profile=evolve(command.profile, limits=limits)), INVENTORY)
        pid = (await node.until(S.STOPPING)).pid
        with trio.fail_after(5):
            while records.read(place).state is not S.STOPPING:
                await trio.sleep(0.01)
    assert pid is not None
    if not lives:
        os.kill(pid, signal.SIGKILL)
        assert soon(lambda: records.end(place) is not None)
    for _ in range(2):  # the second agent finds it failed
        async with running(settings) as node:
            if not node.get().shard.state.ended:
                assert node.get().report().reason.startswith("stood still for 0.3 s at: ")
                os.kill(pid, signal.SIGKILL)
            failed = await node.until_ended()
            assert failed.state is S.FAILED, "a stop that nobody asked for"
            assert failed.reason.startswith("stood still for 0.3 s at: ")
            assert failed.exit == Exit(None, 9)
            await node.get().settled.wait()


async def test_nothing_is_told_to_end_before_that_is_written_down(folder: Path) -> None:
    """Else the next agent would take the end for one that nobody asked for."""
    engine = "trap 'cp record.json seen; exit 0' TERM; : > armed; sleep 3600 & wait"
    async with running(config(folder, ("/bin/sh", "-c", engine))) as node:
        await node.shards.start(start(), INVENTORY)
        known = node.get()
        with trio.fail_after(10):
            while not (known.folder / "armed").exists():
                await trio.sleep(0.01)
        before = known.record
        shim = shim_of(folder)
        os.kill(shim, signal.SIGSTOP)  # what it is sent stays to be seen
        try:
            assert soon(lambda: _status(shim, "State").startswith("T"))
            known.stop("enough", 60)
            known.written(before)  # its writing was under way
            assert not int(_status(shim, "ShdPnd"), 16) & 1 << signal.SIGTERM - 1
        finally:
            os.kill(shim, signal.SIGCONT)
        assert (await node.until_ended()).exit == Exit(0)
        seen = orjson.loads((known.folder / "seen").read_bytes())
        assert seen["state"] == "stopping"


async def test_a_shim_that_has_not_spoken_yet_is_waited_for(folder: Path) -> None:
    """The last agent died while the shim was starting: it holds its folder, and says who it is a moment later."""
    settings = config(folder)
    place = folder / "shards/m-1.0-g1"
    async with running(settings) as node:
        await node.shards.start(start(), INVENTORY)
        pid = (await node.until(S.READY)).pid
    said = (place / "shim.json").read_bytes()
    (place / "shim.json").unlink()
    async with running(settings) as node:
        with trio.move_on_after(0.3):
            await node.get().done.wait()
        assert (node.get().shard.state.ended, node.get().pid) == (False, None)
        node.get().stop("enough", 60)
        (place / "shim.json").write_bytes(said)
        stopped = await node.until_ended()
        assert (stopped.state, stopped.exit, alive(pid)) == (S.STOPPED, Exit(0), False), "it was told then"
    assert pid in [report.pid for report in node.said]


async def test_a_shim_of_an_earlier_launch_never_starts_in_a_folder_that_is_used_again(folder: Path) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(start(), INVENTORY)
        await node.until(S.READY)
        node.get().stop("enough", 1)
        await node.until_ended()
    place = folder / "shards/m-1.0-g1"
    for launch, started in (("an earlier one", False), (records.read(place).launch, True)):
        mark = folder.parent / launch
        with suppress(OperatorError):
            env = {**os.environ, "LLMGW_LAUNCH": launch}
            await process.spawn(place, ("/bin/sh", "-c", f"echo > '{mark}'"), env)
        with trio.move_on_after(5 if started else 0):
            while not mark.exists():
                await trio.sleep(0.01)
        assert mark.exists() is started


async def test_what_ended_without_an_agent_is_reported(folder: Path) -> None:
    settings = config(folder)
    async with running(settings) as node:
        await node.shards.start(start(), INVENTORY)
        pid = (await node.until(S.READY)).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with trio.fail_after(5):
        while records.end(folder / "shards/m-1.0-g1") is None:
            await trio.sleep(0.01)
    async with running(settings) as node:
        (report,) = node.shards.reports()
        assert report.state is S.FAILED
        assert report.reason == "the engine ended without being asked while no agent ran: killed by signal 9"
        assert report.log_tail


async def test_a_pid_that_is_somebody_elses_now_is_never_signalled(folder: Path) -> None:
    settings = config(folder)
    async with running(settings) as node:
        await node.shards.start(start(), INVENTORY)
        await node.until(S.READY)
        node.get().stop("x", 1)
        await node.until(S.STOPPED)
    place = folder / "shards/m-1.0-g1"
    (place / "exit.json").unlink()
    record = records.read(place)
    records.write(place, evolve(record, state=S.READY))
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        started = process.start_time(stranger.pid)
        assert started is not None
        both = {"shim": stranger.pid, "engine": stranger.pid}
        for told in (
            {**both, "shim_start": started - 5, "engine_start": started - 5},
            {**both, "shim_start": started, "engine_start": started - 5, "fingerprint": "0badc0de"},
        ):
            records.write(place, evolve(record, state=S.READY))
            (place / "shim.json").write_text(json.dumps(told))
            async with running(settings) as node:
                assert node.get().shard.state is S.FAILED
                node.get().stop("x", 0)
            stop_engines(folder, 0.0)
            with pytest.raises(subprocess.TimeoutExpired):
                stranger.wait(0.3)
        grip = evolve(records.pids(place), fingerprint=proctree.fingerprint(stranger.pid) or "").grip()
        assert grip is not None, "by its own command line it is known"
        grip.close()
    finally:
        stranger.kill()
        stranger.wait()


async def test_an_engine_that_ends_while_it_is_looked_at_is_told_with_its_exit(folder: Path) -> None:
    """It lived when its end was read, and no more when its folder's lock was tried."""
    async with running(config(folder)) as node:
        await node.shards.start(start(), INVENTORY)
        await node.until(S.READY)
        node.get().stop("x", 1)
        await node.until(S.STOPPED)
        await node.get().settled.wait()
    place = folder / "shards/m-1.0-g1"
    (place / "exit.json").rename(folder / "said")
    armed = True

    def shim_ends(event: str, args: tuple[object, ...]) -> None:
        if armed and event == "fcntl.flock" and (folder / "said").exists():
            (folder / "said").rename(place / "exit.json")

    sys.addaudithook(shim_ends)  # for ever
    try:
        async with running(config(folder)) as node:
            assert not (folder / "said").exists()
            assert node.get().report().exit == Exit(0)
    finally:
        armed = False


async def test_a_pid_of_another_boot_is_somebody_elses_though_it_started_at_the_same_tick(folder: Path) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(start(), INVENTORY)
        await node.until(S.READY)
        node.get().stop("x", 1)
        await node.until(S.STOPPED)
    place = folder / "shards/m-1.0-g1"
    (place / "exit.json").unlink()
    said = json.loads((place / "shim.json").read_text())
    for whose, record in (("unreadable", b"{"), ("whole", b"")):
        stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        try:
            at = process.start_time(stranger.pid)
            pids = {"shim": stranger.pid, "shim_start": at, "engine": stranger.pid, "engine_start": at}
            (place / "shim.json").write_text(json.dumps({**said, **pids, "boot": "another"}))
            if record:
                kept = records.read(place)
                (place / "record.json").write_bytes(record)
            else:
                records.write(place, evolve(kept, state=S.READY, boot_id="another"))
            assert stop_engines(folder, 0.0) == (), whose
            if not record:
                async with running(config(folder)) as node:
                    assert node.get().shard.reason == "the machine was restarted"
            with pytest.raises(subprocess.TimeoutExpired):
                stranger.wait(0.3)
        finally:
            stranger.kill()
            stranger.wait()


async def test_records_of_another_boot_and_records_that_are_none(folder: Path) -> None:
    settings = config(folder)
    async with running(settings) as node:
        await node.shards.start(start(), INVENTORY)
        await node.until(S.READY)
        node.get().stop("x", 1)
        await node.until(S.STOPPED)
    place = folder / "shards/m-1.0-g1"
    records.write(place, evolve(records.read(place), state=S.READY, boot_id="another"))
    (place / "exit.json").unlink()
    (folder / "shards/m-2.0-g1").mkdir()
    (folder / "shards/m-2.0-g1/record.json").write_text("{")
    (folder / "shards/m-3.0-g1").mkdir()
    records.write(folder / "shards/m-3.0-g1", evolve(records.read(place), shard="m-3.0"))
    async with running(settings) as node:
        assert node.get().shard.reason == "the machine was restarted"
        assert node.shards.find("m-2.0", 1) is None
        assert (folder / "shards/m-2.0-g1/record.json").exists(), "what cannot be read is left alone"
        assert node.shards.find("m-3.0", 1) is None
        assert not (folder / "shards/m-3.0-g1").exists(), "what never came about is dropped"


@pytest.mark.parametrize("shim_lives", [True, False])
async def test_nothing_is_started_over_an_engine_whose_record_cannot_be_read(folder: Path, shim_lives: bool) -> None:
    settings = config(folder)
    place = folder / "shards/m-1.0-g1"
    async with running(settings) as node:
        await node.shards.start(start(), INVENTORY)
        pid = (await node.until(S.READY)).pid
    if not shim_lives:
        shim = shim_of(folder)
        os.kill(shim, signal.SIGKILL)
        assert soon(lambda: not alive(shim))
    (place / "record.json").write_bytes(b"{")
    async with running(settings) as node:
        with pytest.raises(OperatorError, match="an engine runs there"):
            await node.shards.start(start(), INVENTORY)
        assert node.shards.find("m-1.0", 1) is None
        assert (place / "record.json").read_bytes() == b"{"
    assert alive(pid)
    stop_engines(folder, 0.0)
    assert soon(lambda: not alive(pid)), "as the error said"
    async with running(settings) as node:
        await node.shards.start(start(), INVENTORY)
        await node.until(S.READY)
        node.get().stop("x", 1)
        await node.until(S.STOPPED)
