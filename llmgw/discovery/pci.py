"""The PCI bus as sysfs shows it: which NVIDIA GPUs are there whatever the driver says, and where things sit."""

from __future__ import annotations

import re
from pathlib import Path

from attrs import frozen

from llmgw.discovery.sysfs import Reader
from llmgw.hardware.topology import PciPlace, route_of

_GPU_CLASS = re.compile(r"0x030[02][0-9a-f]{2}")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NVIDIA = "0x10de"
_INFORMATION = re.compile(r"^(Model|GPU UUID|GPU Excluded):\s+(.+?)\s*$", re.MULTILINE)


@frozen
class PciGpu:
    """An NVIDIA GPU on the bus. ``driver`` is the kernel module that has it, ``vfio-pci`` for a virtual machine's."""

    address: str
    driver: str


@frozen
class Information:
    """What the kernel module itself says of a card, also when NVML cannot open it. Empty where it says nothing."""

    model: str = ""
    uuid: str = ""
    excluded: bool = False


def _order(address: str) -> tuple[int, ...]:
    return tuple(int(part, 16) for part in re.split(r"[:.]", address))


def read_information(root: Path, reader: Reader, address: str) -> Information:
    """``/proc/driver/nvidia/gpus/<address>/information``."""
    text = reader.text(root / "proc/driver/nvidia/gpus" / address / "information") or ""
    said = dict(_INFORMATION.findall(text))
    uuid = said.get("GPU UUID", "")
    return Information(said.get("Model", ""), "" if "?" in uuid else uuid, said.get("GPU Excluded") == "Yes")


def read_gpus(root: Path, reader: Reader) -> tuple[PciGpu, ...]:
    """Every NVIDIA GPU, in the order of the bus, which is the order in which NVML counts."""
    base = root / "sys/bus/pci/devices"
    found = []
    for name in sorted((n for n in reader.names(base) if _ADDRESS.fullmatch(n)), key=_order):
        kind = reader.text(base / name / "class")
        if kind is None or not _GPU_CLASS.fullmatch(kind) or reader.text(base / name / "vendor") != _NVIDIA:
            continue
        found.append(PciGpu(name, reader.target(base / name / "driver") or ""))
    return tuple(found)


def read_place(root: Path, reader: Reader, address: str) -> tuple[PciPlace, str]:
    """Where the function at ``address`` sits, and the list of processors near it as the kernel writes it."""
    path = root / "sys/bus/pci/devices" / address
    numa = reader.text(path / "numa_node")
    real = reader.real(path)
    place = PciPlace(
        route=() if real is None else route_of(real),
        numa_node=int(numa) if numa is not None and numa.isascii() and numa.isdigit() else None,
    )
    return place, reader.text(path / "local_cpulist") or ""
