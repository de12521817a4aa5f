"""Ports of engines: nobody is given one that another engine has, or will open for its own processes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from attrs import evolve

from llmgw.agent.launch import Launches
from llmgw.agent.records import Record
from llmgw.engines.registry import ports_of
from llmgw.errors import OperatorError
from llmgw.hardware.inventory import Device, Host, Inventory
from llmgw.link.messages import StartShard
from llmgw.settings.catalog import EngineKind, Profile
from llmgw.settings.daemon import Address, AgentConfig, EngineInstall, TlsFiles

INVENTORY = Inventory(
    Host("h", "b"), "nvidia-smi", tuple(Device(n, f"GPU-{n}", "x", "h100-80g", 81559) for n in range(2))
)
HERE = "127.77.0.1"
"""An address of this machine that nobody else uses, below the ports that the kernel gives out."""

PLAIN = Profile("p", EngineKind.SGLANG, "/w", ("h100-80g",))
GROUPS = evolve(PLAIN, gpus=2, dp=2, expert_parallel=True)


class Fixture:
    def __init__(self, count: int, weights_dir: str = "/") -> None:
        self.first = 21_000
        self.records: list[Record] = []
        config = AgentConfig(
            id="n1", control_planes=(Address("127.0.0.1", 1),), tls=TlsFiles("c", "k", "ca"), state_dir="/x",
            port_first=self.first, port_last=self.first + count - 1, address=HERE,
            weights_dir=weights_dir,
        )  # fmt: skip
        install = EngineInstall(EngineKind.SGLANG, ("sglang",))
        self._launches = Launches(config, lambda _kind: install, lambda: 0.0, lambda: self.records, None)

    async def port(self, profile: Profile) -> int:
        """Of one more shard with this profile; counted from the first that there is."""
        devices = tuple(range(profile.gpus))
        command = StartShard("c#1", 1, "c1", "m-1", f"m-{len(self.records)}.0", 1, 0, "m", profile, "d", devices)
        record = (await self._launches.prepare(command, INVENTORY)).record
        self.records.append(evolve(record, devices=(), uuids=()))  # ports are what this is about
        return record.port - self.first


def test_what_an_engine_opens_besides() -> None:
    assert ports_of(PLAIN, 100, None) == {100}
    assert ports_of(PLAIN, 100, 200) == {100, 200}
    assert ports_of(GROUPS, 100, None) == {100, *range(333, 343)}
    assert ports_of(evolve(GROUPS, nodes=2, gpus=1), 100, 200) == {100, 200, *range(201, 211)}
    assert ports_of(evolve(GROUPS, engine=EngineKind.VLLM), 100, None) == {100}


async def test_engines_in_groups_keep_out_of_each_other_s_way() -> None:
    it = Fixture(300)
    assert [await it.port(GROUPS) for _ in range(3)] == [0, 10, 20]
    plain = [await it.port(PLAIN) for _ in range(226)]
    assert plain[:9] == list(range(1, 10))
    assert not set(plain) & set(range(233, 263))
    used = [ports_of(r.profile, r.port, None) for r in it.records]
    assert sum(map(len, used)) == len(frozenset().union(*used))


async def test_a_port_of_which_something_is_taken_by_another_program_is_passed_over() -> None:
    it = Fixture(3)
    with socket.socket() as other:
        other.bind((HERE, it.first + 233))
        assert await it.port(GROUPS) == 1
    with socket.socket() as other:
        other.bind((HERE, it.first))
        assert await it.port(PLAIN) == 2
        with pytest.raises(OperatorError, match="none is free"):
            await it.port(PLAIN)


async def test_a_link_does_not_lead_out_of_the_folder_for_weights(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "weights/out").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "weights/in").symlink_to("here")
    it = Fixture(9, str(tmp_path / "weights"))
    for name in ("here", "in"):
        assert await it.port(evolve(PLAIN, weights=str(tmp_path / "weights" / name))) >= 0
    for wrong in ({"weights": "out"}, {"weights": "out/x"}, {"weights": "here", "lora": {"a": "out"}}):
        with pytest.raises(OperatorError, match="a link that leads out of weights_dir"):
            await it.port(evolve(PLAIN, engine=EngineKind.VLLM, **{k: _below(tmp_path, v) for k, v in wrong.items()}))
    # The folder itself may well be a link.
    (tmp_path / "mount").symlink_to(tmp_path / "weights")
    assert await Fixture(9, str(tmp_path / "mount")).port(evolve(PLAIN, weights=str(tmp_path / "mount/here"))) >= 0


async def test_a_pipe_among_the_weights_is_refused_rather_than_waited_for(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w/a.safetensors").write_text("")
    (tmp_path / "w/gone").symlink_to("/nowhere")
    it = Fixture(9, str(tmp_path))
    profile = evolve(PLAIN, weights=str(tmp_path / "w"))
    await it.port(profile)
    os.mkfifo(tmp_path / "w/b.safetensors")
    with pytest.raises(OperatorError, match=r"w/b.safetensors: is neither a file nor a folder\. take it out"):
        await it.port(profile)


def _below(folder: Path, value: object) -> object:
    """Paths below the folder for weights."""
    if isinstance(value, dict):
        return {name: str(folder / "weights" / path) for name, path in value.items()}
    return str(folder / "weights" / str(value))
