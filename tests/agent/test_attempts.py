from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from llmgw.agent import records
from llmgw.agent.attempts import Rules, prune, retire, summarize
from llmgw.agent.records import Record
from llmgw.agent.shard import Shard
from llmgw.scheduler.state import Exit, ShardState
from llmgw.settings.catalog import EngineKind, Profile

PROFILE = Profile("p", EngineKind.VLLM, "/w", ("h100-80g",))


def ended(state_dir: Path, shard: str, generation: int, text: str = "boom\n") -> Path:
    folder = records.folder_of(state_dir / "shards", shard, generation)
    record = Record(
        "c", shard[:-2], shard, generation, 0, "m", PROFILE, "d", (0,), ("vllm",), "127.0.0.1", 1, "m", "/h", "/v1/models",
        1.0, "boot", 100.0, api_key="sk-secret", uuids=("GPU-0",),
    )  # fmt: skip
    records.write(folder, record)
    for name in ("engine.log", "engine.log.1", "stacks.txt", "exit.json", "shim.json", ".shim.json.new", "lock"):
        (folder / name).write_text(text)
    summarize(folder, record, Shard(ShardState.FAILED, 105.0, "out of memory", "", exit=Exit(1), remedy="more"))
    return folder


def test_the_log_of_a_launch_that_is_over_is_kept_and_its_key_is_not(tmp_path: Path) -> None:
    folder = ended(tmp_path, "m-1.0", 1)
    assert retire(folder, tmp_path / "logs")
    kept = tmp_path / "logs/m-1.0-g1"
    assert sorted(p.name for p in kept.iterdir()) == [
        "engine.log", "engine.log.1", "exit.json", "stacks.txt", "summary.json",
    ]  # fmt: skip
    assert json.loads((kept / "summary.json").read_text()) == {
        "shard": "m-1.0", "generation": 1, "model": "m", "profile": "p", "devices": ["GPU-0"], "started": 100.0,
        "ended": 105.0, "state": "failed", "reason": "out of memory", "remedy": "more", "exit": "exit code 1",
    }  # fmt: skip
    assert not folder.exists()
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    for text in ("one", "two", "three"):
        assert retire(ended(tmp_path, "m-1.0", 1, text), tmp_path / "logs")
    kept = {p.name: (p / "engine.log").read_text() for p in (tmp_path / "logs").iterdir()}
    assert kept == {"m-1.0-g1": "one", "m-1.0-g1.2": "two", "m-1.0-g1.3": "three"}


def test_the_newest_are_kept_of_each_shard_and_in_all(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    for generation in range(1, 9):
        for shard in ("a-1.0", "b-1.0", "c-g1.0"):
            retire(ended(tmp_path, shard, generation), logs)
            os.utime(logs / f"{shard}-g{generation}", (1000 + generation, 1000 + generation))
    prune(logs, Rules(of_a_shard=5, in_all=50))
    assert sorted(p.name for p in logs.glob("a-*")) == [f"a-1.0-g{n}" for n in (4, 5, 6, 7, 8)]
    prune(logs, Rules(of_a_shard=3, in_all=7))
    assert len(list(logs.iterdir())) == 7
    assert {p.name for p in logs.iterdir()} >= {f"{s}-g{n}" for s in ("a-1.0", "b-1.0", "c-g1.0") for n in (7, 8)}


def test_a_launch_whose_shim_lives_is_not_touched(tmp_path: Path) -> None:
    folder = ended(tmp_path, "m-1.0", 1)
    with records.lock(folder) as free:
        assert free
        assert not retire(folder, tmp_path / "logs")
    assert (folder / "record.json").exists()


RETIRE = """
import os, sys
from pathlib import Path
from llmgw.agent import attempts

left = 0
def audit(event, args):
    global left
    if event in ("os.remove", "os.rename", "os.mkdir", "shutil.rmtree"):
        left -= 1
        if left == 0:
            os._exit(9)

for name in sys.argv[2:]:
    if (child := os.fork()) == 0:
        left = int(name)
        sys.addaudithook(audit)
        attempts.retire(Path(sys.argv[1]) / name / "shards/m-1.0-g1", Path(sys.argv[1]) / name / "logs")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_move_that_is_cut_off_anywhere_is_finished(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    points = [str(n) for n in range(1, 12)]
    folders = [ended(tmp_path / n, "m-1.0", 1) for n in points]
    done = subprocess.run(
        [sys.executable, "-c", RETIRE, str(tmp_path), *points], env=environment, check=True, capture_output=True
    )
    codes = [int(code) for code in done.stdout.split()]
    assert len(codes) == len(points)
    assert codes.count(9) >= 3
    assert codes[-1] == 0, "it never came through"
    for n, folder in zip(points, folders, strict=True):
        if folder.exists():
            assert (folder / "engine.log").read_text() == "boom\n"
            assert retire(folder, tmp_path / n / "logs")
        assert (tmp_path / n / "logs/m-1.0-g1/engine.log").read_text() == "boom\n"
        assert not list((tmp_path / n).rglob("record.json"))
