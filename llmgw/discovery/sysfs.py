"""RDMA adapters from ``/sys/class/infiniband``.

Formats: the kernel's ``drivers/infiniband/core/sysfs.c`` and ``Documentation/ABI/stable/sysfs-class-infiniband``.
Every single read may fail (``EINVAL`` for an unset entry, ``ENOENT`` for a device that went away meanwhile): what
cannot be read is absent, and never ends the rest.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Protocol

from llmgw.hardware.inventory import Adapter, AdapterKind, Fault, Port

_FILE_BYTES = 4096
_VPD_BYTES = 64 * 1024
_STATE = re.compile(r"\s*\d+:\s*(\S.*?)\s*$")
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?) Gb/sec")


class Reader(Protocol):
    """How files are read; tests hand in one that fails where the kernel would."""

    def text(self, path: Path) -> str | None:
        """A file's text without surrounding white space, or ``None`` when it cannot be read."""
        ...

    def names(self, path: Path) -> tuple[str, ...]:
        """A folder's entries, or nothing when it cannot be listed."""
        ...

    def raw(self, path: Path, limit: int) -> bytes:
        """A file's first bytes, or nothing."""
        ...

    def target(self, path: Path) -> str | None:
        """The last part of where a link leads, or ``None``."""
        ...


class DiskReader:
    """Reads the real tree, or a folder that stands in for it."""

    def text(self, path: Path) -> str | None:
        """See :class:`Reader`."""
        data = self.raw(path, _FILE_BYTES)
        return data.decode(errors="replace").strip() or None

    def names(self, path: Path) -> tuple[str, ...]:
        """See :class:`Reader`."""
        try:
            return tuple(os.listdir(path))
        except OSError:
            return ()

    def raw(self, path: Path, limit: int) -> bytes:
        """See :class:`Reader`."""
        try:
            with path.open("rb") as file:
                return file.read(limit)
        except OSError:
            return b""

    def target(self, path: Path) -> str | None:
        """See :class:`Reader`."""
        try:
            return os.path.basename(os.path.realpath(path, strict=True))
        except OSError as failed:
            return None if failed.errno != errno.ELOOP else path.name


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that puts ``mlx5_2`` before ``mlx5_10``."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((0, int(p), "") if p.isdigit() and p.isascii() else (1, 0, p) for p in parts)


def read_adapters(root: Path, reader: Reader | None = None) -> tuple[Adapter, ...]:
    """Every adapter below ``root``, in natural order; empty where there is no RDMA driver."""
    reader = DiskReader() if reader is None else reader
    base = root / "sys/class/infiniband"
    return tuple(_adapter(base / name, reader) for name in sorted(reader.names(base), key=natural))


def adapter_warnings(adapters: tuple[Adapter, ...]) -> tuple[Fault, ...]:
    """What an operator should know of adapters that look usable and are not."""
    return tuple(
        Fault("switch-management", f"{a.name} manages the NVLink switches and is no fabric", "leave it alone")
        for a in adapters
        if a.kind is AdapterKind.SWITCH_MANAGEMENT
    )


def _adapter(path: Path, reader: Reader) -> Adapter:
    device = path / "device"
    ports = tuple(
        _port(path / "ports" / name, int(name), reader)
        for name in sorted(reader.names(path / "ports"), key=natural)
        if name.isascii() and name.isdigit()
    )
    numa = reader.text(device / "numa_node")
    return Adapter(
        name=path.name,
        kind=_kind(path, ports, reader),
        ports=ports,
        pci_address=reader.target(device) or "",
        numa_node=int(numa) if numa is not None and numa.isascii() and numa.isdigit() else None,
        netdevs=tuple(sorted(reader.names(device / "net"), key=natural)),
        firmware=reader.text(path / "fw_ver") or "",
        board=reader.text(path / "hca_type") or reader.text(path / "board_id") or "",
    )


def _kind(path: Path, ports: tuple[Port, ...], reader: Reader) -> AdapterKind:
    device = path / "device"
    # The bridges of NVLink 5 switches look like ordinary adapters in every other way.
    if b"SMDL=SW_MNG" in reader.raw(device / "vpd", _VPD_BYTES):
        return AdapterKind.SWITCH_MANAGEMENT
    vendor = (reader.text(device / "vendor") or "").lower()
    node_type = (reader.text(path / "node_type") or "").lower()
    if vendor == "0x1d0f":
        return AdapterKind.EFA
    if not reader.names(device) and path.name.startswith(("rxe", "siw")):
        return AdapterKind.SOFTWARE
    if "rnic" in node_type:
        return AdapterKind.IWARP
    layers = {p.link_layer for p in ports if p.state == "active"} or {p.link_layer for p in ports}
    if "infiniband" in layers:
        return AdapterKind.INFINIBAND
    if "ethernet" in layers:
        return AdapterKind.ROCE
    return AdapterKind.UNKNOWN


def _word(text: str | None) -> str:
    match = None if text is None else _STATE.fullmatch(text)
    return "unknown" if match is None else match[1].lower()


def _port(path: Path, number: int, reader: Reader) -> Port:
    rate = _RATE.match(reader.text(path / "rate") or "")
    lid = reader.text(path / "lid")
    try:
        lid_number = int(lid, 16) if lid is not None else None
    except ValueError:
        lid_number = None
    return Port(
        number=number,
        state=_word(reader.text(path / "state")),
        link_layer=(reader.text(path / "link_layer") or "unknown").lower(),
        rate_gbps=float(rate[1]) if rate else None,
        physical_state=_word(reader.text(path / "phys_state")),
        lid=None if lid_number in (0, 0xFFFF) else lid_number,
    )
