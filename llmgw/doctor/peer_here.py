"""This machine as one of two nodes that try each other."""

from __future__ import annotations

import ipaddress
import time

import trio

from llmgw.discovery.faults import DiscoveryError
from llmgw.discovery.machine import Machine
from llmgw.doctor import texts
from llmgw.doctor.peer import End

_RESOLVE_S = 3.0
_PLAIN_MTU = 1500
_AGENT_PORTS = (20000, 20999)


def here(machine: Machine, name: str) -> End:
    """This machine, which calls itself so."""

    async def mtu(address: str) -> int:
        return await _mtu(machine, address)

    return End(name, time.time, resolve, mtu)


async def resolve(name: str) -> tuple[str, ...]:
    """Every address that a name comes to here; empty where none, or where nobody answers in time."""
    if name:
        with trio.move_on_after(_RESOLVE_S):
            try:
                found = await trio.socket.getaddrinfo(name, None)
            except (OSError, UnicodeError):
                return ()
            return tuple(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))
    return ()


async def _mtu(machine: Machine, address: str) -> int:
    """The MTU of the interface with this address, the usual one where that cannot be told."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    try:
        found = texts.netdevs((await machine.ask("ip", "-j", "addr", "show")).stdout) or ()
    except DiscoveryError:
        return _PLAIN_MTU
    return next(
        (n.mtu for n in found if n.mtu and any(ipaddress.ip_interface(a).ip == wanted for a in n.addresses)), _PLAIN_MTU
    )


def ports_to_try(machine: Machine, agent: tuple[int, int] | None) -> tuple[int, ...]:
    """The ends of the agent's ports, and of those that the kernel gives to NCCL and Gloo. Blocking."""
    said = (machine.reader.text(machine.root / "proc/sys/net/ipv4/ip_local_port_range") or "").split()
    first, last = (int(word) for word in said) if len(said) == 2 and all(w.isdigit() for w in said) else (32768, 60999)
    return tuple(dict.fromkeys((*(agent or _AGENT_PORTS), first, (first + last) // 2, last)))
