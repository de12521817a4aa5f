from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from llmgw.agent import stacks
from llmgw.agent.proctree import Member, stat

THREADS = (
    "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); "
    "print('up', flush=True); time.sleep(60)"
)


@contextmanager
def hanging() -> Iterator[Member]:
    process = subprocess.Popen([sys.executable, "-c", THREADS], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        found = stat(process.pid)
        assert found is not None
        yield Member(process.pid, found.start, found.name, "VLLM::Worker_TP1")
    finally:
        process.kill()
        process.communicate()


def program(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "py-spy"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return folder / "engine"


async def test_every_thread_and_what_py_spy_says(tmp_path: Path) -> None:
    engine = program(tmp_path / "bin", 'echo "Thread $3 (idle): wait (nccl.py:7)"')
    engine.write_text("#!/bin/sh\n")
    engine.chmod(0o755)
    with hanging() as member:
        with trio.fail_after(5):
            while any(stat.read_text().split()[2] != "S" for stat in Path(f"/proc/{member.pid}/task").glob("*/stat")):
                await trio.sleep(0.01)
        await stacks.keep(tmp_path, [member, Member(2**22 + 1, 1, "gone")], [str(engine), "serve"])
        said = (tmp_path / "stacks.txt").read_text()
        assert f"== pid {member.pid} VLLM::Worker_TP1: {tmp_path}/bin/py-spy dump" in said
        assert f"Thread {member.pid} (idle): wait (nccl.py:7)" in said
        assert len([line for line in said.splitlines() if line.startswith("-- thread ")]) == 2
        assert f"-- thread {member.pid} {member.name} state S wchan " in said
        if os.access(f"/proc/{member.pid}/stack", os.R_OK) and os.geteuid() == 0:
            assert "nanosleep" in said
    assert (tmp_path / "stacks.txt").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("text", "told"), [("echo 'Permission denied' >&2; exit 1", "Permission denied"), ("", None)])
async def test_a_py_spy_that_says_nothing_good(tmp_path: Path, text: str, told: str | None) -> None:
    engine = program(tmp_path / "bin", text)
    engine.write_text("")
    engine.chmod(0o755)
    with hanging() as member:
        await stacks.keep(tmp_path, [member], [str(engine)])
    said = (tmp_path / "stacks.txt").read_text()
    assert "-- thread" in said
    assert (told in said) if told else ("dump" not in said)


async def test_a_py_spy_that_hangs_too_leaves_the_kernels_view(tmp_path: Path) -> None:
    engine = program(tmp_path / "bin", "exec sleep 60")
    engine.write_text("")
    engine.chmod(0o755)
    with hanging() as member:
        with trio.move_on_after(0.5) as scope:
            await stacks.keep(tmp_path, [member], [str(engine)])
    assert scope.cancelled_caught
    assert "-- thread" in (tmp_path / "stacks.txt").read_text()


def test_which_py_spy(tmp_path: Path) -> None:
    proc, venv = tmp_path / "proc", tmp_path / "venv"
    (proc / "10").mkdir(parents=True)
    program(venv, "")
    (proc / "10/exe").symlink_to(venv / "python3.12")
    found = [Member(9, 1, "x"), Member(10, 1, "x")]
    assert stacks.py_spy(["/nothing/vllm"], found, proc) == str(venv / "py-spy")
    assert stacks.py_spy([], [], proc) in (None, *(f"{place}/py-spy" for place in os.environ["PATH"].split(":")))


def test_what_is_not_readable_is_said(tmp_path: Path) -> None:
    task = tmp_path / "10/task/10"
    task.mkdir(parents=True)
    (task / "stat").write_text("10 (nccl) D 1 2\n")
    (task / "wchan").write_text("nvidia_ioctl")
    said = stacks.kernel_view([Member(10, 1, "python", "python -m x")], tmp_path)
    assert said.splitlines()[:2] == [
        "== pid 10 python: python -m x", "-- thread 10 nccl state D wchan nvidia_ioctl syscall not readable",
    ]  # fmt: skip
