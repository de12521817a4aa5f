"""Engines' logs as they are followed: over cuts that keep them short, by slow readers, and of an earlier start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmgw.agent.tails import FollowedLog, folder_of
from llmgw.errors import OperatorError

BEHIND = 256 * 1024


def cut(folder: Path) -> None:
    """As the shim cuts it: what it holds becomes the older part."""
    (folder / "engine.log").replace(folder / "engine.log.1")
    (folder / "engine.log").touch()


def write(folder: Path, *lines: str) -> None:
    with (folder / "engine.log").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[FollowedLog]:
    with FollowedLog(tmp_path) as followed:
        yield followed


def test_it_goes_on_over_a_cut_without_a_gap(tmp_path: Path, log: FollowedLog) -> None:
    write(tmp_path, "a", "b", "c")
    assert log.last(2) == [b"b", b"c"]
    write(tmp_path, "d")
    with (tmp_path / "engine.log").open("a") as file:
        file.write("half ")
    assert log.more() == [b"d"]
    write(tmp_path, "a line", "e")
    cut(tmp_path)
    write(tmp_path, "f")
    assert (log.more(), log.skipped) == ([b"half a line", b"e", b"f"], 0)
    # Who begins after the cut is shown what was before it, too.
    with FollowedLog(tmp_path) as late:
        assert late.last(3) == [b"half a line", b"e", b"f"]
    with (tmp_path / "engine.log").open("a") as file:
        file.write("its last words")
    assert (log.more(), log.end()) == ([], [b"its last words"])


def test_its_last_words_come_when_its_folder_was_moved_away(tmp_path: Path) -> None:
    shard = tmp_path / "shards"
    shard.mkdir()
    write(shard, "a")
    with FollowedLog(shard) as log:
        assert log.last(1) == [b"a"]
        write(shard, "b")
        shard.rename(tmp_path / "logs")
        assert log.more() == [b"b"]
        write(tmp_path / "logs", "c")
        assert (log.end(), log.skipped) == ([b"c"], 0)


@pytest.mark.parametrize("cuts", [0, 1, 2])
def test_what_a_slow_reader_does_not_get_is_counted(tmp_path: Path, log: FollowedLog, cuts: int) -> None:
    write(tmp_path, "0" * 63)
    log.last(1)
    lines = [f"{n:063}" for n in range(30_000)]
    write(tmp_path, *lines)
    for _ in range(cuts):
        cut(tmp_path)
        write(tmp_path, "x" * 63)
    found = log.more()
    missing = 64 * (len(lines) + cuts - len(found))
    assert missing > 0
    if cuts < 2:
        assert abs(log.skipped - missing) <= 64 + 64 * cuts, "to a line"
    assert log.skipped > 0
    assert all(len(line) == 63 for line in found[1:]), "whole lines"


def test_which_log_it_is(tmp_path: Path) -> None:
    for number, place in ((1, "logs"), (3, "logs"), (4, "shards")):
        folder = tmp_path / place / f"m-1.0-g{number}"
        folder.mkdir(parents=True)
        (folder / "engine.log").touch()
    assert folder_of(tmp_path, "m-1.0", 4, previous=False).parent.name == "shards"
    assert folder_of(tmp_path, "m-1.0", 4, previous=True).name == "m-1.0-g3"
    assert folder_of(tmp_path, "m-1.0", 3, previous=True).name == "m-1.0-g1"
    for number, previous in ((1, True), (2, False)):
        with pytest.raises(OperatorError, match="is not on this node any more"):
            folder_of(tmp_path, "m-1.0", number, previous=previous)
