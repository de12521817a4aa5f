"""The listener: what one bad agent can do to it, and to the others. Nothing, and not for long."""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
import trio.testing
from attrs import evolve

from llmgw.errors import OperatorError
from llmgw.link.attend import Handler, attend
from llmgw.link.client import connect
from llmgw.link.messages import EnginesChanged, Heartbeat, Message, NotUnderstood, Register, Welcome
from llmgw.link.patience import DEFAULT_LIMITS, LinkLimits
from llmgw.link.protocol import LinkProtocol, Role
from llmgw.link.server import serve
from llmgw.link.session import LinkRefused, PeerGone, Session, open_session
from llmgw.link.tls import client_context
from llmgw.settings.daemon import Address, LinkListener
from tests.link.samples import TRUST_DOMAIN, WELCOME, Pki, register


async def welcome(session: Session, _: Register) -> None:
    await session.send(WELCOME)
    await session.receive()


@asynccontextmanager
async def listening(
    pki: Pki,
    handler: Handler = welcome,
    *,
    limits: LinkLimits = DEFAULT_LIMITS,
    handshake_s: float = 5.0,
    wall: Callable[[], float] = time.time,
) -> AsyncIterator[Address]:
    async with trio.open_nursery() as nursery:
        config = LinkListener(pki.server, Address("127.0.0.1", 0), trust_domain=TRUST_DOMAIN)
        (address,) = await nursery.start(
            partial(serve, config, handler, limits=limits, handshake_s=handshake_s, wall=wall)
        )
        yield address
        began = time.monotonic()
        nursery.cancel_scope.cancel(reason="test over")
    assert time.monotonic() - began < 1, "the listener and all its sessions end within a second"


async def is_welcomed(address: Address, pki: Pki) -> bool:
    with trio.fail_after(5):
        async with connect(address, pki.node(), TRUST_DOMAIN) as session:
            assert session.peer == "localhost"
            await session.send(register())
            return isinstance(await session.receive(), Welcome)


async def test_a_handler_that_fails_ends_its_own_session_and_says_so(pki: Pki) -> None:
    async def faulty(session: Session, first: Register) -> None:
        if first.address == "bad":
            raise ZeroDivisionError
        await welcome(session, first)

    async with listening(pki, faulty) as address:
        async with connect(address, pki.node(), TRUST_DOMAIN) as session:
            await session.send(evolve(register(), address="bad"))
            with pytest.raises(PeerGone, match="the control plane failed to handle this session"):
                await session.receive()
        assert await is_welcomed(address, pki)


async def test_a_fault_outside_of_any_handler_ends_one_connection(pki: Pki) -> None:
    faults = [RuntimeError("no clock")]

    def wall() -> float:
        if faults:
            raise faults.pop()
        return time.time()

    async with listening(pki, wall=wall) as address:
        with pytest.raises(PeerGone):
            await is_welcomed(address, pki)
        assert await is_welcomed(address, pki)


async def test_a_handler_that_returns_ends_the_session(pki: Pki) -> None:
    async def brief(session: Session, _: Register) -> None:
        await session.send(WELCOME)

    async with listening(pki, brief) as address:
        async with connect(address, pki.node(), TRUST_DOMAIN) as session:
            await session.send(register())
            assert await session.receive() == WELCOME, "what was sent before the end still arrives"
            with pytest.raises(PeerGone, match="the control plane ended the session"):
                await session.receive()


async def test_the_first_message_must_be_register(pki: Pki, capsys: pytest.CaptureFixture[str]) -> None:
    async def refused(first: Message, found: str) -> None:
        async with connect(address, pki.node(), TRUST_DOMAIN) as session:
            await session.send(first)
            with pytest.raises(LinkRefused, match=f"wanted register, found {found}"):
                await session.receive()

    async with listening(pki) as address:
        for _ in range(4):
            await refused(Heartbeat(1), "Heartbeat")
        await refused(EnginesChanged((), ()), "EnginesChanged")
        logged = [line for line in capsys.readouterr().out.splitlines() if "agent refused" in line]
        assert len(logged) == 2, "once a change, not at every try"
        assert "times=4" in logged[1]
        assert await is_welcomed(address, pki)
        await refused(EnginesChanged((), ()), "EnginesChanged")
        assert "agent refused" in capsys.readouterr().out, "it had gone well in between"


