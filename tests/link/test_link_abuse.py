"""Peers that want too much: each is told to calm down, costs little, and nobody else notices."""

from __future__ import annotations

import ssl
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import h2.events
import pytest
import trio
import trio.testing
from attrs import evolve
from h2.errors import ErrorCodes
from hyperframe.frame import DataFrame, PingFrame
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.errors import PeerError
from llmgw.link.attend import attend
from llmgw.link.client import connect
from llmgw.link.codec import UP, ExcessiveError, MalformedError, decode, encode
from llmgw.link.crowd import HURRIED_S
from llmgw.link.messages import Message, NotUnderstood, Register
from llmgw.link.patience import LinkLimits
from llmgw.link.protocol import Ended, LinkProtocol, Role
from llmgw.link.server import Gate, gate_of, serve
from llmgw.link.session import LinkRefused, PeerGone, Session, open_session
from llmgw.link.tls import client_context
from llmgw.settings.daemon import Address, LinkListener
from tests.link.samples import TRUST_DOMAIN, WELCOME, Pki, register, report
from tests.link.test_link_protocol import Ends, RawPeer, attacked, frame, goodbye, opened, step_to

MIB = 1024 * 1024


# The protocol alone


def test_headers_are_bounded() -> None:
    server, agent = LinkProtocol(Role.SERVER, 0), RawPeer(Role.AGENT)
    agent.exchange(server)
    agent.h2.send_headers(
        1,
        [
            (":method", "POST"),
            (":scheme", "https"),
            (":authority", "x"),
            (":path", "/"),
            *((f"x-{n}", "y" * 100) for n in range(80)),
        ],
    )
    heard = agent.exchange(server)
    assert goodbye(heard) is ErrorCodes.ENHANCE_YOUR_CALM
    assert server.ended is not None
    assert "header" in server.ended.reason
    (told,) = (e.additional_data for e in heard if isinstance(e, h2.events.ConnectionTerminated))
    assert told == server.ended.reason.encode(), "it is told why, not only that"


def test_frames_of_hardly_anything_are_bounded() -> None:
    payload = encode(NotUnderstood("x" * 5000))
    server, heard = attacked(*(DataFrame(1, data=payload[n : n + 1]) for n in range(501)))
    assert goodbye(heard) is ErrorCodes.ENHANCE_YOUR_CALM
    assert server.ended == Ended("the other end sent more than 500 DATA frames below 64 bytes within a second")


def test_a_message_that_never_becomes_whole_is_given_up() -> None:
    """A byte now and then keeps the link alive, not the message."""
    ends = opened()
    ends.agent.send(register(), 0)
    ends.settle()
    ends.server.take()
    ends.server.send(WELCOME, 0)
    ends.settle()
    ends.server.receive(DataFrame(1, data=(1000).to_bytes(4, "big")).serialize(), 0.0)
    second = 0
    while ends.server.ended is None:
        second += 1
        ends.server.receive(DataFrame(1, data=b"x").serialize(), float(second))
        step_to(ends.server, float(second))
    assert second == 60
    assert ends.server.ended == Ended("a message was not whole within 60 s")
    ends.agent.receive(ends.server.data_to_send(), 60)
    assert ends.agent.ended == Ended("closed by the other end: a message was not whole within 60 s")


@pytest.mark.parametrize("opens", [False, True])
def test_whoever_says_nothing_is_told_to_calm_down(opens: bool) -> None:
    server, agent = LinkProtocol(Role.SERVER, 0), RawPeer(Role.AGENT)
    if opens:
        agent.request()
        agent.exchange(server)
    step_to(server, 6)
    assert goodbye(agent.h2.receive_data(server.data_to_send())) is ErrorCodes.ENHANCE_YOUR_CALM


FRAMES = st.builds(
    frame, st.integers(0, 9), st.sampled_from([0, 1, 4, 8, 5]), st.sampled_from([0, 1, 3]), st.binary(max_size=20)
)


@settings(max_examples=200)
@given(st.lists(FRAMES, max_size=30))
def test_nobody_makes_us_reset_streams_again_and_again(frames: list[bytes]) -> None:
    """MadeYouReset: frames that are wrong in a way that each is answered with RST_STREAM."""
    server, agent = LinkProtocol(Role.SERVER, 0), RawPeer(Role.AGENT)
    agent.request()
    server.receive(agent.h2.data_to_send(), 0)
    out = server.data_to_send()
    for each in frames:
        server.receive(each, 0)
        out += server.data_to_send()
    resets = at = 0
    while at < len(out):
        resets += out[at + 3] == 3
        at += 9 + int.from_bytes(out[at : at + 3], "big")
    assert resets <= 1


