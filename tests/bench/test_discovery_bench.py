"""What discovery of a large machine costs: ``pytest -m bench -s tests/bench/test_discovery_bench.py``."""

from __future__ import annotations

import resource
import statistics
import time
from pathlib import Path

import pytest

from fakes.machines import Card, Hca, Machine, render
from llmgw.discovery.probe import discover
from llmgw.hardware.fabric import FabricRule, LinkLayer
from llmgw.settings.daemon import Discovery, GpuSource

TIMES = 20


def _machine() -> Machine:
    """Eight cards, twelve adapters with addresses, everything on switches."""
    cards = tuple(Card("NVIDIA H100 80GB HBM3", 81559, "9.0", switch=n, numa=n // 4) for n in range(8))
    adapters = tuple(
        Hca(f"mlx5_{n}", "Ethernet", netdev=f"r{n}", address=f"10.0.{n}.1/24", switch=n % 8, numa=n % 8 // 4)
        for n in range(12)
    )
    return Machine("bench", cards, adapters, nvswitch=18, driver="580.105.08")


@pytest.mark.bench
@pytest.mark.parametrize("source", [GpuSource.NVML, GpuSource.NVIDIA_SMI])
async def test_discovery_of_a_large_machine(source: GpuSource, tmp_path: Path) -> None:
    render(_machine(), tmp_path)
    for n in range(12):
        table = tmp_path / f"sys/class/infiniband/mlx5_{n}/ports/1/gids"
        for index in range(16, 255):
            (table / str(index)).write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    config, rules = Discovery(source, str(tmp_path)), (FabricRule("rails", link_layer=LinkLayer.ETHERNET),)
    await discover(config, rules)
    own, children, wall = [], [], []
    for _ in range(TIMES):
        before, began, at = resource.getrusage(resource.RUSAGE_CHILDREN), time.process_time(), time.perf_counter()
        found = await discover(config, rules)
        own.append((time.process_time() - began) * 1000)
        wall.append((time.perf_counter() - at) * 1000)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        children.append((after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000)
    assert len(found.devices) == 8
    assert len(found.fabrics[0].ports) == 12
    print(
        f"\n{source.value}: own CPU median {statistics.median(own):.1f} ms (max {max(own):.1f}), "
        f"programs {statistics.median(children):.0f} ms CPU, wall {statistics.median(wall):.0f} ms, over {TIMES} runs"
    )
