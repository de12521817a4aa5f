"""The control plane's end: accept agents, check who they are, and hand each to its handler.

Whoever offers the protocol for joining is answered by :mod:`llmgw.link.joining` and never gets near a session.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TypeVar

import trio
from attrs import frozen

from llmgw.errors import OperatorError, PeerError
from llmgw.link import identity, joining
from llmgw.link.attempts import Attempts, host_of
from llmgw.link.attend import Handler, attend
from llmgw.link.crowd import HURRIED_S, Crowd, Place
from llmgw.link.hello import offered_protocols
from llmgw.link.identity import Certificate, Rules
from llmgw.link.messages import (
    PROTOCOL,
    CertificateIssued,
    Join,
    Joined,
    Refused,
    Register,
    RenewCertificate,
)
from llmgw.link.patience import DEFAULT_LIMITS, LinkLimits
from llmgw.link.renewal import RENEWAL
from llmgw.link.repeats import Repeats
from llmgw.link.session import Watch, turn_away
from llmgw.link.tcp import Metered, bound_unacknowledged
from llmgw.link.tls import JOIN_ALPN, TlsError, TlsStream, handshake, verified_chain
from llmgw.link.trust import Trust, TrustFiles
from llmgw.settings.daemon import Address, LinkListener
from llmgw.telemetry.logging import logger

_Kind = TypeVar("_Kind")

_HANDSHAKES_PER_TURN = 8
"""Handshakes begun in one turn of the event loop. Beginning is what costs: a thousand at once stall it for 0.3 s.
An agent that stalls later in its handshake keeps nobody else out."""

_FAILURES, _FAILED_S = 20, 1.0
"""From so many connections a second on that came to nothing, an address gets the place of each back only after this
time (seconds): handshakes that failed, certificates that were refused, agents that did not register."""

_BACKLOG = 1024
_ISSUED_ELSEWHERE = "this control plane issues none (server.yaml has no link.issuing)"
_log = logger("link")


def _nobody(_remote: str, _node: str, _refused: Refused) -> None:
    """Nobody wants to know."""


@frozen
class Gate:
    """Who gets in. ``trust`` and ``rules`` are asked anew for each connection.

    ``join`` decides who gets a first certificate, ``renew`` about one that expired at most ``grace_s`` ago; without
    them nobody does. ``refused`` is told of every agent that was turned away after its handshake.
    """

    trust: Callable[[], Trust]
    rules: Callable[[], Rules]
    join: joining.Welcome | None = None
    renew: (
        Callable[[tuple[Certificate, ...], str, RenewCertificate, str], Awaitable[CertificateIssued | Refused]] | None
    ) = None
    grace_s: float = 0.0
    refused: Callable[[str, str, Refused], None] = _nobody


def gate_of(listener: LinkListener) -> Gate:
    """The gate that the files alone make, read once. Raises :class:`OperatorError` when they cannot be used."""
    files = TrustFiles(listener)
    rules = Rules(listener.trust_domain, nodes=None if listener.nodes is None else frozenset(listener.nodes))
    return Gate(lambda: files.now, lambda: rules)


async def serve(
    listener: LinkListener,
    handler: Handler,
    *,
    gate: Gate | None = None,
    limits: LinkLimits = DEFAULT_LIMITS,
    handshake_s: float = 5.0,
    wall: Callable[[], float] = time.time,
    task_status: trio.TaskStatus[tuple[Address, ...]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Accept agents until cancelled. Started with the addresses that it listens on.

    Every agent gets its own task: TLS handshake, first message, identity check, then ``handler(session,
    register)``; the session ends when the handler does. A handler that fails is logged and ends only its session.
    Raises :class:`OperatorError` when the files or the address cannot be used.
    """
    gate = gate or gate_of(listener)
    crowd = Crowd(listener.connections_per_address)
    watch = Watch(limits)
    repeats = Repeats()
    doors = _Doors(gate, handler, limits, handshake_s, wall, watch, repeats)
    turn = trio.Semaphore(_HANDSHAKES_PER_TURN)
    async with AsyncExitStack() as stack:
        try:
            sockets = await trio.open_tcp_listeners(listener.listen.port, host=listener.listen.host, backlog=_BACKLOG)
        except OSError as cause:
            raise OperatorError(f"link listener {listener.listen}", f"cannot be opened: {cause.strerror}") from cause
        for opened in sockets:
            stack.push_async_exit(opened)

        failures = Attempts(_FAILURES, 1.0)

        def not_served(remote: str, reason: str) -> None:
            if times := repeats.times(host_of(remote), reason, trio.current_time()):
                _log.warning("connection not served", remote=remote, reason=reason, times=times)

        async def served(transport: trio.SocketStream, remote: str, place: Place) -> None:
            try:
                failed = not await doors.open(transport, remote, turn, place)
            except PeerError as ended:
                not_served(remote, ended.reason)
                failed = not place.agent
            if failed:
                # It is told why by now. Who goes on like this finds its place among its address's still taken.
                failures.failed(host_of(remote), trio.current_time())
                if failures.wait_s(host_of(remote), trio.current_time()) > 0:
                    await trio.sleep(_FAILED_S)

        async def accept(transport: trio.SocketStream) -> None:
            remote = _remote(transport)
            bound_unacknowledged(transport, limits.silence_s)
            async with transport:
                try:
                    async with crowd.one_more(remote) as place:
                        if place is not None:
                            with place.scope:
                                await served(transport, remote, place)
                            if place.scope.cancelled_caught:
                                not_served(remote, f"unknown after {HURRIED_S:g} s, while others of its address wait")
                except Exception:  # noqa: BLE001
                    # The listener serves all other nodes too: one connection's fault is written down and ends it.
                    _log.exception("connection failed", remote=remote)

        task_status.started(tuple(_address(s) for s in sockets))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.run)
            await trio.serve_listeners(accept, sockets)