STEPS = st.one_of(
    st.tuples(st.sampled_from(["say up", "say down"]), st.integers(0, 9000)),
    st.tuples(st.sampled_from(["carry up", "carry down"]), st.integers(1, 20_000)),
    st.tuples(st.sampled_from(["take up", "take down"]), st.just(0)),
    st.tuples(st.just("wait both"), st.integers(1, 4)),
    st.tuples(st.sampled_from(["lose up", "lose down"]), st.just(0)),
)


@given(st.lists(STEPS, max_size=50))
def test_a_connection_that_loses_everything_from_some_point_is_given_up_by_both(steps: list[tuple[str, int]]) -> None:
    """In any pieces and at any speed: what arrives is the beginning of what was said, and silence ends both ends."""
    ends = Ends(LinkLimits(message_bytes=20_000, window_bytes=65_535, unsent_bytes=5_000))
    sender, taker = {"up": ends.agent, "down": ends.server}, {"up": ends.server, "down": ends.agent}
    said: dict[str, list[Message]] = {"up": [], "down": []}
    heard: dict[str, list[Any]] = {"up": [], "down": []}
    lost: set[str] = set()

    def carry(up: int, down: int) -> None:
        for way, queue in (("up", ends.up), ("down", ends.down)):
            if way in lost:
                queue.clear()
        ends.carry(0 if "up" in lost else up, 0 if "down" in lost else down)

    for step, size in [*steps, ("lose up", 0), ("lose down", 0)]:
        verb, way = step.split()
        match verb:
            case "say" if sender[way].room:
                said[way].append(NotUnderstood(f"{len(said[way])} {'x' * size}"))
                sender[way].send(said[way][-1], ends.now)
            case "carry":
                carry(size if way == "up" else 0, size if way == "down" else 0)
            case "take" if (message := taker[way].take()) is not None:
                heard[way].append(message)
            case "lose":
                lost.add(way)
            case "wait":
                for end in (ends.agent, ends.server):
                    step_to(end, ends.now + size)
                ends.now += size
    for end in (ends.agent, ends.server):
        step_to(end, ends.now + 30)
        assert end.ended is not None, "within 30 s"
    for way in ("up", "down"):
        assert heard[way] == said[way][: len(heard[way])]


# What a message may cost


def test_a_message_of_too_many_parts_is_not_even_parsed() -> None:
    payload = b'{"type":"x","a":[' + b",".join([b"[]"] * 200_000) + b"]}"
    with pytest.raises(ExcessiveError, match="has 400002 parts"):
        decode(payload, UP)


def test_faults_by_the_thousand_are_not_collected() -> None:
    """A fault costs a thousand times what a value costs: a megabyte of them was measured to take 15 s."""
    payload = b'{"type":"heartbeat","sequence":1,"loads":[' + b",".join([b"7"] * 20_000) + b"]}"
    began = time.thread_time()
    with pytest.raises(MalformedError) as caught:
        decode(payload, UP)
    assert "$.loads[2]" in str(caught.value)
    assert "more" not in str(caught.value)
    assert time.thread_time() - began < 1


# Sessions


class Steps(trio.abc.Instrument):
    """The most processor time that any task took before it let others go on."""

    def __init__(self) -> None:
        self.longest_s = self._began = 0.0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.longest_s = max(self.longest_s, time.thread_time() - self._began)


async def accept(session: Session, _: Register) -> None:
    await session.send(WELCOME)
    with suppress(PeerGone):
        while True:
            await session.receive()


