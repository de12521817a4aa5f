from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given

from llmgw.hardware.devices import devices
from llmgw.hardware.health import stranger
from llmgw.hardware.inventory import Device, DeviceProcess, Host, Inventory, Load, MigInstance
from llmgw.hardware.reading import CardHealth, CardReading, GpuReading, InstanceReading, ProcessReading
from tests.hardware.machines import readings

H100 = CardReading(
    2, "GPU-2", "NVIDIA H100 80GB HBM3", "0000:18:00.0", 81559, 3, capability=90, mig=False, mig_pending=False,
    load=Load(40, 120, 7),
)  # fmt: skip


def cut(*instances: InstanceReading, card: CardReading = H100) -> CardReading:
    return evolve(card, mig=True, mig_pending=True, instances=instances)


def instance(index: int, profile: str, gi: int, ci: int = 0, mib: int = 9984) -> InstanceReading:
    return InstanceReading(index, f"MIG-{gi}-{ci}", profile, gi, ci, mib, 12, 0)


def codes(card: CardReading) -> list[list[str]]:
    return [[f.code for f in d.faults] for d in devices(card, None)]


def test_a_whole_card() -> None:
    (whole,) = devices(H100, 500_000)
    assert (whole.number, whole.label, whole.device_class) == (2, "gpu-2", "h100-80g")
    assert (whole.total_mib, whole.used_mib, whole.compute_capability) == (81559, 3, 90)
    assert (whole.faults, whole.mig, whole.unified) == ((), None, False)


def test_a_card_that_nothing_can_name_is_given_to_nothing() -> None:
    assert codes(evolve(H100, uuid="")) == [["unreadable"]]


def test_instances_stand_in_place_of_their_card() -> None:
    processes = (ProcessReading(7, "python", 5000, 9, 0), ProcessReading(8, "other", 100, 11, 0))
    card = evolve(cut(instance(0, "1g.10gb", 9), instance(1, "1g.20gb", 11, mib=20096)), processes=processes)
    first, second = devices(card, None)
    assert (first.number, first.label, first.uuid) == (1200, "gpu-2/mig0", "MIG-9-0")
    assert (first.device_class, second.device_class) == ("h100-80g-mig-1g.10gb", "h100-80g-mig-1g.20gb")
    assert (first.total_mib, second.total_mib) == (9984, 20096)
    assert first.processes == (DeviceProcess(7, "python", 5000),)
    assert second.processes == (DeviceProcess(8, "other", 100),)
    # Heat and power are the card's; utilisation is nobody's, and that is not zero.
    assert first.load == Load(40, 120, None)


def test_compute_instances_share_the_memory_of_their_gpu_instance() -> None:
    card = cut(
        instance(0, "1c.3g.40gb", 1, 0, 40448), instance(1, "2c.3g.40gb", 1, 1, 40448), instance(2, "1g.10gb", 9)
    )
    found = devices(card, None)
    assert [d.total_mib for d in found] == [40448, 40448, 9984]
    assert Inventory(Host("h", "b"), "nvml", found).memory_mib == 40448 + 9984
    assert found[0].shares_memory(found[1])
    assert not found[0].shares_memory(found[2])


def test_ids_that_nobody_tells_share_nothing() -> None:
    mig = MigInstance(0, 0, "1g.10gb", None, None)
    a = Device(1000, "MIG-a", "x", "c", 10, mig=mig)
    assert not a.shares_memory(evolve(a, number=1001))
    assert Inventory(Host("h", "b"), "nvml", (a, evolve(a, number=1001))).memory_mib == 20


def test_nothing_carved_stays_out_and_says_how_to_carve() -> None:
    (empty,) = devices(cut(), None)
    assert [f.code for f in empty.faults] == ["mig-empty"]
    assert "nvidia-smi mig -i 2 -cgi" in empty.faults[0].remedy
    assert "nvidia-smi -i 2 -mig 0" in empty.faults[0].remedy


def test_a_mode_that_is_pending_is_said() -> None:
    (off,) = devices(evolve(H100, mig_pending=True), None)
    assert (off.faults[0].code, off.faults[0].reason) == ("not-ready", "MIG mode is off, on is pending")
    card = evolve(cut(instance(0, "1g.10gb", 9)), mig_pending=False)
    assert codes(card) == [["not-ready"]]


def test_the_parent_of_a_class_is_the_whole_card_also_in_a_container() -> None:
    hidden = evolve(cut(instance(0, "1g.10gb", 9)), total_mib=None, memory_hidden=True)
    (found,) = devices(hidden, None)
    assert (found.device_class, found.faults) == ("h100-80g-mig-1g.10gb", ())
    odd = evolve(cut(instance(0, "9g.999gb", 9, mib=5)), total_mib=None)
    (unknown,) = devices(odd, None)
    assert [f.code for f in unknown.faults] == ["unreadable"]
    assert "class is unknown" in unknown.faults[0].reason


