"""The inventory of one node, as discovery read it and as it travels in ``Register``.

Every type here is a frozen value. Absent readings are ``None``: "could not be read" is never zero.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen


@frozen
class Fault:
    """Why a device must not be given work, or why a part of the machine could not be read.

    ``code`` is stable and short (``ecc-uncorrected``, ``needs-reset``, ``failed``, ``not-ready``,
    ``memory-held``, ``mig-empty``, ``unreadable``); ``reason`` and ``remedy`` are sentences for people.
    """

    code: str
    reason: str
    remedy: str = ""


@frozen
class DeviceProcess:
    """A process that holds memory of a device. ``used_mib`` is ``None`` where the driver does not say."""

    pid: int
    name: str
    used_mib: int | None = None


@frozen
class MigInstance:
    """Where a MIG device sits on its card. Identity is the device's UUID: ``index`` renumbers."""

    card: int
    index: int
    profile: str
    gpu_instance: int
    compute_instance: int


@frozen
class Device:
    """One thing that an engine can be given: a whole GPU, or one MIG instance.

    ``number`` is the placement number: the card's index, or 1000 + 100 * card + instance for MIG.
    ``total_mib`` and ``used_mib`` are MiB as the driver reports them; ``used_mib`` excludes what the driver
    reserves for itself. ``compute_capability`` is ten times the version: 89 for 8.9.
    """

    number: int
    uuid: str
    name: str
    device_class: str
    total_mib: int | None
    used_mib: int | None = None
    pci_address: str = ""
    numa_node: int | None = None
    compute_capability: int | None = None
    processes: tuple[DeviceProcess, ...] = ()
    faults: tuple[Fault, ...] = ()
    mig: MigInstance | None = None

    @property
    def label(self) -> str:
        """What people see: ``gpu-3``, or ``gpu-3/mig1`` for a MIG instance."""
        return f"gpu-{self.mig.card}/mig{self.mig.index}" if self.mig else f"gpu-{self.number}"


class AdapterKind(StrEnum):
    """What an RDMA adapter is; only the first two can carry a fabric."""

    INFINIBAND = "infiniband"
    ROCE = "roce"
    IWARP = "iwarp"
    EFA = "efa"
    SOFTWARE = "software"
    SWITCH_MANAGEMENT = "switch-management"
    UNKNOWN = "unknown"


@frozen
class Port:
    """One port of an adapter. ``state`` is the kernel's word in lower case (``active``, ``down``, ``init``)."""

    number: int
    state: str
    link_layer: str
    rate_gbps: float | None = None
    physical_state: str = ""
    lid: int | None = None


@frozen
class Adapter:
    """One RDMA device of ``/sys/class/infiniband``."""

    name: str
    kind: AdapterKind
    ports: tuple[Port, ...]
    pci_address: str = ""
    numa_node: int | None = None
    netdevs: tuple[str, ...] = ()
    firmware: str = ""
    board: str = ""


@frozen
class FabricPort:
    """A port that belongs to a fabric."""

    adapter: str
    port: int


@frozen
class Fabric:
    """A labelled network as this node reaches it: the label is the operator's, the ports were found here."""

    label: str
    kind: AdapterKind
    ports: tuple[FabricPort, ...]
    faults: tuple[Fault, ...] = ()


@frozen
class Driver:
    """The NVIDIA driver, as it names itself."""

    version: str
    cuda_version: str = ""


@frozen
class Host:
    """The machine itself. ``boot_id`` changes at each boot; ``memory_mib`` is MemTotal."""

    hostname: str
    boot_id: str
    kernel: str = ""
    system: str = ""
    cpus: int | None = None
    memory_mib: int | None = None


@frozen
class Inventory:
    """All that a node has. ``simulated`` names the fake machine when the hardware is not real."""

    host: Host
    source: str
    devices: tuple[Device, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    fabrics: tuple[Fabric, ...] = ()
    nvlink_domains: tuple[tuple[int, ...], ...] = ()
    driver: Driver | None = None
    warnings: tuple[Fault, ...] = ()
    simulated: str | None = None

    def device(self, number: int) -> Device | None:
        """The device with this placement number, if the node has one."""
        return next((d for d in self.devices if d.number == number), None)