def test_a_large_message_is_read_beside_the_others() -> None:
    large = evolve(register(), shards=tuple(evolve(report(), shard=f"m-{n}.0") for n in range(700)))
    payload = encode(large)[4:]
    began = time.thread_time()
    decode(payload, UP)
    alone_s = time.thread_time() - began
    steps = Steps()
    seen = []

    async def main() -> None:
        ours, theirs = trio.testing.memory_stream_pair()

        async def handler(session: Session, first: Register) -> None:
            seen.append(len(first.shards))
            await session.send(WELCOME)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(attend, theirs, handler, lambda _: None, peer="n1", remote="memory"))
            async with open_session(ours, Role.AGENT, peer="s", remote="memory") as session:
                session._protocol._pending += len(payload).to_bytes(4, "big") + payload  # encoded already
                session._to_write.unpark_all()
                assert await session.receive() == WELCOME

    trio.run(main, instruments=[steps])
    assert seen == [700]
    assert steps.longest_s < alone_s * 0.6, "not decoded in a step of the loop"


async def test_a_peer_that_costs_much_time_waits(autojump_clock: trio.testing.MockClock) -> None:
    """Each message here costs ten milliseconds or so, and there is no end of them: nine tenths of the time are free."""
    ours, theirs = trio.testing.memory_stream_pair()
    large = evolve(register(), shards=tuple(evolve(report(), shard=f"m-{n}.0") for n in range(200)))
    taken = 0

    async def handler(session: Session, _: Register) -> None:
        nonlocal taken
        await session.send(WELCOME)
        with suppress(PeerGone):
            while True:
                await session.receive()
                taken += 1

    spent_s = 0.0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(attend, theirs, handler, lambda _: None, peer="n1", remote="memory"))
        async with open_session(ours, Role.AGENT, peer="s", remote="memory") as session:
            await session.send(large)
            await session.receive()
            began = time.thread_time()
            with trio.move_on_after(10):
                while True:
                    await session.send(large)
            spent_s = time.thread_time() - began
        nursery.cancel_scope.cancel()
    assert taken > 10
    assert spent_s < 10 * 0.5, "ten seconds, of which the peer had about one; the rest is the sender's own work"


@asynccontextmanager
async def socket_pair() -> AsyncIterator[tuple[trio.SocketStream, trio.SocketStream]]:
    """Real TCP, whose buffers are the kernel's."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    ours = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
    theirs = await listener.accept()
    async with listener, ours, theirs:
        yield ours, theirs


class ByHand:
    """An agent played by hand over a stream: it reads only when it is told to."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.protocol = LinkProtocol(Role.AGENT, 0, LinkLimits(window_bytes=2**30))

    async def flush(self) -> None:
        while data := self.protocol.data_to_send():
            await self.stream.send_all(data)

    async def open(self) -> None:
        await self.flush()
        while not self.protocol.opened:
            self.protocol.receive(bytes(await self.stream.receive_some()), 0)
        self.protocol.send(register(), 0)
        await self.flush()


async def growth(
    handler: Callable[[Session, Register], Awaitable[None]], abuse: Callable[[ByHand], Awaitable[None]]
) -> int:
    """The most bytes that a session's end of this process held while its peer did as it liked."""
    async with socket_pair() as (ours, theirs), trio.open_nursery() as nursery:
        agent = ByHand(ours)

        async def attended() -> None:
            with suppress(PeerGone):
                await attend(theirs, handler, lambda _: None, peer="n1", remote="m", limits=LinkLimits(send_s=1.5))

        nursery.start_soon(attended)
        await agent.open()
        await trio.sleep(0.05)
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            with trio.move_on_after(1.0):
                with suppress(trio.BrokenResourceError):
                    await abuse(agent)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        nursery.cancel_scope.cancel()
    return peak - before


async def reads_nothing(agent: ByHand) -> None:
    await trio.sleep_forever()


async def test_a_peer_that_reads_nothing_costs_less_than_a_megabyte() -> None:
    """Its windows are a gigabyte wide; what stops us is TCP, and then our own bound."""
    sent = 0

    async def talk(session: Session, _: Register) -> None:
        nonlocal sent
        message = NotUnderstood("x" * 20_000)
        while True:
            await session.send(message)
            sent += 1

    held = await growth(talk, reads_nothing)
    assert sent * 20_000 > 256 * 1024, "it was sent until nothing more went"
    assert held < MIB, f"{held / MIB:.2f} MiB"


async def test_a_peer_whose_messages_nobody_takes_costs_less_than_a_megabyte() -> None:
    async def deaf(session: Session, _: Register) -> None:
        await trio.sleep_forever()

    async def talks(agent: ByHand) -> None:
        while True:
            while agent.protocol._h2.local_flow_control_window(1) > 17_000:
                agent.protocol.send(NotUnderstood("x" * 16_000), 0)
                await agent.flush()
            agent.protocol.receive(bytes(await agent.stream.receive_some()), 0)  # for ever, once the window is shut

    held = await growth(deaf, talks)
    assert held < MIB, f"{held / MIB:.2f} MiB"


