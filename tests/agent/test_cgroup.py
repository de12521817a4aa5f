"""Cgroups: made-up trees for the question whether there is one for us, and the real one where this machine lets us."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import trio

from llmgw.agent import cgroup
from llmgw.agent.records import lock, read
from llmgw.scheduler.state import ShardState
from tests.agent.test_shards import INVENTORY, Node, alive, config, start

S = ShardState


def tree(root: Path, path: str = "/system.slice/llmgw-agent.service") -> tuple[tuple[Path, ...], Path, Path]:
    """A cgroup v2 tree with our own group in it, and what ``/proc/self/cgroup`` says of that."""
    here = root / "fs" / path.strip("/")
    here.mkdir(parents=True, exist_ok=True)
    (root / "fs/cgroup.controllers").write_text("cpu\n")
    (here / "cgroup.procs").write_text("")
    own = root / "own"
    own.write_text(f"9:name=systemd:/x\n0::{path}\n")
    return (root / "none", root / "fs"), own, here


def test_a_tree_that_nobody_manages_is_ours_if_we_may_write(tmp_path: Path) -> None:
    roots, own, here = tree(tmp_path)
    assert cgroup.delegated(roots, own, tmp_path / "no-systemd") == here
    assert cgroup.path_for(here, "m-1.0", 3, "abcdef0123456789") == f"{here}/llmgw-m-1.0-g3-abcdef01"


def test_what_systemd_did_not_give_away_is_its_own(tmp_path: Path) -> None:
    roots, own, here = tree(tmp_path)
    systemd = tmp_path / "systemd"
    systemd.mkdir()
    if os.geteuid() != 0:
        assert cgroup.delegated(roots, own, systemd) == here, "it would not be owned by us otherwise"
        return
    assert cgroup.delegated(roots, own, systemd) is None
    try:
        os.setxattr(here, "user.delegate", b"1")
    except OSError:
        return  # this file system has no such attributes, so systemd's word cannot be imitated on it
    assert cgroup.delegated(roots, own, systemd) == here


def test_without_delegation_there_is_none(tmp_path: Path) -> None:
    roots, own, here = tree(tmp_path)
    none = tmp_path / "no-systemd"
    assert cgroup.delegated(roots, tmp_path / "missing", none) is None
    own.write_text("4:memory:/x\n")
    assert cgroup.delegated(roots, own, none) is None, "cgroup v1 alone"
    own.write_text("0::/../outside\n")
    assert cgroup.delegated(roots, own, none) is None
    own.write_text("0::/gone\n")
    assert cgroup.delegated(roots, own, none) is None
    assert cgroup.path_for(None, "m-1.0", 1, "abc") == ""
    assert not cgroup.kill(here / "gone")
    cgroup.remove(here / "gone")
    cgroup.remove(here)
    assert here.exists(), "what is not empty stays"


async def one_life(folder: Path, delegation: Path | None, how: str, **engine: object) -> tuple[Path | None, Node]:
    """Start an engine with a worker that left its group, end it in some way, and see everything gone."""
    node = Node(config(folder), delegation=delegation)
    async with trio.open_nursery() as nursery:
        await nursery.start(node.shards.run)
        await node.shards.start(start(daemon=True, **engine), INVENTORY)
        ready = await node.until(S.READY)
        assert ready.pid is not None
        record = read(folder / "shards/m-1.0-g1")
        found = node.get().tracking.members()
        assert len(found) == 2, found
        if record.cgroup_path is not None and record.cgroup_path.parent.exists():
            inside = {int(pid) for pid in (record.cgroup_path / "cgroup.procs").read_text().split()}
            assert inside == {m.pid for m in found}, "all of the engine's, and not the shim"
        if how == "stop":
            node.get().stop("enough", 0.0)
            stopped = await node.until(S.STOPPED)
            assert stopped.exit is not None
            assert stopped.exit.signal == signal.SIGKILL, "the shim outlives it, to tell how it ended"
        else:
            os.kill(ready.pid, signal.SIGKILL)
            assert "killed by signal 9" in (await node.until(S.FAILED)).reason
        assert not any(alive(m.pid) for m in found)
        with lock(folder / "shards/m-1.0-g1"):
            pass
        nursery.cancel_scope.cancel(reason="the agent stops")
    return record.cgroup_path, node


REAL = cgroup.delegated()


@pytest.mark.skipif(REAL is None, reason="no part of the cgroup tree is ours here")
@pytest.mark.parametrize("how", ["stop", "crash"])
async def test_an_engine_and_its_cgroup_end_together(folder: Path, how: str) -> None:
    path, _ = await one_life(folder, REAL, how, ignore_sigterm=True)
    assert path is not None
    assert not path.exists()


@pytest.mark.parametrize(
    "there", [pytest.param(True, marks=pytest.mark.skipif(REAL is None, reason="no cgroup of ours")), False]
)
async def test_that_there_is_no_cgroup_is_said_only_where_it_is_so(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], there: bool
) -> None:
    """An engine that ends at once takes its cgroup with it."""
    node = Node(config(folder, ("/bin/true",)), delegation=REAL if there else tmp_path / "none")
    async with trio.open_nursery() as nursery:
        await nursery.start(node.shards.run)
        await node.shards.start(start(), INVENTORY)
        await node.until_ended()
        nursery.cancel_scope.cancel(reason="the agent stops")
    assert ("its cgroup could not be made" in capsys.readouterr().out) is not there


async def test_a_cgroup_that_cannot_be_made_costs_nothing_but_itself(folder: Path, tmp_path: Path) -> None:
    """As if delegation had been taken back meanwhile."""
    await one_life(folder, tmp_path / "no/such/tree", "stop", ignore_sigterm=True)
