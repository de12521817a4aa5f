from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from attrs import define, evolve, field

from llmgw.agent.dispatch import Dispatch
from llmgw.agent.epoch import Epoch, EpochFile
from llmgw.errors import OperatorError
from llmgw.hardware.inventory import Host, Inventory
from llmgw.link.messages import DrainShard, ForgetShard, StartShard, StopShard
from tests.agent.test_shards import start

INVENTORY = Inventory(Host("h", "b"), "none")


@define
class Asked:
    """Stands where the shards stand, and writes down what it is asked."""

    calls: list[str] = field(factory=list)
    refuse: str = ""
    fail: OSError | None = None
    known: bool = False

    def find(self, shard: str, generation: int) -> Asked | None:
        return self if self.known else None

    async def start(self, command: StartShard, inventory: Inventory) -> None:
        self.calls.append(f"start {command.shard}")
        if self.refuse:
            raise OperatorError("ports", self.refuse, "widen them")
        if self.fail is not None:
            raise self.fail
        self.known = True

    async def forget(self, shard: str, generation: int) -> None:
        self.calls.append(f"forget {shard}")
        if self.refuse:
            raise OperatorError(shard, self.refuse)

    def launch(self) -> None:
        self.calls.append("launch")

    def drain(self, reason: str) -> None:
        self.calls.append(f"drain {reason}")

    def stop(self, reason: str, grace_s: float) -> None:
        self.calls.append(f"stop {reason} {grace_s:g}")


def dispatch(folder: Path, asked: Asked) -> Dispatch:
    return Dispatch(asked, Epoch(EpochFile(folder)), lambda: INVENTORY)


async def test_a_start_that_was_held_is_let_go_by_the_same_start_without_it(tmp_path: Path) -> None:
    asked = Asked()
    it = dispatch(tmp_path, asked)
    await it.run(evolve(start(), command="hold", hold=True))
    await it.run(evolve(start(), command="hold too", hold=True))
    assert asked.calls == ["start m-1.0"]
    await it.run(start())
    await it.run(start())
    assert asked.calls == ["start m-1.0", "launch"]


async def test_each_command_is_done_once(tmp_path: Path) -> None:
    asked = Asked()
    it = dispatch(tmp_path, asked)
    command = start()
    first = await it.run(command)
    assert first == await it.run(command)
    assert (first.accepted, asked.calls) == (True, ["start m-1.0"])
    again = evolve(command, command="another id for the same start")
    assert (await it.run(again)).accepted
    assert asked.calls == ["start m-1.0", "launch"], "it runs already, which a launch does not change"
    for told in (
        DrainShard("d", 1, "m-1.0", 1, "x"),
        StopShard("s", 1, "m-1.0", 1, "y", 3),
        ForgetShard("f", 1, "m-1.0", 1),
    ):
        assert (await it.run(told)).accepted
    assert asked.calls[2:] == ["drain x", "stop y 3", "forget m-1.0"]


async def test_a_stop_of_what_is_not_here_is_done_already(tmp_path: Path) -> None:
    asked = Asked()
    assert (await dispatch(tmp_path, asked).run(StopShard("s", 1, "m-1.0", 1, "y", 3))).accepted
    assert asked.calls == []


async def test_a_refusal_has_its_reason_and_is_remembered(tmp_path: Path) -> None:
    asked = Asked(refuse="none is free")
    it = dispatch(tmp_path, asked)
    result = await it.run(start())
    assert (result.accepted, result.reason, result.remedy) == (False, "ports: none is free", "widen them")
    assert await it.run(start()) == result
    assert asked.calls == ["start m-1.0"]


async def test_what_could_not_be_forgotten_is_tried_again(tmp_path: Path) -> None:
    asked = Asked(refuse="its shim has not ended")
    it = dispatch(tmp_path, asked)
    forget = ForgetShard("f", 1, "m-1.0", 1)
    assert not (await it.run(forget)).accepted
    asked.refuse = ""
    assert (await it.run(forget)).accepted
    assert (await it.run(forget)).accepted
    assert asked.calls == ["forget m-1.0"] * 2, "once it is forgotten nobody is asked"


async def test_an_older_epoch_is_not_obeyed_also_after_a_restart(tmp_path: Path) -> None:
    asked = Asked()
    assert (await dispatch(tmp_path, asked).run(evolve(start(), epoch=5))).accepted
    result = await dispatch(tmp_path, asked).run(evolve(start("m-2.0"), epoch=4))
    assert (result.accepted, result.reason) == (False, "epoch 4 is over, 5 was seen")
    assert asked.calls == ["start m-1.0"]


def test_an_epoch_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "epoch").write_text(json.dumps("x"))
    with pytest.raises(OperatorError, match="is not a number"):
        EpochFile(tmp_path)


async def test_an_epoch_that_cannot_be_written_is_not_obeyed(tmp_path: Path) -> None:
    asked = Asked()
    it = dispatch(tmp_path / "gone", asked)
    result = await it.run(start())
    assert not result.accepted
    assert "cannot be written: No such file or directory" in result.reason
    assert asked.calls == []


async def test_what_the_node_cannot_do_is_said_and_ends_nobody(tmp_path: Path) -> None:
    asked = Asked(fail=OSError(errno.EMFILE, "Too many open files", "/proc/1/stat"))
    result = await dispatch(tmp_path, asked).run(start())
    assert (result.accepted, result.reason) == (False, "/proc/1/stat: Too many open files")
    assert result.remedy == "check the node's disk, memory and limit of open files"
