"""Discovery of one node: every source is asked, and what one of them cannot say is a warning in the inventory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import trio
from attrs import evolve, frozen

from llmgw.discovery import nvml_process, smi
from llmgw.discovery.addresses import read_addresses
from llmgw.discovery.faults import DiscoveryError
from llmgw.discovery.machine import LiveMachine, Machine
from llmgw.discovery.pci import PciGpu, read_gpus, read_information, read_place
from llmgw.discovery.sysfs import adapter_warnings, read_adapters
from llmgw.hardware.devices import devices
from llmgw.hardware.fabric import FabricRule, fabric_warnings, resolve_all
from llmgw.hardware.inventory import Adapter, Device, Fault, Host, Inventory
from llmgw.hardware.reading import CardReading, GpuReading
from llmgw.hardware.topology import PciPlace, links, near, nvlink_domains, nvlink_warnings
from llmgw.settings.daemon import Discovery, GpuSource

MARK = "llmgw-fake-machine"
"""A file of this name in a root says in its first line which machine is simulated there."""


@frozen
class _Gpus:
    source: str
    reading: GpuReading | None
    faults: tuple[Fault, ...]


async def discover(config: Discovery, rules: Sequence[FabricRule] = (), machine: Machine | None = None) -> Inventory:
    """Read the node as ``config`` says. Never fails: what is wrong is in the inventory's warnings.

    ``rules`` are the fabrics that the operator declared. A cancelled call leaves no program running.
    """
    machine = LiveMachine(config) if machine is None else machine
    root, reader = machine.root, machine.reader
    host = await trio.to_thread.run_sync(machine.host)
    simulated = await trio.to_thread.run_sync(_simulated, machine)
    on_bus = await trio.to_thread.run_sync(read_gpus, root, reader)
    adapters: tuple[Adapter, ...] = ()
    gpus = _Gpus("none", None, ())

    async def network() -> None:
        nonlocal adapters
        addresses = await read_addresses(machine)
        adapters = await trio.to_thread.run_sync(read_adapters, root, reader, addresses)

    async def cards() -> None:
        nonlocal gpus
        gpus = await _read_gpus(config, machine, on_bus)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(network)
        nursery.start_soon(cards)
    return await trio.to_thread.run_sync(_assemble, machine, host, simulated, on_bus, gpus, adapters, rules)


async def _read_gpus(config: Discovery, machine: Machine, on_bus: Sequence[PciGpu]) -> _Gpus:
    """The GPUs through the first source that works, and why another one did not."""
    if config.source is GpuSource.NONE:
        return _Gpus("none", None, ())
    nvml_failed: DiscoveryError | None = None
    if config.source is not GpuSource.NVIDIA_SMI:
        try:
            return _Gpus("nvml", await nvml_process.read(machine, config.timeout_s), ())
        except DiscoveryError as failed:
            nvml_failed = failed
    if config.source is GpuSource.NVML and nvml_failed is not None:
        reason = f"discovery is set to nvml, and NVML does not work: {nvml_failed.reason}"
        return _Gpus("none", None, (Fault("nvml-failed", reason, nvml_failed.remedy),))
    try:
        found = await smi.read(machine, config.timeout_s, [gpu.address for gpu in on_bus])
    except DiscoveryError as failed:
        return _Gpus("none", None, _no_source(config, on_bus, nvml_failed, failed))
    if nvml_failed is None:
        return _Gpus("nvidia-smi", found, ())
    fallen = Fault(
        "nvml-unavailable",
        f"NVML does not work, the GPUs were read through nvidia-smi: {nvml_failed.reason}",
        nvml_failed.remedy,
    )
    return _Gpus("nvidia-smi", found, (fallen,))


def _no_source(
    config: Discovery, on_bus: Sequence[PciGpu], nvml_failed: DiscoveryError | None, smi_failed: DiscoveryError
) -> tuple[Fault, ...]:
    """Why no GPU is reported: most often because there is none."""
    absent = {"not-found", "driver-missing", "no-gpu", "no-binding"}
    codes = {e.code for e in (nvml_failed, smi_failed) if e is not None}
    ours = [gpu for gpu in on_bus if gpu.driver != "vfio-pci"]
    if codes <= absent and config.nvidia_smi is None:
        if not on_bus:
            return (Fault("no-gpu", "no NVIDIA GPU is on the PCI bus", "a node without GPUs is fine for CPU engines"),)
        if ours:
            there = ", ".join(gpu.address for gpu in ours)
            said = smi_failed.reason if smi_failed.code != "not-found" else "nvidia-smi was not found"
            reason = f"{len(ours)} NVIDIA GPU{'s are' if len(ours) > 1 else ' is'} on the PCI bus ({there}), and {said}"
            return (Fault("driver-missing", reason, smi_failed.remedy or "install the NVIDIA driver"),)
    faults = [smi_failed.as_fault()]
    if nvml_failed is not None and nvml_failed.code != smi_failed.code:
        faults.insert(0, nvml_failed.as_fault())
    return tuple(faults)


def _assemble(
    machine: Machine,
    host: Host,
    simulated: str | None,
    on_bus: Sequence[PciGpu],
    gpus: _Gpus,
    adapters: tuple[Adapter, ...],
    rules: Sequence[FabricRule],
) -> Inventory:
    """Put everything together, with where things sit. Blocking: it reads sysfs."""
    reading = gpus.reading
    cards = [] if reading is None else [_identified(machine, card, on_bus) for card in reading.cards]
    places = {a.name: _place(machine, a.pci_address)[0] for a in adapters if a.pci_address}
    found: list[Device] = []
    for card in cards:
        place, cpus = _place(machine, card.pci_address)
        numa = place.numa_node if place.route or place.numa_node is not None else card.numa_node
        closest = near(place, places) if place.route else card.adapters
        found += [
            evolve(device, numa_node=numa, cpus=cpus or card.cpus, adapters=closest)
            for device in devices(card, host.memory_mib)
        ]
    pairs = () if reading is None else reading.pairs
    fabrics = resolve_all(rules, adapters)
    warnings = (
        *gpus.faults,
        *(() if reading is None else reading.faults),
        *_bus_warnings(machine, on_bus, gpus, cards),
        *nvlink_warnings(cards, pairs),
        *adapter_warnings(adapters),
        *fabric_warnings(fabrics, adapters),
    )
    return Inventory(
        host=host,
        source=gpus.source,
        devices=tuple(found),
        adapters=adapters,
        fabrics=fabrics,
        links=links(pairs),
        nvlink_domains=nvlink_domains(pairs, cards),
        driver=None if reading is None else reading.driver,
        warnings=warnings,
        simulated=simulated,
    )


def _place(machine: Machine, address: str) -> tuple[PciPlace, str]:
    return read_place(machine.root, machine.reader, address) if address else (PciPlace(()), "")


def _identified(machine: Machine, card: CardReading, on_bus: Sequence[PciGpu]) -> CardReading:
    """A card that the driver cannot open is told by its position on the bus and by what the kernel module knows."""
    if card.uuid and card.name != "unknown GPU":
        return card
    ours = [gpu.address for gpu in on_bus if gpu.driver != "vfio-pci"]
    address = card.pci_address or (ours[card.index] if card.index < len(ours) else "")
    said = read_information(machine.root, machine.reader, address) if address else None
    return evolve(
        card,
        pci_address=address,
        uuid=card.uuid or (said.uuid if said is not None else ""),
        name=said.model if said is not None and said.model and card.name == "unknown GPU" else card.name,
    )


def _bus_warnings(
    machine: Machine, on_bus: Sequence[PciGpu], gpus: _Gpus, cards: Sequence[CardReading]
) -> Iterator[Fault]:
    """GPUs that the bus has and the driver does not show."""
    if gpus.reading is None:
        return
    shown = {card.pci_address for card in cards}
    guests = [gpu.address for gpu in on_bus if gpu.driver == "vfio-pci"]
    if guests:
        yield Fault("passthrough", f"{', '.join(guests)} are kept for virtual machines (vfio-pci)", "")
    missing = [gpu.address for gpu in on_bus if gpu.address not in shown and gpu.driver != "vfio-pci"]
    excluded = [a for a in missing if read_information(machine.root, machine.reader, a).excluded]
    if excluded:
        yield Fault("excluded", f"{', '.join(excluded)} are excluded from the driver", "see NVreg_ExcludedGpus")
    missing = [address for address in missing if address not in excluded]
    if missing:
        count = f"{len(missing)} NVIDIA GPU{'s' if len(missing) > 1 else ''} on the PCI bus"
        yield Fault(
            "gpu-not-shown",
            f"{count} {'are' if len(missing) > 1 else 'is'} not shown by the driver: {', '.join(missing)}",
            "look for Xid lines and 'fallen off the bus' in the kernel log; in a container: not all are given to it",
        )


def _simulated(machine: Machine) -> str | None:
    """Which machine a folder stands in for, if it is a fake one's. Blocking."""
    said = machine.reader.raw(machine.root / MARK, 200)
    if not said:
        return None
    return said.decode(errors="replace").splitlines()[0].strip() or "unnamed machine"
