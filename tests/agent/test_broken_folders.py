"""State folders in which something is broken: said, left alone where it cannot be read, and never the end of an agent."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from llmgw.agent import leftovers
from llmgw.agent.jobs import records as job_records
from llmgw.agent.jobs.records import Record as JobRecord
from llmgw.agent.stop import stop_engines
from llmgw.errors import OperatorError
from llmgw.scheduler import jobs as rules
from llmgw.scheduler.jobs import Fetch, JobSpec
from llmgw.scheduler.state import Exit, ShardState
from tests.agent.test_shards import INVENTORY, SLEEPER, alive, config, processes, running, shim_of, start

S = ShardState


async def ended(folder: Path) -> Path:
    """A launch that was started and has ended, as its agent left it."""
    async with running(config(folder, SLEEPER)) as node:
        await node.shards.start(start(), INVENTORY)
        node.get().stop("enough", 1)
        await node.until_ended()
    return folder / "shards/m-1.0-g1"


@pytest.mark.parametrize("name", ["record.json", "shim.json", "exit.json"])
async def test_a_file_that_was_cut_at_any_byte_ends_no_agent(folder: Path, name: str) -> None:
    place = await ended(folder)
    whole = {path: path.read_bytes() for path in place.iterdir()}
    data = whole[place / name]
    for cut in range(len(data)):
        place.mkdir(exist_ok=True)
        for path, content in whole.items():
            if not path.exists():
                path.write_bytes(content)
        (place / name).write_bytes(data[:cut])
        left = leftovers.find(place, folder / "logs", 1.0)
        if name == "record.json":
            assert left is None
            assert (place / "record.json").read_bytes() == data[:cut], "what cannot be read is left alone"
        else:
            assert left is None or left.shard.state.ended, (cut, left)
    for other in (
        b"[]",
        b"null",
        b'{"shim": "x"}',
        b'{"code": {}, "signal": [], "at": "x"}',
        b'{"code": [], "signal": null, "at": 1.0}',
        b"\xff\xfe",
        b"1" * 5000,
    ):
        (place / name).write_bytes(other)
        left = leftovers.find(place, folder / "logs", 1.0)
        assert left is None or left.shard.state.ended, other
        assert left is None or isinstance(left.shard.exit, Exit), other
        assert left is None or str(left.shard.exit) in ("killed by signal 15", "exit code unknown"), other


def test_a_job_that_was_cut_at_any_byte_is_none(tmp_path: Path) -> None:
    spec = JobSpec("j1", Fetch("hf:org/tiny"))
    job_records.write(tmp_path / "j1", JobRecord(spec, rules.queued(spec, 1.0)))
    data = (tmp_path / "j1/job.json").read_bytes()
    assert len(job_records.everything(tmp_path)) == 1
    for cut in range(len(data)):
        (tmp_path / "j1/job.json").write_bytes(data[:cut])
        assert job_records.everything(tmp_path) == []


@pytest.mark.parametrize("said", [b"", b"{"], ids=["empty", "cut"])
async def test_an_engine_whose_shim_cannot_be_read_is_known_and_can_be_ended(folder: Path, said: bytes) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(start(workers=1), INVENTORY)
        await node.until(S.READY)
    place = folder / "shards/m-1.0-g1"
    (place / "shim.json").write_bytes(said)
    async with running(config(folder)) as node:
        assert (node.get().report().state, node.get().pid) == (S.READY, None)
        with pytest.raises(OperatorError, match=r"is held by shard m-1\.0"):
            await node.shards.start(start("m-2.0"), INVENTORY)
        node.get().stop("enough", 0.2)
        assert (await node.until_ended()).state is S.STOPPED
        assert processes(folder) == set()
        await node.shards.forget("m-1.0", 1)


async def test_an_engine_whose_folder_was_removed_is_named_and_can_be_ended(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(start(escaped_worker=True), INVENTORY)
        await node.until(S.READY)
    shim = shim_of(folder)
    shutil.rmtree(folder / "shards/m-1.0-g1")
    async with running(config(folder)) as node:
        assert node.shards.reports() == ()
    said = capsys.readouterr().out
    assert "an engine runs whose folder is gone" in said
    assert f"pid={shim}" in said
    assert stop_engines(folder, 1.0) == (f"pid {shim}",)
    assert processes(folder) == set()


async def test_files_that_are_folders_and_folders_that_are_files(folder: Path) -> None:
    place = await ended(folder)
    shards = folder / "shards"
    (shards / "a-1.0-g1").write_text("a file")
    (shards / "no shard").mkdir()
    (shards / "b-1.0-g1/record.json").mkdir(parents=True)
    (shards / "c-1.0-g1").symlink_to(place)
    (place / "shim.json").unlink()
    (place / "shim.json").mkdir()
    async with running(config(folder, SLEEPER)) as node:
        assert [r.shard for r in node.shards.reports()] == ["m-1.0"]
        assert node.get().shard.state is S.STOPPED
        await node.shards.forget("m-1.0", 1)
        assert not place.exists()
        await node.shards.start(start(generation=2), INVENTORY)
        assert alive(node.get(generation=2).pid)
