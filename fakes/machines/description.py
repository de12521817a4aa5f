"""What a machine is: one readable description, from which everything that discovery reads is rendered."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from attrs import asdict, field, frozen


@frozen
class Mig:
    """One MIG device of a card. Several compute instances of one GPU instance have its memory each."""

    profile: str
    total_mib: int
    gpu_instance: int
    compute_instance: int = 0


@frozen
class Card:
    """One GPU as its driver describes it. ``capability`` is like ``9.0``; a card without memory of its own has none.

    ``switch`` numbers the PCIe switch that it is behind; without one it sits at a port of its NUMA node's host bridge.
    ``state`` holds faults and load, see :func:`fakes.machines.render.write_state`.
    """

    name: str
    total_mib: int | None
    capability: str
    mig: tuple[Mig, ...] | None = None
    mig_capable: bool = True
    switch: int | None = None
    numa: int = 0
    state: Mapping[str, Any] = field(factory=dict)


@frozen
class Hca:
    """One RDMA adapter with one port. ``address`` is its interface's IPv4 address, such as ``10.0.0.2/24``."""

    name: str
    link_layer: str = "InfiniBand"
    rate: str = "400 Gb/sec (4X NDR)"
    state: str = "4: ACTIVE"
    physical: str = "5: LinkUp"
    switch_management: bool = False
    netdev: str | None = None
    address: str | None = None
    bond: str | None = None
    virtual: bool = False
    switch: int | None = None
    numa: int = 0


@frozen
class Machine:
    """A machine: what it is called, its driver, cards, NVLinks and adapters. Without a driver there is no nvidia-smi.

    ``nvswitch`` counts each card's links to NVSwitches; ``bridges`` joins two cards by so many links. ``cluster`` is
    the NVLink fabric that a GB200 or GB300 tray is part of. ``guest`` hides the switches, as a hypervisor does.
    ``memory_mib`` is the host's where that matters.
    """

    label: str
    cards: tuple[Card, ...] = ()
    adapters: tuple[Hca, ...] = ()
    driver: str | None = "570.148.08"
    cuda: str = "12.8"
    nvswitch: int = 0
    bridges: tuple[tuple[int, int, int], ...] = ()
    cluster: str = ""
    guest: bool = False
    memory_mib: int | None = None


@frozen
class Place:
    """Where a function is on the bus: its address and its folder below ``/sys/devices``."""

    address: str
    path: str


def gpu_uuid(machine: Machine, index: int) -> str:
    """A UUID that is the same at every rendering."""
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_URL, f'{machine.label}/{index}')}"


def mig_uuid(machine: Machine, index: int, mig: Mig) -> str:
    """A MIG device's UUID, which stays when others are made beside it."""
    ids = f"{mig.gpu_instance}/{mig.compute_instance}"
    return f"MIG-{uuid.uuid5(uuid.NAMESPACE_URL, f'{machine.label}/{index}/{ids}')}"


def places(machine: Machine) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Addresses of the cards and of the adapters. Switches have buses 10, 20, …, ports without one e0 and f0."""
    used: dict[tuple[int | None, int], int] = {}

    def place(item: Card | Hca) -> Place:
        slot = used[item.switch, item.numa] = used.get((item.switch, item.numa), -1) + 1
        if item.switch is None:
            root = 0xE0 + item.numa * 0x10
            address = f"0000:{root + 1 + slot:02x}:00.0"
            return Place(address, f"pci0000:{root:02x}/0000:{root:02x}:{slot + 1:02x}.0/{address}")
        root = 0x10 + item.switch * 0x10
        address = f"0000:{root + 3 + slot:02x}:00.0"
        inner = f"0000:{root:02x}:01.0/0000:{root + 1:02x}:00.0/0000:{root + 2:02x}:{slot:02x}.0"
        return Place(address, f"pci0000:{root:02x}/{inner}/{address}")

    cards = tuple(place(card) for card in machine.cards)
    return cards, tuple(place(adapter) for adapter in machine.adapters)


def nearness(a: Card | Hca, b: Card | Hca) -> str:
    """How two functions reach each other over PCIe, in the words of `nvidia-smi topo -m`."""
    if a.numa != b.numa:
        return "SYS"
    if a.switch is None and b.switch is None:
        return "PHB"
    return "PIX" if a.switch == b.switch else "NODE"


def as_json(machine: Machine) -> dict[str, Any]:
    """The description with everything that follows from it, for the fake nvidia-smi and the fake NVML."""
    said = asdict(machine)
    cards, adapters = places(machine)
    ordered = sorted(range(len(machine.cards)), key=lambda i: cards[i].address)
    assert ordered == list(range(len(machine.cards))), "cards must be listed in the order of their addresses"
    for index, card in enumerate(said["cards"]):
        card["uuid"] = gpu_uuid(machine, index)
        card["address"] = cards[index].address
        for mig, described in zip(card["mig"] or (), machine.cards[index].mig or (), strict=True):
            mig["uuid"] = mig_uuid(machine, index, described)
        card["near"] = [nearness(machine.cards[index], other) for other in machine.cards]
        card["near_adapters"] = [nearness(machine.cards[index], adapter) for adapter in machine.adapters]
    for adapter, placed in zip(said["adapters"], adapters, strict=True):
        adapter["pci"] = placed.address
    return said
