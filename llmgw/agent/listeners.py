"""Where an engine's processes listen, and whether that is where they should: its API has one address.

:func:`listening` reads ``/proc`` and blocks for milliseconds; :func:`judge` is pure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from attrs import frozen

from llmgw.agent.proctree import PROC

_LISTEN = "0A"  # TCP_LISTEN, net/tcp_states.h
_SHOWN = 6

Ip = IPv4Address | IPv6Address


@frozen(order=True)
class Listener:
    """A TCP socket that takes connections. ``host`` is an IP address; an IPv4-mapped one is told as IPv4."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@frozen
class Verdict:
    """``exposed`` says why the engine must not go on, ``warnings`` what an operator should know."""

    exposed: str = ""
    warnings: tuple[str, ...] = ()


def listening(pids: Iterable[int], proc: Path = PROC) -> tuple[Listener, ...]:
    """Every address at which one of these processes listens. What vanishes meanwhile is left out."""
    found: set[Listener] = set()
    spaces: dict[str, dict[str, Listener]] = {}
    for pid in pids:
        sockets = set(_sockets(proc / str(pid) / "fd"))
        if not sockets:
            continue
        # Another network namespace has another table: an engine in a container of its own.
        space = _link(proc / str(pid) / "ns/net") or str(pid)
        if space not in spaces:
            spaces[space] = dict(_tables(proc / str(pid) / "net"))
        found |= {listener for inode, listener in spaces[space].items() if inode in sockets}
    return tuple(sorted(found))


def judge(found: Iterable[Listener], host: str, port: int, *, serves: bool = True) -> Verdict:
    """Compare with the address that the engine was told. ``serves`` is false for a shard without an API.

    Engines of several processes open ports of their own on the address that they were told, for each other: on a
    private address that is nothing to wake anybody for. ``host`` may be a name; then only wildcards are known wrong.
    """
    found = list(found)
    told = _ip(host)
    if told is not None and told.is_unspecified:
        return Verdict()
    api = [one for one in found if one.port == port]
    wrong = [one for one in api if serves and _elsewhere(one, told)]
    if wrong:
        where = Listener(host, port)
        who = "anybody who reaches this node can use it" if _wild(wrong[0]) else "the router is not told of that"
        return Verdict(exposed=f"its API listens on {_some(wrong)}, and was told {where}: {who}")
    warnings = []
    if serves and found and not api:
        warnings.append(f"none of its processes listens on port {port}: another program may answer there")
    others = [one for one in found if one not in api and _elsewhere(one, told)]
    if others:
        warnings.append(f"listens for its own processes on {_some(others)}: keep those ports behind a firewall")
    public = [one for one in found if one not in api and _ip(one.host) == told and told is not None and told.is_global]
    if public:
        warnings.append(
            f"listens for its own processes on {_some(public)}, the address that it was told, and that one is public: "
            "keep those ports behind a firewall"
        )
    return Verdict(warnings=tuple(warnings))


def _elsewhere(one: Listener, told: Ip | None) -> bool:
    """Whether others can reach it, at an address that is not the one told."""
    ip = _ip(one.host)
    if ip is None or ip.is_loopback or ip == told:
        return False
    return told is not None or ip.is_unspecified


def _wild(one: Listener) -> bool:
    ip = _ip(one.host)
    return ip is not None and ip.is_unspecified


def _ip(host: str) -> Ip | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _some(found: list[Listener]) -> str:
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(map(str, found[:_SHOWN])) + more


def _sockets(folder: Path) -> Iterator[str]:
    """Inodes of the sockets that a process has open."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        target = _link(folder / name)
        if target.startswith("socket:["):
            yield target[8:-1]


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _tables(folder: Path) -> Iterator[tuple[str, Listener]]:
    for name in ("tcp", "tcp6"):
        try:
            lines = (folder / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            if (entry := parse(line)) is not None:
                yield entry


def parse(line: str) -> tuple[str, Listener] | None:
    """Inode and address of a line of ``/proc/net/tcp`` or ``tcp6``, if that is a socket that listens.

    The kernel prints an address as 32-bit words in the byte order of the machine.
    """
    fields = line.split()
    if len(fields) < 10 or fields[3] != _LISTEN:
        return None
    try:
        address, port = fields[1].split(":")
        raw = bytes.fromhex(address)
        if sys.byteorder == "little":
            raw = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
        ip = ip_address(raw)
        mapped = ip.ipv4_mapped if isinstance(ip, IPv6Address) else None
        return fields[9], Listener(str(mapped or ip), int(port, 16))
    except ValueError:
        return None
