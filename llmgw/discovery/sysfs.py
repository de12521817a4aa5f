"""RDMA adapters from ``/sys/class/infiniband``.

Formats: the kernel's ``drivers/infiniband/core/sysfs.c`` and ``Documentation/ABI/stable/sysfs-class-infiniband``.
Every single read may fail (``EINVAL`` for an unset entry, ``ENOENT`` for a device that went away meanwhile): what
cannot be read is absent, and never ends the rest. Counters are not read: they fail, and flood the log, on some.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from ipaddress import IPv6Address
from pathlib import Path
from typing import Protocol

from attrs import frozen

from llmgw.hardware.fabric import natural
from llmgw.hardware.inventory import Adapter, AdapterKind, Fault, Gid, Port

_FILE_BYTES = 4096
_VPD_BYTES = 64 * 1024
SWITCH_MANAGEMENT = b"SMDL=SW_MNG"
_AMAZON = "0x1d0f"
_V2 = "RoCE v2"
_GIDS_EMPTY = 64
"""So many empty entries in a row end the reading of a GID table in which something was found, or whose port is not
active. The table of a mlx5 adapter has 255 entries, and in a pod the usable ones come after those of others."""

_STATE = re.compile(r"\s*\d+:\s*(\S.*?)\s*")
_NUMBER = re.compile(r"[0-9]{1,5}")
_LID = re.compile(r"0x[0-9a-fA-F]{1,8}")
_RATE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec")


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
        # Not open(), which takes twice as long: GID tables are hundreds of files.
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = more = os.read(file, limit)
                # sysfs hands out a page at a time; only what is binary is longer than one.
                while more and len(data) < limit and limit > _FILE_BYTES:
                    data += (more := os.read(file, limit - len(data)))
            finally:
                os.close(file)
        except OSError:
            return b""
        return data

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
    it is read is left out. A GID table is read to its end only where an active port has nothing in it; else 64 empty
    entries in a row end it. Blocking.
    """
    reader = DiskReader() if reader is None else reader
    base = root / "sys/class/infiniband"
    functions = {name: reader.target(base / name / "device") or "" for name in reader.names(base)}
    # A folder of that name, as in a copy without links, is nobody's PCI function.
    functions = {name: "" if function == "device" else function for name, function in functions.items()}
    interfaces, uverbs = frozenset(reader.names(root / "sys/class/net")), _verbs_devices(root, reader)
    reading = _Reading(root, reader, addresses or {}, interfaces, uverbs, functions)
    made = (reading.adapter(name) for name in sorted(functions, key=natural))
    return tuple(adapter for adapter in made if adapter is not None)


def adapter_warnings(adapters: Sequence[Adapter]) -> tuple[Fault, ...]:
    """What an operator should know of adapters that look usable and are not."""
    made = []
    managing = [a.name for a in adapters if a.kind is AdapterKind.SWITCH_MANAGEMENT]
    if managing:
        many = len(managing) > 1
        reason = f"{', '.join(managing)} {'manage' if many else 'manages'} the NVLink switches and "
        reason += "are no fabric" if many else "is no fabric"
        made.append(Fault("switch-management", reason, "leave them alone"))
    virtual = [a for a in adapters if a.virtual]
    if virtual:
        active = sum(any(p.state == "active" for p in a.ports) for a in virtual)
        functions = "function" if len(virtual) == 1 else "functions"
        reason = f"{len(virtual)} virtual {functions}, {active} active; used for a fabric only when named"
        made.append(Fault("virtual-functions", reason, ""))
    for adapter in (a for a in adapters if not a.virtual):
        made += [Fault(f.code, f"{adapter.name}: {f.reason}", f.remedy) for f in adapter.faults]
    return tuple(made)


def _verbs_devices(root: Path, reader: Reader) -> Mapping[str, tuple[str, ...]] | None:
    """The uverbs devices of each adapter; ``None`` below a root without ``/dev``, where nothing can be said."""
    if not reader.names(root / "dev"):
        return None
    verbs, made = root / "sys/class/infiniband_verbs", dict[str, tuple[str, ...]]()
    for device in sorted(reader.names(verbs), key=natural):
        if device.startswith("uverbs") and (adapter := reader.text(verbs / device / "ibdev")) is not None:
            made[adapter] = (*made.get(adapter, ()), device)
    return made


