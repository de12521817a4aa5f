"""What one node opens for another to try, and the trying: ports, a larger transfer, packets that may not be cut.

Everything is between two addresses that already speak with each other, small, and bounded in time.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio
from attrs import define, field

from llmgw.doctor.peer_facts import PeerPort, Way

DIAL_S = 2.0
BULK_S = 2.5
BULK_BYTES = 256 * 1024
MOST_PORTS = 16
MOST_PACKET = 9216
_GRACE_S = 0.5
_ROUNDS, _ROUND_S = 3, 0.05
_SHIFTS = 8
_USUAL = (9000, 8950, 8900, 4200, 2044, 1500, 1492, 1476, 1460, 1450, 1430, 1420, 1400, 1300, 1280, 576)
"""MTUs that interfaces, tunnels and clouds have."""

# From linux/in.h and linux/in6.h: the socket module does not have them. Probing sends as large as the interface takes,
# uncut, whatever the kernel has learned of the path.
_DISCOVER = {socket.AF_INET: (socket.IPPROTO_IP, 10, 3), socket.AF_INET6: (socket.IPPROTO_IPV6, 23, 3)}
_HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}

Place = tuple[Any, ...]
"""An address as sockets have it; of IPv6 ones the scope counts."""


def at(place: Place, port: int) -> Place:
    """The same address with another port."""
    return (place[0], port, *place[2:])


def _socket(place: Place, kind: socket.SocketKind) -> trio.socket.SocketType:
    return trio.socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET, kind)


@define(eq=False)
class Door:
    """Ports that are open, and a port for datagrams that begin with ``token``."""

    token: bytes
    ports: tuple[int, ...] = ()
    udp: int = 0
    _sizes: set[int] = field(factory=set)
    _heard: trio.Event = field(factory=trio.Event)

    async def largest(self, wanted: int) -> int:
        """The largest packet that came, which is waited for until it has ``wanted`` bytes."""
        with trio.move_on_after(_GRACE_S):
            while max(self._sizes, default=0) < wanted:
                await self._heard.wait()
        return max(self._sizes, default=0)

    def came(self, size: int) -> None:
        """A packet of this size came."""
        self._sizes.add(size)
        self._heard.set()
        self._heard = trio.Event()


@asynccontextmanager
async def opened(own: Place, partner: Place, wanted: Sequence[int], token: bytes) -> AsyncIterator[Door]:
    """Listen on these ports of one's own address, or near those that are taken, for this partner alone."""
    door = Door(token)
    sockets: list[trio.socket.SocketType] = []
    try:
        async with trio.open_nursery() as nursery:
            for port in wanted:
                if (listening := await _listening(own, port)) is not None:
                    sockets.append(listening)
                    nursery.start_soon(_accept, nursery, listening, partner[0])
            door.ports = tuple(s.getsockname()[1] for s in sockets)
            datagrams = _socket(own, socket.SOCK_DGRAM)
            sockets.append(datagrams)
            await datagrams.bind(at(own, 0))
            door.udp = datagrams.getsockname()[1]
            nursery.start_soon(_hear, door, datagrams, partner[0])
            yield door
            nursery.cancel_scope.cancel(reason="the other node is done")
    finally:
        for one in sockets:
            one.close()


async def _listening(own: Place, port: int) -> trio.socket.SocketType | None:
    for number in range(port, min(port + _SHIFTS, 65536)):
        made = _socket(own, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            await made.bind(at(own, number))
            made.listen(8)
        except OSError as taken:
            made.close()
            if taken.errno != errno.EADDRINUSE:
                return None
        else:
            return made
    return None


async def _accept(nursery: trio.Nursery, listening: trio.socket.SocketType, partner: str) -> None:
    while True:
        try:
            stream, address = await listening.accept()
        except OSError:
            return
        if address[0] == partner:
            nursery.start_soon(_take, stream)
        else:
            stream.close()


async def _take(stream: trio.socket.SocketType) -> None:
    left = BULK_BYTES
    try:
        with trio.move_on_after(BULK_S):
            while left > 0 and (chunk := await stream.recv(65536)):
                left -= len(chunk)
            if left <= 0:
                await stream.send(b"k")
    except OSError:
        pass  # the other side sees it as well, and says so
    finally:
        stream.close()


async def _hear(door: Door, datagrams: trio.socket.SocketType, partner: str) -> None:
    while True:
        try:
            data, address = await datagrams.recvfrom(65536)
        except OSError:
            continue  # an ICMP message to what was sent before
        if address[0] == partner and data.startswith(door.token):
            door.came(len(data) + _HEADERS[datagrams.family])


async def crossed(own: Place, partner: Place, ports: Sequence[int], udp: int, token: bytes, mtu: int) -> Way:
    """Try what the partner opened. ``largest`` is for the partner to say."""
    troubles: dict[int, str] = {}

    async def one(port: int) -> None:
        troubles[port] = await _dial(own, partner, port)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_send_sizes, own, at(partner, udp), token, mtu)
        for port in ports:
            nursery.start_soon(one, port)
    way = tuple(PeerPort(port, troubles[port]) for port in ports)
    free = next((p.port for p in way if not p.trouble), None)
    return Way(way, min(mtu, MOST_PACKET), bulk="" if free is None else await _bulk(own, partner, free))


async def _connected(own: Place, partner: Place, port: int) -> trio.socket.SocketType:
    made = _socket(own, socket.SOCK_STREAM)
    try:
        await made.bind(at(own, 0))
        await made.connect(at(partner, port))
    except BaseException:
        made.close()
        raise
    return made


async def _dial(own: Place, partner: Place, port: int) -> str:
    with trio.move_on_after(DIAL_S):
        try:
            (await _connected(own, partner, port)).close()
        except OSError as failed:
            return failed.strerror or str(failed)
        return ""
    return f"no answer within {DIAL_S:g} s"


async def _bulk(own: Place, partner: Place, port: int) -> str:
    made: trio.socket.SocketType | None = None
    try:
        with trio.move_on_after(BULK_S):
            made = await _connected(own, partner, port)
            stream = trio.SocketStream(made)
            await stream.send_all(bytes(BULK_BYTES))
            if await stream.receive_some(1) == b"k":
                return ""
            return f"the connection to port {port} was closed under {BULK_BYTES // 1024} KiB"
    except (OSError, trio.BrokenResourceError) as failed:
        return f"the connection to port {port} was lost ({failed})"
    finally:
        if made is not None:
            made.close()
    return f"{BULK_BYTES // 1024} KiB over TCP did not get through within {BULK_S:g} s"


async def _send_sizes(own: Place, place: Place, token: bytes, mtu: int) -> None:
    """Datagrams of the interface's own size and of usual ones below it, each several times, never cut."""
    made = _socket(own, socket.SOCK_DGRAM)
    family = made.family
    most = min(mtu, MOST_PACKET)
    try:
        await made.bind(at(own, 0))
        made.setsockopt(*_DISCOVER[family])
        for _ in range(_ROUNDS):
            for size in (most, *(usual for usual in _USUAL if usual < most)):
                try:
                    await made.sendto(token.ljust(size - _HEADERS[family], b"\0"), place)
                except OSError:
                    continue  # larger than an interface takes, or an ICMP message about an earlier one
            await trio.sleep(_ROUND_S)
    except OSError:
        return  # that nothing came is what the partner says
    finally:
        made.close()
