"""What a shard's own processes hold of its devices, from an inventory. No I/O."""

from __future__ import annotations

from collections.abc import Collection
from itertools import starmap

from llmgw.hardware.inventory import Device, Inventory

Peaks = tuple[int, ...] | None
"""MiB by device, in the shard's order; ``None`` where nothing was ever read."""


def holders(inventory: Inventory, uuids: Collection[str], ours: Collection[int]) -> tuple[str, ...]:
    """Who of ours holds memory of these devices, in words; what a driver does not list cannot be seen."""
    return tuple(
        f"pid {process.pid} {process.name} holds {_amount(process.used_mib)} on {device.label}"
        for device in _devices(inventory, uuids)
        for process in device.processes
        if process.pid in ours
    )


def pids(inventory: Inventory, uuids: Collection[str]) -> frozenset[int]:
    """Every process that is listed on these devices."""
    return frozenset(p.pid for device in _devices(inventory, uuids) for p in device.processes)


def held(inventory: Inventory, uuids: Collection[str], ours: Collection[int]) -> Peaks:
    """What our processes hold of each device right now, in MiB.

    ``None`` when that cannot be told of every device: it is gone, its memory is the host's, the driver does not say how
    much a process holds, or it lists none of ours at all, as in a container.
    """
    found = _devices(inventory, uuids)
    mine = [[p.used_mib for p in device.processes if p.pid in ours] for device in found]
    if len(found) != len(uuids) or not any(mine) or any(d.unified for d in found):
        return None
    if any(used is None for device in mine for used in device):
        return None
    return tuple(sum(used or 0 for used in device) for device in mine)


def higher(one: Peaks, other: Peaks) -> Peaks:
    """The higher of the two, device by device."""
    if one is None or other is None:
        return one if other is None else other
    return tuple(starmap(max, zip(one, other, strict=True)))


def _devices(inventory: Inventory, uuids: Collection[str]) -> list[Device]:
    return [device for uuid in uuids if (device := inventory.by_uuid(uuid)) is not None]


def _amount(mib: int | None) -> str:
    if mib is None:
        return "memory"
    return f"{mib / 1024:.0f} GiB" if mib >= 1024 else f"{mib} MiB"
