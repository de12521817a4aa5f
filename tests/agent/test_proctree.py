"""Real processes that are told from all others, and a made-up /proc for what cannot be made to happen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.agent import proctree
from llmgw.agent.proctree import Member, alive, carries, kill, marks, members, read_bytes, stat

SLEEP = "import time; time.sleep(60)"


@contextmanager
def child(code: str = SLEEP, **env: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **env}, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_what_carries_the_mark_is_ours_also_when_it_left_everything_else() -> None:
    double_fork = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True);"
        "print(p.pid, flush=True)"
    )
    with child(double_fork, **marks("m-1.0", 1, "abc")) as parent, child(**marks("m-1.0", 1, "other")) as stranger:
        assert parent.stdout is not None
        orphan = int(parent.stdout.readline())
        parent.wait()
        (found,) = members("abc")
        assert (found.pid, str(found)) == (orphan, f"pid {orphan} {found.name}")
        assert "time.sleep(60)" in found.command
        kill([found, Member(stranger.pid, stat(stranger.pid).start, "x")], "abc")  # type: ignore[union-attr]
        assert until(lambda: not alive(found))
        assert stranger.poll() is None, "another launch of a shard of the same name"
        assert members("abc") == ()
        assert members("") == (), "a launch of an older version has no mark, and nothing is guessed"


def until(done: Callable[[], bool]) -> bool:
    for _ in range(500):
        if done():
            return True
        signal.sigtimedwait([], 0.01)
    return False


def test_a_corpse_is_not_alive() -> None:
    with child(**marks("m-1.0", 1, "abc")) as process:
        (found,) = members("abc")
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{process.pid}").exists(), "nobody reaped it yet"
        assert not alive(found)
        assert members("abc", below=process.pid) == ()


def test_nobody_is_killed_who_is_another_process_by_now() -> None:
    with child(**marks("m-1.0", 1, "abc")) as process:
        (found,) = members("abc")
        kill([Member(found.pid, found.start - 1, found.name)], "abc")
        kill([found], "another")
        kill([Member(2**22 + 1, 1, "gone")], "abc")
        assert process.poll() is None
        kill([found], "abc")
        assert process.wait(5) == -signal.SIGKILL


def test_a_title_over_the_environment_is_found_by_its_parents(tmp_path: Path) -> None:
    """A program that overwrites its environment is ours as long as somebody of ours is above it."""
    for pid, parent in ((10, 1), (11, 10), (12, 11), (20, 1)):
        made(tmp_path, pid, parent, environ=b"VLLM::Worker\0\0\0")
    assert [m.pid for m in members("abc", below=10, proc=tmp_path)] == [10, 11, 12]
    assert [m.pid for m in members("abc", below=10, but=(10,), proc=tmp_path)] == [11, 12], "not the shim"
    assert members("abc", below=99, proc=tmp_path) == ()


def made(
    proc: Path, pid: int, parent: int = 1, *, state: str = "S", environ: bytes = b"", start: int = 7, read: int = 0
) -> Path:
    place = proc / str(pid)
    place.mkdir(parents=True, exist_ok=True)
    (place / "stat").write_text(f"{pid} (a) (b) {state} {parent} " + "0 " * 17 + f"{start} 0\n")
    (place / "environ").write_bytes(environ)
    (place / "cmdline").write_bytes(b"VLLM::Worker_TP1\0")
    (place / "io").write_text(f"rchar: 99\nread_bytes: {read}\nwrite_bytes: 1\n")
    return place


def test_what_vanishes_while_it_is_read_is_no_error(tmp_path: Path) -> None:
    made(tmp_path, 10, environ=b"A=b\0LLMGW_LAUNCH=abc\0")
    made(tmp_path, 11, environ=b"LLMGW_LAUNCH=abc")
    for name in ("environ", "cmdline", "io"):
        (tmp_path / "11" / name).unlink()
    (tmp_path / "12").mkdir()
    (tmp_path / "self").mkdir()
    made(tmp_path, 13, state="Z", environ=b"LLMGW_LAUNCH=abc\0")
    assert members("abc", proc=tmp_path) == (Member(10, 7, "a) (b", "VLLM::Worker_TP1"),)
    assert str(members("abc", proc=tmp_path)[0]) == "pid 10 VLLM::Worker_TP1"
    assert members("abc", proc=tmp_path / "none") == ()


def test_a_mark_is_a_whole_variable(tmp_path: Path) -> None:
    for pid, environ in ((10, b"LLMGW_LAUNCH=abcd"), (11, b"XLLMGW_LAUNCH=abc"), (12, b"X=LLMGW_LAUNCH=abc")):
        made(tmp_path, pid, environ=environ + b"\0")
        assert not carries(pid, "abc", tmp_path)


def test_who_is_in_the_cgroup_is_ours(tmp_path: Path) -> None:
    made(tmp_path / "proc", 10)
    (tmp_path / "cgroup.procs").write_text("10\n11\n")
    assert [m.pid for m in members("abc", cgroup=tmp_path, proc=tmp_path / "proc")] == [10]
    assert proctree.in_cgroup(tmp_path / "gone") == ()


def test_bytes_are_summed_over_all_of_them(tmp_path: Path) -> None:
    for pid, read in ((10, 5), (11, 7)):
        made(tmp_path, pid, environ=b"LLMGW_LAUNCH=abc\0", read=read)
    found = members("abc", proc=tmp_path)
    assert read_bytes(found, tmp_path) == 12
    (tmp_path / "10/io").unlink()
    (tmp_path / "11/io").write_text("read_bytes:\n")
    assert read_bytes(found, tmp_path) == 0


def test_the_engine_is_told_to_leave_its_environment_alone() -> None:
    assert marks("m-1.0", 3, "abc") == {"LLMGW_SHARD": "m-1.0#3", "LLMGW_LAUNCH": "abc", "SPT_NOENV": "1"}


@given(st.binary(max_size=200))
@pytest.mark.filterwarnings("ignore")
def test_any_stat_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    place = tmp_path_factory.mktemp("proc")
    (place / "9").mkdir()
    (place / "9/stat").write_bytes(raw)
    found = stat(9, place)
    assert found is None or isinstance(found.start, int)
