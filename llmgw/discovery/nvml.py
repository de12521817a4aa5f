"""GPUs through NVML, over an interface of ours: the real library and the fake machines' have the same shape.

Meanings, error codes and constants: nvml.h of the NVIDIA driver (https://docs.nvidia.com/deploy/nvml-api/). Every
call about a card may fail by itself: what cannot be read is unknown, and one bad card hides no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from attrs import frozen

from llmgw.discovery.smi_text import PID_MAX, pci_address, process_name
from llmgw.hardware.inventory import Driver, Fault, Load, Relation, Wear
from llmgw.hardware.reading import CardHealth, CardReading, GpuReading, InstanceReading, PairReading, ProcessReading

INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, LOST, RESET_REQUIRED, UNKNOWN = 2, 3, 4, 6, 15, 16, 999
MAX_LINKS = 36
PROHIBITED = 2
_MIB = 1024 * 1024
_NO_INSTANCE = 0xFFFFFFFF

T = TypeVar("T")
Handle = Any


class NvmlError(Exception):
    """A call that failed, with NVML's own code and words."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(said)
        self.code = code


class Library(Protocol):
    """What is asked of NVML. Every method may raise :class:`NvmlError`; sizes are bytes."""

    def driver_version(self) -> str: ...
    def cuda_version(self) -> str: ...
    def count(self) -> int: ...
    def card(self, index: int) -> Handle: ...
    def uuid(self, handle: Handle) -> str: ...
    def name(self, handle: Handle) -> str: ...
    def pci_bus_id(self, handle: Handle) -> str: ...
    def memory(self, handle: Handle) -> tuple[int, int]:
        """Total, and used without what the driver reserves."""
        ...

    def capability(self, handle: Handle) -> tuple[int, int]: ...
    def mig_mode(self, handle: Handle) -> tuple[int, int]:
        """Current and pending: 0 off, 1 on."""
        ...

    def mig_slots(self, handle: Handle) -> int: ...
    def mig(self, handle: Handle, index: int) -> Handle: ...
    def gpu_instance(self, mig: Handle) -> int: ...
    def compute_instance(self, mig: Handle) -> int: ...
    def uncorrected(self, handle: Handle, *, lifetime: bool) -> int: ...
    def sram_uncorrected(self, mig: Handle) -> int: ...
    def remapped_rows(self, handle: Handle) -> tuple[int, int, bool, bool]:
        """After correctable errors, after uncorrectable ones, one pending, one failed."""
        ...

    def retirement_pending(self, handle: Handle) -> bool: ...
    def repair_pending(self, handle: Handle) -> bool: ...
    def sram_threshold(self, handle: Handle) -> bool: ...
    def unrepairable(self, handle: Handle) -> bool: ...
    def compute_mode(self, handle: Handle) -> int:
        """0 default, 1 and 3 exclusive, 2 prohibited."""
        ...

    def recovery(self, handle: Handle) -> int: ...
    def reset_required(self, handle: Handle) -> bool: ...
    def fabric(self, handle: Handle) -> tuple[int, int, int, int, str]:
        """State, status (an error code), health summary, clique, and cluster UUID."""
        ...

    def temperature_c(self, handle: Handle) -> int: ...
    def power_mw(self, handle: Handle) -> int: ...
    def utilization(self, handle: Handle) -> int: ...
    def processes(self, handle: Handle) -> Sequence[tuple[int, int | None, int | None, int | None]]:
        """Pid, bytes, GPU instance and compute instance of each process, compute and graphics."""
        ...

    def process_name(self, pid: int) -> str: ...
    def nvlink_active(self, handle: Handle, link: int) -> bool: ...
    def nvlink_remote(self, handle: Handle, link: int) -> tuple[int, str]:
        """What is at the other end (0 GPU, 1 IBM, 2 switch, 255 not told), and its bus id."""
        ...

    def p2p_nvlink(self, a: Handle, b: Handle) -> bool: ...
    def ancestor(self, a: Handle, b: Handle) -> int: ...


_RECOVERY = ("none", "reset", "reboot", "drain p2p", "drain and reset", "recover imex domain", "bus reset",
             "system reboot")  # fmt: skip
_FABRIC_STATE = ("", "not started", "in progress", "completed")
_FABRIC_HEALTH = ("", "healthy", "unhealthy", "limited capacity")
_ANCESTOR: Mapping[int, Relation] = {
    0: Relation.PIX, 10: Relation.PIX, 20: Relation.PXB, 30: Relation.PHB, 40: Relation.NODE, 50: Relation.SYS
}  # fmt: skip
_GPU, _SWITCH, _NOT_TOLD = 0, 2, 255


@frozen
class _Link:
    active: bool
    kind: int
    remote: str


