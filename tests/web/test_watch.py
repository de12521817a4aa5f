"""The watch over a real WebSocket: as it is, then what changes; who may; and who holds up nothing."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
import trio
import trio.testing
from attrs import evolve
from starlette.websockets import WebSocket
from trio_websocket import ConnectionRejected, open_websocket_url

from llmgw.web.access import Access
from llmgw.web.changes import applied, change
from llmgw.web.watch import PERIOD_S, TRY_LATER, Watch
from tests.web.admin import TOKEN, Picture, admin

HEADERS = [(b"authorization", f"Bearer {TOKEN}".encode())]


def url(port: int, parts: str = "replicas") -> str:
    return f"ws://127.0.0.1:{port}/api/v1/watch?parts={parts}"


def test_a_change_makes_one_picture_of_the_other() -> None:
    before = {"nodes": [{"id": "a", "x": 1}, {"id": "b", "x": 1}], "decisions": [{"n": 1}], "brake": None}
    after = {"nodes": [{"id": "a", "x": 2}, {"id": "c", "x": 1}], "decisions": [{"n": 2}, {"n": 1}], "brake": {}}
    told = change(before, after)
    assert told == {
        "set": {"nodes": [{"id": "a", "x": 2}, {"id": "c", "x": 1}], "decisions": [{"n": 2}], "brake": {}},
        "gone": {"nodes": ["b"]},
    }
    assert applied(before, told, 9) == after
    assert change(after, after) is None


async def test_first_as_it_is_then_what_changes() -> None:
    async with admin() as it, open_websocket_url(url(it.port), extra_headers=HEADERS) as socket:
        with trio.fail_after(10):
            first: dict[str, Any] = json.loads(await socket.get_message())
            assert (first["type"], next(r["id"] for r in first["replicas"])) == ("snapshot", "m-1")
            assert "nodes" not in first
            it.picture.cluster = evolve(it.picture.cluster, replicas=it.picture.cluster.replicas[1:])
            told = json.loads(await socket.get_message())
        assert (told["type"], told["gone"]) == ("change", {"replicas": ["m-1"]})


# trio-websocket leaves the socket of a refused handshake to the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
async def test_who_may_not_is_told_why() -> None:
    async with admin() as it:
        cases: tuple[tuple[str, list[tuple[bytes, bytes]], int], ...] = (
            (url(it.port), [], 401),
            (url(it.port), [(b"authorization", b"Bearer x")], 401),
            (url(it.port), [*HEADERS, (b"origin", b"https://evil.example")], 403),
            (url(it.port, "secrets"), HEADERS, 400),
        )
        for where, headers, status in cases:
            with pytest.raises(ConnectionRejected) as refused:
                async with open_websocket_url(where, extra_headers=headers):
                    pass
            assert refused.value.status_code == status


# trio-websocket leaves the socket of a refused handshake to the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
async def test_a_ticket_opens_one() -> None:
    async with admin() as it:
        _, _, body = await it.ask("/api/v1/watch/ticket", "POST", body=b"{}")
        offered = ["llmgw.watch.v1", f"llmgw.ticket.{json.loads(body)['ticket']}"]
        async with open_websocket_url(url(it.port), subprotocols=offered) as socket:
            assert socket.subprotocol == "llmgw.watch.v1"
            assert json.loads(await socket.get_message())["type"] == "snapshot"
        with pytest.raises(ConnectionRejected):
            async with open_websocket_url(url(it.port), subprotocols=offered):
                pass


class Stuck:
    """What of a WebSocket the watch uses, to somebody who reads nothing."""

    def __init__(self) -> None:
        self.headers = {"authorization": f"Bearer {TOKEN}"}
        self.state, self.query_params = object(), {"parts": "replicas"}
        self.scope: dict[str, Any] = {"subprotocols": []}
        self.closed: list[tuple[int, str]] = []

    async def accept(self, subprotocol: str | None) -> None:
        assert subprotocol is None

    async def receive_text(self) -> str:
        return await trio.sleep_forever()

    async def send_text(self, text: str) -> None:
        assert text
        await trio.sleep_forever()

    async def close(self, code: int, reason: str) -> None:
        self.closed.append((code, reason))


async def test_who_reads_nothing_is_let_go(autojump_clock: trio.testing.MockClock) -> None:
    picture, socket = Picture(), Stuck()
    watch = Watch(picture, None, Access(TOKEN))
    replicas = picture.cluster.replicas
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)

        async def change_all_the_time() -> None:
            while True:
                picture.cluster = evolve(picture.cluster, replicas=() if picture.cluster.replicas else replicas)
                await trio.sleep(PERIOD_S)

        nursery.start_soon(change_all_the_time)
        with trio.fail_after(60):
            await watch.endpoint(cast("WebSocket", socket))
        nursery.cancel_scope.cancel()
    assert socket.closed == [(TRY_LATER, "too slow: 8 messages wait")]


async def test_who_reads_nothing_holds_up_no_stop() -> None:
    async with admin() as it:
        stream = await trio.open_tcp_stream("127.0.0.1", it.port)
        await stream.send_all(
            b"GET /api/v1/watch HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\nsec-websocket-version: 13\r\n"
            b"authorization: Bearer " + TOKEN.encode() + b"\r\n\r\n"
        )
        assert b"101" in await stream.receive_some(20)
        began = trio.current_time()
    assert trio.current_time() - began < 2
    await stream.aclose()
