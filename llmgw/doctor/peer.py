"""Two nodes try each other: one waits with `llmgw doctor --peer-wait`, the other asks with `--peer`.

They speak lines of JSON over one TCP connection, in a fixed order: who they are, the clock a few times, then each
opens ports and the other tries them. The one that waits dials nobody but who asks.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import trio
from attrs import evolve, frozen

from llmgw.doctor.peer_door import MOST_PACKET, MOST_PORTS, Door, Place, crossed, opened
from llmgw.doctor.peer_facts import Peer, PeerPath, PeerPort, Way
from llmgw.errors import LlmgwError, first_error, leaves

PORT = 28029
FORMAT = 1
_DIAL_S, _ANSWER_S, _TALK_S = 3.0, 8.0, 15.0
_LINE_BYTES = 16 * 1024
_CLOCKS = 5
_NAME_CHARS = 255


class NoTalk(LlmgwError):
    """The other side does not say what was expected; ``reason`` is why."""

    def __init__(self, reason: str) -> None:
        super().__init__("the other node", reason)


@frozen
class End:
    """One of the two nodes: its name, its clock, what it resolves a name to, and the MTU at one of its addresses."""

    name: str
    wall: Callable[[], float]
    resolve: Callable[[str], Awaitable[tuple[str, ...]]]
    mtu: Callable[[str], Awaitable[int]]


class _Talk:
    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._rest = b""
        self.own: Place = stream.socket.getsockname()
        self.partner: Place = stream.socket.getpeername()

    async def say(self, **words: Any) -> None:
        try:
            await self._stream.send_all(json.dumps(words).encode() + b"\n")
        except (OSError, trio.BrokenResourceError) as lost:
            raise NoTalk(f"the connection was lost ({_words(lost)})") from lost

    async def _more(self) -> bytes:
        try:
            return bytes(await self._stream.receive_some(4096))
        except (OSError, trio.BrokenResourceError) as lost:
            raise NoTalk(f"the connection was lost ({_words(lost)})") from lost

    async def hear(self) -> dict[str, Any]:
        with trio.move_on_after(_ANSWER_S):
            while b"\n" not in self._rest:
                chunk = await self._more()
                if not chunk:
                    raise NoTalk("it ended the connection")
                self._rest += chunk
                if len(self._rest) > _LINE_BYTES:
                    raise NoTalk("it says too much")
            line, _, self._rest = self._rest.partition(b"\n")
            try:
                said = json.loads(line)
            except (ValueError, RecursionError) as wrong:
                raise NoTalk("it does not speak as llmgw doctor does") from wrong
            if not isinstance(said, dict):
                raise NoTalk("it does not speak as llmgw doctor does")
            if isinstance(said.get("no"), str):
                raise NoTalk(said["no"][:_NAME_CHARS])
            return said
        raise NoTalk(f"no answer within {_ANSWER_S:g} s")


async def ask_peer(end: End, host: str, port: int, ports: Sequence[int]) -> tuple[Peer, PeerPath | None]:
    """Try the node that waits at ``host``, in both directions. ``ports`` are those that each opens for the other.

    Ends within 18 s, and never fails: without a path the peer says why.
    """
    peer, stream = Peer(host), None
    try:
        with trio.move_on_after(_DIAL_S):
            stream = await trio.open_tcp_stream(host, port)
        if stream is None:
            return evolve(peer, trouble=f"port {port}: no answer within {_DIAL_S:g} s"), None
        async with stream:
            peer = evolve(peer, address=str(stream.socket.getpeername()[0]))
            with trio.move_on_after(_TALK_S), first_error():
                return await _ask(end, peer, _Talk(stream), ports[:MOST_PORTS])
    except OSError as failed:
        return evolve(peer, trouble=f"port {port}: {_words(failed)}"), None
    except NoTalk as failed:
        return evolve(peer, trouble=failed.reason), None
    return evolve(peer, trouble=f"it was not done within {_TALK_S:g} s"), None


def _words(failed: BaseException) -> str:
    """The kernel's words for it: trio says only that no attempt went well."""
    best = failed.__cause__ or failed
    if isinstance(best, BaseExceptionGroup):
        best = next(leaves(best))
    if isinstance(best, OSError) and best.errno is not None and best.errno > 0:
        return os.strerror(best.errno)
    return (best.strerror if isinstance(best, OSError) else None) or str(best) or type(best).__name__


async def _ask(end: End, peer: Peer, talk: _Talk, ports: Sequence[int]) -> tuple[Peer, PeerPath | None]:
    await talk.say(doctor=FORMAT, name=end.name)
    said = await talk.hear()
    if said.get("doctor") != FORMAT:
        raise NoTalk("it is of another version of llmgw doctor, or something else")
    peer = evolve(peer, name=_name(said.get("name")))
    path = PeerPath(
        address=str(talk.own[0]), seen=_address(said.get("seen")), named_there=_addresses(said.get("named")),
        named_here=await end.resolve(peer.name),
    )  # fmt: skip
    best = math.inf
    for _ in range(_CLOCKS):
        began, wall = trio.current_time(), end.wall()
        await talk.say(ask="clock")
        now = _number((await talk.hear()).get("now"))
        took = trio.current_time() - began
        if took < best:
            best = took
            path = evolve(path, rtt_ms=round(took * 1000, 2), ahead_s=round(now - wall - took / 2, 3))
    await talk.say(ask="open", ports=list(ports))
    path = evolve(path, there=await _there(end, talk, await talk.hear()))
    token = secrets.token_bytes(8)
    async with opened(talk.own, talk.partner, ports, token) as door:
        await talk.say(ask="dial", ports=list(door.ports), udp=door.udp, token=token.hex())
        back = _way(await talk.hear(), door.ports)
        return peer, evolve(path, back=evolve(back, largest=await door.largest(back.mtu)))