class _Doors:
    """The two ways in: for agents with a certificate, and for those who want one."""

    def __init__(
        self,
        gate: Gate,
        handler: Handler,
        limits: LinkLimits,
        handshake_s: float,
        wall: Callable[[], float],
        watch: Watch,
        repeats: Repeats,
    ) -> None:
        self._gate = gate
        self._handler = handler
        self._limits = limits
        self._handshake_s = handshake_s
        self._wall = wall
        self._watch = watch
        self._repeats = repeats
        self._joining: Counter[str] = Counter()
        self._attempts = Attempts()

    async def open(self, transport: trio.SocketStream, remote: str, turn: trio.Semaphore, place: Place) -> bool:
        """Serve a connection to its end; whether it was worth its handshake: a certificate refused was not."""
        by = trio.current_time() + self._handshake_s
        trust = self._gate.trust()
        wants = await _within(by, f"agent at {remote}", self._handshake_s, partial(_wants, transport, turn))
        join = self._gate.join
        if trust.joining is None or join is None or JOIN_ALPN.encode() not in wants:
            stream: TlsStream = trio.SSLStream(Metered(transport), trust.link, server_side=True)
            await handshake(stream, f"agent at {remote}", self._handshake_s, by=by)
            return await self._agent(stream, remote, place)
        thing = f"somebody who wants to join at {remote}"
        host = host_of(remote)
        if self._joining[host] >= joining.AT_ONCE_ADDRESS or self._joining.total() >= joining.AT_ONCE:
            raise TlsError(
                thing, f"{self._joining[host]} of this address and {self._joining.total()} in all are joining"
            )
        self._joining[host] += 1
        try:
            stream = trio.SSLStream(Metered(transport), trust.joining, server_side=True)
            await handshake(stream, thing, self._handshake_s, JOIN_ALPN, by=by)
            await joining.answer(stream, remote, trust.bundle_pem, partial(self._join, join))
        finally:
            self._joining[host] -= 1
            self._joining += Counter()  # drops those that are 0
        return True

    async def _join(self, welcome: joining.Welcome, request: Join, remote: str) -> Joined | Refused:
        host = host_of(remote)
        if (wait_s := self._attempts.wait_s(host, trio.current_time())) > 0:
            found = f"too many attempts from {host} that failed"
            return Refused("token", "fewer attempts", found, "none", f"try again in {wait_s:.0f} s")
        answered = await welcome(request, remote)
        if isinstance(answered, Refused):
            self._attempts.failed(host, trio.current_time())
        return answered

    async def _agent(self, stream: TlsStream, remote: str, place: Place) -> bool:
        rules = self._gate.rules()
        chain = identity.read_chain(verified_chain(stream))
        node = identity.identity(chain[0], identity.node_uri(rules.trust_domain, "")) or ""
        welcome = True
        # Who will be refused is told that, like any agent.
        if place.crowded and identity.check(chain, node, self._wall(), rules) is None:
            if times := self._repeats.times(host_of(remote), place.crowded, trio.current_time()):
                _log.warning("agent turned away", remote=remote, reason=place.crowded, times=times)
            await turn_away(stream, place.crowded)
            return False

        def refuse(node: str, refused: Refused) -> Refused:
            nonlocal welcome
            welcome = False
            self._gate.refused(remote, node, refused)
            return refused

        def check(register: Register) -> Refused | None:
            refused = _check(register, chain, self._wall(), self._gate.rules())
            if refused is None and place.crowded:
                remedy = "raise link.connections_per_address in server.yaml and restart the server"
                refused = Refused("connections of an address", "fewer", place.crowded, str(chain[0]), remedy)
            if refused is not None:
                return refuse(register.node, refused)
            place.registers()
            return None

        async def renew(request: RenewCertificate) -> CertificateIssued | Refused:
            refused = self._outdated(chain, node)
            if refused is None and self._gate.renew is not None:
                answered = await self._gate.renew(chain, node, request, remote)
                if isinstance(answered, CertificateIssued):
                    return answered
                refused = answered
            return refuse(node, refused or _no_renewal(chain))

        await attend(
            stream,
            self._handler,
            check,
            peer=node,
            remote=remote,
            limits=self._limits,
            chain=chain,
            renew=renew,
            watch=self._watch,
            repeats=self._repeats,
        )
        return welcome

    def _outdated(self, chain: tuple[Certificate, ...], node: str) -> Refused | None:
        """Why a certificate must not be renewed on a connection of its own; ``None`` if it may.

        Only one that has expired may: whoever has one that is valid connects, and is seen to.
        """
        now, rules = self._wall(), self._gate.rules()
        if identity.check(chain, node, now, rules) is None:
            found = f"one that is valid until {identity.day(chain[0].not_after)}"
            remedy = "connect as usual; this node's clock may be ahead of the control plane's"
            return Refused(RENEWAL, "a certificate that has expired", found, str(chain[0]), remedy)
        refused = identity.check(chain, node, now, rules, grace_s=self._gate.grace_s)
        if refused is not None and refused.claim == "validity":
            days = self._gate.grace_s / 86400
            wanted = f"a certificate that expired at most {days:g} days ago" if days else "a certificate that is valid"
            remedy = f"join again with a new token: llmgw ctl token create --node {node}"
            if self._gate.join is None:
                remedy = f"{_ISSUED_ELSEWHERE}: have one issued, as the first one was"
            return Refused("validity", wanted, refused.found, refused.certificate, remedy)
        return refused


