"""An agent that is short of disk, files or rights says so, and loses nothing that runs."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from attrs import evolve

from llmgw.agent import logs, main, process, records
from llmgw.agent.dispatch import Dispatch
from llmgw.agent.epoch import Epoch, EpochFile
from llmgw.agent.shim.log import Log
from llmgw.agent.stop import stop_engines
from llmgw.errors import OperatorError
from llmgw.hardware.inventory import Device
from llmgw.link.messages import StopShard
from llmgw.scheduler.state import Exit, ShardState
from llmgw.store.folder import held
from tests.agent.test_shards import INVENTORY, SLEEPER, alive, config, processes, running, soon, start, written

S = ShardState
MIB = 1024 * 1024
PAGE = 4096


def mount(place: Path, options: str) -> None:
    """Put a file system of its own there, where this user may."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A state folder on a disk of 1 MiB; no engine of it is left after the test."""
    place = tmp_path / "disk"
    place.mkdir()
    mount(place, "size=1m,mode=0700")
    try:
        yield place
        (place / "ballast").unlink(missing_ok=True)
        stop_engines(place, 0.0)
        assert soon(lambda: processes(place) == set())
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path, free: int = 0) -> None:
    """Leave so many pages."""
    with (disk / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(PAGE))
        except OSError:
            file.truncate(file.tell() // PAGE * PAGE - free * PAGE)


async def test_a_start_on_a_full_disk_says_so_and_leaves_nothing(disk: Path) -> None:
    refused = 0
    async with running(config(disk, SLEEPER)) as node:
        for free in range(8):
            fill(disk, free)
            try:
                await node.shards.start(start(generation=free + 1), INVENTORY)
            except OperatorError as failed:
                refused += 1
                assert failed.reason == "cannot be written: No space left on device", failed
                assert failed.remedy == "check the disk"
                assert node.shards.reports() == ()
                assert list((disk / "shards").iterdir()) == []
                assert processes(disk) == set()
            else:
                assert alive(node.get(generation=free + 1).pid)
                break
            (disk / "ballast").unlink()
    assert 3 <= refused < 8, "neither the record nor what the shim writes had room"


async def test_a_disk_that_gets_full_hides_no_engine_and_no_end(disk: Path) -> None:
    async with running(config(disk)) as node:
        await node.shards.start(start(), INVENTORY)
        pid = (await node.until(S.READY)).pid
        fill(disk)
    async with running(config(disk)) as node:
        assert node.get().report().pid == pid
        await node.until(S.READY)
        node.get().stop("enough", 2)
        stopped = await node.until(S.STOPPED)
        assert stopped.exit == Exit(0), "room for it was taken when there was some"
        with pytest.raises(OperatorError, match="cannot be moved: No space left on device"):
            await node.shards.forget("m-1.0", 1)
        (disk / "ballast").unlink()
        await node.shards.forget("m-1.0", 1)
    assert list((disk / "shards").iterdir()) == []


FILLER = """
import os, time

def say(line):
    try:
        return os.write(1, line.encode() + b"\\n") == len(line) + 1
    except OSError:
        return False

for n in range(10000):
    if not say(f"{n:>1023}"):
        time.sleep(0.001)
while not say("the end"):
    time.sleep(0.001)
time.sleep(3600)
"""


async def test_a_log_that_fills_the_disk_is_cut_and_its_last_lines_are_kept(disk: Path) -> None:
    """The disk is smaller than what a log may have."""
    script = disk.parent / "filler.py"
    script.write_text(FILLER)
    place = disk / "shards/m-1.0-g1"
    async with running(config(disk, (sys.executable, str(script)))) as node:
        await node.shards.start(start(), INVENTORY)
        with trio.fail_after(30):
            while logs.tail(place)[-1:] != ("the end",):
                await trio.sleep(0.05)
        assert node.get().shard.state is S.STARTING
        node.get().stop("enough", 2)
        assert (await node.until_ended()).exit == Exit(None, 15)


async def flood(folder: Path, mib: int) -> tuple[float, int, int, int]:
    """MB/s of an engine that only logs, the most that its log and the older part had, and how many lines were lost."""
    place = folder / "shards/m-1.0-g1"
    most = [0, 0]
    seen: set[int] = set()
    async with running(config(folder)) as node:
        command = start(log_mib=mib)
        limits = evolve(command.profile.limits, start_s=600, load_s=600)
        command = evolve(command, profile=evolve(command.profile, limits=limits))
        await node.shards.start(command, INVENTORY)
        began = trio.current_time()
        with trio.fail_after(30 + mib / 50):
            while b"Loading weights took" not in "".join(logs.tail(place)).encode():
                for at, name in enumerate(("engine.log", "engine.log.1")):
                    if (place / name).exists():
                        most[at] = max(most[at], (place / name).stat().st_size)
                await trio.sleep(0.01)
        took_s = trio.current_time() - began
        await node.until(S.READY)
        with trio.fail_after(20):
            while (place / "engine.log").stat().st_size > process.LOG_BYTES:
                await trio.sleep(0.05)  # its shim has not looked at it since it was filled
    assert {(place / name).stat().st_mode & 0o777 for name in ("engine.log.1", "engine.log")} == {0o600}
    data = b"".join((place / name).read_bytes() for name in ("engine.log.1", "engine.log"))
    assert b"\0" not in data
    seen = {int(line) for line in data.splitlines() if len(line) == 1023 and line.strip().isdigit()}
    assert max(seen) == mib * 1024 - 1
    gaps = mib * 1024 - min(seen) - len(seen)
    return mib * MIB / 1e6 / took_s, most[0], most[1], gaps


async def test_a_flood_of_output_is_kept_short_while_it_lasts(folder: Path) -> None:
    rate, newest, older, lost = await flood(folder, 150)
    print(f"{rate:.0f} MB/s, at most {newest / MIB:.0f} and {older / MIB:.0f} MiB, {lost} of the kept lines lost")
    assert newest < process.LOG_BYTES + rate * 1e6, "a second's worth beyond"
    assert process.LOG_BYTES - PAGE <= older <= process.LOG_BYTES


def test_a_log_that_ends_with_a_block_is_cut_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system cannot take all blocks away; the other way to cut loses what is written meanwhile."""
    monkeypatch.chdir(tmp_path)
    log = Log(16 * PAGE)
    for size in (32 * PAGE + 7, 32 * PAGE):
        said = bytes(n % 251 for n in range(size))
        os.ftruncate(log.file, 0)
        os.write(log.file, said)
        log.look()
        newer, older = (Path(name).read_bytes() for name in ("engine.log", "engine.log.1"))
        assert said.endswith(older + newer)
        if not newer:
            pytest.skip("this file system takes no blocks off the beginning")
        assert len(older) + len(newer) == 16 * PAGE
    os.close(log.file)


@pytest.mark.soak
async def test_a_long_flood_of_output_is_kept_short_while_it_lasts(folder: Path) -> None:
    rate, newest, older, lost = await flood(folder, 4000)
    print(f"\n{rate:.0f} MB/s, at most {newest / MIB:.0f} and {older / MIB:.0f} MiB, {lost} of the kept lines lost")
    assert rate > 100
    assert newest < process.LOG_BYTES + rate * 1e6
    assert process.LOG_BYTES - PAGE <= older <= process.LOG_BYTES


@contextmanager
def files_at_most(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_256_files_are_enough_for_many_shards(folder: Path) -> None:
    many = 12
    inventory = evolve(INVENTORY, devices=tuple(Device(n, f"GPU-{n}", "x", "h100-80g", 81559, 1) for n in range(many)))
    with files_at_most(256):
        async with running(config(folder, SLEEPER)) as node:
            for n in range(many):
                await node.shards.start(start(f"m-{n}.0", devices=(n,)), inventory)
            assert len(processes(folder)) == 2 * many
        async with running(config(folder, SLEEPER)) as node:
            for n in range(many):
                node.get(f"m-{n}.0").stop("enough", 1)
            for n in range(many):
                assert (await node.until_ended(f"m-{n}.0")).state is S.STOPPED


async def test_an_agent_out_of_files_takes_no_engine_to_be_gone(folder: Path) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(start(escaped_worker=True), INVENTORY)
        pid = (await node.until(S.READY)).pid
        before = processes(folder)
        dispatch = Dispatch(node.shards, Epoch(EpochFile(folder)), lambda: INVENTORY)
        await dispatch.run(StopShard("s", 1, "another.0", 1, "x", 1.0))
        with files_at_most(3):
            result = await dispatch.run(start("m-2.0", devices=(1,)))
            assert result.reason == "shard m-2.0: Too many open files"
            with trio.move_on_after(1.5):
                await node.get().done.wait()
        assert not node.get().shard.state.ended
        assert processes(folder) == before
        await node.shards.start(start("m-2.0", devices=(1,)), INVENTORY)
        await node.until(S.READY, "m-2.0")
        assert (await node.until(S.READY)).pid == pid
        node.get().stop("enough", 2)
        assert (await node.until(S.STOPPED)).exit == Exit(0)


async def test_an_agent_out_of_files_does_not_adopt_by_guess(folder: Path) -> None:
    """Rather no agent than one that takes what lives for ended."""
    async with running(config(folder)) as node:
        await node.shards.start(start(), INVENTORY)
        pid = (await node.until(S.READY)).pid
    settings = config(folder)
    with files_at_most(3), pytest.raises(BaseExceptionGroup) as failed:
        async with running(settings):
            pytest.fail("it started")
    assert failed.group_contains(OperatorError, match="Too many open files", depth=None)
    assert alive(pid)
    async with running(settings) as node:
        assert node.get().report().pid == pid


def test_a_state_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(real)
    with pytest.raises(OperatorError, match=r"link: is a symbolic link\. set state_dir to "):
        main.run(written(config(link), tmp_path / "agent.yaml"))
    mount(real, "ro,mode=0700")
    try:
        with pytest.raises(OperatorError, match=r"real: is not writable: Read-only file system\. give the user"):
            main.run(written(config(real), tmp_path / "agent.yaml"))
    finally:
        subprocess.run(["umount", "-l", str(real)], check=True)


async def test_engines_on_a_disk_that_became_read_only_can_be_stopped(disk: Path, tmp_path: Path) -> None:
    async with running(config(disk)) as node:
        await node.shards.start(start(), INVENTORY)
        await node.until(S.READY)
    assert processes(disk)
    with held(disk, "agent"):
        pass
    seen = tmp_path / "seen"
    seen.mkdir()
    subprocess.run(["mount", "--bind", str(disk), str(seen)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(seen)], check=True)
        with held(disk, "agent"), pytest.raises(OperatorError, match="another llmgw agent holds it"):
            stop_engines(seen, 1.0)
        assert stop_engines(seen, 1.0) == ("m-1.0-g1",)
    finally:
        subprocess.run(["umount", "-l", str(seen)], check=True)
    assert soon(lambda: processes(disk) == set())


async def test_engines_on_a_full_disk_can_be_stopped_where_no_agent_had_ended(disk: Path) -> None:
    async with running(config(disk)) as node:
        await node.shards.start(start(), INVENTORY)
        await node.until(S.READY)
    fill(disk)
    assert stop_engines(disk, 1.0) == ("m-1.0-g1",)


def test_engines_are_not_said_to_be_stopped_where_there_cannot_be_any(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"deep: is not there: no agent ran on it\. look at state_dir"):
        stop_engines(tmp_path / "absent/deep", 0.0)
    assert not (tmp_path / "absent").exists()
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (state / "shards").write_text("")
    with pytest.raises(OperatorError, match="shards: cannot be looked at: Not a directory"):
        stop_engines(state, 0.0)


def test_an_agent_that_cannot_see_what_was_left_says_so_and_ends(folder: Path) -> None:
    """In one sentence, as everything that an operator has to mend."""
    (folder / "shards").write_text("")
    with pytest.raises(OperatorError, match=r"shards: is not a folder\. move it away"):
        main.run(written(config(folder), folder.parent / "agent.yaml"))
    (folder / "shards").unlink()


async def test_a_shards_folder_that_is_a_link_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (folder / "shards").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BaseExceptionGroup) as failed:
        async with running(config(folder)):
            pytest.fail("it started")
    assert failed.group_contains(OperatorError, match="shards: is a symbolic link", depth=None)
    (folder / "shards").unlink()
    assert records.folders(folder / "shards") == ()
