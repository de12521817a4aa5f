from __future__ import annotations

from attrs import evolve

from llmgw.hardware.inventory import Device, Driver, Host, Inventory, MigInstance
from llmgw.hardware.known import differences, known_cards, merged

A6000 = Device(0, "GPU-0", "NVIDIA RTX A6000", "rtx-a6000-48g", 49140, pci_address="0000:01:00.0")
OTHER = evolve(A6000, number=1, uuid="GPU-1", pci_address="0000:02:00.0")
BOTH = Inventory(Host("h", "b"), "nvml", (A6000, OTHER), driver=Driver("550.1"))
KNOWN = known_cards(BOTH)


def said(inventory: Inventory) -> list[tuple[str, str]]:
    return [(f.code, f.reason) for f in differences(KNOWN, inventory)]


def test_nothing_is_different() -> None:
    assert said(BOTH) == []
    assert merged(KNOWN, KNOWN) == KNOWN


def test_a_card_that_vanished_is_missing_until_somebody_accepts_it() -> None:
    one = evolve(BOTH, devices=(A6000,))
    assert said(one) == [("gpu-missing", "NVIDIA RTX A6000 at 0000:02:00.0 was here and is missing")]
    assert merged(KNOWN, known_cards(one)) == KNOWN


def test_a_card_in_another_slot_is_not_missing() -> None:
    moved = evolve(BOTH, devices=(A6000, evolve(OTHER, pci_address="0000:05:00.0")))
    assert said(moved) == []


def test_ecc_changes_a_class() -> None:
    ecc = evolve(A6000, device_class="rtx-a6000-45g", total_mib=46068)
    assert said(evolve(BOTH, devices=(ecc, OTHER))) == [
        (
            "class-changed",
            "gpu-0 is of class rtx-a6000-45g, it was rtx-a6000-48g (ECC was switched, or its memory was changed)",
        )
    ]


def test_a_driver_changes_a_class() -> None:
    upgraded = evolve(BOTH, devices=(evolve(A6000, device_class="rtx-a6000-47g"), OTHER), driver=Driver("580.1"))
    assert said(upgraded) == [
        ("class-changed", "gpu-0 is of class rtx-a6000-47g, it was rtx-a6000-48g (driver 550.1 then, 580.1 now)")
    ]


def test_another_card_in_the_same_slot() -> None:
    swapped = evolve(A6000, uuid="GPU-9", device_class="l40s-45g", name="NVIDIA L40S")
    assert said(evolve(BOTH, devices=(swapped, OTHER)))[0][1].endswith("(another card)")


def test_carving_is_no_change() -> None:
    mig = Device(
        1000, "MIG-1", "NVIDIA RTX A6000 MIG 1g", "rtx-a6000-48g-mig-1g", 1, pci_address=A6000.pci_address,
        mig=MigInstance(0, 0, "1g", 1, 0),
    )  # fmt: skip
    carved = evolve(BOTH, devices=(mig, OTHER))
    assert said(carved) == []
    assert known_cards(carved)[0].device_class == ""
    assert merged(KNOWN, known_cards(carved)) == KNOWN


def test_a_class_that_was_not_known_is_learnt() -> None:
    early = tuple(evolve(card, device_class="") for card in KNOWN)
    assert merged(early, KNOWN) == KNOWN


def test_a_machine_that_could_not_be_read_says_nothing_of_its_cards() -> None:
    assert said(evolve(BOTH, devices=(), source="none")) == []


def test_a_card_that_could_not_be_identified_is_not_remembered() -> None:
    assert known_cards(evolve(BOTH, devices=(evolve(A6000, name="unknown GPU"),))) == ()