async def _there(end: End, talk: _Talk, said: dict[str, Any]) -> Way:
    udp, token = _ports([said.get("udp")])[0], _token(said.get("token"))
    mtu = await end.mtu(str(talk.own[0]))
    way = await crossed(talk.own, talk.partner, _ports(said.get("ports")), udp, token, mtu)
    await talk.say(ask="count", mtu=way.mtu)
    return evolve(way, largest=_size((await talk.hear()).get("largest")))


def _way(said: dict[str, Any], opened_ports: Sequence[int]) -> Way:
    found = said.get("ports")
    if not isinstance(found, list) or len(found) != len(opened_ports):
        raise NoTalk("it does not say which ports it tried")
    troubles = tuple(PeerPort(port, _text(why)) for port, why in zip(opened_ports, found, strict=True))
    return Way(troubles, _size(said.get("mtu")), bulk=_text(said.get("bulk")))


async def wait_for_peers(
    end: End,
    hosts: Sequence[str | None],
    port: int,
    tell: Callable[[str], None],
    *,
    task_status: trio.TaskStatus[list[trio.SocketListener]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Let other nodes try this one, one at a time, until cancelled. Raises ``OSError`` when it cannot listen."""
    one = trio.CapacityLimiter(1)
    listeners = [found for host in hosts for found in await trio.open_tcp_listeners(port, host=host)]

    async def serve(stream: trio.SocketStream) -> None:
        try:
            talk = _Talk(stream)
            with trio.move_on_after(_TALK_S), first_error():
                await _alone(end, talk, one, tell)
        except OSError:
            return  # it was gone before it said anything
        except NoTalk as failed:
            tell(f"{talk.partner[0]}: {failed.reason}")

    task_status.started(listeners)
    await trio.serve_listeners(serve, listeners)


async def _alone(end: End, talk: _Talk, one: trio.CapacityLimiter, tell: Callable[[str], None]) -> None:
    try:
        one.acquire_on_behalf_of_nowait(talk)
    except trio.WouldBlock:
        await talk.say(no="it is trying another node just now, ask again")
        return
    try:
        name = await _answer(end, talk)
        tell(f"{name} ({talk.partner[0]}) tried this node; what was found is shown there")
    finally:
        one.release_on_behalf_of(talk)


async def _answer(end: End, talk: _Talk) -> str:
    said = await talk.hear()
    if said.get("doctor") != FORMAT:
        await talk.say(no="the doctor that waits there is of another version")
        raise NoTalk("is of another version of llmgw doctor, or something else")
    name = _name(said.get("name"))
    named = await end.resolve(name)
    await talk.say(doctor=FORMAT, name=end.name, seen=str(talk.partner[0]), named=list(named))
    for _ in range(_CLOCKS):
        await talk.hear()
        await talk.say(now=end.wall())
    ports = _ports((await talk.hear()).get("ports"))
    token = secrets.token_bytes(8)
    async with opened(talk.own, talk.partner, ports, token) as door:
        await _let_in(talk, door)
    said = await talk.hear()
    udp, wanted, mtu = _ports([said.get("udp")])[0], _ports(said.get("ports")), await end.mtu(str(talk.own[0]))
    way = await crossed(talk.own, talk.partner, wanted, udp, _token(said.get("token")), mtu)
    await talk.say(ports=[p.trouble for p in way.ports], mtu=way.mtu, bulk=way.bulk)
    return name or "a node without a name"


async def _let_in(talk: _Talk, door: Door) -> None:
    await talk.say(ports=list(door.ports), udp=door.udp, token=door.token.hex())
    said = await talk.hear()
    await talk.say(largest=await door.largest(_size(said.get("mtu"))))


def _text(said: Any) -> str:
    if not isinstance(said, str):
        raise NoTalk("it does not speak as llmgw doctor does")
    return "".join(c if c.isprintable() else "?" for c in said[:_NAME_CHARS])


_name = _text


def _address(said: Any) -> str:
    try:
        return str(ipaddress.ip_address(_text(said)))
    except ValueError as wrong:
        raise NoTalk("it names an address that is none") from wrong


def _addresses(said: Any) -> tuple[str, ...]:
    if not isinstance(said, list):
        raise NoTalk("it does not say what a name comes to")
    return tuple(_address(one) for one in said[:MOST_PORTS])


def _whole(said: Any, least: int, most: int) -> int:
    if not isinstance(said, int) or isinstance(said, bool) or not least <= said <= most:
        raise NoTalk("it says a number that cannot be")
    return said


def _number(said: Any) -> float:
    if not isinstance(said, int | float) or isinstance(said, bool) or not abs(said) < 1e11:
        raise NoTalk("it says a time that cannot be")
    return float(said)


def _size(said: Any) -> int:
    return _whole(said, 0, MOST_PACKET)


def _ports(said: Any) -> tuple[int, ...]:
    if not isinstance(said, Iterable) or isinstance(said, str) or len(listed := list(said)) > MOST_PORTS:
        raise NoTalk("it does not name ports")
    return tuple(_whole(port, 1024, 65535) for port in listed)


def _token(said: Any) -> bytes:
    try:
        found = bytes.fromhex(_text(said))
    except ValueError as wrong:
        raise NoTalk("it does not speak as llmgw doctor does") from wrong
    if len(found) != 8:
        raise NoTalk("it does not speak as llmgw doctor does")
    return found
