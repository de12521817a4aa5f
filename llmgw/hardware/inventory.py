"""The inventory of one node, as discovery read it and as it travels in ``Register``.

Every type here is a frozen value. Absent readings are ``None``: "could not be read" is never zero.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property

from attrs import frozen


@frozen
class Fault:
    """Why a device must not be given work, or why a part of the machine could not be read.

    ``code`` is stable and short (``ecc-uncorrected``, ``needs-reset``, ``failed``, …: docs/hardware.md has them all);
    ``reason`` and ``remedy`` are sentences for people.
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
    gpu_instance: int | None
    compute_instance: int | None


class Relation(StrEnum):
    """How two PCI devices reach each other, nearest first (the words of `nvidia-smi topo -m`).

    ``pix``: over one PCIe switch. ``pxb``: over several. ``phb``: over the host bridge. ``node``: within one NUMA
    node. ``sys``: over the interconnect of the processors.
    """

    NVLINK = "nvlink"
    PIX = "pix"
    PXB = "pxb"
    PHB = "phb"
    NODE = "node"
    SYS = "sys"


@frozen
class AdapterPath:
    """How near an adapter is to a device."""

    adapter: str
    relation: Relation


@frozen
class DeviceLink:
    """How two whole cards reach each other. ``nvlinks`` counts the active NVLinks, 0 for another relation."""

    a: int
    b: int
    relation: Relation
    nvlinks: int = 0


@frozen
class Load:
    """What a card is doing right now. For a MIG instance heat and power are its card's, utilisation is nobody's."""

    temperature_c: int | None = None
    power_w: int | None = None
    utilization_percent: int | None = None


@frozen
class Wear:
    """What a card's memory went through in its life: rows remapped, uncorrected errors. No fault by itself."""

    remapped_rows: int | None = None
    uncorrected_errors: int | None = None


@frozen
class Device:
    """One thing that an engine can be given: a whole GPU, or one MIG instance.

    ``number`` is the placement number: the card's index, or 1000 + 100 * card + instance for MIG.
    ``total_mib`` and ``used_mib`` are MiB as the driver reports them; ``used_mib`` excludes what the driver
    reserves for itself. ``unified`` says that the memory is the host's, and ``total_mib`` then all of it.
    ``compute_capability`` is ten times the version: 89 for 8.9. ``cpus`` is the kernel's list of the processors near
    the card (``0-15,32-47``). ``adapters`` are the adapters nearer than ``sys``, nearest first. ``nvlink_fabric``
    names the NVLink fabric of several nodes that the card is part of (``<cluster UUID>/<clique>``), if it is of one.
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
    unified: bool = False
    cpus: str = ""
    adapters: tuple[AdapterPath, ...] = ()
    nvlink_fabric: str = ""
    load: Load = Load()
    wear: Wear = Wear()

    @property
    def label(self) -> str:
        """What people see: ``gpu-3``, or ``gpu-3/mig1`` for a MIG instance."""
        return f"gpu-{self.mig.card}/mig{self.mig.index}" if self.mig else f"gpu-{self.number}"

    def shares_memory(self, other: Device) -> bool:
        """Whether the two are compute instances of one GPU instance, which share its memory."""
        mine, its = self.mig, other.mig
        return (
            mine is not None
            and its is not None
            and mine.gpu_instance is not None
            and (mine.card, mine.gpu_instance) == (its.card, its.gpu_instance)
        )


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
class Gid:
    """A RoCE v2 address of a port: where it stands in the GID table, the IPv4 address, and whose it is."""

    index: int
    address: str
    netdev: str


@frozen
class Port:
    """One port of an adapter. ``state`` is the kernel's word in lower case (``active``, ``down``, ``init``).

    ``link_layer`` is the port's own: a VPI adapter can have one of each. ``rate_gbps`` is ``None`` unless the port is
    active, as a port that is down reports a meaningless one. ``gids`` are the RoCE v2 entries that are IPv4-mapped,
    in the order of the table; ``gid_trouble`` says why there is none.
    """

    number: int
    state: str
    link_layer: str
    rate_gbps: float | None = None
    physical_state: str = ""
    lid: int | None = None
    gids: tuple[Gid, ...] = ()
    gid_trouble: str = ""


@frozen
class Adapter:
    """One RDMA device of ``/sys/class/infiniband``.

    ``virtual`` says that it is an SR-IOV virtual function, ``bond`` names the bond that its interface is part of.
    ``addresses`` are the IPv4 addresses of its interfaces with their prefix lengths.
    """

    name: str
    kind: AdapterKind
    ports: tuple[Port, ...]
    pci_address: str = ""
    numa_node: int | None = None
    netdevs: tuple[str, ...] = ()
    firmware: str = ""
    board: str = ""
    virtual: bool = False
    bond: str = ""
    addresses: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()


@frozen
class FabricPort:
    """A port that belongs to a fabric, and on RoCE the address that it speaks from."""

    adapter: str
    port: int
    gid: Gid | None = None


@frozen
class Fabric:
    """A labelled network as this node reaches it: the label is the operator's, the ports were found here.

    ``kind`` is what its ports are; with faults a replica over several nodes must not use it.
    """

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
    """All that a node has. ``simulated`` names the fake machine when the hardware is not real.

    ``source`` is how the GPUs were read: ``nvml``, ``nvidia-smi`` or ``none``. ``links`` join whole cards;
    ``nvlink_domains`` are the placement numbers of cards that reach each other over NVLink.
    """

    host: Host
    source: str
    devices: tuple[Device, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    fabrics: tuple[Fabric, ...] = ()
    links: tuple[DeviceLink, ...] = ()
    nvlink_domains: tuple[tuple[int, ...], ...] = ()
    driver: Driver | None = None
    warnings: tuple[Fault, ...] = ()
    simulated: str | None = None

    def device(self, number: int) -> Device | None:
        """The device with this placement number, if the node has one."""
        return self._numbers.get(number)

    def by_uuid(self, uuid: str) -> Device | None:
        """The device with this UUID, whatever its number is by now."""
        return self._uuids.get(uuid)

    @cached_property
    def _numbers(self) -> dict[int, Device]:
        return {d.number: d for d in reversed(self.devices)}

    @cached_property
    def _uuids(self) -> dict[str, Device]:
        return {d.uuid: d for d in reversed(self.devices) if d.uuid}

    @property
    def memory_mib(self) -> int:
        """Device memory that is known of, with what compute instances share counted once."""
        total, shared = 0, set()
        for device in self.devices:
            if device.mig is not None and device.mig.gpu_instance is not None:
                key = (device.mig.card, device.mig.gpu_instance)
                if key in shared:
                    continue
                shared.add(key)
            total += device.total_mib or 0
        return total
