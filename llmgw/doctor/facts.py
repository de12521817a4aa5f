"""What was read of a machine, as one frozen value that travels whole: checks judge this and nothing else.

A fact that could not be read has its neutral value here and stands in ``unread`` with the reason. So every check is
in one of three states: it holds, it does not, or nobody can tell and why.
"""

from __future__ import annotations

from attrs import frozen

from llmgw.doctor.node_facts import (
    Certificate,
    Clock,
    Disk,
    Docker,
    Engine,
    Firewall,
    Limits,
    Memory,
    Reach,
    Stuck,
    Unit,
    Variable,
)
from llmgw.doctor.peer_facts import Peer, PeerPath
from llmgw.hardware.fabric import FabricRule
from llmgw.hardware.inventory import Adapter, Device, Driver, Fabric, Host
from llmgw.hardware.reading import CardReading


@frozen
class Unread:
    """A fact that could not be read. ``root`` says that root could have."""

    fact: str
    why: str
    root: bool = False


@frozen
class PciFunction:
    """A function on the PCI bus, and the kernel module that has it."""

    address: str
    driver: str = ""
    device: str = ""


@frozen
class Answer:
    """Whether a program or library answered: ``code`` is empty when it did, and ``said`` is in its own words.

    ``remedy`` is what helps against that, where it is known.
    """

    code: str = ""
    said: str = ""
    remedy: str = ""


@frozen
class Card:
    """One card: what discovery reads of it, and what only diagnosis wants to know.

    Widths are PCIe lanes, generations those of PCIe; ``slowed`` are the hardware's reasons to lower its clocks.
    """

    reading: CardReading
    persistence: bool | None = None
    width: int | None = None
    width_most: int | None = None
    generation: int | None = None
    generation_most: int | None = None
    busy: bool = False
    slowed: tuple[str, ...] = ()
    ecc: bool | None = None
    ecc_pending: bool | None = None
    vbios: str = ""


@frozen
class KernelModule:
    """The loaded NVIDIA module. ``flavour`` is ``open`` or ``proprietary``."""

    version: str = ""
    flavour: str = ""


@frozen
class LoadedModule:
    """A line of ``/proc/modules``."""

    name: str
    users: tuple[str, ...] = ()


@frozen
class Service:
    """A systemd unit, in systemd's words."""

    load: str = ""
    active: str = ""
    result: str = ""


@frozen
class Imex:
    """The daemon of NVLink over several nodes. ``state`` is what its own tool says."""

    channel: bool = False
    state: str = ""


@frozen
class GpuInstance:
    """A GPU instance of a card in MIG mode, as `nvidia-smi mig -lgi` lists it."""

    card: int
    number: int
    profile: str


@frozen
class Netdev:
    """A network interface. ``up`` is its operational state; ``addresses`` have their prefix lengths."""

    name: str
    up: bool = True
    mtu: int | None = None
    addresses: tuple[str, ...] = ()


@frozen
class Counter:
    """One counter of a port, read twice. ``trouble`` is why it could not be read."""

    adapter: str
    port: int
    name: str
    before: int = 0
    after: int = 0
    trouble: str = ""

    @property
    def growth(self) -> int:
        """How much it grew between the two readings; a saturated or reset counter did not."""
        return max(0, self.after - self.before)


@frozen
class GidStart:
    """The first index of a port's GID table that this network namespace can read."""

    adapter: str
    port: int
    index: int


@frozen
class PciLink:
    """The PCIe lanes that a function has now, and those that it could have."""

    name: str
    address: str
    width: int
    width_most: int


@frozen
class Acs:
    """A PCIe bridge whose access control sends traffic between devices up to the processor, or does not."""

    address: str
    redirects: bool


_NO_HOST = Host("", "")
_NO_DRIVER = Driver("")
_NO_UNIT = Unit()
_NO_LIMITS = Limits()
_NO_FIREWALL = Firewall()
_NO_MEMORY = Memory()
_CLOCK = Clock()
_NO_DOCKER = Docker()
_NO_PEER = Peer()
_NO_PATH = PeerPath()


