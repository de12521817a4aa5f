"""Which network interface of this machine carries an address: what ranks of one replica are told to meet over."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import trio

_RESOLVE_S = 5.0
_SIOCGIFCONF = 0x8912  # linux/sockios.h: every IPv4 address with the name of its interface
_IFREQ_BYTES = 40  # struct ifreq of 64-bit Linux: 16 bytes of name, then a sockaddr_in with the address at its byte 4
_MOST = 4096


async def interface_of(address: str) -> str | None:
    """The interface that has ``address``, an IP address or a name that resolves to one; ``None`` if none does."""
    wanted = set()
    with trio.move_on_after(_RESOLVE_S):
        try:
            found = await trio.socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
        except OSError:
            return None
        wanted = {ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found}
    return await trio.to_thread.run_sync(_find, wanted)


def _find(wanted: set[ipaddress.IPv4Address | ipaddress.IPv6Address]) -> str | None:
    # The loopback interface takes all of 127.0.0.0/8 and lists one address of it.
    inner = any(address.version == 4 and address.is_loopback for address in wanted)
    for name, address in interfaces():
        if address in wanted or (inner and address.version == 4 and address.is_loopback):
            return name
    return None


def interfaces(root: Path = Path("/")) -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Every address of this network namespace, with its interface. Blocking."""
    buffer = array.array("B", bytes(_MOST * _IFREQ_BYTES))
    place, size = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, _SIOCGIFCONF, struct.pack("iL", size, place))
    data = buffer.tobytes()
    for at in range(0, struct.unpack("iL", answer)[0], _IFREQ_BYTES):
        name = data[at : at + 16].partition(b"\0")[0].decode()
        # A second address may have a label of its own, such as eth0:1.
        yield name.partition(":")[0], ipaddress.IPv4Address(data[at + 20 : at + 24])
    try:
        lines = (root / "proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, *_, name = line.split()
        yield name, ipaddress.IPv6Address(bytes.fromhex(number))
