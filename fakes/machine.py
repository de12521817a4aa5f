"""Fake machines: one readable description renders a folder that discovery reads as if it were a machine's root.

    python fakes/machine.py hgx-h100 DIR

The folder gets an executable ``usr/bin/nvidia-smi``, ``/sys/class/infiniband`` below it, and the file
``llmgw-fake-machine`` with the label that everybody sees. The fake nvidia-smi reads ``state.json`` at each run, so a
test can change counters, processes or the program's behaviour while an agent runs.

Element names of the XML: NVIDIA's nvsmi_device DTD v12 (R535 to R575).
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import asdict, frozen


@frozen
class Mig:
    """One MIG instance of a card: its profile, memory and ids."""

    profile: str
    total_mib: int
    gpu_instance: int
    compute_instance: int = 0


@frozen
class Card:
    """One GPU as its driver describes it. ``capability`` is like ``9.0``."""

    name: str
    total_mib: int
    capability: str
    mig: tuple[Mig, ...] | None = None
    mig_capable: bool = True


@frozen
class Hca:
    """One RDMA adapter with one port."""

    name: str
    link_layer: str = "InfiniBand"
    rate: str = "400 Gb/sec (4X NDR)"
    state: str = "4: ACTIVE"
    switch_management: bool = False
    netdev: str | None = None


@frozen
class Machine:
    """A machine: what it is called, its driver, its cards and its adapters. Without a driver there is no nvidia-smi."""

    label: str
    cards: tuple[Card, ...] = ()
    adapters: tuple[Hca, ...] = ()
    driver: str | None = "570.148.08"
    cuda: str = "12.8"


_H100 = Card("NVIDIA H100 80GB HBM3", 81559, "9.0")
_A100 = Card("NVIDIA A100-SXM4-80GB", 81920, "8.0")

MACHINES: Mapping[str, Machine] = {
    "hgx-h100": Machine(
        "HGX H100 with 8 GPUs and 8 InfiniBand adapters",
        (_H100,) * 8,
        (*(Hca(f"mlx5_{n}", netdev=f"ib{n}") for n in range(8)),
         Hca("mlx5_8", "Ethernet", "100 Gb/sec (4X EDR)", netdev="ens1f0np0")),
    ),
    "l40s-2": Machine("two L40S on PCIe", (Card("NVIDIA L40S", 46068, "8.9", mig_capable=False),) * 2),
    "a100-mig": Machine(
        "two A100, one of them cut into 3g.40gb and 4g.40gb",
        (
            Card(
                "NVIDIA A100-SXM4-80GB",
                81920,
                "8.0",
                (Mig("4g.40gb", 40192, 1), Mig("3g.40gb", 40192, 2)),
            ),
            _A100,
        ),
    ),
    "t4-vm": Machine(
        "cloud VM with one T4", (Card("Tesla T4", 15360, "7.5", mig_capable=False),), driver="535.183.01", cuda="12.2"
    ),
    "none": Machine("a machine without any GPU", driver=None),
}  # fmt: skip
"""The machines that tests and the demo use, by name."""


def gpu_uuid(machine: Machine, index: int) -> str:
    """A UUID that is the same at every rendering."""
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_URL, f'{machine.label}/{index}')}"


def mig_uuid(machine: Machine, index: int, instance: int) -> str:
    """A MIG device's UUID."""
    return f"MIG-{uuid.uuid5(uuid.NAMESPACE_URL, f'{machine.label}/{index}/{instance}')}"


def render(machine: Machine, folder: Path) -> None:
    """Write the machine into ``folder``, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "llmgw-fake-machine").write_text(f"{machine.label}\n")
    for adapter in machine.adapters:
        _render_adapter(adapter, folder, machine.adapters.index(adapter))
    if machine.driver is None:
        return
    description = asdict(machine)
    for index, card in enumerate(description["cards"]):
        card["uuid"] = gpu_uuid(machine, index)
        for instance, mig in enumerate(card["mig"] or ()):
            mig["uuid"] = mig_uuid(machine, index, instance)
    (folder / "machine.json").write_text(json.dumps(description))
    write_state(folder)
    program = folder / "usr/bin/nvidia-smi"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text((Path(__file__).with_name("nvidia_smi.py")).read_text())
    program.chmod(0o755)


def write_state(folder: Path, cards: Mapping[int, Mapping[str, Any]] | None = None, program: str = "") -> None:
    """Change what the fake nvidia-smi says from its next run on.

    ``cards`` maps an index to any of ``ecc`` (uncorrected errors), ``used_mib``, ``processes`` (lists of pid, name,
    MiB), ``lost``, ``needs_reset``, ``pending_mig``. ``program`` makes all of it ``hang``, report ``mismatch``,
    ``no-driver`` or a ``lost`` GPU.
    """
    fresh = folder / ".state.json.new"
    fresh.write_text(json.dumps({"cards": {str(k): dict(v) for k, v in (cards or {}).items()}, "program": program}))
    fresh.replace(folder / "state.json")


def _render_adapter(adapter: Hca, folder: Path, index: int) -> None:
    address = f"0000:{0x10 + index:02x}:00.0"
    function = folder / "sys/devices/pci0000:00" / address
    base = folder / "sys/class/infiniband" / adapter.name
    port = base / "ports/1"
    for path in (function, port):
        path.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("state", adapter.state), ("phys_state", "5: LinkUp"), ("rate", adapter.rate),
        ("link_layer", adapter.link_layer), ("lid", "0x0" if adapter.link_layer == "Ethernet" else f"0x{index + 1:x}"),
    ):  # fmt: skip
        (port / name).write_text(f"{text}\n")
    for name, text in (("node_type", "1: CA"), ("fw_ver", "28.43.2026"), ("hca_type", "MT4129")):
        (base / name).write_text(f"{text}\n")
    for name, text in (("vendor", "0x15b3"), ("device", "0x1021"), ("numa_node", str(index // 4))):
        (function / name).write_text(f"{text}\n")
    if adapter.netdev is not None:
        (function / "net" / adapter.netdev).mkdir(parents=True, exist_ok=True)
    if adapter.switch_management:
        (function / "vpd").write_bytes(b"\x82\x0d\x00Fake bridge\x90\x0b\x00V0\x0bSMDL=SW_MNG")
    link = base / "device"
    if not link.is_symlink():
        link.symlink_to(os.path.relpath(function, base))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in MACHINES:
        sys.exit(f"usage: machine.py {{{','.join(MACHINES)}}} DIR")
    render(MACHINES[sys.argv[1]], Path(sys.argv[2]))
