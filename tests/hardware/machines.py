"""Readings and inventories out of thin air, for Hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from llmgw.hardware.inventory import Driver, Load, Relation, Wear
from llmgw.hardware.reading import (
    CardHealth,
    CardReading,
    GpuReading,
    InstanceReading,
    PairReading,
    ProcessReading,
)

maybe = st.none() | st.integers(0, 300_000)
flag = st.none() | st.booleans()
word = st.sampled_from(["", "none", "reset", "completed", "in progress", "success", "unhealthy", "x"])

healths = st.builds(
    CardHealth,
    lost=st.booleans(), wants_reset=st.booleans(), memory_error=st.booleans(), uncorrected=maybe, remap_pending=flag,
    remap_failed=flag, retirement_pending=flag, sram_threshold=flag, unrepairable=flag, recovery=word,
    fabric_state=word, fabric_status=word, fabric_health=word,
)  # fmt: skip
ids = st.none() | st.integers(0, 13)
instances = st.builds(
    InstanceReading,
    index=st.integers(0, 6), uuid=st.sampled_from(["", "MIG-a", "MIG-b"]),
    profile=st.sampled_from(["", "1g.10gb", "3g.40gb", "1c.3g.40gb", "1g.10gb+me", "odd"]),
    gpu_instance=ids, compute_instance=ids, total_mib=maybe, used_mib=maybe, uncorrected=maybe,
)  # fmt: skip
processes = st.builds(ProcessReading, st.integers(1, 9), st.sampled_from(["python", "x"]), maybe, ids, ids)
loads = st.builds(Load, maybe, maybe, maybe)


def card(index: int) -> st.SearchStrategy[CardReading]:
    return st.builds(
        CardReading,
        index=st.just(index),
        uuid=st.just(f"GPU-{index}"),
        name=st.sampled_from(["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA GB10", "unknown GPU", ""]),
        pci_address=st.just(f"0000:{index + 16:02x}:00.0"),
        total_mib=maybe, used_mib=maybe, memory_hidden=st.booleans(), capability=st.none() | st.just(90),
        mig=flag, mig_pending=flag,
        instances=st.lists(instances, max_size=4, unique_by=lambda i: i.index).map(tuple),
        processes=st.lists(processes, max_size=4).map(tuple),
        health=healths, load=loads, wear=st.builds(Wear, maybe, maybe),
        nvlinks=st.none() | st.just(18), nvlinks_up=st.none() | st.integers(1, 18),
        fabric_cluster=st.sampled_from(["", "c-1"]), fabric_clique=ids,
    )  # fmt: skip


@st.composite
def readings(draw: st.DrawFn, most: int = 5) -> GpuReading:
    count = draw(st.integers(0, most))
    cards = tuple(draw(card(index)) for index in range(count))
    pairs = tuple(
        PairReading(a, b, relation, draw(st.integers(1, 18)) if relation is Relation.NVLINK else 0)
        for a in range(count)
        for b in range(a + 1, count)
        if (relation := draw(st.none() | st.sampled_from(Relation))) is not None
    )
    return GpuReading(Driver("570.1", "12.8"), cards, pairs)