async def _wants(transport: trio.SocketStream, turn: trio.Semaphore) -> tuple[bytes, ...]:
    """The protocols that the other end offers, once it has something to say and it is its turn."""
    await trio.lowlevel.wait_readable(transport.socket)
    wants = await offered_protocols(transport.socket)
    async with turn:
        await trio.lowlevel.checkpoint()
    return wants


async def _within(by: float, thing: str, within_s: float, work: Callable[[], Awaitable[_Kind]]) -> _Kind:
    try:
        with trio.fail_at(by):
            return await work()
    except trio.TooSlowError as slow:
        raise TlsError(thing, f"the TLS handshake was not begun within {within_s:g} s") from slow


def _check(register: Register, chain: tuple[Certificate, ...], now: float, rules: Rules) -> Refused | None:
    clock = register.clock or None
    refused = identity.check(chain, register.node, now, rules, clock=clock)
    if refused is None and abs(register.protocol - PROTOCOL) > 1:
        older = "agent" if register.protocol < PROTOCOL else "control plane"
        remedy = f"upgrade the {older}"
        return Refused("protocol version", str(PROTOCOL), str(register.protocol), str(chain[0]), remedy)
    return refused


def _no_renewal(chain: tuple[Certificate, ...]) -> Refused:
    wanted = "a certificate from whoever issues them here"
    remedy = f"{_ISSUED_ELSEWHERE}: have one issued, as the first one was"
    return Refused(RENEWAL, wanted, "a request to renew it", str(chain[0]), remedy)


def _remote(transport: trio.SocketStream) -> str:
    try:
        host, port, *_ = transport.socket.getpeername()
    except OSError:
        return "unknown"
    return str(Address(host, port))


def _address(listener: trio.SocketListener) -> Address:
    host, port, *_ = listener.socket.getsockname()
    return Address(host, port)
