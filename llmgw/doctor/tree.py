"""What the doctor reads from files: one pass over ``/sys``, ``/proc``, ``/dev`` and ``/etc``. Blocking."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llmgw.discovery.machine import Machine
from llmgw.discovery.pci import read_gpus
from llmgw.doctor import texts
from llmgw.doctor.checks.ports import FLAP_COUNTER, LINK_COUNTERS, ROCE_COUNTERS
from llmgw.doctor.facts import Counter, GidStart, KernelModule, LoadedModule, PciFunction, PciLink
from llmgw.doctor.node_facts import Memory
from llmgw.hardware.inventory import Adapter, AdapterKind

_BIG = 4 * 1024 * 1024
_SWITCHES = frozenset({"0x1af1", "0x22a3"})
"""NVSwitches of A100 and of H100 boards; those of NVLink 5 are not on the bus."""
_GUESTS = ("qemu", "kvm", "vmware", "virtual machine", "amazon ec2", "google compute", "openstack", "xen", "bochs")
_GIDS_LOOKED_AT = 16
_NUMBER = re.compile(r"[0-9]{1,9}")
_COMPAT = re.compile(r"libcuda\.so\.(\d{3,}\.[\d.]+)")

Found = dict[str, Any]


class Missing(Exception):
    """A fact that these files do not tell, and why."""

    def __init__(self, why: str, *, root: bool = False) -> None:
        super().__init__(why)
        self.why, self.root = why, root


def static(machine: Machine) -> Mapping[str, Callable[[], Any]]:
    """How each fact that files tell is read; each raises :class:`Missing` where they do not."""
    root, reader = machine.root, machine.reader

    def text(path: str, why: str = "") -> str:
        data = reader.raw(root / path, _BIG).decode(errors="replace")
        if not data.strip():
            raise Missing(why or f"/{path} cannot be read")
        return data

    def pci(matches: Callable[[str, str, str], bool]) -> Iterator[PciFunction]:
        base = root / "sys/bus/pci/devices"
        names = reader.names(base)
        if not names and not reader.names(root / "sys/bus"):
            raise Missing("/sys/bus cannot be listed")
        for name in sorted(names):
            kind, vendor = reader.text(base / name / "class") or "", reader.text(base / name / "vendor") or ""
            device = reader.text(base / name / "device") or ""
            if matches(kind, vendor, device):
                yield PciFunction(name, reader.target(base / name / "driver") or "", device)

    def pci_gpus() -> tuple[PciFunction, ...]:
        # A virtual machine may have no PCI bus at all: then there is no GPU on it.
        if not reader.names(root / "sys/bus"):
            raise Missing("/sys/bus cannot be listed")
        return tuple(PciFunction(gpu.address, gpu.driver) for gpu in read_gpus(root, reader))

    def nics() -> tuple[PciFunction, ...]:
        return tuple(pci(_is_rdma))

    def switches() -> tuple[str, ...]:
        return tuple(f.address for f in pci(lambda k, v, d: v == "0x10de" and d in _SWITCHES))

    def modules() -> tuple[LoadedModule, ...]:
        listed = texts.modules(text("proc/modules"))
        names = {m.name for m in listed}
        built_in = (LoadedModule(n) for n in reader.names(root / "sys/module") if n not in names)
        return (*listed, *sorted(built_in, key=lambda m: m.name))

    def module() -> KernelModule:
        said = text("proc/driver/nvidia/version", "the NVIDIA module is not loaded")
        version = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", said)
        return KernelModule(version[1] if version else "", "open" if "Open Kernel Module" in said else "proprietary")

    def nodes() -> tuple[str, ...]:
        found = list(reader.names(root / "dev"))
        if not found:
            raise Missing("/dev cannot be listed")
        for folder in ("infiniband", "nvidia-caps-imex-channels"):
            found += [f"{folder}/{name}" for name in reader.names(root / "dev" / folder)]
        return tuple(sorted(n for n in found if n.startswith(("nvidia", "infiniband/", "dri"))))

    def virtual() -> bool:
        said = " ".join(
            reader.text(root / "sys/class/dmi/id" / name) or "" for name in ("sys_vendor", "product_name")
        ).lower()
        return any(word in said for word in _GUESTS)

    def sockets() -> int:
        base = root / "sys/devices/system/node"
        # Only nodes with processors: a Grace board shows its GPUs' memory as nodes of their own.
        return max(1, sum(bool(reader.text(base / n / "cpulist")) for n in reader.names(base) if n.startswith("node")))

    def numa_nodes() -> tuple[int, ...]:
        base = root / "sys/bus/pci/devices"
        said = [reader.text(base / f.address / "numa_node") for f in (*pci_gpus(), *nics())]
        if said and not any(said):
            raise Missing("the kernel does not say numa_node")
        return tuple(int(s) for s in said if s is not None and re.fullmatch(r"-?\d+", s))

    def pci_links() -> tuple[PciLink, ...]:
        made = []
        for name in sorted(reader.names(root / "sys/class/infiniband")):
            device = root / "sys/class/infiniband" / name / "device"
            now, most = (reader.text(device / f"{which}_link_width") or "" for which in ("current", "max"))
            if now.isdigit() and most.isdigit() and int(now):
                made.append(PciLink(name, reader.target(device) or "", int(now), int(most)))
        return tuple(made)

    def iommu() -> str:
        if not reader.names(root / "sys"):
            raise Missing("/sys cannot be listed")
        if not reader.names(root / "sys/class/iommu"):
            return "off"
        groups = root / "sys/kernel/iommu_groups"
        kinds = {reader.text(groups / name / "type") for name in reader.names(groups)}
        return "translating" if kinds & {"DMA", "DMA-FQ"} else "passthrough"

    def compat() -> tuple[str, ...]:
        base = root / "usr/local"
        folders = (base / name / "compat" for name in reader.names(base) if name.startswith("cuda"))
        found = (_COMPAT.fullmatch(name) for folder in folders for name in reader.names(folder))
        return tuple(sorted({match[1] for match in found if match}))

    def peer_memory() -> tuple[str, ...]:
        return tuple(sorted(reader.names(root / "sys/kernel/mm/memory_peers")))

    def numa_balancing() -> int:
        said = text("proc/sys/kernel/numa_balancing").strip()
        if not _NUMBER.fullmatch(said):
            raise Missing("/proc/sys/kernel/numa_balancing is no number")
        return int(said)

    def memory() -> Memory:
        said = dict(re.findall(r"^(\w+):\s+(\d+)", text("proc/meminfo"), re.MULTILINE))
        pages = int(said.get("HugePages_Total", 0)) * int(said.get("Hugepagesize", 0))
        if "MemAvailable" not in said:
            raise Missing("/proc/meminfo does not say what is available")
        return Memory(int(said.get("MemTotal", 0)) // 1024, int(said["MemAvailable"]) // 1024, pages // 1024)

    def remove_ipc() -> bool:
        said = text("etc/systemd/logind.conf")
        found = re.findall(r"^\s*RemoveIPC\s*=\s*(\w+)", said, re.MULTILINE)
        return not found or found[-1].lower() in ("yes", "true", "1", "on")

    def port_range() -> str:
        return "-".join(text("proc/sys/net/ipv4/ip_local_port_range").split())

    def missing_tools() -> tuple[str, ...]:
        places = {
            "nvlsm": ("opt/nvidia/nvlsm/sbin/nvlsm", "usr/sbin/nvlsm", "usr/bin/nvlsm"),
            "ibstat": ("usr/sbin/ibstat", "usr/bin/ibstat"),
        }
        if not reader.names(root / "usr"):
            raise Missing("/usr cannot be listed")
        return tuple(n for n, paths in places.items() if not any(reader.raw(root / p, 4) for p in paths))

    return {
        "pci_gpus": pci_gpus, "pci_nics": nics, "nvswitches": switches, "modules": modules, "module": module,
        "nodes": nodes, "virtual": virtual, "sockets": sockets, "numa_nodes": numa_nodes, "pci_links": pci_links,
        "peer_memory": peer_memory, "numa_balancing": numa_balancing, "memory": memory, "remove_ipc": remove_ipc,
        "port_range": port_range, "missing_tools": missing_tools, "iommu": iommu,
        "compat": compat,
    }  # fmt: skip


def _is_rdma(kind: str, vendor: str, device: str) -> bool:
    """Network functions that have RDMA: Mellanox's, Broadcom's Thor, Intel's E810, Amazon's EFA."""
    if not kind.startswith(("0x0200", "0x0207")):
        return False
    number = int(device, 16) if re.fullmatch(r"0x[0-9a-f]{4}", device) else 0
    return (
        vendor == "0x15b3"
        or (vendor == "0x14e4" and 0x1750 <= number <= 0x1760)
        or (vendor == "0x8086" and 0x1591 <= number <= 0x159B)
        or (vendor == "0x1d0f" and number >> 4 == 0xEFA)
    )


def counters(machine: Machine, adapters: tuple[Adapter, ...]) -> tuple[Counter, ...]:
    """The counters of every port, ``after`` being now. Those of what manages switches are left alone."""
    made = []
    for adapter in adapters:
        if adapter.kind is AdapterKind.SWITCH_MANAGEMENT or adapter.virtual:
            continue
        for port in adapter.ports:
            base = machine.root / "sys/class/infiniband" / adapter.name / "ports" / str(port.number)
            for folder, names in (("counters", (*LINK_COUNTERS, FLAP_COUNTER)), ("hw_counters", ROCE_COUNTERS)):
                there = machine.reader.names(base / folder)
                if not there and folder == "counters":
                    made.append(Counter(adapter.name, port.number, "counters", trouble="there is no folder of them"))
                made += [_counter(machine, base / folder / n, adapter.name, port.number) for n in names if n in there]
    return tuple(made)


def _counter(machine: Machine, path: Path, adapter: str, port: int) -> Counter:
    said = machine.reader.text(path)
    if said is not None and said.isascii() and said.isdigit():
        return Counter(adapter, port, path.name, int(said), int(said))
    return Counter(adapter, port, path.name, trouble=f"{path.name}: {said or 'cannot be read'}")


def gid_starts(machine: Machine, adapters: tuple[Adapter, ...]) -> tuple[GidStart, ...]:
    """Where each Ethernet port's GID table begins to be readable here."""
    made = []
    for adapter in adapters:
        for port in adapter.ports:
            types = (
                machine.root / "sys/class/infiniband" / adapter.name / "ports" / str(port.number) / "gid_attrs/types"
            )
            if port.link_layer != "ethernet" or port.state != "active" or adapter.kind is not AdapterKind.ROCE:
                continue
            first = next((i for i in range(_GIDS_LOOKED_AT) if machine.reader.text(types / str(i))), None)
            if first is not None:
                made.append(GidStart(adapter.name, port.number, first))
    return tuple(made)


def bridges_above(machine: Machine, addresses: tuple[str, ...]) -> frozenset[str]:
    """Every PCI bridge over these functions, by where sysfs has them."""
    above: set[str] = set()
    for address in addresses:
        real = machine.reader.real(machine.root / "sys/bus/pci/devices" / address) or ""
        parts = [p for p in real.split("/") if re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", p)]
        above.update(parts[:-1])
    return frozenset(above)
