"""When a device must be left alone: what the driver says of it, and who holds its memory."""

from __future__ import annotations

from collections.abc import Iterator

from llmgw.hardware.inventory import Device, Fault
from llmgw.hardware.reading import CardHealth

HELD_FLOOR_MIB = 512
"""Memory in use below this is nobody's: idle cards read 0 to 5 MiB, a desktop's or monitor's context a few hundred."""

_RESET = "run nvidia-smi --gpu-reset on it, or reboot"


def card_faults(health: CardHealth) -> Iterator[Fault]:
    """Why a card must not get work, most serious first. ``None`` and ``""`` are unknown, and no fault."""
    if health.lost:
        yield Fault("failed", "GPU is lost", "reboot the node; if it comes back, check its power and slot")
        return
    if health.memory_error:
        yield Fault(
            "failed", "the driver cannot read its memory (Unknown Error)", "look for Xid lines in the kernel log"
        )
    for broken, what in (
        (health.remap_failed, "row remapping failed"),
        (health.sram_threshold, "the SRAM error threshold is exceeded"),
        (health.unrepairable, "memory is unrepairable"),
    ):
        if broken:
            yield Fault("failed", what, "replace the GPU")
    if health.uncorrected:
        errors = f"{health.uncorrected} uncorrected ECC error{'s' if health.uncorrected > 1 else ''}"
        yield Fault(
            "ecc-uncorrected", f"has {errors} since the driver was loaded", "reset the GPU; if they return, replace it"
        )
    if (why := _reset(health)) is not None:
        yield Fault("needs-reset", why, _RESET)
    if health.prohibited:
        yield Fault("prohibited", "its compute mode is Prohibited", "run nvidia-smi -c DEFAULT on it")
    if health.fabric_state == "in progress":
        yield Fault("not-ready", "the NVLink fabric is still being set up", "wait; else restart nvidia-fabricmanager")
    elif health.fabric_state == "not started":
        yield Fault(
            "not-ready", "the NVLink fabric is not set up", "start nvidia-fabricmanager, of the driver's version"
        )
    elif health.fabric_state == "completed" and health.fabric_status not in ("", "success"):
        yield Fault("not-ready", f"NVLink fabric: {health.fabric_status}", "see the log of nvidia-fabricmanager")
    elif health.fabric_health == "unhealthy":
        yield Fault("not-ready", "the NVLink fabric is unhealthy", "see the log of nvidia-fabricmanager")


def _reset(health: CardHealth) -> str | None:
    """Why the card wants a reset. Such a card reports 0 MiB in use, and would look like the freest of all."""
    if health.remap_pending:
        return "a row remapping is pending"
    if health.retirement_pending:
        return "a page retirement is pending"
    if health.repair_pending:
        return "a repair of its memory channels or processors is pending"
    if health.recovery not in ("", "none"):
        return f"the driver recommends: {health.recovery}"
    return "the driver says that the GPU requires a reset" if health.wants_reset else None


def stranger(device: Device, *, ours: bool, floor_mib: int = HELD_FLOOR_MIB) -> Fault | None:
    """The fault ``memory-held`` when a process that is none of ours holds this device's memory.

    ``used_mib`` decides and the listed processes only explain: in a container the list is empty though memory is
    held. ``ours`` says that one of our shards runs on the device, or on one that shares its memory, and then nothing
    here is a stranger's.
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