@frozen
class _Reading:
    """One reading of all adapters.

    ``interfaces`` are those of this network namespace, none where they cannot be listed; ``functions`` are the PCI
    functions that the adapters are on.
    """

    root: Path
    reader: Reader
    addresses: Mapping[str, tuple[str, ...]]
    interfaces: frozenset[str]
    uverbs: Mapping[str, tuple[str, ...]] | None
    functions: Mapping[str, str]

    def adapter(self, name: str) -> Adapter | None:
        path = self.root / "sys/class/infiniband" / name
        device = path / "device"
        # What the switches are managed by is told first: nothing of its ports but their state is touched.
        managing = SWITCH_MANAGEMENT in self.reader.raw(device / "vpd", _VPD_BYTES)
        numbers = [n for n in sorted(self.reader.names(path / "ports"), key=natural) if _NUMBER.fullmatch(n)]
        node_type, firmware = self.reader.text(path / "node_type"), self.reader.text(path / "fw_ver")
        if not numbers and node_type is None and firmware is None:
            return None
        netdevs = self.netdevs(path, () if managing else numbers)
        bond = self.bond(netdevs)
        mine = tuple(dict.fromkeys((bond, *netdevs))) if bond else netdevs
        ports = tuple(self.port(path / "ports" / n, int(n), mine, gids=not managing) for n in numbers)
        named = tuple(dict.fromkeys(g.netdev for p in ports for g in p.gids if g.netdev))
        kind = AdapterKind.SWITCH_MANAGEMENT if managing else self.kind(path, node_type, firmware, ports)
        numa = self.reader.text(device / "numa_node")
        return Adapter(
            name=name,
            kind=kind,
            ports=ports,
            pci_address=self.functions[name],
            numa_node=int(numa) if numa is not None and _NUMBER.fullmatch(numa) else None,
            netdevs=netdevs or named,
            firmware=firmware or "",
            board=self.reader.text(path / "hca_type") or self.reader.text(path / "board_id") or "",
            virtual=self.reader.target(device / "physfn") is not None,
            bond=bond or self.bond(named),
            addresses=tuple(a for i in (mine or named) for a in self.addresses.get(i, ())),
            faults=self.verbs(path, kind),
        )

    def kind(self, path: Path, node_type: str | None, firmware: str | None, ports: Sequence[Port]) -> AdapterKind:
        read, device, name = self.reader, path / "device", path.name
        if (read.text(device / "vendor") or "").lower() == _AMAZON:
            return AdapterKind.EFA
        # It can have been given any name; what rxe made has a parent file then, and no device.
        made = name.startswith(("rxe", "siw")) or read.text(path / "parent") is not None
        if made or (firmware == "0.0.0" and not read.names(device)):
            return AdapterKind.SOFTWARE
        if node_type is None and name.startswith(("i40iw", "cxgb")):
            return AdapterKind.IWARP
        if node_type is not None and not node_type.endswith("CA"):
            return AdapterKind.IWARP if node_type.endswith("RNIC") else AdapterKind.UNKNOWN
        layers = {p.link_layer for p in ports if p.state == "active"} or {p.link_layer for p in ports}
        # Omni-Path (hfi1) says InfiniBand too, and NCCL opens it as such.
        if "infiniband" in layers:
            return AdapterKind.INFINIBAND
        return AdapterKind.ROCE if "ethernet" in layers else AdapterKind.UNKNOWN

    def netdevs(self, path: Path, numbers: Sequence[str]) -> tuple[str, ...]:
        """The interfaces of an adapter. Of those on its PCI function, the GIDs tell which of several are its own."""
        own = tuple(sorted(self.reader.names(path / "device/net"), key=natural))
        function = self.functions[path.name]
        shared = function != "" and list(self.functions.values()).count(function) > 1
        if own and len(numbers) < 2 and not shared:
            return own
        said = (self.reader.text(path / "ports" / n / "gid_attrs/ndevs/0") for n in numbers)
        named = tuple(dict.fromkeys(netdev for netdev in said if netdev is not None and self.known(netdev)))
        if shared and own:
            return tuple(netdev for netdev in own if netdev in named) or own
        return tuple(dict.fromkeys((*own, *named)))

    def known(self, netdev: str) -> bool:
        return not self.interfaces or netdev in self.interfaces

    def bond(self, netdevs: Sequence[str]) -> str:
        """The bond that an interface is part of, or is itself (an adapter that the hardware bonded)."""
        net = self.root / "sys/class/net"
        there = [netdev for netdev in netdevs if netdev in self.interfaces]
        masters = [m for netdev in there if (m := self.reader.target(net / netdev / "master")) is not None]
        return next((name for name in (*masters, *there) if self.reader.names(net / name / "bonding")), "")

    def verbs(self, path: Path, kind: AdapterKind) -> tuple[Fault, ...]:
        """Whether programs can open the adapter: in a container sysfs shows what ``/dev`` does not have."""
        if kind not in (AdapterKind.INFINIBAND, AdapterKind.ROCE) or self.uverbs is None:
            return ()
        folder = self.root / "dev/infiniband"
        mine = self.uverbs.get(path.name) or self.reader.names(path / "device/infiniband_verbs")
        here = [name for name in self.reader.names(folder) if name in mine and name.startswith("uverbs")]
        if any(self.reader.usable(folder / name) for name in here):
            return ()
        if here:
            reason = f"/dev/infiniband/{here[0]} may not be opened by this user"
            return (Fault("no-verbs", reason, "let the agent's user open it (group rdma), or run the agent as root"),)
        reason = "sysfs shows it, verbs cannot open it: no device in /dev/infiniband"
        return (Fault("no-verbs", reason, "load ib_uverbs; give a container /dev/infiniband"),)

    def port(self, path: Path, number: int, mine: tuple[str, ...], *, gids: bool) -> Port:
        text = self.reader.text
        rate, lid = _RATE.match(text(path / "rate") or ""), _LID.fullmatch(text(path / "lid") or "")
        state, layer = _word(text(path / "state")).lower(), (text(path / "link_layer") or "unknown").lower()
        active = state == "active"
        found, trouble = self.gids(path, mine, active=active) if gids and layer == "ethernet" else ((), "")
        return Port(
            number=number,
            state=state or "unknown",
            link_layer=layer,
            rate_gbps=float(rate[1]) if rate and active else None,
            physical_state=_word(text(path / "phys_state")),
            lid=int(lid[0], 16) if lid and int(lid[0], 16) not in (0, 0xFFFF) else None,
            gids=found,
            gid_trouble=trouble,
        )

    def gids(self, port: Path, mine: tuple[str, ...], *, active: bool) -> tuple[tuple[Gid, ...], str]:
        """The RoCE v2 addresses of a port, or why it has none."""
        table, text = port / "gids", self.reader.text
        indices = sorted(int(n) for n in self.reader.names(table) if _NUMBER.fullmatch(n))
        if not indices:
            return (), "no GID table"
        first = text(port / "gid_attrs/ndevs/0") if len(mine) > 1 else None
        on = f" on {first if first in mine else ', '.join(mine)}" if mine else ""
        found: list[Gid] = []
        unfit: list[tuple[int, str]] = []
        empty = 0
        for index in indices:
            address = _gid_address(text(table / str(index)))
            empty = empty + 1 if address is None else 0
            if empty >= _GIDS_EMPTY and (found or unfit or not active):
                break
            if address is not None:
                gid = self.gid(port, index, address, on)
                if isinstance(gid, Gid):
                    found.append(gid)
                else:
                    unfit.append(gid)
        if found:
            # Its own interface first: a VLAN or a container's may stand before it in the table.
            return tuple(sorted(found, key=lambda g: g.netdev not in mine)), ""
        if unfit:
            return (), min(unfit)[1]
        if self.interfaces and not mine:
            return (), "its GIDs belong to another network namespace, as its interface does"
        return (), f"no address{on}: all GIDs are empty"

    def gid(self, port: Path, index: int, address: IPv6Address, on: str) -> Gid | tuple[int, str]:
        """One entry, or why it is not fit. The lower the number, the more that reason tells of the port."""
        mapped = address.ipv4_mapped
        if mapped is None and address.is_link_local:
            return 7, f"no address{on}: only link-local GIDs"
        if mapped is None:
            return 6, f"no IPv4 address{on}: only IPv6 GIDs"
        attributes, text = port / "gid_attrs", self.reader.text
        kind = text(attributes / "types" / str(index))
        if kind is None:
            # Before Linux 4.5 there is no such folder; an entry of another namespace has no type there.
            if not self.reader.names(attributes / "types"):
                return 3, "the kernel does not say GID types"
            return 4, f"the kernel does not say the type of GID {index} ({mapped})"
        if kind != _V2:
            return 5, f"{mapped}{on} has no RoCE v2 GID"
        netdev = text(attributes / "ndevs" / str(index)) or ""
        at = f" on {netdev}" if netdev else ""
        if not self.known(netdev):
            return 2, "its GIDs belong to another network namespace" + (f" ({netdev})" if netdev else "")
        if mapped.is_link_local:
            # NCCL itself would take it, and time out.
            return 0, f"self-assigned address {mapped}{at}"
        if mapped.is_unspecified or mapped.is_loopback or mapped.is_multicast:
            return 1, f"unusable address {mapped}{at}"
        return Gid(index, str(mapped), netdev)


def _gid_address(text: str | None) -> IPv6Address | None:
    """A GID as an address; ``None`` for an unset entry (all zero, or a prefix without an interface id)."""
    # Most entries are zero, and IPv6Address takes its time.
    if text is None or not text.strip("0:"):
        return None
    try:
        address = IPv6Address(text)
    except ValueError:
        return None
    return None if int(address) & 0xFFFF_FFFF_FFFF_FFFF == 0 else address


def _word(text: str | None) -> str:
    """The word of ``4: ACTIVE``, as the kernel writes it."""
    match = None if text is None else _STATE.fullmatch(text)
    return "" if match is None else match[1]
