"""A connection's coroutine goes on where its bytes arrive: whatever happens there stays its own."""

from __future__ import annotations

import errno
import json
import select
from collections import Counter
from collections.abc import Callable

import pytest
import structlog.testing
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.router.connection import Connection
from llmgw.router.keys import Holder
from llmgw.router.sockets import Peer, Watch
from tests.router import engines as e
from tests.router.engines import Visit
from tests.router.test_gate import AUTH, STREAM, USAGE, cells, closed
from tests.router.test_server import Router, router

HEALTH = b"GET /healthz HTTP/1.1\r\nhost: g\r\n\r\n"
ASKED = b'POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 13\r\n\r\n{"model":"m"}'


async def asks(it: Router, requests: bytes) -> None:
    """A client that sends all of them at once and takes the answers as they come, until cancelled."""
    async with it.client() as client, trio.open_nursery() as nursery:
        nursery.start_soon(client.send, requests)
        while await client.stream.receive_some(65536):
            pass


@pytest.mark.parametrize("asked", [HEALTH, ASKED], ids=["the router", "an engine"])
async def test_ten_thousand_requests_in_one_piece_hold_up_another_client_for_a_few_of_them(asked: bytes) -> None:
    async with router(e.answers) as it, it.client() as one, trio.open_nursery() as nursery:
        await one.send(HEALTH)
        await one.answer()
        nursery.start_soon(asks, it, asked * 10_000)
        while it.server._count < 20:
            await trio.lowlevel.checkpoint()
        for _ in range(5):
            before = it.server._count
            await one.send(HEALTH)
            with trio.fail_after(5):
                assert (await one.answer())[0] == 200
            assert it.server._count - before < 20
        nursery.cancel_scope.cancel()


async def test_a_hundred_that_send_a_thousand_each_hold_up_another_for_a_turn_of_them_all() -> None:
    async with router(e.answers) as it, it.client() as one, trio.open_nursery() as nursery:
        await one.send(HEALTH)
        await one.answer()
        for _ in range(100):
            nursery.start_soon(asks, it, HEALTH * 1000)
        while it.server._count < 1000:
            await trio.lowlevel.checkpoint()
        before = it.server._count
        await one.send(HEALTH)
        with trio.fail_after(5):
            assert (await one.answer())[0] == 200
        assert it.server._count - before < 1000, "ten turns"
        nursery.cancel_scope.cancel()


async def test_a_fault_in_a_step_ends_its_connection_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with router(e.begins_a_stream, e.answers) as it, it.client() as stream, it.client() as kept:
        await stream.post()
        await stream.head()
        await kept.send(HEALTH)
        await kept.answer()
        known = it.server.gate.known

        def faulty(authorization: bytes) -> Holder | None:
            if authorization == b"Bearer odd":
                raise ZeroDivisionError
            if authorization == b"Bearer deep":
                raise RecursionError
            return known(authorization)

        monkeypatch.setattr(it.server.gate, "known", faulty)
        for name in (b"odd", b"deep"):
            with structlog.testing.capture_logs() as said:
                async with it.client() as client:
                    await client.send(HEALTH)
                    await client.answer()  # what comes after this is stepped
                    await client.send(ASKED.replace(b"host: g", b"host: g\r\nauthorization: Bearer " + name))
                    assert await client.rest() == b""
            assert [line["event"] for line in said] == ["request failed"]
        await kept.send(HEALTH)
        assert (await kept.answer())[0] == 200
        assert len(it.server._connections) == 2


async def test_what_awaits_something_of_trio_s_in_a_step_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sleeps(_connection: object) -> bytes:
        try:
            await trio.sleep(0)
        finally:
            await trio.sleep(0)  # it does not even end when it is told to
        return b""

    monkeypatch.setattr("llmgw.router.connection.Connection._scrape", sleeps)
    async with router(e.answers) as it, it.client() as kept, it.client() as client:
        for one in (kept, client):
            await one.send(HEALTH)
            await one.answer()
        with structlog.testing.capture_logs() as said:
            await client.get(b"/metrics")
            assert await client.rest() == b""
        assert [line["event"] for line in said] == ["request failed"]
        await kept.send(HEALTH)
        assert (await kept.answer())[0] == 200


@pytest.mark.parametrize("whose", ["the client's", "the engine's"])
async def test_a_socket_that_cannot_be_watched(monkeypatch: pytest.MonkeyPatch, whose: str) -> None:
    """As when fs.epoll.max_user_watches is reached."""
    watch, refused = Watch.watch, []

    def full(self: Watch, peer: Peer, gone: Callable[[], None] | None = None) -> None:
        if (gone is None) == (whose == "the engine's") and not refused:
            refused.append(peer)
            raise OSError(errno.ENOSPC, "No space left on device")
        watch(self, peer, gone)

    monkeypatch.setattr(Watch, "watch", full)
    async with router(e.answers) as it:
        async with it.client() as client:
            await client.post()
            if whose == "the engine's":
                assert (await client.answer())[0] == 502
                assert not it.server.directory._engines[next(iter(it.server.directory._engines))].health._failures
            else:
                assert await client.rest() == b""
        assert refused[0].sock.fileno() == -1
        async with it.client() as client:
            await client.post()
            assert (await client.answer())[0] == 200
    assert not it.server._connections


async def everything(visit: Visit) -> None:
    """A stream in pieces."""
    while True:
        await visit.request()
        await visit.send(e.EVENTS)
        for n in range(5):
            await visit.send(e.event(b"%d" % n))
            await trio.sleep(0)
        await visit.send(b"0\r\n\r\n")


def leaves(connection: Connection) -> None:
    connection.leave()


