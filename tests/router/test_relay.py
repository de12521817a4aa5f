"""Bodies passed on without waking a task: what goes wrong with one is its own task's to hear, and nobody else's."""

from __future__ import annotations

import itertools
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
import trio
import trio.testing

from llmgw.router.chunks import ChunkDecoder
from llmgw.router.http1 import BadMessage
from llmgw.router.relay import Relay
from llmgw.router.sockets import Peer, Ticker, Watch
from llmgw.router.usage import TAIL_BYTES
from llmgw.router.usage_filter import UsageFilter

CHUNK = b"5\r\nhello\r\n"


@contextmanager
def pair() -> Iterator[tuple[socket.socket, Peer]]:
    engine, ours = socket.socketpair()
    with engine, ours:
        yield engine, Peer(ours)


@asynccontextmanager
async def watching() -> AsyncIterator[Watch]:
    watch = Watch()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        yield watch
        assert not watch._ready, "nothing is left registered"
        nursery.cancel_scope.cancel()
    watch.close()


async def test_a_socket_that_always_has_more_keeps_no_task_waiting() -> None:
    calls = 0
    async with watching() as watch:
        with pair() as (engine, peer):

            def ready() -> None:
                nonlocal calls
                calls += 1
                peer.sock.recv(1)
                engine.send(b"x")

            engine.send(b"x")
            watch.relay(peer.sock, ready)
            turns = 0
            while calls < 300:
                await trio.lowlevel.checkpoint()
                turns += 1
            watch.rest(peer.sock)
    assert turns <= 30, "several events a turn"
    assert calls < 400, "and a turn for others between"


class Client:
    """Takes ``room`` bytes at once and no more."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.got, self.room = b"", room

    def put(self, data: bytes) -> bytes:
        taken, left = data[: self.room], data[self.room :]
        self.got, self.room = self.got + taken, self.room - len(taken)
        return left


async def test_pieces_go_on_and_the_end_is_left_to_the_task() -> None:
    async with watching() as watch:
        with pair() as (engine, peer):
            client, ticker = Client(), Ticker(1.0)
            relay = Relay(peer, client.put, watch, ticker, None)
            relay.take(CHUNK, b"head ")
            assert client.got == b"head " + CHUNK
            async with trio.open_nursery() as nursery:
                nursery.start_soon(relay.wait)
                await trio.testing.wait_all_tasks_blocked()
                for sent in range(40):
                    ticker.now = float(sent)
                    engine.send(CHUNK)
                    with trio.fail_after(2):
                        while len(client.got) < 5 + (sent + 2) * len(CHUNK):
                            await trio.lowlevel.checkpoint()
                assert relay.heard == 39.0
                engine.send(CHUNK + b"0\r\n\r\nmore")
            assert (relay.ended, relay.exact, relay.over) == (True, False, False)
            assert relay.unsent == CHUNK + b"0\r\n\r\n"
            body = 42 * CHUNK + b"0\r\n\r\n"
            assert (relay.passed, relay.tail) == (len(body), body[-TAIL_BYTES:])


async def test_a_client_that_does_not_keep_up_stops_the_engine() -> None:
    async with watching() as watch:
        with pair() as (engine, peer):
            client = Client(room=3)
            relay = Relay(peer, client.put, watch, Ticker(0.0), None)
            engine.send(CHUNK)
            await relay.wait()
            assert (client.got, relay.unsent) == (CHUNK[:3], CHUNK[3:])
            engine.send(CHUNK)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert relay.passed == len(CHUNK), "nothing more is read meanwhile"


async def test_failures_are_heard_by_the_task_and_nobody_else() -> None:
    def gone(_data: bytes) -> bytes:
        raise BrokenPipeError

    def odd(_data: bytes) -> bytes:
        raise ZeroDivisionError

    async with watching() as watch:
        for put, sent, expected in (
            (gone, CHUNK, BrokenPipeError), (odd, CHUNK, ZeroDivisionError), (Client().put, b"5x\r\n", BadMessage),
        ):  # fmt: skip
            with pair() as (engine, peer):
                relay = Relay(peer, put, watch, Ticker(0.0), None)
                engine.send(sent)
                with pytest.raises(expected):
                    await relay.wait()
        with pair() as (engine, peer):
            relay = Relay(peer, Client().put, watch, Ticker(0.0), None)
            engine.close()
            await relay.wait()
            assert relay.over


async def test_one_that_is_cancelled_is_not_called_any_more() -> None:
    async with watching() as watch:
        with pair() as (engine, peer):
            client = Client()
            relay = Relay(peer, client.put, watch, Ticker(0.0), None)
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(relay.wait)
                    await trio.testing.wait_all_tasks_blocked()
                    assert watch._ready
                    scope.cancel()
                    assert not watch._ready, "nor in the turn in which it is cancelled"
            assert scope.cancelled_caught
            engine.send(CHUNK)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert client.got == b""


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


async def test_pieces_that_look_alike_are_passed_on_right_wherever_they_are_cut() -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n'
    event, half, other = b'data: {"n":1}\n\n', b'data: {"n"', b":2}\n\n"
    nested = b"data: x" + chunk(event) + b"y\n\n"  # a part of it looks like a whole chunk
    chunks = [
        event,
        event,
        nested,
        half,
        other,
        event,
        usage,
        event,
        usage[:30],
        usage[30:],
        event,
        other,
        b"data: [DONE]\n\n",
    ]
    wire = b"".join(map(chunk, chunks)) + b"0\r\n\r\n"
    ends = [sum(len(chunk(c)) for c in chunks[: n + 1]) for n in range(len(chunks))]
    inner = wire.index(chunk(event) + b"y")
    ends += [inner, inner + len(chunk(event))]
    whole = b"".join(chunks)
    async with watching() as watch:
        for events_filter, expected in ((lambda: None, whole), (UsageFilter, whole.replace(usage, b""))):
            for cut in range(1, len(wire)):
                cuts = sorted({0, cut, *ends, len(wire)})
                with pair() as (engine, peer):
                    client = Client()
                    relay = Relay(peer, client.put, watch, Ticker(0.0), events_filter())
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(relay.wait)
                        await trio.lowlevel.checkpoint()
                        for begin, end in itertools.pairwise(cuts):
                            engine.send(wire[begin:end])
                            while relay.passed < end:
                                await trio.lowlevel.checkpoint()
                    client.put(bytes(relay.unsent))
                    decoder = ChunkDecoder()
                    assert decoder.feed(client.got) == expected, wire[:cut]
                    assert (decoder.finished, relay.passed, relay.tail) == (True, len(wire), wire[-TAIL_BYTES:])


async def test_of_a_body_only_its_end_is_kept() -> None:
    async with watching() as watch:
        with pair() as (engine, peer):
            relay = Relay(peer, Client().put, watch, Ticker(0.0), None)
            piece = chunk(b"data: x\n\n")
            relay.take(piece)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(relay.wait)
                await trio.lowlevel.checkpoint()
                for sent in range(100):
                    engine.send(piece)
                    while relay.passed < (sent + 2) * len(piece):
                        await trio.lowlevel.checkpoint()
                    assert len(relay._pieces) <= 17
                nursery.cancel_scope.cancel()
