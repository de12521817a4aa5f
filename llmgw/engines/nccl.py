"""What NCCL and Gloo are told of the network, and what NCCL makes of such words. Pure.

Rules: NCCL 2.30 (``net_ib`` and ``parseStringList``). A list of names, each a prefix unless the value begins with
``=``; all but those if it begins with ``^``. A name may be followed by ``:port``, and by a rail and a plane, which
choose nothing. Spaces are part of a name. A list without a name selects everything.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence

from llmgw.hardware.fabric import LinkLayer, gid_index, hca_list
from llmgw.hardware.inventory import Adapter, AdapterKind, Fabric

VARIABLES = frozenset(
    {
        "NCCL_IB_HCA",
        "NCCL_IB_DISABLE",
        "NCCL_IB_GID_INDEX",
        "NCCL_IB_ADDR_RANGE",
        "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
        "NCCL_DEBUG",
    }
)
"""Every variable that :func:`nccl_env` may set."""

_ATOI = re.compile(r"[ \t\n\v\f\r]*([+-]?[0-9]+)")


def nccl_env(fabric: Fabric | None, interface: str) -> Mapping[str, str]:
    """The network of one rank: exactly the fabric's ports, and the interface over which the ranks find each other.

    All ranks of a node get the same list, as NCCL itself takes the adapter that is near a device. Without a port
    InfiniBand and RoCE are off and the ranks speak TCP: an empty list would select every adapter of the node.
    """
    # NCCL takes a name for a prefix, Gloo for a name: bond0 would also be bond0.2973, and =bond0 no interface at all.
    made = {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface} if interface else {}
    if fabric is None or not fabric.ports:
        return {**made, "NCCL_IB_DISABLE": "1"}
    made["NCCL_IB_HCA"] = "=" + ",".join(hca_list(fabric))
    # Only so does it log which network it took: TCP in the fabric's place is no error to it.
    made["NCCL_DEBUG"] = "INFO"
    if fabric.kind is AdapterKind.ROCE:
        # One index serves all adapters. Where they differ NCCL finds each one's by its address, from 2.21 on.
        index = gid_index(fabric)
        if index is not None:
            made["NCCL_IB_GID_INDEX"] = str(index)
        elif (network := address_range(fabric)) is not None:
            made["NCCL_IB_ADDR_RANGE"] = network
    return made


def address_range(fabric: Fabric) -> str | None:
    """The smallest IPv4 network with the addresses of all the fabric's ports, such as ``10.30.0.0/22``."""
    try:
        found = [int(ipaddress.IPv4Address(port.gid.address)) for port in fabric.ports if port.gid is not None]
    except ValueError:
        return None
    if not found:
        return None
    common = 32 - (min(found) ^ max(found)).bit_length()
    return str(ipaddress.ip_network((min(found), common), strict=False))


def ports_selected(value: str | None, adapters: Iterable[Adapter]) -> frozenset[tuple[str, int]]:
    """The ports, by adapter and number, that NCCL takes with this ``NCCL_IB_HCA`` (``None``: not set).

    What is not active does not count, nor what speaks neither InfiniBand nor Ethernet. Of more than
    :data:`llmgw.hardware.fabric.MOST_ADAPTERS` it would open the first ones.
    """
    exclude, exact, names = _words(value or "")
    return frozenset(
        (adapter.name, port.number)
        for adapter in adapters
        for port in adapter.ports
        if port.state == "active"
        and port.link_layer in tuple(LinkLayer)
        and _matches(adapter.name, port.number, names, exact=exact) is not exclude
    )


def interfaces_selected(value: str | None, interfaces: Iterable[str]) -> tuple[str, ...]:
    """The interfaces that NCCL may take with this ``NCCL_SOCKET_IFNAME``, in their order.

    One character is as good as nothing to it. What it does then (loopback and container bridges last) is not looked at.
    """
    exclude, exact, names = _words(value or "") if value is not None and len(value) > 1 else (False, False, ())
    return tuple(name for name in interfaces if _matches(name, None, names, exact=exact) is not exclude)


def _words(value: str) -> tuple[bool, bool, Sequence[tuple[str, int | None]]]:
    """Whether a value excludes, whether it is exact, and its names with their ports."""
    exclude = value.startswith("^")
    value = value[exclude:]
    exact = value.startswith("=")
    names: list[tuple[str, int | None]] = []
    for word in value[exact:].split(","):
        name, colon, rest = word.partition(":")
        if name:
            number = _ATOI.match(rest)
            names.append((name, (int(number[1]) if number else 0) if colon else None))
    return exclude, exact, names


def _matches(name: str, port: int | None, names: Sequence[tuple[str, int | None]], *, exact: bool) -> bool:
    if not names:
        return True
    return any(
        (name == wanted if exact else name.startswith(wanted))
        and (port is None or number is None or number in (port, -1))
        for wanted, number in names
    )