async def test_a_peer_that_asks_and_does_not_read_costs_less_than_a_megabyte() -> None:
    async def pings(agent: ByHand) -> None:
        ping = PingFrame(0, opaque_data=b"12345678").serialize()
        while True:
            await agent.stream.send_all(ping * 20)
            await trio.sleep(0.1)

    held = await growth(accept, pings)
    assert held < MIB, f"{held / MIB:.2f} MiB"


# The listener


@asynccontextmanager
async def listening(pki: Pki, *, gate: Gate | None = None, **settings_: Any) -> AsyncIterator[Address]:
    async with trio.open_nursery() as nursery:
        config = LinkListener(pki.server, Address("127.0.0.1", 0), trust_domain=TRUST_DOMAIN, **settings_)
        (address,) = await nursery.start(partial(serve, config, accept, gate=gate))
        yield address
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def agent_of(address: Address, pki: Pki, node: str = "n1") -> AsyncIterator[Session]:
    async with connect(address, pki.node(node), TRUST_DOMAIN) as session:
        await session.send(register(node))
        assert await session.receive() == WELCOME
        yield session


async def test_one_address_holds_so_many_connections(pki: Pki) -> None:
    async with listening(pki, connections_per_address=2) as address:
        async with agent_of(address, pki), agent_of(address, pki):
            with pytest.raises(PeerGone, match=r"127\.0\.0\.1 holds more than 2 connections"):
                async with agent_of(address, pki):
                    pass
            async with trio.open_nursery() as nursery:
                hung_up = trio.Event()

                async def silent() -> None:
                    async with await trio.open_tcp_stream("127.0.0.1", address.port) as stream:
                        assert await stream.receive_some() == b""
                        hung_up.set()

                for _ in range(9):
                    nursery.start_soon(silent)
                with trio.fail_after(0.9 * HURRIED_S):
                    await hung_up.wait()  # two have a place, six wait for one
                nursery.cancel_scope.cancel()
        async with agent_of(address, pki):
            pass


async def what_nonsense_is_told(address: Address) -> bytes:
    async with await trio.open_tcp_stream("127.0.0.1", address.port) as stream:
        with suppress(trio.BrokenResourceError):
            await stream.send_all(b"\x16\x03\x01\x00\x04none")
            with trio.fail_after(2):
                return bytes(await stream.receive_some())
    return b""


async def test_who_fails_again_and_again_takes_up_its_own_places(pki: Pki) -> None:
    async with listening(pki, connections_per_address=4) as address:
        assert all([await what_nonsense_is_told(address) for _ in range(20)]), "each gets its alert"
        began = trio.current_time()
        assert all([await what_nonsense_is_told(address) for _ in range(5)]), "the fifth has waited for a place"
        assert trio.current_time() - began > 0.9
        async with agent_of(address, pki):
            pass


async def test_a_certificate_that_is_refused_takes_no_place_of_the_agents_and_costs_its_own(pki: Pki) -> None:
    files = gate_of(LinkListener(pki.server, Address("127.0.0.1", 0), trust_domain=TRUST_DOMAIN))
    rules = evolve(files.rules(), nodes=frozenset({"n1"}))

    async def refused() -> None:
        with pytest.raises(LinkRefused, match="n2"):
            async with agent_of(address, pki, "n2"):
                pass

    async with listening(pki, connections_per_address=1, gate=evolve(files, rules=lambda: rules)) as address:
        denied = trio.SSLStream(
            await trio.open_tcp_stream("127.0.0.1", address.port),
            client_context(pki.node("n2")),
            server_hostname="127.0.0.1",
        )
        with trio.fail_after(3):
            assert await denied.receive_some(), "it is where it could say something"
            async with agent_of(address, pki):
                await trio.aclose_forcefully(denied)
                for _ in range(20):
                    await refused()
                began = trio.current_time()
                await refused()
                await refused()
                assert trio.current_time() - began > 0.9


