"""What the scheduler costs on a large fleet: ``pytest -m bench -s tests/bench/test_scheduler_bench.py``.

Every figure is CPU time, and stands beside a plain scan of the same fleet in the same run: one look at each device and
each row.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable

import pytest
from attrs import evolve

from llmgw.hardware.inventory import Device, Host, Inventory
from llmgw.scheduler.decide import decide
from llmgw.scheduler.explain import Outcome, StartCommand
from llmgw.scheduler.state import ClusterState, Node, NodeState, Replica, ShardReport, ShardState
from llmgw.settings.catalog import EngineKind, Model, Profile

NODES, DEVICES = 1250, 8
GPUS = {1: 1000, 2: 600, 4: 320, 8: 80}
"""Replicas by the number of their devices: 2,000 in all, of 50 models."""

MODELS_EACH = {1: 25, 2: 15, 4: 8, 8: 2}
NOW = 1_000_000.0


def _node(number: int) -> Node:
    devices = tuple(
        Device(n, f"GPU-{number}-{n}", "NVIDIA H100 80GB HBM3", "h100-80g", 81559, 1) for n in range(DEVICES)
    )
    inventory = Inventory(Host(f"n{number}", "boot"), "nvml", devices, nvlink_domains=(tuple(range(DEVICES)),))
    return Node(
        f"n{number:04}", NodeState.CONNECTED, NOW, "", "", f"10.0.{number // 256}.{number % 256}", inventory,
        (EngineKind.VLLM,), heard=NOW,
    )  # fmt: skip


def _models(part: float = 1.0) -> tuple[Model, ...]:
    made = []
    for gpus, replicas in GPUS.items():
        for n in range(MODELS_EACH[gpus]):
            profile = Profile(f"tp{gpus}", EngineKind.VLLM, "/w", ("h100-80g",), gpus=gpus, tp=gpus)
            made.append(Model(f"m{gpus}-{n}", (profile,), round(replicas / MODELS_EACH[gpus] * part)))
    return tuple(made)


def _report(row: Replica, rank: int) -> ShardReport:
    shard = row.shards[rank]
    return ShardReport(
        shard.shard, row.id, row.generation, row.model, rank, "c", "d", shard.devices, ShardState.READY, "ready", "",
        NOW, pid=1, endpoint="http://10.0.0.1:1", uuids=shard.uuids,
    )  # fmt: skip


def _after(state: ClusterState, outcome: Outcome) -> ClusterState:
    """What was started is ready."""
    reports: dict[str, list[ShardReport]] = {}
    for command in outcome.commands:
        if isinstance(command, StartCommand):
            made = _report(command.replica, command.assignment.rank)
            reports.setdefault(command.assignment.node, []).append(made)
    nodes = tuple(evolve(n, reports=(*n.reports, *reports.get(n.id, ()))) for n in state.nodes)
    return evolve(state, nodes=nodes, replicas=outcome.replicas, next_serial=outcome.next_serial)


def _scan(state: ClusterState) -> int:
    free = 0
    for node in state.nodes:
        for device in node.inventory.devices:
            free += not device.faults and device.used_mib is not None
    for row in state.replicas:
        for shard in row.shards:
            free -= len(shard.devices)
    return free


def _ms(work: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        gc.collect()
        began = time.process_time()
        work()
        taken.append((time.process_time() - began) * 1000)
    return statistics.median(taken)


@pytest.mark.bench
def test_a_large_fleet() -> None:
    empty = ClusterState("c", _models(), tuple(_node(n) for n in range(NODES)), (), 1)
    print(f"\n{NODES} nodes x {DEVICES} devices, {platform.machine()}, {os.cpu_count()} CPUs, Python "
          f"{platform.python_version()}")  # fmt: skip

    thousand = evolve(empty, models=_models(0.5))
    assert len(decide(thousand, NOW).replicas) == 1000
    placing = _ms(lambda: decide(evolve(thousand), NOW), 5)

    full = _after(empty, decide(empty, NOW))
    assert len(full.replicas) == 2000
    for quiet in (decide(full, NOW + 1), decide(full, NOW + 2)):
        assert (quiet.commands, quiet.decisions, quiet.replicas) == ((), (), full.replicas)
    # A new picture each time, as the control plane takes one: nothing of an earlier pass is still in it.
    scan = _ms(lambda: _scan(full), 20)
    quiet_ms = _ms(lambda: decide(evolve(full), NOW + 1), 20)

    victim = full.replicas[0].shards[0].node
    lost = evolve(
        full, nodes=tuple(evolve(n, state=NodeState.LOST, heard=NOW - 100) if n.id == victim else n for n in full.nodes)
    )
    moved = len(decide(lost, NOW + 1).replicas) - 2000
    assert moved > 0
    losing = _ms(lambda: decide(evolve(lost), NOW + 1), 10)

    gc.collect()
    tracemalloc.start()
    kept = decide(evolve(full), NOW + 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept.replicas) == 2000

    for name, ms in (
        ("a plain scan", scan),
        ("a quiet pass, 2,000 replicas", quiet_ms),
        (f"one node lost, {moved} replicas replaced", losing),
        ("1,000 placements from empty", placing),
    ):
        print(f"  {name:42} {ms:9.2f} ms  {ms / scan:7.1f} x the scan")
    print(f"  {'memory of a quiet pass at its peak':42} {peak / 2**20:9.2f} MiB")