@frozen
class _Card:
    reading: CardReading
    handle: Handle
    links: tuple[_Link, ...]


class _Troubles:
    """What the calls about one card failed with."""

    def __init__(self) -> None:
        self.codes: set[int] = set()
        self.first: NvmlError | None = None

    def get(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        try:
            return call(*args, **kwargs)
        except NvmlError as failed:
            self.codes.add(failed.code)
            if failed.code not in (INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND):
                self.first = self.first or failed
            return None


def read(library: Library) -> GpuReading:
    """Read everything. Raises :class:`NvmlError` when not even the number of cards can be told."""
    driver = Driver(library.driver_version(), library.cuda_version())
    cards: list[_Card] = []
    hidden: list[int] = []
    for index in range(library.count()):
        try:
            handle = library.card(index)
        except NvmlError as failed:
            if failed.code == NO_PERMISSION:
                hidden.append(index)
            else:
                cards.append(_Card(_unreadable(index, failed), None, ()))
            continue
        cards.append(_card(library, index, handle))
    faults = []
    if hidden:
        them = ", ".join(map(str, hidden))
        faults.append(Fault("hidden", f"GPU {them} may not be opened here", "give the agent all of /dev/nvidia*"))
    pairs, unknown = _pairs(library, [c for c in cards if c.handle is not None and not c.reading.mig])
    if unknown:
        them = ", ".join(f"gpu-{index}" for index in sorted(unknown))
        faults.append(
            Fault(
                "nvlink-unknown",
                f"{them} have active NVLinks, and where they lead is not told here",
                "in a virtual machine: no NVLink domain is assumed; see nvidia-smi topo -m",
            )
        )
    return GpuReading(driver, tuple(c.reading for c in cards), tuple(pairs), tuple(faults))


def _unreadable(index: int, failed: NvmlError) -> CardReading:
    health = CardHealth(
        lost=failed.code == LOST, wants_reset=failed.code == RESET_REQUIRED, memory_error=failed.code == UNKNOWN
    )
    return CardReading(index, "", "unknown GPU", health=health)


def _card(library: Library, index: int, handle: Handle) -> _Card:
    trouble = _Troubles()
    get = trouble.get
    memory_trouble = _Troubles()
    memory = memory_trouble.get(library.memory, handle)
    mode = get(library.mig_mode, handle)
    fabric = get(library.fabric, handle)
    state, status, summary, clique, cluster = fabric or (0, 0, 0, 0, "")
    rows = get(library.remapped_rows, handle)
    power = get(library.power_mw, handle)
    capability = get(library.capability, handle)
    in_mig = bool(mode and mode[0])
    links = () if in_mig else tuple(_links(library, handle))
    up = sum(link.active for link in links)
    recovery = get(library.recovery, handle)
    total = None if memory is None else memory[0] // _MIB
    name = get(library.name, handle)
    pci = get(library.pci_bus_id, handle)
    uncorrected = get(library.uncorrected, handle, lifetime=False)
    repair = get(library.repair_pending, handle)
    retirement, threshold = get(library.retirement_pending, handle), get(library.sram_threshold, handle)
    unrepairable = get(library.unrepairable, handle)
    compute_mode = get(library.compute_mode, handle)
    uuid = get(library.uuid, handle) or ""
    reset = bool(get(library.reset_required, handle))
    # Asked for under MIG as well, where it has no meaning: a card that wants a reset says so here.
    utilization = get(library.utilization, handle)
    load = Load(
        get(library.temperature_c, handle),
        None if power is None else (power + 500) // 1000,
        None if in_mig else utilization,
    )
    wear = Wear(None if rows is None else rows[0] + rows[1], get(library.uncorrected, handle, lifetime=True))
    # A mode that may not be read says nothing of what is there.
    found_trouble = _Troubles()
    instances = tuple(_instances(library, handle, found_trouble)) if in_mig or mode is None else ()
    in_mig = in_mig or bool(instances)
    failed = found_trouble.first if in_mig else None
    processes = tuple(_processes(library, handle, total))
    seen = trouble.codes | memory_trouble.codes
    health = CardHealth(
        lost=LOST in seen,
        wants_reset=reset or RESET_REQUIRED in seen,
        memory_error=UNKNOWN in memory_trouble.codes,
        uncorrected=uncorrected,
        remap_pending=None if rows is None else rows[2],
        remap_failed=None if rows is None else rows[3],
        retirement_pending=retirement,
        repair_pending=repair,
        sram_threshold=threshold,
        unrepairable=unrepairable,
        prohibited=None if compute_mode is None else compute_mode == PROHIBITED,
        recovery="" if recovery is None else _word(_RECOVERY, recovery),
        fabric_state=_word(_FABRIC_STATE, state),
        fabric_status="" if state != 3 else "success" if status == 0 else f"error {status}",
        fabric_health=_word(_FABRIC_HEALTH, summary),
    )
    reading = CardReading(
        index=index,
        uuid=uuid,
        name=name or "unknown GPU",
        pci_address=pci_address(pci or ""),
        total_mib=total,
        used_mib=None if memory is None else memory[1] // _MIB,
        memory_hidden=NO_PERMISSION in memory_trouble.codes,
        capability=None if capability is None else capability[0] * 10 + capability[1],
        mig=True if instances else None if mode is None else bool(mode[0]),
        mig_pending=None if mode is None else bool(mode[1]),
        instances=instances,
        instances_trouble="" if failed is None else f"{failed} (NVML error {failed.code})",
        processes=processes,
        health=health,
        load=load,
        wear=wear,
        nvlinks=len(links) if up else None,
        nvlinks_up=up or None,
        fabric_cluster=cluster if cluster.strip("0-") else "",
        fabric_clique=clique if cluster.strip("0-") else None,
    )
    return _Card(reading, handle, links)


def _word(words: Sequence[str], number: int) -> str:
    return words[number] if 0 <= number < len(words) else f"state {number}"


def _instances(library: Library, card: Handle, trouble: _Troubles) -> Iterator[InstanceReading]:
    """The MIG devices of a card. An index without one is a hole, and no error; any other failure is ``trouble``."""
    get = _Troubles().get
    for index in range(trouble.get(library.mig_slots, card) or 0):
        mig = trouble.get(library.mig, card, index)
        if mig is None:
            continue
        memory = get(library.memory, mig)
        yield InstanceReading(
            index=index,
            uuid=get(library.uuid, mig) or "",
            profile=(get(library.name, mig) or "").rpartition(" MIG ")[2].strip(),
            gpu_instance=get(library.gpu_instance, mig),
            compute_instance=get(library.compute_instance, mig),
            total_mib=None if memory is None else memory[0] // _MIB,
            used_mib=None if memory is None else memory[1] // _MIB,
            uncorrected=get(library.sram_uncorrected, mig),
        )


def _processes(library: Library, card: Handle, total_mib: int | None) -> Iterator[ProcessReading]:
    get = _Troubles().get
    for pid, used, gpu_instance, compute_instance in get(library.processes, card) or ():
        if not 0 < pid <= PID_MAX:
            continue
        mib = None if used is None else used // _MIB
        yield ProcessReading(
            pid=pid,
            name=process_name(get(library.process_name, pid)),
            used_mib=None if mib is not None and total_mib is not None and mib > total_mib else mib,
            gpu_instance=None if gpu_instance == _NO_INSTANCE else gpu_instance,
            compute_instance=None if compute_instance == _NO_INSTANCE else compute_instance,
        )


def _links(library: Library, card: Handle) -> Iterator[_Link]:
    for link in range(MAX_LINKS):
        trouble = _Troubles()
        get = trouble.get
        active = get(library.nvlink_active, card, link)
        if active is None and trouble.first is None:
            return  # past the last one
        kind, remote = (get(library.nvlink_remote, card, link) or (_NOT_TOLD, "")) if active else (_NOT_TOLD, "")
        yield _Link(bool(active), kind, pci_address(remote))


def _pairs(library: Library, cards: Sequence[_Card]) -> tuple[list[PairReading], set[int]]:
    """Every two cards, and those whose active links lead nowhere that is told."""
    made: list[PairReading] = []
    unknown: set[int] = set()
    get = _Troubles().get
    for position, a in enumerate(cards):
        for b in cards[position + 1 :]:
            count = min(_joining(a, b), _joining(b, a))
            if not count:
                count = min(_leading_to(a, _SWITCH), _leading_to(b, _SWITCH))
            hidden = min(_leading_to(a, _NOT_TOLD), _leading_to(b, _NOT_TOLD))
            if not count and hidden:
                told = get(library.p2p_nvlink, a.handle, b.handle)
                count = hidden if told else 0
                if told is None:
                    unknown |= {a.reading.index, b.reading.index}
            if count:
                made.append(PairReading(a.reading.index, b.reading.index, Relation.NVLINK, count))
                continue
            ancestor = get(library.ancestor, a.handle, b.handle)
            if ancestor is not None and (relation := _ANCESTOR.get(ancestor)) is not None:
                made.append(PairReading(a.reading.index, b.reading.index, relation))
    return made, unknown


def _joining(a: _Card, b: _Card) -> int:
    return sum(link.active and link.kind == _GPU and link.remote == b.reading.pci_address for link in a.links)


def _leading_to(card: _Card, kind: int) -> int:
    return sum(link.active and link.kind == kind for link in card.links)
