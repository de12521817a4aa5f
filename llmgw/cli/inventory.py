"""A node's inventory, for people."""

from __future__ import annotations

from collections.abc import Mapping

from llmgw.cli.terminal import echo, table
from llmgw.hardware.health import stranger
from llmgw.hardware.inventory import Adapter, Device, Fabric, Fault, Inventory, Relation


def _memory(device: Device) -> str:
    if device.total_mib is None:
        return "unknown"
    total = f"{device.total_mib / 1024:.1f} GiB"
    if device.unified:
        return f"{total} of the host"
    return total if device.used_mib is None else f"{device.used_mib / 1024:.1f} of {total}"


def _load(device: Device) -> str:
    load = device.load
    parts = (
        "" if load.temperature_c is None else f"{load.temperature_c} C",
        "" if load.power_w is None else f"{load.power_w} W",
        "" if load.utilization_percent is None else f"{load.utilization_percent} %",
    )
    return ", ".join(part for part in parts if part)


def _state(device: Device, shard: str | None) -> str:
    held = stranger(device, ours=shard is not None)
    said = [f.reason for f in device.faults] + ([held.reason] if held is not None else [])
    return "; ".join(said) or (f"runs {shard}" if shard is not None else "healthy")


def _near(device: Device) -> str:
    """The adapters behind the same PCIe switch, or else those that are nearest."""
    if not device.adapters:
        return ""
    nearest = device.adapters[0].relation
    names = [path.adapter for path in device.adapters if path.relation is nearest]
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"{', '.join(names[:2])}{more} ({nearest.value})"


def _ports(adapter: Adapter) -> str:
    return ", ".join(
        f"{p.number} {p.state}" + (f" {p.rate_gbps:g} Gb/s" if p.rate_gbps and p.state == "active" else "")
        for p in adapter.ports
    )


def _gids(adapter: Adapter) -> str:
    told = [f"{p.gids[0].index} {p.gids[0].address}" if p.gids else p.gid_trouble for p in adapter.ports]
    return ", ".join(text for text in told if text)


def _kind(adapter: Adapter) -> str:
    parts = (adapter.kind.value, "virtual" if adapter.virtual else "", f"in {adapter.bond}" if adapter.bond else "")
    return ", ".join(part for part in parts if part)


def _faults(faults: tuple[Fault, ...], indent: str = "  ") -> None:
    for fault in faults:
        echo(f"{indent}{fault.code}: {fault.reason}" + (f"\n{indent}  {fault.remedy}" if fault.remedy else ""))


def _fabric(fabric: Fabric) -> None:
    ports = ", ".join(
        f"{p.adapter}:{p.port}" + (f" (GID {p.gid.index}, {p.gid.address})" if p.gid is not None else "")
        for p in fabric.ports
    )
    echo(f"  {fabric.label} ({fabric.kind.value}): {ports or 'no port'}")
    _faults(fabric.faults, "    ")


def _nvlink(inventory: Inventory, domain: tuple[int, ...]) -> str:
    counts = {x.nvlinks for x in inventory.links if x.relation is Relation.NVLINK and {x.a, x.b} <= set(domain)}
    each = f"{min(counts)}" if len(counts) == 1 else f"{min(counts, default=0)} to {max(counts, default=0)}"
    return f"  {', '.join(f'gpu-{number}' for number in domain)}, {each} links between two"


def show_inventory(inventory: Inventory, shards: Mapping[str, str]) -> None:
    """Print what the node has, what is wrong with it, and how it was read. ``shards`` run on devices, by UUID."""
    host = inventory.host
    if inventory.simulated:
        echo(f"SIMULATED MACHINE: {inventory.simulated} (the host below is real)\n")
    memory = f"{host.memory_mib / 1024:.0f} GiB" if host.memory_mib else "unknown memory"
    echo(f"Host     {host.hostname}: {host.system or 'unknown system'}, kernel {host.kernel}, "
               f"{host.cpus or '?'} CPUs, {memory}")  # fmt: skip
    driver = inventory.driver
    through = "" if inventory.source == "none" else f", read through {inventory.source}"
    echo(f"Driver   {f'NVIDIA {driver.version}, CUDA {driver.cuda_version}' if driver else 'none'}{through}")
    echo(f"\nDevices  {len(inventory.devices)}")
    if inventory.devices:
        rows = [
            [d.label, d.device_class, _memory(d), d.pci_address, "" if d.numa_node is None else str(d.numa_node),
             _near(d), _load(d), _state(d, shards.get(d.uuid))]
            for d in inventory.devices
        ]  # fmt: skip
        table(["DEVICE", "CLASS", "MEMORY USED", "PCI", "NUMA", "NEAREST ADAPTERS", "LOAD", "STATE"], rows, empty="")
        for device in inventory.devices:
            for fault in device.faults:
                if fault.remedy:
                    echo(f"  {device.label} {fault.reason}\n    {fault.remedy}")
    if inventory.nvlink_domains:
        echo(f"\nNVLink domains {len(inventory.nvlink_domains)}")
        for domain in inventory.nvlink_domains:
            echo(_nvlink(inventory, domain))
    echo(f"\nAdapters {len(inventory.adapters)}")
    if inventory.adapters:
        table(
            ["ADAPTER", "KIND", "PORTS", "ROCE V2 GID", "INTERFACES", "FIRMWARE"],
            [[a.name, _kind(a), _ports(a), _gids(a), ", ".join(a.netdevs), a.firmware] for a in inventory.adapters],
            empty="",
        )
    if inventory.fabrics:
        echo(f"\nFabrics  {len(inventory.fabrics)}")
        for fabric in inventory.fabrics:
            _fabric(fabric)
    if inventory.warnings:
        echo(f"\nWarnings {len(inventory.warnings)}")
        _faults(inventory.warnings)