@frozen
class Facts:
    """Everything that was read, once. ``now`` is when, in seconds since 1970.

    ``simulated`` names a fake machine; ``smi`` and ``nvml`` are how the two sources of GPUs answered: what is said of
    cards is nvidia-smi's word, or NVML's where only that answers; ``nvlink_domains`` are the indices of cards that
    reach each other over NVLink;
    ``nodes`` are names below ``/dev``; ``missing_tools`` what fabric management of
    NVLink 5 lacks; ``interface`` the one that carries the agent's ``address``; ``known_cards`` the UUIDs that this node
    is known to have. ``iommu`` is ``off``, ``passthrough`` or ``translating``; ``compat`` are the drivers that CUDA's
    forward-compatibility libraries here stand in for. Two facts only a control plane adds that asked for the rest:
    ``wanted_classes`` are the device classes that the catalog's models name, empty where nobody said, and
    ``plane_ahead_s`` is how far its clock is at least ahead of this one.
    """

    host: Host = _NO_HOST
    now: float = 0.0
    simulated: str = ""
    virtual: bool = False
    sockets: int = 1
    pci_gpus: tuple[PciFunction, ...] = ()
    pci_nics: tuple[PciFunction, ...] = ()
    nvswitches: tuple[str, ...] = ()
    smi: Answer = Answer()
    nvml: Answer = Answer("not-asked")
    driver: Driver = _NO_DRIVER
    cards: tuple[Card, ...] = ()
    devices: tuple[Device, ...] = ()
    nvlink_domains: tuple[tuple[int, ...], ...] = ()
    mig_instances: tuple[GpuInstance, ...] = ()
    module: KernelModule = KernelModule()
    modules: tuple[LoadedModule, ...] = ()
    nodes: tuple[str, ...] = ()
    fabric_manager: Service = Service()
    fabric_manager_version: str = ""
    fabric_manager_log: tuple[str, ...] = ()
    missing_tools: tuple[str, ...] = ()
    imex: Imex = Imex()
    kernel_log: tuple[str, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    rules: tuple[FabricRule, ...] = ()
    fabrics: tuple[Fabric, ...] = ()
    netdevs: tuple[Netdev, ...] = ()
    counters: tuple[Counter, ...] = ()
    counted_s: float = 0.0
    gid_starts: tuple[GidStart, ...] = ()
    pci_links: tuple[PciLink, ...] = ()
    numa_nodes: tuple[int, ...] = ()
    acs: tuple[Acs, ...] = ()
    iommu: str = ""
    compat: tuple[str, ...] = ()
    wanted_classes: tuple[str, ...] = ()
    plane_ahead_s: float = 0.0
    peer_memory: tuple[str, ...] = ()
    unit: Unit = _NO_UNIT
    limits: Limits = _NO_LIMITS
    variables: tuple[Variable, ...] = ()
    host_addresses: tuple[str, ...] = ()
    address: str = ""
    interface: str = ""
    firewall: Firewall = _NO_FIREWALL
    port_range: str = ""
    disks: tuple[Disk, ...] = ()
    shm_mib: int = 0
    memory: Memory = _NO_MEMORY
    numa_balancing: int = 0
    clock: Clock = _CLOCK
    certificates: tuple[Certificate, ...] = ()
    known_cards: tuple[str, ...] = ()
    engines: tuple[Engine, ...] = ()
    docker: Docker = _NO_DOCKER
    remove_ipc: bool = False
    stuck: tuple[Stuck, ...] = ()
    reach: tuple[Reach, ...] = ()
    peer: Peer = _NO_PEER
    peer_path: PeerPath = _NO_PATH
    unread: tuple[Unread, ...] = ()

    def adapter(self, name: str) -> Adapter | None:
        """The adapter of this name, if there is one."""
        return next((a for a in self.adapters if a.name == name), None)

    def netdev(self, name: str) -> Netdev | None:
        """The interface of this name, if there is one."""
        return next((n for n in self.netdevs if n.name == name), None)

    def has_module(self, *names: str) -> bool:
        """Whether any of these kernel modules is there."""
        return any(m.name in names for m in self.modules)

    def in_fabric(self, adapter: str) -> str:
        """The label of the declared fabric that an adapter is in, empty if it is in none."""
        for fabric in self.fabrics:
            if any(port.adapter == adapter for port in fabric.ports):
                return fabric.label
        return next((r.label for r in self.rules if adapter in (n.partition(":")[0] for n in r.adapters)), "")
