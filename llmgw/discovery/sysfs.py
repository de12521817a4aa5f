"""RDMA adapters from ``/sys/class/infiniband``.

Formats: the kernel's ``drivers/infiniband/core/sysfs.c`` and ``Documentation/ABI/stable/sysfs-class-infiniband``.
Every single read may fail (``EINVAL`` for an unset entry, ``ENOENT`` for a device that went away meanwhile): what
cannot be read is absent, and never ends the rest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Protocol

from attrs import frozen

from llmgw.hardware.fabric import natural
from llmgw.hardware.inventory import Adapter, AdapterKind, Fault, Gid, Port

_FILE_BYTES = 4096
_VPD_BYTES = 64 * 1024
SWITCH_MANAGEMENT = b"SMDL=SW_MNG"
_STATE = re.compile(r"\s*\d+:\s*(\S.*?)\s*$")
_GIDS_EMPTY = 64
"""So many empty entries in a row end the reading of a GID table in which something was found. The table of a mlx5
adapter has 255 entries, and in a pod the usable ones come after those of other network namespaces."""

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

    def real(self, path: Path) -> str | None:
        """Where a path really leads, with every link followed, or ``None``."""
        ...

    def usable(self, path: Path) -> bool:
        """Whether this process may open a file for reading and writing."""
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
        real = self.real(path)
        return None if real is None else os.path.basename(real)

    def real(self, path: Path) -> str | None:
        """See :class:`Reader`."""
        try:
            return os.path.realpath(path, strict=True)
        except OSError:
            return None

    def usable(self, path: Path) -> bool:
        """See :class:`Reader`."""
        return os.access(path, os.R_OK | os.W_OK)


def read_adapters(
    root: Path, reader: Reader | None = None, addresses: Mapping[str, tuple[str, ...]] | None = None
) -> tuple[Adapter, ...]:
    """Every adapter below ``root``, in natural order; empty where there is no RDMA driver.

    ``addresses`` are the IPv4 addresses of the interfaces by name, with prefix lengths. An adapter that vanishes while
    it is read is left out. Blocking.
    """
    reading = _Reading(root, DiskReader() if reader is None else reader, addresses or {})
    names = sorted(reading.reader.names(reading.base), key=natural)
    return tuple(adapter for name in names if (adapter := reading.adapter(name)) is not None)


def adapter_warnings(adapters: Sequence[Adapter]) -> tuple[Fault, ...]:
    """What an operator should know of adapters that look usable and are not."""
    made = []
    managing = [a.name for a in adapters if a.kind is AdapterKind.SWITCH_MANAGEMENT]
    if managing:
        what = f"{', '.join(managing)} manage{'' if len(managing) > 1 else 's'} the NVLink switches and "
        made.append(
            Fault(
                "switch-management",
                what + ("are no fabric" if len(managing) > 1 else "is no fabric"),
                "leave them alone",
            )
        )
    virtual = [a for a in adapters if a.virtual]
    if virtual:
        active = sum(any(p.state == "active" for p in a.ports) for a in virtual)
        many = "function" if len(virtual) == 1 else "functions"
        reason = f"{len(virtual)} virtual {many}, {active} active; used for a fabric only when named"
        made.append(Fault("virtual-functions", reason, ""))
    for adapter in adapters:
        made += [Fault(f.code, f"{adapter.name}: {f.reason}", f.remedy) for f in adapter.faults]
    return tuple(made)


@frozen
class _Reading:
    """One reading of all adapters: where from, and what is known of the interfaces."""

    root: Path
    reader: Reader
    addresses: Mapping[str, tuple[str, ...]]

    @property
    def base(self) -> Path:
        return self.root / "sys/class/infiniband"

    def adapter(self, name: str) -> Adapter | None:
        path = self.base / name
        device = path / "device"
        # What the switches are managed by is told first: nothing below its ports is touched.
        managing = SWITCH_MANAGEMENT in self.reader.raw(device / "vpd", _VPD_BYTES)
        names = [n for n in sorted(self.reader.names(path / "ports"), key=natural) if n.isascii() and n.isdigit()]
        netdevs = tuple(sorted(self.reader.names(device / "net"), key=natural))
        ports = tuple(self.port(path / "ports" / n, int(n), netdevs, gids=not managing) for n in names)
        node_type, firmware = self.reader.text(path / "node_type"), self.reader.text(path / "fw_ver")
        if not ports and node_type is None and firmware is None:
            return None
        kind = AdapterKind.SWITCH_MANAGEMENT if managing else self.kind(path, node_type or "", ports)
        netdevs = netdevs or tuple(dict.fromkeys(g.netdev for p in ports for g in p.gids if g.netdev))
        numa = self.reader.text(device / "numa_node")
        return Adapter(
            name=name,
            kind=kind,
            ports=ports,
            pci_address=self.reader.target(device) or "",
            numa_node=int(numa) if numa is not None and numa.isascii() and numa.isdigit() else None,
            netdevs=netdevs,
            firmware=firmware or "",
            board=self.reader.text(path / "hca_type") or self.reader.text(path / "board_id") or "",
            virtual=self.reader.target(device / "physfn") is not None,
            bond=self.bond(netdevs),
            addresses=tuple(a for netdev in netdevs for a in self.addresses.get(netdev, ())),
            faults=self.verbs(path, kind),
        )

    def kind(self, path: Path, node_type: str, ports: tuple[Port, ...]) -> AdapterKind:
        device = path / "device"
        if (self.reader.text(device / "vendor") or "").lower() == "0x1d0f":
            return AdapterKind.EFA
        if path.name.startswith(("rxe", "siw")) and not self.reader.names(device):
            return AdapterKind.SOFTWARE
        if "rnic" in node_type.lower():
            return AdapterKind.IWARP
        layers = {p.link_layer for p in ports if p.state == "active"} or {p.link_layer for p in ports}
        if "infiniband" in layers:
            return AdapterKind.INFINIBAND
        return AdapterKind.ROCE if "ethernet" in layers else AdapterKind.UNKNOWN

    def bond(self, netdevs: Sequence[str]) -> str:
        """The bond that the interface is part of, or is itself (an adapter that the hardware bonded)."""
        net = self.root / "sys/class/net"
        for netdev in netdevs:
            master = self.reader.target(net / netdev / "master")
            for candidate in (master, netdev):
                if candidate is not None and self.reader.names(net / candidate / "bonding"):
                    return candidate
        return ""

    def verbs(self, path: Path, kind: AdapterKind) -> tuple[Fault, ...]:
        """Whether programs can open the adapter: in a container sysfs shows what ``/dev`` does not have."""
        if kind not in (AdapterKind.INFINIBAND, AdapterKind.ROCE) or not self.reader.names(self.root / "dev"):
            return ()
        there = self.reader.names(self.root / "dev/infiniband")
        mine = [n for n in self.reader.names(path / "device/infiniband_verbs") if n.startswith("uverbs")]
        verbs = self.root / "sys/class/infiniband_verbs"
        mine += [n for n in self.reader.names(verbs) if self.reader.text(verbs / n / "ibdev") == path.name]
        here = [name for name in mine if name in there]
        if any(self.reader.usable(self.root / "dev/infiniband" / name) for name in here):
            return ()
        if here:
            reason = f"/dev/infiniband/{here[0]} may not be opened by this user"
            return (Fault("no-verbs", reason, "let the agent's user open it (group rdma), or run the agent as root"),)
        remedy = "load ib_uverbs; give a container /dev/infiniband"
        return (Fault("no-verbs", "sysfs shows it, and it has no device in /dev/infiniband to be opened with", remedy),)

    def port(self, path: Path, number: int, netdevs: tuple[str, ...], *, gids: bool) -> Port:
        text = self.reader.text
        rate, lid, state = _RATE.match(text(path / "rate") or ""), text(path / "lid"), _word(text(path / "state"))
        try:
            lid_number = int(lid, 16) if lid is not None else None
        except ValueError:
            lid_number = None
        layer = (text(path / "link_layer") or "unknown").lower()
        found, trouble = self.gids(path, netdevs) if gids and layer == "ethernet" else ((), "")
        return Port(
            number=number,
            state=state,
            link_layer=layer,
            rate_gbps=float(rate[1]) if rate and state == "active" else None,
            physical_state=_word(text(path / "phys_state")),
            lid=None if lid_number in (0, 0xFFFF) else lid_number,
            gids=found,
            gid_trouble=trouble,
        )

    def gids(self, port: Path, netdevs: tuple[str, ...]) -> tuple[tuple[Gid, ...], str]:
        """The RoCE v2 addresses of a port, or why it has none."""
        indices = sorted(int(n) for n in self.reader.names(port / "gids") if n.isascii() and n.isdigit())
        if not indices:
            return (), "it has no GID table"
        found: list[Gid] = []
        seen: list[str] = []
        empty = 0
        for index in indices:
            address = _gid_address(self.reader.text(port / "gids" / str(index)))
            if address is None:
                empty += 1
                if (found or seen) and empty >= _GIDS_EMPTY:
                    break
                continue
            empty = 0
            mapped = address.ipv4_mapped
            if mapped is None:
                seen.append("only link-local GIDs" if address.is_link_local else "only IPv6 GIDs")
                continue
            kind = self.reader.text(port / "gid_attrs/types" / str(index))
            if kind is None or "v2" not in kind:
                seen.append("the kernel does not say which GIDs are RoCE v2" if kind is None else "only RoCE v1 GIDs")
                continue
            netdev = self.reader.text(port / "gid_attrs/ndevs" / str(index)) or ""
            if (trouble := self.unfit(mapped, netdev)) is not None:
                seen.append(trouble)
                continue
            found.append(Gid(index, str(mapped), netdev))
        if found:
            # Its own interface first: a VLAN or a container's may stand before it in the table.
            return tuple(sorted(found, key=lambda g: g.netdev not in netdevs)), ""
        where = f" on {', '.join(netdevs)}" if netdevs else ""
        telling = next(
            (s for s in reversed(seen) if s.startswith("self-assigned")), seen[-1] if seen else "all are empty"
        )
        return (), telling if "self-assigned" in telling else f"no address{where}: {telling}"

    def unfit(self, address: IPv4Address, netdev: str) -> str | None:
        """Why an address must not be used. NCCL itself would take a self-assigned one, and time out."""
        on = f" on {netdev}" if netdev else ""
        if address.is_link_local:
            return f"self-assigned address {address}{on}"
        if address.is_unspecified or address.is_loopback or address.is_multicast:
            return f"unusable address {address}{on}"
        here = self.reader.names(self.root / "sys/class/net")
        if netdev and here and netdev not in here:
            return f"its GIDs belong to another network namespace ({netdev})"
        return None


def _gid_address(text: str | None) -> IPv6Address | None:
    """A GID as an address; ``None`` for an unset entry (all zero, or a prefix without an interface id)."""
    try:
        address = IPv6Address(text) if text is not None else None
    except ValueError:
        return None
    return None if address is None or int(address) & 0xFFFF_FFFF_FFFF_FFFF == 0 else address


def _word(text: str | None) -> str:
    match = None if text is None else _STATE.fullmatch(text)
    return "unknown" if match is None else match[1].lower()