def test_a_profile_that_no_table_has_is_what_the_driver_says() -> None:
    (found,) = devices(cut(instance(0, "5g.55gb+new", 3, mib=55000)), None)
    assert (found.device_class, found.faults) == ("h100-80g-mig-5g.55gb+new", ())


@pytest.mark.parametrize(
    ("name", "uuid", "total", "known", "unified"),
    [
        ("NVIDIA GB10", "GPU-1", None, "gb10-122g", True),
        ("Orin (nvgpu)", "54d0709b-1", None, "orin-nvgpu-122g", True),
        ("NVIDIA Thor", "GPU-1", None, "thor-122g", True),
        ("NVIDIA GH200 480GB", "GPU-1", 97871, "gh200-96g", False),
        ("NVIDIA Something", "GPU-1", None, "something", False),
    ],
)
def test_unified_memory(name: str, uuid: str, total: int | None, known: str, unified: bool) -> None:
    card = CardReading(0, uuid, name, total_mib=total, used_mib=total and 5)
    (found,) = devices(card, 124610)
    assert (found.device_class, found.unified) == (known, unified)
    assert [f.code for f in found.faults] == ([] if unified or total else ["unreadable"])
    if unified:
        assert (found.total_mib, found.used_mib) == (124610, None)
        assert stranger(found, ours=False) is None


def test_memory_that_may_not_be_read_says_so() -> None:
    (found,) = devices(evolve(H100, total_mib=None, used_mib=None, memory_hidden=True), 1000)
    assert (found.device_class, [f.code for f in found.faults]) == ("h100", ["unreadable"])
    assert "Insufficient Permissions" in found.faults[0].reason


@pytest.mark.parametrize(
    ("health", "code", "said"),
    [
        (CardHealth(lost=True), "failed", "GPU is lost"),
        (CardHealth(memory_error=True), "failed", "cannot read its memory"),
        (CardHealth(remap_failed=True), "failed", "row remapping failed"),
        (CardHealth(sram_threshold=True), "failed", "threshold"),
        (CardHealth(unrepairable=True), "failed", "unrepairable"),
        (CardHealth(uncorrected=1), "ecc-uncorrected", "has 1 uncorrected ECC error since"),
        (CardHealth(uncorrected=3), "ecc-uncorrected", "has 3 uncorrected ECC errors since"),
        (CardHealth(remap_pending=True), "needs-reset", "remapping is pending"),
        (CardHealth(retirement_pending=True), "needs-reset", "retirement is pending"),
        (CardHealth(repair_pending=True), "needs-reset", "repair of its memory channels"),
        (CardHealth(recovery="drain and reset"), "needs-reset", "recommends: drain and reset"),
        (CardHealth(wants_reset=True), "needs-reset", "requires a reset"),
        (CardHealth(prohibited=True), "prohibited", "compute mode is Prohibited"),
        (CardHealth(fabric_state="in progress"), "not-ready", "still being set up"),
        (CardHealth(fabric_state="not started"), "not-ready", "is not set up"),
        (CardHealth(fabric_state="completed", fabric_status="failure"), "not-ready", "failure"),
        (
            CardHealth(fabric_state="completed", fabric_status="success", fabric_health="unhealthy"),
            "not-ready",
            "unhealthy",
        ),
    ],
)
def test_each_fault(health: CardHealth, code: str, said: str) -> None:
    (found,) = devices(evolve(H100, health=health), None)
    assert [f.code for f in found.faults] == [code]
    assert said in found.faults[0].reason
    assert found.faults[0].remedy


def test_what_is_no_fault() -> None:
    fine = CardHealth(
        uncorrected=0, remap_pending=False, remap_failed=None, recovery="none", fabric_state="completed",
        fabric_status="success", fabric_health="limited capacity",
    )  # fmt: skip
    assert codes(evolve(H100, health=fine)) == [[]]


def test_a_process_stands_once_with_the_most_that_is_said_of_it() -> None:
    twice = (ProcessReading(7, "python", None), ProcessReading(7, "python", 9), ProcessReading(3, "x"))
    (found,) = devices(evolve(H100, processes=twice), None)
    assert found.processes == (DeviceProcess(3, "x", None), DeviceProcess(7, "python", 9))


@given(readings())
def test_any_reading_becomes_devices(reading: GpuReading) -> None:
    for card in reading.cards:
        found = devices(card, 1000)
        assert found
        assert len({d.number for d in found}) == len(found)
        for device in found:
            if card.mig and card.instances:
                assert device.mig is not None
                assert device.number == 1000 + 100 * card.index + device.mig.index
                assert device.load.utilization_percent is None
            else:
                assert (device.mig, device.number) == (None, card.index)
            # What has no fault has a memory and a class with a size in it: it may be placed on.
            if not device.faults:
                assert device.total_mib is not None
                assert device.device_class[-1] == "g" or "-mig-" in device.device_class
            if card.health.lost:
                assert device.faults
