"""Replicas over several nodes, as far as each node's agent is concerned."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from llmgw.errors import OperatorError
from llmgw.hardware.inventory import AdapterKind, Fabric, FabricPort, Fault
from llmgw.link.messages import StartShard
from llmgw.scheduler.state import ShardState
from llmgw.settings.daemon import Address
from tests.agent.test_shards import (
    INVENTORY,
    config,
    running,
    start,
)

S = ShardState
FABRIC = Fabric("rack-1", AdapterKind.INFINIBAND, (FabricPort("mlx5_0", 1),))
CONNECTED = evolve(INVENTORY, fabrics=(FABRIC,))


def rank(number: int, meeting: Address | None = None, **engine: Any) -> StartShard:
    """One rank of a replica over two nodes."""
    command = start(f"m-1.{number}", devices=(number,), **engine)
    profile = evolve(command.profile, nodes=2, tp=2)
    return evolve(command, replica="m-1", rank=number, profile=profile, fabric="rack-1", rendezvous=meeting,
                  addresses=("127.0.0.1", "127.0.0.1"))  # fmt: skip


async def test_ranks_meet_where_rank_0_says_and_each_knows_when_it_has_loaded(folder: Path) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(rank(0, load_s=0.4), CONNECTED)
        head = node.get().report()
        assert head.rendezvous is not None
        assert head.rendezvous.port != node.get().record.port
        # Rank 0 loads once all have met, so it is ready no sooner than the other has joined.
        await node.shards.start(rank(1, head.rendezvous), CONNECTED)
        other = await node.until(S.READY, "m-1.1")
        assert (other.reason, other.endpoint, other.rendezvous) == ("loaded, serves through rank 0", None, None)
        environment = Path(f"/proc/{other.pid}/environ").read_bytes().split(b"\0")
        assert {b"NCCL_IB_HCA==mlx5_0:1", b"NCCL_SOCKET_IFNAME==lo", b"GLOO_SOCKET_IFNAME=lo"} <= set(environment)
        assert not any(entry.startswith((b"NCCL_IB_DISABLE=", b"NCCL_IB_GID_INDEX=")) for entry in environment)
        ready = await node.until(S.READY)
        assert ready.endpoint is not None
        # As a real one does, the other rank stays when rank 0 is gone: only a stop ends it.
        assert ready.pid is not None
        os.killpg(ready.pid, signal.SIGKILL)
        head_ended = await node.until_ended()
        assert head_ended.ended is not None
        assert head_ended.ended <= head_ended.since
        assert node.get("m-1.1").shard.state is S.READY
        node.get("m-1.1").stop("rank 0 ended", 1.0)
        assert (await node.until(S.STOPPED, "m-1.1")).reason == "rank 0 ended; exit code 0"


async def test_an_adopted_rank_knows_that_it_had_loaded(folder: Path) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(rank(0, load_s=1.0), CONNECTED)
        await node.shards.start(rank(1, node.get().report().rendezvous, load_s=1.0), CONNECTED)
        await node.until(S.LOADING, "m-1.1")
        pid = node.get("m-1.1").pid
    async with running(config(folder)) as node:
        other = await node.until(S.READY, "m-1.1")
        assert other.pid == pid
        assert node.get().report().rendezvous is not None
        await node.until(S.READY)


async def test_a_rank_is_refused_where_its_fabric_is_not(folder: Path) -> None:
    async with running(config(folder)) as node:
        with pytest.raises(OperatorError, match="fabric rack-1: is not declared on n1"):
            await node.shards.start(rank(0), INVENTORY)
        down = evolve(FABRIC, faults=(Fault("port-down", "mlx5_1 port 1 is down", "plug it in"),))
        with pytest.raises(OperatorError, match="mlx5_1 port 1 is down"):
            await node.shards.start(rank(0), evolve(INVENTORY, fabrics=(down,)))
    elsewhere = evolve(config(folder), address="192.0.2.77", port_first=1, port_last=1)
    async with running(elsewhere) as node:
        with pytest.raises(OperatorError, match=r"none is free on 192\.0\.2\.77"):
            await node.shards.start(rank(0), CONNECTED)
