"""The floors are contracts that a tool checks: each holds, and a planted violation of each is reported."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[1]


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=tree,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copytree(TOP / "llmgw", tmp_path / "llmgw", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(TOP / "pyproject.toml", tmp_path)
    return tmp_path


def test_contracts_hold(tree: Path) -> None:
    done = lint(tree)
    assert done.returncode == 0, done.stdout
    assert "3 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "planted", "contract"),
    [
        ("hardware/gpu.py", "import llmgw.settings.catalog", "imports run downward"),
        ("link/session.py", "import llmgw.router.table", "imports run downward"),
        ("scheduler/place.py", "import trio", "pure stays pure"),
        ("agent/shard.py", "import time", "pure stays pure"),
        ("doctor/checks/gpu.py", "import os", "pure stays pure"),
        ("engines/base.py", "import llmgw.engines.registry", "no cycles"),
    ],
)
def test_planted_violation_is_reported(tree: Path, module: str, planted: str, contract: str) -> None:
    file = tree / "llmgw" / module
    file.write_text(f"{file.read_text()}\n{planted}\n")
    done = lint(tree)
    assert done.returncode == 1
    assert f"{contract} BROKEN" in done.stdout
