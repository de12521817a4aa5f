"""From what was read of a card to the devices that can be given out: the card, or its MIG instances in its place."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from llmgw.hardware.gpu import card_name, compute_capability, device_class, mig_class, mig_number
from llmgw.hardware.health import card_faults
from llmgw.hardware.inventory import Device, DeviceProcess, Fault, MigInstance
from llmgw.hardware.mig import parent_class, suggestion
from llmgw.hardware.reading import CardReading, InstanceReading, ProcessReading

_UNIFIED = frozenset({"gb10", "orin", "xavier", "thor"})
"""Cards without memory of their own (words of the product name). A driver says N/A for theirs, but it says the same
of a card whose memory a container may not see, so the name has to decide."""


def devices(card: CardReading, host_memory_mib: int | None) -> tuple[Device, ...]:
    """The devices of one card. ``host_memory_mib`` is what a card without memory of its own works with."""
    whole = _whole(card, host_memory_mib)
    if not card.mig:
        return (whole,)
    if not card.instances and card.instances_trouble:
        reason = f"its MIG instances cannot be read: {card.instances_trouble}"
        unread = Fault("unreadable", reason, "let the agent's user open them (/dev/nvidia-caps)")
        return (evolve(whole, faults=(*whole.faults, unread)),)
    if not card.instances:
        empty = Fault("mig-empty", "is in MIG mode and has no instance", _carve(card, whole))
        return (evolve(whole, faults=(*whole.faults, empty)),)
    return tuple(_instance(card, instance, whole) for instance in card.instances)


def _carve(card: CardReading, whole: Device) -> str:
    example = suggestion(whole.device_class)
    how = f"nvidia-smi mig -i {card.index} -cgi {example or '…'} -C"
    return f"carve it ({how}), or end MIG mode (nvidia-smi -i {card.index} -mig 0)"


def unified(card: CardReading) -> bool:
    """Whether the card works with the host's memory. Tegra's UUIDs lack the prefix that every other card's has."""
    words = set(card_name(card.name).split("-"))
    return card.total_mib is None and not card.health.memory_error and bool(words & _UNIFIED)


def _whole(card: CardReading, host_memory_mib: int | None) -> Device:
    faults = list(card_faults(card.health))
    shared = unified(card)
    total = host_memory_mib if shared else card.total_mib
    name = device_class(card.name, total)
    if total is None and not card.mig and not faults:
        faults.append(_unread(card))
    if not card.uuid and not card.mig and not faults:
        faults.append(
            Fault("unreadable", "its UUID cannot be read, so nothing can be started on it", "see nvidia-smi -L")
        )
    if card.mig is not None and card.mig_pending is not None and card.mig != card.mig_pending:
        now, then = ("on", "off") if card.mig else ("off", "on")
        faults.append(
            Fault("not-ready", f"MIG mode is {now}, {then} is pending", "stop what runs on it and reset it, or reboot")
        )
    if card.mig and total is None:
        name = parent_class(card.name, [(i.profile, i.total_mib) for i in card.instances]) or name
    return Device(
        number=card.index,
        uuid=card.uuid,
        name=card.name,
        device_class=name,
        total_mib=total,
        used_mib=None if shared else card.used_mib,
        pci_address=card.pci_address,
        compute_capability=card.capability or compute_capability(name),
        processes=_merged(card.processes),
        faults=tuple(faults),
        unified=shared,
        nvlink_fabric=f"{card.fabric_cluster}/{card.fabric_clique}" if card.fabric_cluster else "",
        load=card.load,
        wear=card.wear,
    )


def _unread(card: CardReading) -> Fault:
    if card.memory_hidden:
        return Fault(
            "unreadable", "its memory may not be read here (Insufficient Permissions)", "run the agent on the host"
        )
    return Fault(
        "unreadable", "its memory is not reported", "see nvidia-smi -q; some guests of a hypervisor do not say"
    )


def _merged(found: tuple[ProcessReading, ...]) -> tuple[DeviceProcess, ...]:
    """Holders of memory, each once: one process stands under compute and under graphics with the same memory."""
    by_pid: dict[int, DeviceProcess] = {}
    for p in found:
        known = by_pid.get(p.pid)
        if known is None or (known.used_mib or 0) < (p.used_mib or 0):
            by_pid[p.pid] = DeviceProcess(p.pid, p.name, p.used_mib)
    return tuple(by_pid[pid] for pid in sorted(by_pid))


def _of(card: CardReading, instance: InstanceReading) -> Iterator[ProcessReading]:
    for p in card.processes:
        there = instance.gpu_instance is not None and p.gpu_instance == instance.gpu_instance
        if there and (instance.compute_instance is None or p.compute_instance in (None, instance.compute_instance)):
            yield p


def _instance(card: CardReading, instance: InstanceReading, whole: Device) -> Device:
    faults = list(whole.faults)
    if not instance.uuid or not instance.profile:
        why = f": {card.instances_trouble}" if card.instances_trouble else ""
        faults.append(
            Fault(
                "unreadable",
                f"this MIG instance is not named by nvidia-smi -L{why}",
                "run nvidia-smi -L as the agent's user",
            )
        )
    if whole.device_class == card_name(card.name):
        faults.append(
            Fault(
                "unreadable",
                "the whole card's memory is not reported, so its class is unknown",
                "run the agent on the host",
            )
        )
    if instance.uncorrected:
        errors = f"{instance.uncorrected} uncorrected ECC error{'s' if instance.uncorrected > 1 else ''}"
        faults.append(
            Fault(
                "ecc-uncorrected",
                f"has {errors} since the driver was loaded",
                "reset the GPU; if they return, replace it",
            )
        )
    if instance.total_mib is None and not faults:
        faults.append(Fault("unreadable", "its memory is not reported", "run the agent on the host"))
    profile = instance.profile or "unknown"
    return Device(
        number=mig_number(card.index, instance.index),
        uuid=instance.uuid,
        name=f"{card.name} MIG {profile}",
        device_class=mig_class(whole.device_class, profile),
        total_mib=instance.total_mib,
        used_mib=instance.used_mib,
        pci_address=card.pci_address,
        compute_capability=whole.compute_capability,
        processes=_merged(tuple(_of(card, instance))),
        faults=tuple(faults),
        mig=MigInstance(card.index, instance.index, profile, instance.gpu_instance, instance.compute_instance),
        load=evolve(card.load, utilization_percent=None),
        wear=card.wear,
    )
