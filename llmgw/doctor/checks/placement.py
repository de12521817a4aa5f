"""GPUDirect, PCIe, and what is near what."""

from __future__ import annotations

import re

from llmgw.doctor.checks.fabric import BECAUSE
from llmgw.doctor.checks.gpu import DRIVER, NO_GPU, has_gpus, some
from llmgw.doctor.facts import Facts
from llmgw.doctor.verdict import Check, Finding, Severity
from llmgw.hardware.inventory import Relation

_PEERMEM = ("nvidia_peermem", "nv_peer_mem")
_DMA_BUF = (5, 12)
_CLOSE = (Relation.PIX, Relation.PXB)


def rdma(facts: Facts) -> bool:
    """Whether GPUs and a fabric are here, so that the way between them matters."""
    return has_gpus(facts) and any(f.ports for f in facts.fabrics)


def _kernel(facts: Facts) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", facts.host.kernel)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _dma_buf(facts: Facts) -> bool:
    return facts.module.flavour == "open" and _kernel(facts) >= _DMA_BUF


def _gdr(facts: Facts) -> Finding | None:
    if facts.has_module(*_PEERMEM) or facts.peer_memory or _dma_buf(facts):
        return None
    return Finding(
        "Neither nvidia-peermem nor dma-buf is there: what GPUs send over the network goes through the host's memory."
    )


def _registered(facts: Facts) -> Finding | None:
    if not facts.has_module("nvidia_peermem") or facts.peer_memory or _dma_buf(facts):
        return None
    if any("nvidia_peermem" in m.users for m in facts.modules if m.name in ("ib_core", "ib_uverbs")):
        return None
    return Finding("nvidia-peermem is loaded and the RDMA core does not know it.")


def _peermem_errors(facts: Facts) -> Finding | None:
    count = sum("peermem" in line.replace("_", "-") and "invalid context" in line for line in facts.kernel_log)
    return Finding(f"nvidia-peermem met {count} contexts that were gone; an engine may hang.") if count else None


def _acs(facts: Facts) -> Finding | None:
    bad = [bridge.address for bridge in facts.acs if bridge.redirects]
    if not bad:
        return None
    said = f"PCIe bridges send traffic between devices up to the processor: {some(bad)}. Slow, or it hangs."
    if facts.iommu != "translating":
        return Finding(said)
    return Finding(
        f"{said} The IOMMU translates each transfer there.",
        "Turn ACS and the IOMMU off in the firmware, or give the kernel iommu=pt and turn ACS off with setpci at each boot.",
    )


def _width(facts: Facts) -> Finding | None:
    cards = [
        (f"GPU {c.reading.index}", c.width, c.width_most) for c in facts.cards if c.width and c.width_most
    ]  # fmt: skip
    links = [*cards, *((link.name, link.width, link.width_most) for link in facts.pci_links)]
    bad = [(name, now, most) for name, now, most in links if now and most and now < most]
    if not bad:
        return None
    said = some([f"{name} x{now} of x{most}" for name, now, most in bad])
    gpus = {now for _, now, _ in cards}
    if len(bad) == len(cards) and len(gpus) == 1 and len(cards) > 1 and bad == cards:
        return Finding(
            f"All cards have fewer PCIe lanes than they could: {said}.", "The board may be wired so.", Severity.INFO
        )
    return Finding(f"Fewer PCIe lanes than the device could use: {said}.")


def _far(facts: Facts) -> Finding | None:
    for fabric in facts.fabrics:
        names = {port.adapter for port in fabric.ports}
        near = {d.label: [p for p in d.adapters if p.adapter in names] for d in facts.devices if d.mig is None}
        close = {label for label, paths in near.items() if any(p.relation in _CLOSE for p in paths)}
        far = [label for label in near if label not in close]
        if close and far:
            said = [f"{label} ({near[label][0].relation.value if near[label] else 'sys'})" for label in far]
            return Finding(f"Cards without an adapter of {fabric.label} behind their PCIe switch: {some(said)}.")
    return None


def _speed(facts: Facts) -> Finding | None:
    bad = [
        f"GPU {c.reading.index} Gen{c.generation} of Gen{c.generation_most}"
        for c in facts.cards
        if c.busy and c.generation and c.generation_most and c.generation < c.generation_most
    ]
    return Finding(f"Busy cards use an older PCIe generation than they could: {some(bad)}.") if bad else None


def _numa(facts: Facts) -> Finding | None:
    known = facts.numa_nodes
    if known and all(n < 0 for n in known):
        return Finding("The machine hides which NUMA node a device is at; nearness goes by the PCI bus alone.")
    if len(known) > 2 and facts.sockets > 1 and set(known) == {0}:
        return Finding("All devices claim NUMA node 0 of a machine with several; nearness goes by the PCI bus alone.")
    return None


CHECKS = (
    Check("gdr.unavailable", Severity.WARN, ("modules", "module"), _gdr,
          "modprobe nvidia-peermem (and load it at boot), or NVIDIA's open kernel module with a kernel from 5.12 on.",
          "GPUDirect RDMA needs one of two things, and neither is here.", (*DRIVER, *BECAUSE), applies=rdma, gate=("pci_gpus", "fabrics")),
    Check("gdr.peermem.not-registered", Severity.WARN, ("modules",), _registered,
          "Install the NVIDIA driver again after the RDMA stack (MLNX_OFED, DOCA), or use dma-buf.",
          "nvidia-peermem was built against another RDMA core than the one that runs.", (*DRIVER, *BECAUSE), applies=rdma, gate=("pci_gpus", "fabrics")),
    Check("gdr.peermem.errors", Severity.WARN, ("kernel_log",), _peermem_errors,
          "Restart the engines that use the network; update the driver.",
          "The kernel log has nvidia-peermem's own errors.", DRIVER, applies=has_gpus, gate=("pci_gpus",)),
    Check("pci.acs", Severity.WARN, ("acs",), _acs,
          "Turn ACS off in the firmware, or with setpci at each boot; in a virtual machine leave it and turn ATS on.",
          "Access control on PCIe bridges above GPUs and adapters forces their traffic through the root complex.",
          NO_GPU, applies=lambda facts: has_gpus(facts) and not facts.virtual, gate=("pci_gpus",)),
    Check("pci.width", Severity.WARN, ("cards", "card_details"), _width,
          "Seat the card again; check riser and bifurcation.",
          "A card or adapter has fewer PCIe lanes than it could. Where all cards have equally few it is the board.",
          DRIVER),
    Check("topo.nic.far", Severity.WARN, ("devices", "fabrics"), _far,
          "See whether the adapter beside it is missing or down; else declare the fabric so that it is in it.",
          "Some cards have an adapter of the fabric close by and others do not.",
          (*DRIVER, *BECAUSE, "port.down", "port.init", "roce.gid.none", "fabric.declared.absent"), applies=rdma, gate=("pci_gpus", "fabrics")),
    Check("pci.speed", Severity.INFO, ("cards", "card_details"), _speed,
          "Check the link speed in the firmware's settings.",
          "Under load a card should use its full PCIe generation. Idle cards lower it and are not judged.", DRIVER),
    Check("numa.unknown", Severity.INFO, ("numa_nodes",), _numa,
          "Turn NUMA on in the firmware or the hypervisor.",
          "Without NUMA nodes nobody knows which processor is near a card.", NO_GPU, applies=has_gpus, gate=("pci_gpus",)),
)  # fmt: skip
