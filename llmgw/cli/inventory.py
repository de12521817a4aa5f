"""A node's inventory, for people."""

from __future__ import annotations

import click

from llmgw.cli.terminal import table
from llmgw.hardware.inventory import Adapter, Device, Inventory


def _memory(device: Device) -> str:
    if device.total_mib is None:
        return "unknown"
    total = f"{device.total_mib / 1024:.1f} GiB"
    return total if device.used_mib is None else f"{device.used_mib / 1024:.1f} of {total}"


def _device_state(device: Device) -> str:
    return "; ".join(f.reason for f in device.faults) or "healthy"


def _ports(adapter: Adapter) -> str:
    return ", ".join(
        f"{p.number} {p.state}" + (f" {p.rate_gbps:g} Gb/s" if p.rate_gbps and p.state == "active" else "")
        for p in adapter.ports
    )


def show_inventory(inventory: Inventory) -> None:
    """Print what the node has, what is wrong with it, and how it was read."""
    host = inventory.host
    if inventory.simulated:
        click.echo(f"SIMULATED MACHINE: {inventory.simulated} (the host below is real)\n")
    memory = f"{host.memory_mib / 1024:.0f} GiB" if host.memory_mib else "unknown memory"
    click.echo(f"Host     {host.hostname}: {host.system or 'unknown system'}, kernel {host.kernel}, "
               f"{host.cpus or '?'} CPUs, {memory}")  # fmt: skip
    driver = inventory.driver
    click.echo(f"Driver   {f'NVIDIA {driver.version}, CUDA {driver.cuda_version}' if driver else 'none'}, "
               f"read through {inventory.source}")  # fmt: skip
    click.echo(f"\nDevices  {len(inventory.devices)}")
    if inventory.devices:
        rows = [
            [d.label, d.device_class, _memory(d), d.pci_address, "" if d.numa_node is None else str(d.numa_node),
             _device_state(d)]
            for d in inventory.devices
        ]  # fmt: skip
        table(["DEVICE", "CLASS", "MEMORY USED", "PCI", "NUMA", "STATE"], rows)
    for domain in inventory.nvlink_domains:
        click.echo(f"NVLink domain: devices {', '.join(map(str, domain))}")
    click.echo(f"\nAdapters {len(inventory.adapters)}")
    if inventory.adapters:
        table(
            ["ADAPTER", "KIND", "PORTS", "INTERFACES", "FIRMWARE"],
            [[a.name, a.kind.value, _ports(a), ", ".join(a.netdevs), a.firmware] for a in inventory.adapters],
        )
    for fabric in inventory.fabrics:
        ports = ", ".join(f"{p.adapter}:{p.port}" for p in fabric.ports)
        click.echo(f"Fabric {fabric.label} ({fabric.kind.value}): {ports or 'no port'}")
    for warning in inventory.warnings:
        click.echo(f"\nwarning: {warning.reason}" + (f"\n  {warning.remedy}" if warning.remedy else ""))
