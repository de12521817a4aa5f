"""When a device must be left alone. Faults of the device itself come with it; this is about who holds its memory."""

from __future__ import annotations

from llmgw.hardware.inventory import Device, Fault

HELD_FLOOR_MIB = 512
"""Memory in use below this is nobody's: idle cards read 0 to 5 MiB, a desktop's or monitor's context a few hundred."""


def stranger(device: Device, *, ours: bool, floor_mib: int = HELD_FLOOR_MIB) -> Fault | None:
    """The fault ``memory-held`` when a process that is none of ours holds this device's memory.

    ``used_mib`` decides and the listed processes only explain: in a container the list is empty though memory is
    held. ``ours`` says that one of our shards runs on the device, and then nothing here is a stranger's.
    """
    if ours or device.used_mib is None or device.used_mib < floor_mib:
        return None
    holders = sorted(device.processes, key=lambda p: -(p.used_mib or 0))
    gib = f"{device.used_mib / 1024:.0f} GiB" if device.used_mib >= 1024 else f"{device.used_mib} MiB"
    if holders:
        names = ", ".join(f"pid {p.pid} {p.name}" for p in holders[:3])
        more = f" and {len(holders) - 3} more" if len(holders) > 3 else ""
        return Fault(
            "memory-held", f"{device.label} holds {gib} by {names}{more}", "stop that process, or give the device to it"
        )
    return Fault(
        "memory-held",
        f"{device.label} holds {gib}, by a process that the driver does not name",
        "look for it outside of this container, or reset the device",
    )
