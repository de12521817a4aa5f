"""Bodies in the framing that they come in and in the one that they go in, and whose fault it is when they stand still."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from llmgw.router.chunks import ChunkDecoder
from llmgw.router.connection import Connection
from llmgw.router.http1 import ResponseHead, parse_response
from llmgw.router.passage import Cut, Passage
from llmgw.router.shared import Shared
from llmgw.router.sockets import Peer, Ticker, Watch
from llmgw.router.usage_filter import UsageFilter
from tests.router import engines as e
from tests.router.engines import Script, Visit
from tests.router.test_server import Client, Router, router

OLD = b'POST /v1/completions HTTP/1.0\r\ncontent-length: 13\r\n\r\n{"model":"m"}'
CHUNKED = parse_response(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
UNFRAMED = parse_response(b"HTTP/1.1 200 OK\r\n\r\n")
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


class Rig:
    """A passage whose engine sends these pieces and then ends, and whose client takes all, or nothing at once."""

    def __init__(self, *pieces: bytes, chunks_out: bool = True, usage: bool = False, slow: bool = False) -> None:
        self.got = b""
        self._pieces: Iterator[bytes] = iter(pieces)
        self.asked = 0
        self._slow = slow
        self.passage = Passage(
            self._put, self._send, self._more, UsageFilter() if usage else None, chunks_out=chunks_out
        )

    def _put(self, data: bytes) -> bytes:
        if self._slow:
            return data
        self.got += data
        return b""

    async def _send(self, data: bytes | memoryview) -> None:
        self.got += data

    async def _more(self) -> bytes:
        self.asked += 1
        return next(self._pieces, b"")

    async def rest(self, response: ResponseHead, lines: bytes = b"") -> bytes:
        """The body as the client has it."""
        await self.passage.rest(response, lines + b"\r\n", b"")
        return self.got.partition(b"\r\n\r\n")[2]


def content_of(chunked: bytes) -> bytes:
    decoder = ChunkDecoder()
    content = decoder.feed(chunked)
    assert decoder.finished, chunked
    assert not decoder.rest
    return content


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize(
    ("pieces", "exact"),
    [
        ((b"0123", b"456789"), True),
        ((b"0123456789",), True),
        ((b"0123", b"456789x"), False),
        ((b"0123456789x",), False),
        ((b"", b"01234", b"5678", b"9HTTP/1.1 500 evil\r\n\r\n"), False),
    ],
)
async def test_a_body_of_a_length_and_what_comes_behind_it(pieces: tuple[bytes, ...], exact: bool, slow: bool) -> None:
    first, *more = pieces
    rig = Rig(*more, slow=slow)
    assert await rig.passage.sized(10, b"head ", first) is exact
    assert (rig.got, rig.passage.passed, rig.passage.tail) == (b"head 0123456789", 10, b"0123456789")
    assert rig.asked == len(more), "nothing is waited for behind its end"


async def test_a_body_of_a_length_that_ends_early() -> None:
    rig = Rig(b"45")
    with pytest.raises(Cut, match="ended the connection"):
        await rig.passage.sized(10, b"head ", b"0123")
    assert (rig.got, rig.passage.passed, rig.passage.tail) == (b"head 012345", 6, b"012345")


@pytest.mark.parametrize("chunks_out", [False, True])
@pytest.mark.parametrize("usage", [False, True])
async def test_a_body_that_ends_with_the_connection(chunks_out: bool, usage: bool) -> None:
    events = b"data: 1\n\n" + USAGE + DONE
    expected = b"data: 1\n\n" + DONE if usage else events
    for cut in range(len(events)):
        rig = Rig(events[:cut], events[cut:], chunks_out=chunks_out, usage=usage)
        if not cut:
            rig = Rig(events, chunks_out=chunks_out, usage=usage)
        got = await rig.rest(UNFRAMED)
        assert (content_of(got) if chunks_out else got) == expected, cut
        assert (rig.passage.passed, rig.passage.tail) == (len(events), events), "and what came is what counts"
        assert rig.passage.between_chunks is chunks_out


@pytest.mark.parametrize("usage", [False, True])
async def test_a_stream_without_its_last_line_end_is_passed_on_whole(usage: bool) -> None:
    for chunks_out in (False, True):
        rig = Rig(b"data: 1\n\n", b"data: 2", chunks_out=chunks_out, usage=usage)
        got = await rig.rest(UNFRAMED)
        assert (content_of(got) if chunks_out else got) == b"data: 1\n\ndata: 2"


@pytest.mark.parametrize("usage", [False, True])
async def test_chunks_for_a_client_that_knows_none(usage: bool) -> None:
    wire = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (b"data: 1\n\n", USAGE, DONE)) + b"0\r\n\r\n"
    expected = b"data: 1\n\n" + (b"" if usage else USAGE) + DONE
    for cut in range(1, len(wire)):
        rig = Rig(wire[:cut], wire[cut:], chunks_out=False, usage=usage)
        assert await rig.rest(CHUNKED) == expected, cut
        assert rig.asked == 2, "its end is known, and nothing is waited for behind it"
        rig = Rig(wire[:cut], chunks_out=False, usage=usage)
        with pytest.raises(Cut, match="ended within"):
            await rig.rest(CHUNKED)
        assert not rig.passage.between_chunks, "no event can be put behind it"


async def test_chunks_that_are_none_are_a_cut() -> None:
    rig = Rig(b"3\r\nabc\r\n", b"zz\r\n", chunks_out=False)
    with pytest.raises(Cut, match="hexadecimal"):
        await rig.rest(CHUNKED)
    assert rig.got.endswith(b"\r\n\r\nabc")


@pytest.mark.parametrize("lines", [b"", b"connection: keep-alive\r\n", b"connection: close\r\n"])
async def test_a_client_that_knows_no_chunks_is_told_once_that_its_connection_ends(lines: bytes) -> None:
    rig = Rig(b"x", chunks_out=False)
    await rig.rest(UNFRAMED, lines)
    assert rig.got.count(b"connection:") == rig.got.count(b"connection: close\r\n") == 1


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_engine_that_breaks_its_connection_has_not_ended_its_answer(chunked: bool) -> None:
    """A body without a length ends with the connection, and a connection that is reset has no end."""

    async def script(visit: Visit) -> None:
        await visit.request()
        head = e.EVENTS if chunked else e.EVENTS.replace(b"transfer-encoding: chunked\r\n", b"")
        await visit.send(head + (e.event(b"1") if chunked else b"data: 1\n\n"))
        visit.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await go_on.wait()

    go_on = trio.Event()
    async with router(script) as it, it.client() as client:
        await client.post()
        await client.head()
        while b"data: 1" not in client.buffer:
            client.buffer += await client.stream.receive_some()
        go_on.set()
        with trio.fail_after(5):
            rest = await client.rest()
        assert b"upstream_error" in rest
        assert not rest.endswith(b"0\r\n\r\n")


async def to_the_end(client: Client) -> None:
    while await client.stream.receive_some():
        pass


async def stops(visit: Visit) -> None:
    """A stream without a length that is never over."""
    await visit.request()
    await visit.send(e.EVENTS + e.event(b"1"))
    await visit.gone()


@pytest.mark.parametrize("script", [e.dies_in_the_stream, stops], ids=["the engine dies", "the request is cut"])
async def test_what_only_the_connection_s_end_would_end_is_not_ended_but_broken(script: Script) -> None:
    async with router(script) as it, it.client() as old:
        await old.send(OLD)
        await old.head()
        if script is stops:
            (connection,) = it.server._connections
            connection.leave()
        with pytest.raises(trio.BrokenResourceError) as raised:
            await to_the_end(old)
        assert isinstance(raised.value.__cause__, ConnectionResetError)


async def test_what_a_client_that_knows_no_chunks_got_whole_is_not_broken() -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(e.EVENTS + e.event(b"1") + b"0\r\n\r\n")

    async with router(script) as it, it.client() as old:
        await old.send(OLD)
        await old.head()
        await to_the_end(old)


# Who is waited for


class Trickle:
    """A client that takes a byte at a time, an hour after the other."""

    def __init__(self, ticker: Ticker) -> None:
        self._ticker = ticker
        self.connection: Connection | None = None
        self.deadlines: list[float | None] = []

    def put(self, data: bytes) -> bytes:
        return data

    async def send_some(self, data: bytes) -> bytes:
        assert self.connection is not None
        self.deadlines.append(self.connection.deadline)
        self._ticker.now += 3600
        return data[1:]


async def test_a_client_that_takes_a_little_now_and_then_has_not_stood_still() -> None:
    ticker = Ticker(1000.0)
    client = Trickle(ticker)
    shared = Shared.__new__(Shared)
    object.__setattr__(shared, "ticker", ticker)
    connection = client.connection = Connection(client, shared, trio.CancelScope())  # type: ignore[arg-type]
    await connection._send(b"abc")
    assert client.deadlines == [1060.0, 4660.0, 8260.0]
    assert connection.deadline is None


def large(head: bytes, piece: bytes) -> Script:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(head)
        try:
            for _ in range(1000):
                await visit.send(piece)
        except trio.BrokenResourceError:
            pass
        await visit.gone()

    return script


async def blocked(it: Router) -> Connection:
    """The one connection, once its client takes nothing any more."""
    while True:
        (connection,) = it.server._connections
        passed = -1 if connection.exchange is None else connection.exchange.passed
        await trio.testing.wait_all_tasks_blocked(0.02)
        if connection.deadline is not None and connection.exchange is not None and connection.exchange.passed == passed:
            return connection


@pytest.mark.parametrize(
    "script",
    [
        large(b"HTTP/1.1 200 OK\r\ncontent-length: 30000000\r\n\r\n", b"x" * 2000),
        large(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 2000),
        large(e.EVENTS, e.event(b"x" * 2000)),
    ],
    ids=["sized", "to the end", "chunked"],
)
async def test_an_engine_that_waits_for_a_slow_client_is_not_silent(script: Script) -> None:
    async with router(script, idle_timeout_s=10) as it, it.client() as client:
        await client.post()
        await client.head()
        connection = await blocked(it)
        connection.sweep(trio.current_time() + 30)
        exchange = connection.exchange
        assert exchange is not None
        assert not exchange._gave_up
        enough = 1000 * len(e.event(b"x" * 2000) if exchange.events else b"x" * 2000)
        while connection.deadline is not None or exchange.passed < enough:
            await client.stream.receive_some(65536)
        await trio.testing.wait_all_tasks_blocked(0.02)
        connection.sweep(trio.current_time() + 5)
        assert not exchange._gave_up
        connection.sweep(trio.current_time() + 30)
        assert exchange._gave_up == "sent nothing for 10 s"


@pytest.mark.parametrize(
    "answer", [e.whole(), e.whole()[:-1], e.EVENTS + e.event(b"1")], ids=["whole", "sized", "chunked"]
)
async def test_nor_is_one_whose_first_piece_is_not_taken_yet(answer: bytes) -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(answer)
        await visit.gone()

    def blocks(_data: bytes) -> int:
        raise BlockingIOError

    async with router(script, idle_timeout_s=10, first_byte_timeout_s=10) as it, it.client() as client:
        await client.get(b"/healthz")
        await client.answer()
        (connection,) = it.server._connections
        takes, connection._client._send = connection._client._send, blocks
        await client.post()
        while connection.deadline is None or connection.exchange is None:
            await trio.lowlevel.checkpoint()
        connection.sweep(trio.current_time() + 30)
        assert not connection.exchange._gave_up
        connection._client._send = takes
        assert (await client.head())[0] == 200


class Slow(Rig):
    """A client that takes nothing at once, and then all of it a while later."""

    ticker: Ticker

    async def _send(self, data: bytes | memoryview) -> None:
        assert self.passage.heard == math.inf, "nobody waits for the engine meanwhile"
        self.ticker.now += 20
        await super()._send(data)


@pytest.mark.parametrize("slow", [False, True])
async def test_when_something_came_last_is_known_where_nobody_asks(slow: bool) -> None:
    watch, ticker = Watch(), Ticker(5.0)
    theirs, ours = socket.socketpair()
    rig = Slow(slow=slow)
    rig.ticker = ticker
    with theirs, ours:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.run)
            nursery.start_soon(rig.passage.chunked, Peer(ours), watch, ticker, b"head ", e.event(b"1"))
            await trio.testing.wait_all_tasks_blocked()
            assert rig.passage.heard == ticker.now == (25.0 if slow else 5.0)
            for piece in (e.event(b"2"), e.event(b"3")[:4], e.event(b"3")[4:]):
                ticker.now += 2
                theirs.send(piece)
                await trio.testing.wait_all_tasks_blocked(0.01)
                assert rig.passage.heard == ticker.now
            assert ticker.now == (91.0 if slow else 11.0)
            nursery.cancel_scope.cancel()
    watch.close()


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("behind", [b"", b"HTTP/1.1 500 evil\r\n\r\n"])
async def test_chunks_that_go_on_as_they_are_and_what_comes_behind_them(behind: bytes, slow: bool) -> None:
    wire = e.event(b"1") + e.event(b"2") + b"0\r\n\r\n"
    for cut in (len(e.event(b"1")), len(wire)):
        watch, theirs, ours = Watch(), *socket.socketpair()
        first, later = (wire[:cut], wire[cut:] + behind) if cut < len(wire) else (wire + behind, b"not read any more")
        with theirs, ours:
            rig = Rig(slow=slow)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch.run)
                theirs.send(later)
                exact = await rig.passage.chunked(Peer(ours), watch, Ticker(0.0), b"head ", first)
                nursery.cancel_scope.cancel()
            assert (rig.got, exact) == (b"head " + wire, not behind)
            assert (rig.passage.passed, rig.passage.tail) == (len(wire), wire)
            assert not rig.passage.between_chunks
        watch.close()