def is_stepped_and_leaves(connection: Connection) -> None:
    told(connection)
    connection.leave()


def leaves_and_is_stepped(connection: Connection) -> None:
    connection.leave()
    told(connection)
    connection.leave()


def takes_too_long(connection: Connection) -> None:
    connection.sweep(trio.current_time() + 1e6)


def takes_too_long_and_leaves(connection: Connection) -> None:
    takes_too_long(connection)
    told(connection)
    connection.leave()


def told(connection: Connection) -> None:
    """As when something of both sides comes in this moment."""
    connection._client.told(select.EPOLLIN)
    if connection.exchange is not None and connection.exchange._upstream is not None:
        connection.exchange._upstream.told(select.EPOLLIN)


CUTS = [leaves, is_stepped_and_leaves, leaves_and_is_stepped, takes_too_long, takes_too_long_and_leaves]


@pytest.mark.parametrize("cut", CUTS, ids=[cut.__name__ for cut in CUTS])
async def test_it_is_cut_in_any_turn_and_nothing_is_left_of_it(cut: Callable[[Connection], None]) -> None:
    ends = Counter[bool]()
    async with closed(everything) as it, it.client() as other:
        await other.send(HEALTH)
        await other.answer()
        (others,) = it.server._connections
        for turns in range(0, 60, 3):
            async with it.client() as client:
                await client.send(HEALTH)
                await client.answer()
                (connection,) = set(it.server._connections) - {others}
                await client.post(STREAM, fields=AUTH + b"connection: close\r\n")
                for _ in range(turns):
                    await trio.lowlevel.checkpoint()
                cut(connection)
                with trio.fail_after(5):
                    rest = await client.rest()
                    ends[rest.endswith(b"0\r\n\r\n")] += 1
                    while len(it.server._connections) > 1:
                        await trio.lowlevel.checkpoint()
            assert not any(it.server.directory.outstanding().values())
            assert cells(it)[2:4] == (0, 0), "nothing is under way or held"
            await other.send(HEALTH)
            assert (await other.answer())[0] == 200, "nobody else notices"
    assert ends[False]
    assert ends[True], "some were over before"


STREAMED = e.EVENTS + e.event(b"1") + e.event(USAGE) + e.event(b"[DONE]") + b"0\r\n\r\n"
EACH = [
    (ASKED, e.whole(), e.whole().partition(b"\r\n\r\n")[2]),
    (HEALTH, b"", b"ok\n"),
    (ASKED, STREAMED, STREAMED.partition(b"\r\n\r\n")[2]),
    (ASKED, b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", b""),
    (ASKED, e.whole(b"x" * 70_000), b"x" * 70_000),
]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
async def test_whatever_comes_in_whatever_pieces_and_is_told_however_often(data: st.DataObject) -> None:
    """Requests in a row, cut anywhere, answers too, and each socket said to be ready when it is and when it is not."""
    wanted = data.draw(st.lists(st.sampled_from(EACH), min_size=1, max_size=5))
    sent = data.draw(st.lists(st.integers(1, 60), max_size=12))
    said = data.draw(st.lists(st.integers(1, 120), max_size=12))
    moves = data.draw(st.lists(st.sampled_from("cet!"), max_size=40))
    given_out, taken_in = trio.Semaphore(0), iter([*said, *[1 << 20] * 5])
    ended = False

    async def script(visit: Visit) -> None:
        for _, answer, _ in (one for one in wanted if one[0] is ASKED):
            await visit.request()
            while answer:
                if not ended:
                    await given_out.acquire()
                size = next(taken_in)
                await visit.send(answer[:size])
                answer = answer[size:]

    async with router(script) as it, it.client() as client:
        left = b"".join(request for request, _, _ in wanted)
        for move in moves:
            match move:
                case "c" if left:
                    size = sent.pop() if sent else len(left)
                    await client.send(left[:size])
                    left = left[size:]
                case "e":
                    given_out.release()
                case "!":
                    for connection in list(it.server._connections):
                        told(connection)
                case _:
                    await trio.lowlevel.checkpoint()
        ended = True
        given_out.release()
        if left:
            await client.send(left)
        with trio.fail_after(5):
            for _, _, body in wanted:
                status, fields = await client.head()
                assert status in (200, 404)
                while len(client.buffer) < len(body):
                    client.buffer += await client.stream.receive_some()
                assert client.buffer[: len(body)] == body
                assert b"content-length" not in fields or int(fields[b"content-length"]) == len(body)
                client.buffer = client.buffer[len(body) :]
        assert not client.buffer
        assert len(it.server._connections) == 1


async def test_a_large_body_whose_end_comes_by_itself() -> None:
    """It is read in a thread, for which the coroutine goes back to its task first."""
    body = json.dumps({"model": "m", "prompt": "x" * 300_000}).encode()
    asked = b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    async with router(e.answers) as it, it.client() as client:
        await client.send(asked[:-10])
        await trio.testing.wait_all_tasks_blocked(0.01)
        await client.send(asked[-10:])
        assert (await client.answer())[0] == 200
        assert it.engines[0].requests[0][1] == body


async def test_that_clients_wait_for_files_is_said_once_and_not_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmgw.router.server._most_clients", lambda: 1)
    later = 0.0
    async with router(e.answers) as it:
        it.server._clock = lambda: trio.current_time() + later
        with structlog.testing.capture_logs() as said:
            for turn in range(2):
                async with trio.open_nursery() as nursery:
                    for _ in range(10):
                        nursery.start_soon(asks, it, HEALTH.replace(b"host", b"connection: close\r\nhost"))
                assert sum("others wait" in line["event"] for line in said) == turn + 1
                later += 61
