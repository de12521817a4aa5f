from __future__ import annotations

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.agent.memory import held, higher, holders, pids
from llmgw.hardware.inventory import Device, DeviceProcess, Host, Inventory

WORKERS = (DeviceProcess(7, "VLLM::Worker_TP1", 72704), DeviceProcess(8, "VLLM::EngineCore", 300))


def inventory(*processes: tuple[DeviceProcess, ...], **more: bool) -> Inventory:
    devices = (Device(n, f"GPU-{n}", "x", "h100-80g", 81559, 1, processes=p, **more) for n, p in enumerate(processes))
    return Inventory(Host("h", "b"), "nvml", tuple(devices))


HERE = inventory(WORKERS, (DeviceProcess(9, "python", 100),), (DeviceProcess(7, "VLLM::Worker_TP1", None),))


def test_who_holds_what() -> None:
    assert holders(HERE, ("GPU-0", "GPU-1", "GPU-2"), {7, 8}) == (
        "pid 7 VLLM::Worker_TP1 holds 71 GiB on gpu-0",
        "pid 8 VLLM::EngineCore holds 300 MiB on gpu-0",
        "pid 7 VLLM::Worker_TP1 holds memory on gpu-2",
    )
    assert holders(HERE, ("GPU-1", "GPU-gone"), {7}) == ()
    assert pids(HERE, ("GPU-0", "GPU-1")) == {7, 8, 9}


def test_what_cannot_be_told_is_none_and_not_zero() -> None:
    assert held(HERE, ("GPU-0", "GPU-1"), {7, 8}) == (73004, 0)
    assert held(HERE, ("GPU-1", "GPU-0"), {7}) == (0, 72704), "in the shard's order"
    assert held(HERE, ("GPU-0", "GPU-2"), {7}) is None, "the driver does not say how much"
    assert held(HERE, ("GPU-0", "GPU-9"), {7}) is None, "one is gone"
    assert held(HERE, ("GPU-0",), {1}) is None, "in a container none of ours is listed"
    assert held(inventory(WORKERS, unified=True), ("GPU-0",), {7}) is None, "the memory is the host's"
    none = evolve(HERE, devices=())
    assert (held(none, (), ()), held(none, ("GPU-0",), {7})) == (None, None)


peaks = st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9))


@given(st.lists(peaks))
def test_peaks_only_grow(seen: list[tuple[int, int] | None]) -> None:
    peak = None
    for one in seen:
        before, peak = peak, higher(peak, one)
        assert before is None or (peak is not None and all(a <= b for a, b in zip(before, peak, strict=True)))
    known = [one for one in seen if one is not None]
    assert peak == (tuple(map(max, zip(*known, strict=True))) if known else None)