async def test_agents_that_stall_anywhere_keep_nobody_out(pki: Pki) -> None:
    """Silent after TCP, in the middle of the handshake, and after it: twenty of each."""
    async with listening(pki, handshake_s=1, limits=LinkLimits(open_s=1)) as address:
        context = client_context(pki.node())
        stalled: list[trio.abc.AsyncResource] = []
        for _ in range(20):
            stalled.append(await trio.open_tcp_stream("127.0.0.1", address.port))
            hello = await trio.open_tcp_stream("127.0.0.1", address.port)
            to_peer, from_peer = ssl.MemoryBIO(), ssl.MemoryBIO()
            with pytest.raises(ssl.SSLWantReadError):
                context.wrap_bio(from_peer, to_peer, server_hostname="127.0.0.1").do_handshake()
            await hello.send_all(to_peer.read())
            stalled.append(hello)
            shaken = trio.SSLStream(
                await trio.open_tcp_stream("127.0.0.1", address.port), context, server_hostname="127.0.0.1"
            )
            await shaken.do_handshake()
            stalled.append(shaken)
        began = time.monotonic()
        assert await is_welcomed(address, pki)
        assert time.monotonic() - began < 1
        for stream in stalled:
            transport = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
            assert isinstance(transport, trio.SocketStream)
            with trio.fail_after(4):  # each is hung up on within its bound
                while await transport.receive_some():
                    pass
            await transport.aclose()


async def test_a_crowd_is_served(pki: Pki) -> None:
    """A hundred agents at once, as after a restart of the control plane."""
    async with listening(pki) as address, trio.open_nursery() as nursery:
        for _ in range(100):

            async def one() -> None:
                assert await is_welcomed(address, pki)

            nursery.start_soon(one)


async def test_ending_against_a_peer_that_reads_nothing(pki: Pki) -> None:
    """TCP windows shut, a writer in the middle of a write: the end comes within a second all the same."""
    full = trio.Event()

    async def flood(session: Session, _: Register) -> None:
        with trio.move_on_after(0.5):
            while True:
                await session.send(NotUnderstood("x" * 100_000))
        full.set()
        await trio.sleep_forever()

    async with listening(pki, flood) as address:
        stream = trio.SSLStream(
            await trio.open_tcp_stream("127.0.0.1", address.port),
            client_context(pki.node()),
            server_hostname="127.0.0.1",
        )
        await stream.do_handshake()
        # An agent with windows so large that only TCP can stop the control plane.
        agent = LinkProtocol(Role.AGENT, 0, LinkLimits(window_bytes=2**30))
        await stream.send_all(agent.data_to_send())
        while not agent.opened:
            agent.receive(bytes(await stream.receive_some()), 0)
        agent.send(register(), 0)
        await stream.send_all(agent.data_to_send())
        await full.wait()
        # listening() now checks how long its end takes
    await trio.aclose_forcefully(stream)


async def test_an_address_in_use_is_named(pki: Pki) -> None:
    async with listening(pki) as address:
        config = LinkListener(pki.server, Address("127.0.0.1", address.port), trust_domain=TRUST_DOMAIN)
        with pytest.raises(OperatorError, match=rf"link listener 127\.0\.0\.1:{address.port}: cannot be opened"):
            await serve(config, welcome)


async def test_ipv6(pki: Pki) -> None:
    async with trio.open_nursery() as nursery:
        config = LinkListener(pki.server, Address("::1", 0), trust_domain=TRUST_DOMAIN)
        try:
            (address,) = await nursery.start(partial(serve, config, welcome))
        except* OperatorError:
            pytest.skip("no IPv6 here")
        assert str(address).startswith("[::1]:")
        assert await is_welcomed(address, pki)
        nursery.cancel_scope.cancel()


async def test_attend_works_on_any_stream(autojump_clock: trio.testing.MockClock) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(attend, theirs, welcome, lambda _: None, peer="n1", remote="memory"))
        async with open_session(ours, Role.AGENT, peer="s", remote="memory") as session:
            await session.send(register())
            assert await session.receive() == WELCOME
