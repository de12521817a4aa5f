"""Fabrics: networks that operators declare by a label and a rule, resolved to the ports that this node has of them.

The same hardware is numbered differently on sibling nodes, so a list of adapters is right on one node only; a link
layer or a subnet is right on all of them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum

from attrs import frozen

from llmgw.hardware.inventory import Adapter, AdapterKind, Fabric, FabricPort, Fault, Port

MOST_ADAPTERS = 32
"""NCCL opens this many at most (MAX_IB_DEVS in its net_ib transport) and leaves out the others silently."""

_ABLE = (AdapterKind.INFINIBAND, AdapterKind.ROCE)


class LinkLayer(StrEnum):
    """What a port speaks. RoCE is ``ethernet``."""

    INFINIBAND = "infiniband"
    ETHERNET = "ethernet"


@frozen
class FabricRule:
    """Which ports belong to a fabric: those for which every condition that is given holds.

    ``adapters`` are exact names, ``mlx5_0`` for all ports of an adapter, or ``mlx5_0:1`` for one. ``subnets`` are
    networks such as ``10.30.0.0/16``: on RoCE a GID of the port lies in one, else an address of its interface does.
    """

    label: str
    adapters: tuple[str, ...] = ()
    link_layer: LinkLayer | None = None
    subnets: tuple[str, ...] = ()


def resolve_all(rules: Iterable[FabricRule], adapters: Sequence[Adapter]) -> tuple[Fabric, ...]:
    """Every declared fabric as this node has it."""
    return tuple(resolve(rule, adapters) for rule in rules)


def resolve(rule: FabricRule, adapters: Sequence[Adapter]) -> Fabric:
    """One fabric: the active ports that belong to it, in natural order, and why some that should do not.

    What is named and down is a fault, as somebody counts on it: with one rail of eight missing, NCCL pairs the others
    with the wrong ones of another node. What merely matches and is down is not mentioned.
    """
    adapters = sorted(adapters, key=lambda a: (natural(a.name), a.name))
    faults = list(_named_faults(rule, adapters))
    up: list[tuple[Adapter, Port]] = []
    for adapter in adapters:
        for port in adapter.ports:
            if not _matches(rule, adapter, port):
                continue
            addresses, named = _addresses(adapter, port), _named(rule, adapter, port)
            inside = not rule.subnets or any(_inside(address, rule.subnets) for address in addresses)
            # Of what is named and has lost its address nobody can say that it is of another network.
            lost = named and not addresses
            if port.state != "active":
                if named and (inside or lost):
                    faults.append(_down(adapter, port))
            elif inside or (lost and port.link_layer == LinkLayer.ETHERNET):
                up.append((adapter, port))
    layers = sorted({port.link_layer for _, port in up})
    if len(layers) > 1:
        reason = f"its ports are of {' and '.join(layers)}; NCCL does not run over both at once"
        faults.append(Fault("mixed-link-layers", reason, "give the rule a link_layer, or declare two fabrics"))
        return Fabric(rule.label, AdapterKind.UNKNOWN, (), tuple(faults))
    for adapter in dict.fromkeys(adapter for adapter, _ in up):
        faults += [Fault(f.code, f"{adapter.name}: {f.reason}", f.remedy) for f in adapter.faults]
    ports: list[FabricPort] = []
    for adapter, port in up:
        gid = next((g for g in port.gids if not rule.subnets or _inside(g.address, rule.subnets)), None)
        if port.link_layer == LinkLayer.INFINIBAND:
            ports.append(FabricPort(adapter.name, port.number))
        elif gid is None:
            why = port.gid_trouble or f"none of its GIDs is in {', '.join(rule.subnets)}"
            remedy = f"give {_interface(adapter)} an address of the fabric's network"
            faults.append(Fault("no-gid", f"{adapter.name} port {port.number}: {why}", remedy))
        else:
            ports.append(FabricPort(adapter.name, port.number, gid))
    if len(ports) > MOST_ADAPTERS:
        reason = f"{len(ports)} ports match, NCCL opens {MOST_ADAPTERS}"
        faults.append(Fault("too-many-adapters", reason, "name the adapters in the rule"))
    elif not ports and not faults:
        reason = f"no active port matches ({_wanted(rule)}); {_there(adapters)}"
        faults.append(Fault("no-port", reason, "correct the rule"))
    kind = AdapterKind.UNKNOWN
    if ports:
        kind = AdapterKind.INFINIBAND if layers == [LinkLayer.INFINIBAND.value] else AdapterKind.ROCE
    return Fabric(rule.label, kind, tuple(ports), tuple(faults))


def _named(rule: FabricRule, adapter: Adapter, port: Port) -> bool:
    return adapter.name in rule.adapters or f"{adapter.name}:{port.number}" in rule.adapters


def _matches(rule: FabricRule, adapter: Adapter, port: Port) -> bool:
    """Whether the port is of the rule, whatever its state and its addresses are."""
    if adapter.kind not in _ABLE or port.link_layer not in tuple(LinkLayer):
        return False
    if rule.link_layer is not None and port.link_layer != rule.link_layer:
        return False
    if rule.adapters:
        return _named(rule, adapter, port)
    # A virtual function is somebody's slice, and a member of a bond carries other traffic: only when asked for.
    return not adapter.virtual and not bond_member(adapter, port)


def bond_member(adapter: Adapter, port: Port) -> bool:
    """Whether the port is one of several in a bond; drivers put ``bond`` in the name of one that is a whole bond.

    A bond of IPoIB interfaces says nothing of the InfiniBand ports below it.
    """
    return bool(adapter.bond) and "bond" not in adapter.name and port.link_layer == LinkLayer.ETHERNET


def _addresses(adapter: Adapter, port: Port) -> tuple[str, ...]:
    """What the port can be reached at, without addresses that a machine gives itself."""
    gids = [gid.address for gid in port.gids]
    # The interfaces are the whole adapter's: where there are several ports, the GIDs know which is whose.
    if not gids or len(adapter.ports) == 1:
        gids += [address.partition("/")[0] for address in adapter.addresses]
    return tuple(address for address in gids if not _inside(address, ("169.254.0.0/16",)))


def _down(adapter: Adapter, port: Port) -> Fault:
    physical = f" ({port.physical_state})" if port.physical_state else ""
    if port.physical_state.lower() == "disabled":
        remedy = f"enable it: bring {_interface(adapter)} up, or its switch port"
    elif port.state in ("init", "armed"):
        remedy = "an InfiniBand port that stays so has no subnet manager, or is in no partition"
    else:
        remedy = "check its cable and its switch port"
    if len(adapter.ports) > 1:
        remedy += f"; or name only the port that is meant, such as {adapter.name}:{adapter.ports[-1].number}"
    return Fault("port-down", f"{adapter.name} port {port.number} is {port.state}{physical}", remedy)


def _inside(address: str, subnets: Sequence[str]) -> bool:
    for subnet in subnets:
        try:
            if ipaddress.ip_address(address) in ipaddress.ip_network(subnet, strict=False):
                return True
        except ValueError:
            continue
    return False


def _named_faults(rule: FabricRule, adapters: Sequence[Adapter]) -> Iterator[Fault]:
    by_name = {adapter.name: adapter for adapter in adapters}
    for name in rule.adapters:
        adapter = by_name.get(name.partition(":")[0])
        if adapter is None:
            there = ", ".join(by_name) or "no adapter at all"
            yield Fault(
                "adapter-missing",
                f"{name} is not on this node, there is {there}",
                "correct the rule, or load its driver",
            )
        elif adapter.kind not in _ABLE:
            yield Fault("not-a-fabric", f"{name} is {_cannot(adapter.kind)}", "take it out of the rule")
        elif ":" in name and not any(_named(rule, adapter, p) for p in adapter.ports):
            yield Fault("adapter-missing", f"{adapter.name} has no port {name.partition(':')[2]}", "correct the rule")


def _cannot(kind: AdapterKind) -> str:
    return {
        AdapterKind.SWITCH_MANAGEMENT: "a bridge that manages the NVLink switches",
        AdapterKind.SOFTWARE: "software RDMA, which is no fabric",
        AdapterKind.EFA: "an EFA adapter, which NCCL uses through a plugin and not by its name",
        AdapterKind.IWARP: "an iWARP adapter, which NCCL does not use",
    }.get(kind, "of a kind that could not be told")


def _interface(adapter: Adapter) -> str:
    return adapter.bond or ", ".join(adapter.netdevs) or "its interface"


def _wanted(rule: FabricRule) -> str:
    parts = [
        f"adapters {', '.join(rule.adapters)}" if rule.adapters else "",
        f"link layer {rule.link_layer.value}" if rule.link_layer else "",
        f"subnet {', '.join(rule.subnets)}" if rule.subnets else "",
    ]
    return "; ".join(part for part in parts if part)


def _there(adapters: Sequence[Adapter]) -> str:
    active = [f"{a.name} {p.link_layer}" for a in adapters if a.kind in _ABLE for p in a.ports if p.state == "active"]
    return f"active are {', '.join(active)}" if active else "no port of this node is active"


def fabric_warnings(fabrics: Sequence[Fabric], adapters: Sequence[Adapter]) -> tuple[Fault, ...]:
    """What forbids nothing and should be known: ports of one fabric that differ."""
    return tuple(_fabric_warnings(fabrics, {adapter.name: adapter for adapter in adapters}))


def _fabric_warnings(fabrics: Sequence[Fabric], by_name: dict[str, Adapter]) -> Iterator[Fault]:
    for fabric in fabrics:
        used = [(by_name[p.adapter], p) for p in fabric.ports if p.adapter in by_name]
        members = [a.name for a, p in used if any(bond_member(a, port) for port in a.ports if port.number == p.port)]
        if members and len(members) < len(used):
            reason = f"fabric {fabric.label}: {', '.join(members)} are members of a bond, and others are not"
            yield Fault("bond-members", reason, "a list of names is right on one node only: use a subnet")
        rates = {port.rate_gbps for adapter, p in used for port in adapter.ports if port.number == p.port}
        if len(rates) > 1:
            said = " and ".join(
                f"{rate:g} Gb/s" if rate else "an unknown rate" for rate in sorted(rates, key=lambda r: r or 0)
            )
            yield Fault(
                "mixed-rates", f"fabric {fabric.label}: its ports run at {said}", "check cables and switch ports"
            )
        for board in sorted({adapter.board for adapter, _ in used}):
            firmware = sorted({adapter.firmware for adapter, _ in used if adapter.board == board})
            if len(firmware) > 1:
                said = f"fabric {fabric.label}: {board or 'its'} adapters have firmware {' and '.join(firmware)}"
                yield Fault("mixed-firmware", said, "bring them to one version")
        if fabric.kind is AdapterKind.ROCE and fabric.ports and gid_index(fabric) is None:
            each = ", ".join(f"{p.adapter} {p.gid.index}" for p in fabric.ports if p.gid is not None)
            yield Fault(
                "mixed-gid-index",
                f"fabric {fabric.label}: the addresses stand at different GID indices ({each})",
                "no NCCL_IB_GID_INDEX fits all of them; NCCL is given their address range, which it reads from 2.21 on",
            )


def gid_index(fabric: Fabric) -> int | None:
    """The GID index that all RoCE ports of the fabric share, ``None`` when they differ or it has none."""
    found = {port.gid.index for port in fabric.ports if port.gid is not None}
    return found.pop() if len(found) == 1 else None


def hca_list(fabric: Fabric) -> tuple[str, ...]:
    """The ports as NCCL names them, in natural order: ``mlx5_1:1``, ``mlx5_10:1``."""
    return tuple(f"{p.adapter}:{p.port}" for p in sorted(fabric.ports, key=lambda p: (natural(p.adapter), p.port)))


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that puts ``mlx5_2`` before ``mlx5_10``."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return tuple((0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts)