async def test_who_shows_a_certificate_and_does_not_register_is_a_stranger(pki: Pki) -> None:
    """A loop of handshakes with a node's certificate costs its address no more than one without any."""

    async def hangs_up() -> None:
        stream = trio.SSLStream(
            await trio.open_tcp_stream("127.0.0.1", address.port), client_context(pki.node()),
            server_hostname="127.0.0.1",
        )  # fmt: skip
        await stream.do_handshake()
        await trio.aclose_forcefully(stream)

    async with listening(pki, connections_per_address=1) as address, agent_of(address, pki):
        pass
    async with listening(pki, connections_per_address=1) as address:
        for _ in range(20):
            await hangs_up()
        began = trio.current_time()
        await hangs_up()
        await hangs_up()
        assert trio.current_time() - began > 0.9


async def test_a_hundred_strangers_who_come_again_at_once_keep_no_agent_of_their_address_out(pki: Pki) -> None:
    """Behind one NAT: each of a hundred machines of another cluster tries anew as soon as it was told no."""
    foreign, most = pki.node(authority="foreign"), 100

    async def stranger() -> None:
        nonlocal refused
        while True:
            with suppress(PeerError):
                async with connect(address, foreign, TRUST_DOMAIN):
                    pass
            refused += 1

    async def agent(number: int) -> None:
        while True:
            with suppress(PeerError):  # on a machine that is busy otherwise a handshake may be late
                async with agent_of(address, pki, f"n{number}"):
                    welcomed.add(number)
                    await trio.sleep_forever()

    welcomed: set[int] = set()
    refused = 0
    async with listening(pki, connections_per_address=most) as address, trio.open_nursery() as nursery:
        for _ in range(most):
            nursery.start_soon(stranger)
        with trio.fail_after(40):
            while refused < 20:
                await trio.sleep(0.01)
            for number in range(most):
                nursery.start_soon(agent, number)
            while len(welcomed) < most:
                await trio.sleep(0.05)
        nursery.cancel_scope.cancel()


async def test_who_is_turned_away_is_told_with_enhance_your_calm(pki: Pki) -> None:
    async with listening(pki, connections_per_address=1) as address, agent_of(address, pki):
        stream = trio.SSLStream(
            await trio.open_tcp_stream("127.0.0.1", address.port),
            client_context(pki.node()),
            server_hostname="127.0.0.1",
        )
        await stream.do_handshake()
        peer = RawPeer(Role.AGENT)
        await stream.send_all(peer.h2.data_to_send())
        events: list[h2.events.Event] = []
        with trio.fail_after(2):
            while goodbye(events) is None:
                events += peer.h2.receive_data(bytes(await stream.receive_some()))
        assert goodbye(events) is ErrorCodes.ENHANCE_YOUR_CALM
        await trio.aclose_forcefully(stream)


class Counting:
    """A TLS context that counts the handshakes that begin, by turn of the event loop."""

    def __init__(self, context: ssl.SSLContext, turns: Turns) -> None:
        self._context = context
        self._turns = turns

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        self._turns.begun[-1] += 1
        return self._context.wrap_bio(*args, **kwargs)


class Turns(trio.abc.Instrument):
    def __init__(self) -> None:
        self.begun = [0]

    def before_io_wait(self, timeout: float) -> None:
        self.begun.append(0)


async def test_no_more_than_eight_handshakes_begin_in_one_turn(pki: Pki) -> None:
    turns = Turns()
    files = gate_of(LinkListener(pki.server, Address("127.0.0.1", 0), trust_domain=TRUST_DOMAIN))
    trust = evolve(files.trust(), link=Counting(files.trust().link, turns))  # type: ignore[arg-type]
    hello, unused = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        client_context(pki.node()).wrap_bio(unused, hello, server_hostname="127.0.0.1").do_handshake()
    said = hello.read()
    async with listening(pki, gate=evolve(files, trust=lambda: trust)) as address:
        crowd = [await trio.open_tcp_stream("127.0.0.1", address.port) for _ in range(60)]
        await trio.sleep(0.1)
        trio.lowlevel.add_instrument(turns)
        for stream in crowd:
            stream.socket._sock.send(said)  # all at once, in one turn
        with trio.fail_after(5):
            while sum(turns.begun) < 60:
                await trio.sleep(0.01)
        trio.lowlevel.remove_instrument(turns)
        for stream in crowd:
            await trio.aclose_forcefully(stream)
    assert max(turns.begun) == 8
