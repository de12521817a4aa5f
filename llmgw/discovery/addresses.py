"""The IPv4 addresses of the network interfaces, from `ip -j addr show` (iproute2)."""

from __future__ import annotations

from typing import Any

import orjson

from llmgw.discovery.faults import DiscoveryError
from llmgw.discovery.machine import Machine


async def read_addresses(machine: Machine) -> dict[str, tuple[str, ...]]:
    """Addresses with prefix lengths by interface; empty where `ip` is not there or does not speak JSON."""
    try:
        ran = await machine.ask("ip", "-j", "addr", "show")
    except DiscoveryError:
        return {}
    return parse_addresses(ran.stdout)


def parse_addresses(text: str) -> dict[str, tuple[str, ...]]:
    """See :func:`read_addresses`; entries of another shape are left out."""
    try:
        said: Any = orjson.loads(text)
    except ValueError:
        return {}
    made: dict[str, tuple[str, ...]] = {}
    for interface in said if isinstance(said, list) else ():
        if not isinstance(interface, dict) or not isinstance(name := interface.get("ifname"), str):
            continue
        infos = interface.get("addr_info")
        found = [
            f"{info['local']}/{info['prefixlen']}"
            for info in (infos if isinstance(infos, list) else ())
            if isinstance(info, dict)
            and info.get("family") == "inet"
            and isinstance(info.get("local"), str)
            and isinstance(info.get("prefixlen"), int)
        ]
        if found:
            made[name] = tuple(found)
    return made
