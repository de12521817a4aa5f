"""What a source said of the GPUs, before anything is made of it: the same values whether nvidia-smi or NVML said so.

Whatever a source does not say, or says in one of the driver's many ways of not saying it, is ``None`` or empty.
"""

from __future__ import annotations

from attrs import frozen

from llmgw.hardware.inventory import AdapterPath, Driver, Fault, Load, Relation, Wear


@frozen
class ProcessReading:
    """A process that holds memory of a card. The two instance ids are ``None`` off MIG."""

    pid: int
    name: str
    used_mib: int | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None


@frozen
class InstanceReading:
    """One MIG device: a compute instance. ``total_mib`` is all of its GPU instance's memory."""

    index: int
    uuid: str
    profile: str
    gpu_instance: int | None
    compute_instance: int | None
    total_mib: int | None = None
    used_mib: int | None = None
    uncorrected: int | None = None


@frozen
class CardHealth:
    """What the driver says of a card's health. Words are in lower case, ``""`` where it says none.

    ``uncorrected`` counts uncorrected volatile ECC errors; ``prohibited`` says that the compute mode lets nobody in.
    ``recovery`` is ``none``, ``reset``, ``reboot``, ``drain p2p``, ``drain and reset`` or newer; ``fabric_state`` is
    ``not started``, ``in progress`` or ``completed``; ``fabric_status`` is ``success`` or what went wrong;
    ``fabric_health`` is ``healthy``, ``unhealthy`` or ``limited capacity``.
    """

    lost: bool = False
    wants_reset: bool = False
    memory_error: bool = False
    uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retirement_pending: bool | None = None
    repair_pending: bool | None = None
    sram_threshold: bool | None = None
    unrepairable: bool | None = None
    prohibited: bool | None = None
    recovery: str = ""
    fabric_state: str = ""
    fabric_status: str = ""
    fabric_health: str = ""


@frozen
class CardReading:
    """One card. ``index`` is NVML's; ``mig`` and ``mig_pending`` are ``None`` where the card has no MIG mode.

    ``instances_trouble`` is why instances that there may be could not be read.
    ``nvlinks`` and ``nvlinks_up`` count the NVLinks that the card has and those that are active. ``cpus``,
    ``numa_node`` and ``adapters`` are the driver's word on what is near, for where sysfs has none.
    """

    index: int
    uuid: str
    name: str
    pci_address: str = ""
    total_mib: int | None = None
    used_mib: int | None = None
    memory_hidden: bool = False
    capability: int | None = None
    mig: bool | None = None
    mig_pending: bool | None = None
    instances: tuple[InstanceReading, ...] = ()
    instances_trouble: str = ""
    processes: tuple[ProcessReading, ...] = ()
    health: CardHealth = CardHealth()
    load: Load = Load()
    wear: Wear = Wear()
    nvlinks: int | None = None
    nvlinks_up: int | None = None
    fabric_cluster: str = ""
    fabric_clique: int | None = None
    cpus: str = ""
    numa_node: int | None = None
    adapters: tuple[AdapterPath, ...] = ()


@frozen
class PairReading:
    """How two cards reach each other, by their indices, ``a`` below ``b``."""

    a: int
    b: int
    relation: Relation
    nvlinks: int = 0


@frozen
class GpuReading:
    """All that one source said. ``faults`` are about the source: what of it could not be read, and why."""

    driver: Driver
    cards: tuple[CardReading, ...]
    pairs: tuple[PairReading, ...] = ()
    faults: tuple[Fault, ...] = ()
