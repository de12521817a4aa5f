"""The control plane's end: accept agents, check who they are, and hand each to its handler."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

import trio

from llmgw.errors import OperatorError, PeerError
from llmgw.link import identity
from llmgw.link.codec import Unknown
from llmgw.link.messages import PROTOCOL, Message, Refused, Register
from llmgw.link.protocol import DEFAULT_LIMITS, LinkLimits, Role
from llmgw.link.session import Session, open_session, turn_away
from llmgw.link.tcp import bound_unacknowledged
from llmgw.link.tls import TlsError, TlsStream, handshake, server_context, verified_chain
from llmgw.settings.daemon import Address, LinkListener
from llmgw.telemetry.logging import logger

Handler = Callable[[Session, Register], Awaitable[None]]
Check = Callable[[Register], Refused | None]

_HANDSHAKES_PER_TURN = 8
"""Handshakes begun in one turn of the event loop. Beginning is what costs: a thousand at once stall it for 0.3 s.
An agent that stalls later in its handshake keeps nobody else out."""

_BACKLOG = 1024

_ABRUPT = 2
"""An address with this many times its connections is hung up on without TLS: saying why would cost more than it."""

_log = logger("link")


async def serve(
    listener: LinkListener,
    handler: Handler,
    *,
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
    context = server_context(listener.tls)
    turn = trio.Semaphore(_HANDSHAKES_PER_TURN)
    open_of: Counter[str] = Counter()
    most = listener.connections_per_address
    async with AsyncExitStack() as stack:
        try:
            sockets = await trio.open_tcp_listeners(listener.listen.port, host=listener.listen.host, backlog=_BACKLOG)
        except OSError as cause:
            raise OperatorError(f"link listener {listener.listen}", f"cannot be opened: {cause.strerror}") from cause
        for opened in sockets:
            stack.push_async_exit(opened)

        async def accept(transport: trio.SocketStream) -> None:
            remote = _remote(transport)
            async with transport:
                if open_of[remote.host] >= _ABRUPT * most:
                    return
                open_of[remote.host] += 1
                try:
                    await shake_hands(transport, remote)
                except PeerError as ended:
                    _log.info("agent not served", remote=str(remote), reason=ended.reason)
                except Exception:  # noqa: BLE001
                    # The listener serves all other nodes too: one connection's fault is written down and ends it.
                    _log.exception("connection failed", remote=str(remote))
                finally:
                    open_of[remote.host] -= 1
                    if not open_of[remote.host]:
                        del open_of[remote.host]

        async def shake_hands(transport: trio.SocketStream, remote: Address) -> None:
            bound_unacknowledged(transport, limits.silence_s)
            stream: TlsStream = trio.SSLStream(transport, context, server_side=True)
            await _handshake(stream, str(remote), turn, handshake_s)
            if open_of[remote.host] > most:
                reason = f"{remote.host} holds more than {most} connections (link.connections_per_address)"
                _log.warning("agent turned away", remote=str(remote), reason=reason)
                await turn_away(stream, reason)
                return
            chain = identity.read_chain(verified_chain(stream))
            check = partial(_check, chain=chain, wall=wall, trust_domain=listener.trust_domain)
            node = identity.identity(chain[0], identity.node_uri(listener.trust_domain, "")) or ""
            await attend(stream, handler, check, peer=node, remote=str(remote), limits=limits)

        task_status.started(tuple(_address(s) for s in sockets))
        await trio.serve_listeners(accept, sockets)


async def attend(
    stream: trio.abc.Stream,
    handler: Handler,
    check: Check,
    *,
    peer: str,
    remote: str,
    limits: LinkLimits = DEFAULT_LIMITS,
) -> None:
    """Serve one agent over a stream whose other end is ``peer``: first message, ``check``, handler.

    Raises :class:`~llmgw.link.session.PeerGone` when the agent never got as far as its handler.
    """
    async with open_session(stream, Role.SERVER, peer=peer, remote=remote, limits=limits) as session:
        first = await session.receive()
        refused = check(first) if isinstance(first, Register) else _not_register(first)
        if refused is not None:
            _log.warning(
                "agent refused",
                remote=remote,
                claim=refused.claim,
                wanted=refused.wanted,
                found=refused.found,
                certificate=refused.certificate,
            )
            await session.refuse(refused)
            return
        assert isinstance(first, Register)
        try:
            await handler(session, first)
        except PeerError as ended:
            _log.info("session ended", node=first.node, remote=remote, reason=ended.reason)
        except Exception:  # noqa: BLE001
            # Caught here so that the agent learns of it too.
            _log.exception("session failed", node=first.node, remote=remote)
            session.close("the control plane failed to handle this session; its log says how")


async def _handshake(stream: TlsStream, remote: str, turn: trio.Semaphore, within_s: float) -> None:
    """Shake hands with an agent, once it has something to say and it is its turn."""
    thing = f"agent at {remote}"
    by = trio.current_time() + within_s
    with trio.move_on_at(by) as silent:
        await trio.lowlevel.wait_readable(stream.transport_stream.socket)
        async with turn:
            await trio.lowlevel.checkpoint()
    if silent.cancelled_caught:
        raise TlsError(thing, f"the TLS handshake was not begun within {within_s:g} s")
    await handshake(stream, thing, by - trio.current_time())


def _check(
    register: Register, *, chain: tuple[identity.Certificate, ...], wall: Callable[[], float], trust_domain: str
) -> Refused | None:
    refused = identity.check(chain, register.node, wall(), trust_domain)
    if refused is None and abs(register.protocol - PROTOCOL) > 1:
        older = "agent" if register.protocol < PROTOCOL else "control plane"
        remedy = f"upgrade the {older}"
        return Refused("protocol version", str(PROTOCOL), str(register.protocol), str(chain[0]), remedy)
    return refused


def _not_register(first: Message | Unknown) -> Refused:
    found = first.tag if isinstance(first, Unknown) else type(first).__name__
    return Refused("first message", "register", found, "", "this is no llmgw agent, or one that is too new")


def _remote(transport: trio.SocketStream) -> Address:
    try:
        host, port, *_ = transport.socket.getpeername()
    except OSError:
        return Address("unknown", 0)  # it is gone already
    return Address(host, port)


def _address(listener: trio.SocketListener) -> Address:
    host, port, *_ = listener.socket.getsockname()
    return Address(host, port)
