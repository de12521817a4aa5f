"""The README's main job, as a newcomer runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmgw.cli.demo_run import survivors

pytestmark = pytest.mark.e2e


def demo(*args: str, cwd: Path, engine: str = "fake") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "llmgw", "demo", "--engine", engine, "--dir", str(cwd / "demo"), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_check(folder: Path, engine: str) -> str:
    """`llmgw demo --check` with this engine; its output, once it has passed and left no process."""
    process = demo("--check", cwd=folder, engine=engine)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert not list(survivors(folder))
    return said


@pytest.mark.long
def test_check(tmp_path: Path) -> None:
    said = run_check(tmp_path, "fake")
    for expected in (
        "FAKE engine",
        "FAKE machine",
        "STARTING",
        "LOADING",
        "READY",
        "CONNECTED",
        "UNREACHABLE",
        "LOST",
        "curl -N",
        "engines adopted, same pids",
        "passed",
    ):
        assert expected in said, said


def test_ctrl_c_stops_everything_in_two_seconds(tmp_path: Path) -> None:
    process = demo(cwd=tmp_path)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "curl -N" in line:
                break
        assert list(survivors(tmp_path))
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        said = process.stdout.read()
        assert process.wait(10) == 0, said
        assert time.monotonic() - began < 2.5, said
        assert "killing what is left" not in said
        assert not list(survivors(tmp_path))
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
