"""The router's data plane on real sockets, in front of engines whose every byte is scripted."""

from __future__ import annotations

import gc
import json
import random
import select
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from attrs import evolve

from llmgw.cli.demo_files import free_ports
from llmgw.router.body import asked_in_json
from llmgw.router.exchange import Exchange
from llmgw.router.health import ERRORS, RETRIES_SAVED, RETRY_SHARE
from llmgw.router.server import RouterServer, listen
from llmgw.router.table import Endpoint, Route, Table
from llmgw.settings.catalog import Balance, Routing
from llmgw.settings.daemon import Address
from llmgw.settings.document import RouterSettings
from tests.router import engines as e
from tests.router.engines import Script, ScriptedEngine

BODY = json.dumps({"model": "m", "stream": True, "messages": []}).encode()


class Client:
    """A client that sees every byte."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.buffer = b""

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def post(self, body: bytes = BODY, path: bytes = b"/v1/chat/completions", fields: bytes = b"") -> None:
        await self.send(
            b"POST %b HTTP/1.1\r\nhost: gw\r\ncontent-length: %d\r\n%b\r\n%b" % (path, len(body), fields, body)
        )

    async def get(self, path: bytes, method: bytes = b"GET") -> None:
        await self.send(b"%b %b HTTP/1.1\r\nhost: gw\r\n\r\n" % (method, path))

    async def head(self) -> tuple[int, dict[bytes, bytes]]:
        while b"\r\n\r\n" not in self.buffer:
            data = await self.stream.receive_some()
            assert data, f"closed within the head: {self.buffer!r}"
            self.buffer += data
        head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        return int(first.split(b" ")[1]), {k.lower(): v.strip() for k, _, v in (line.partition(b":") for line in lines)}

    async def answer(self, *, bodiless: bool = False) -> tuple[int, dict[bytes, bytes], bytes]:
        """One answer with a length."""
        status, fields = await self.head()
        length = 0 if bodiless else int(fields[b"content-length"])
        while len(self.buffer) < length:
            data = await self.stream.receive_some()
            assert data
            self.buffer += data
        body, self.buffer = self.buffer[:length], self.buffer[length:]
        return status, fields, body

    async def rest(self) -> bytes:
        """Everything until the connection ends."""
        while True:
            try:
                data = await self.stream.receive_some()
            except trio.BrokenResourceError:
                break
            if not data:
                break
            self.buffer += data
        data, self.buffer = self.buffer, b""
        return data


class Router:
    def __init__(self, server: RouterServer, port: int, engines: list[ScriptedEngine], nursery: trio.Nursery) -> None:
        self.server, self.port, self.engines, self.nursery = server, port, engines, nursery

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
            yield Client(stream)

    def metric(self, text: str) -> bool:
        return text in self.server.metrics.render().decode()

    async def quiet(self) -> None:
        """Wait until no engine has a request open."""
        with trio.fail_after(2):
            while any(self.server.directory.outstanding().values()):
                await trio.sleep(0.005)


@asynccontextmanager
async def router(*scripts: Script, **settings: object) -> AsyncIterator[Router]:
    async with trio.open_nursery() as nursery:
        engines = [ScriptedEngine(script) for script in scripts]
        for engine in engines:
            await nursery.start(engine.run)
        endpoints = tuple(Endpoint(f"e{n}", "127.0.0.1", engine.port, f"sk-{n}") for n, engine in enumerate(engines))
        server = RouterServer(chance=random.Random(7))
        routes = (
            Route("m", endpoints, created=7),
            Route("empty", (), "is loading (45 %)", state="loading", ready=0, wanted=2),
        )
        server.use(Table(1, routes, evolve(RouterSettings(), **settings)))
        listener = listen(Address("127.0.0.1", 0))
        await nursery.start(server.run, listener)
        yield Router(server, listener.getsockname()[1], engines, nursery)
        nursery.cancel_scope.cancel()


async def test_bytes_in_bytes_out_and_kept_connections() -> None:
    async with router(e.answers) as it, it.client() as client:
        for n in range(3):
            body = json.dumps({"model": "m", "n": n, "text": "ü\\u0041 "}).encode()
            await client.post(body, fields=b"authorization: Bearer client\r\nx-request-id: r-7\r\nuser-agent: t\r\n")
            status, fields, content = await client.answer()
            assert (status, fields[b"x-request-id"], content) == (200, b"r-7", e.whole().partition(b"\r\n\r\n")[2])
            head, sent = it.engines[0].requests[n]
            assert sent == body
            assert b"authorization: Bearer sk-0" in head
            assert b"client" not in head
            assert b"user-agent: t" in head
        assert it.engines[0].connections == 1
        assert it.metric('llmgw_router_requests_total{endpoint="e0",model="m",status="200"} 3.0')
        assert it.metric('llmgw_router_tokens_total{kind="prompt",model="m"} 6.0')


async def test_two_requests_sent_at_once_are_answered_in_order() -> None:
    async with router(e.answers) as it, it.client() as client:
        one = b"POST /v1/completions HTTP/1.1\r\nhost: gw\r\ncontent-length: 13\r\n\r\n" + b'{"model":"m"}'
        await client.send(one + b"GET /v1/models HTTP/1.1\r\nhost: gw\r\n\r\n" + one)
        assert [(await client.answer())[0] for _ in range(3)] == [200, 200, 200]


async def test_whoever_sends_many_at_once_keeps_nobody_waiting() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with router(e.answers) as it, it.client() as many:
        asked = b"GET /healthz HTTP/1.1\r\nhost: gw\r\n\r\n"
        it.nursery.start_soon(count)
        await many.send(asked * 1000 + asked.replace(b"host", b"connection: close\r\nhost"))
        assert (await many.rest()).count(b"200 OK") == 1001
        assert turns > 500, "between any two of them everybody else has a turn"
        turns = 0
        async with it.client() as tiny:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: gw\r\ntransfer-encoding: chunked\r\n\r\n"
            await tiny.send(head + b"1\r\n \r\n" * 50_000 + b'd\r\n{"model":"m"}\r\n0\r\n\r\n')
            assert (await tiny.answer())[0] == 200
        assert turns > 90, "and while a body of tiny chunks is taken apart"


async def test_a_body_of_many_things_keeps_nobody_waiting() -> None:
    body = b'{"model":"m","url":"https://example.com/x","a":[' + b"{}," * 500_000 + b"1]}"
    began = time.perf_counter()
    asked_in_json(body)
    takes = time.perf_counter() - began
    longest: list[float] = []

    async def look() -> None:
        while True:
            before = time.perf_counter()
            await trio.sleep(0)
            longest[-1] = max(longest[-1], time.perf_counter() - before)

    async with router(e.answers) as it, it.client() as client:
        it.nursery.start_soon(look)
        for _ in range(3):  # something else on this machine may hold up one of them
            longest.append(0.0)
            await client.post(body)
            assert (await client.answer())[0] == 200
        assert it.engines[0].requests[0][1] == body
    assert min(longest) < takes / 2


async def test_own_routes() -> None:
    async with router(e.answers) as it, it.client() as client:
        await client.get(b"/v1/models")
        _, _, body = await client.answer()
        listed = json.loads(body)["data"]
        assert [m["id"] for m in listed] == ["m", "empty"]
        how = {"state": "loading", "ready": 0, "wanted": 2, "status": "is loading (45 %)"}
        assert listed[1]["llmgw"] == how
        await client.get(b"/v1/models/m")
        assert json.loads((await client.answer())[2]) == {
            "id": "m",
            "object": "model",
            "created": 7,
            "owned_by": "llmgw",
            "llmgw": {"state": "", "ready": None, "wanted": 0, "status": ""},
        }
        await client.get(b"/healthz", b"HEAD")
        status, fields, _ = await client.answer(bodiless=True)
        assert (status, fields[b"content-length"]) == (200, b"3")
        for path in (b"/readyz", b"/metrics", b"/healthz"):
            await client.get(path)
            assert (await client.answer())[0] == 200


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 17\r\n\r\n" + b'{"model": "nope"}', 404, "model_not_found"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 17\r\n\r\n" + b'{"model":"empty"}', 503, "no_ready_replica"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 3\r\n\r\n" + b'{"m', 400, "invalid_json"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 2\r\n\r\n" + b"{}", 400, "invalid_body"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 11\r\n\r\n" + b'{"model":7}', 400, "invalid_body"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 2\r\n\r\n" + b"[]", 400, "invalid_body"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 4\r\n\r\n" + b"\xff\xfe{}", 400, "invalid_json"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n\r\n", 411, "length_required"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 99999999\r\n\r\n", 413, "body_too_large"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 25\r\n\r\n" + b'{"model":"m","model":"m"}', 400, "invalid_body"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\n\x1f\x8b", 415, "bad_request"),
        (b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: g\r\ncontent-length: 13\r\n\r\n" + b'{"model":"m"}', 400, "invalid_body"),
        (b"POST /pause HTTP/1.1\r\nhost: g\r\ncontent-length: 0\r\n\r\n", 404, "not_found"),
        (b"POST /update_weights HTTP/1.1\r\nhost: g\r\ncontent-length: 0\r\n\r\n", 404, "not_found"),
        (b"POST /tokenize/ HTTP/1.1\r\nhost: g\r\ncontent-length: 0\r\n\r\n", 404, "not_found"),
        (b"GET /v1/chat/completions HTTP/1.1\r\nhost: g\r\n\r\n", 405, "method_not_allowed"),
        (b"POST /v1/models HTTP/1.1\r\nhost: g\r\ncontent-length: 0\r\n\r\n", 405, "method_not_allowed"),
        (b"GET / HTTP/1.1\r\nhost: g\r\n\r\n", 404, "not_found"),
        (b"POST /invocations HTTP/1.1\r\nhost: g\r\ncontent-length: 0\r\n\r\n", 404, "not_found"),
        (b"POST /v1/%63hat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 0\r\n\r\n", 404, "not_found"),
        (b"POST //v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 0\r\n\r\n", 404, "not_found"),
        (b"POST /v1/chat/../completions HTTP/1.1\r\nhost: g\r\ncontent-length: 0\r\n\r\n", 404, "not_found"),
        (b"POST http://g/v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 0\r\n\r\n", 404, "not_found"),
        (b"GET /v1/models/nope HTTP/1.1\r\nhost: g\r\n\r\n", 404, "model_not_found"),
        (b"POST /v1/chat/completions HTTP/1.1\nhost: g\ncontent-length: 13\n\n" + b'{"model":"m"}', 400, "bad_request"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\nffffffff\r\n" + b"x" * 10_000_000, 413, "body_too_large"),
        (b"POST /v1/chat/completions HTTP/1.1\rhost: g\r\r", 400, "bad_request"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n2\n{}\n0\n\n", 400, "bad_request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, "bad_request"),
        (b"POST /v1/chat/completions HTTP/1.1\r\n\r\n", 400, "bad_request"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\na: " + b"x" * 20000 + b"\r\n\r\n", 431, "bad_request"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n5x\r\n", 400, "bad_request"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 100002\r\n\r\n" + b"[" * 100002, 400, "invalid_"),
    ],
)  # fmt: skip
async def test_refused_in_the_apis_own_words_and_never_forwarded(request_: bytes, status: int, code: str) -> None:
    async with router(e.answers) as it, it.client() as client:
        await client.send(request_)
        found, fields, body = await client.answer()
        error = json.loads(body)["error"]
        assert (found, error["code"].startswith(code)) == (status, True), body
        assert set(error) == {"message", "type", "param", "code"}
        assert fields[b"x-request-id"]
        if status in (411, 413) or b"99999999" in request_ or b"[[[" in request_:
            assert (fields.get(b"connection") == b"close") == (status == 413), "a body that nobody reads ends it"
        if status == 503:
            assert fields[b"retry-after"] in (b"2", b"3")
            assert error["message"] == "No replica of empty is ready: it is loading (45 %)."
        assert it.engines[0].requests == []


PATHS = (
    b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/embeddings", b"/v1/rerank", b"/v1/score",
    b"/tokenize", b"/detokenize", b"/v1/messages", b"/v1/messages/count_tokens", b"/v1/audio/speech",
    b"/v1/images/generations",
)  # fmt: skip
FORM = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'


async def test_every_route_of_an_engine_passes_bytes_on_as_they_are() -> None:
    async with router(e.answers) as it, it.client() as client:
        for path in PATHS:
            await client.post(b'{"model": "m" }', path)
            assert (await client.answer())[0] == 200
        forms = (b"/v1/audio/transcriptions", b"/v1/audio/translations", b"/v1/images/edits", b"/v1/images/variations")
        for path in forms:
            await client.post(FORM, path, b"content-type: multipart/form-data; boundary=b\r\n")
            assert (await client.answer())[0] == 200
        sent = [(head.split(b" ")[1], body) for head, body in it.engines[0].requests]
        assert sent == [*((path, b'{"model": "m" }') for path in PATHS), *((path, FORM) for path in forms)]


async def test_an_alias_is_another_name_for_the_same_model() -> None:
    async with router(e.answers) as it, it.client() as client:
        routes = it.server.directory.table.routes
        it.server.use(Table(2, (*routes, Route("gpt", (), alias_of="m"))))
        await client.post(b'{"model": "gpt", "n": 1}')
        assert (await client.answer())[0] == 200
        await client.post(FORM.replace(b"m\r\n--b--", b"gpt\r\n--b--"), b"/v1/audio/transcriptions",
                          b"content-type: multipart/form-data; boundary=b\r\n")  # fmt: skip
        assert (await client.answer())[0] == 200
        assert [body for _, body in it.engines[0].requests] == [b'{"model": "m", "n": 1}', FORM]
        await client.get(b"/v1/models")
        assert [m["id"] for m in json.loads((await client.answer())[2])["data"]] == ["m", "empty", "gpt"]
        await client.get(b"/v1/models/gpt")
        assert json.loads((await client.answer())[2])["id"] == "gpt"
        assert it.server.directory.asked == {"m": 2}
        assert it.metric('llmgw_router_requests_total{endpoint="e0",model="m",status="200"} 2.0')


async def test_recordings_and_images_may_be_larger() -> None:
    async with router(e.answers, max_body_bytes=1024, max_media_bytes=4096) as it, it.client() as client:
        body = b'{"model": "m", "input": "' + b"x" * 2000 + b'"}'
        await client.post(body, b"/v1/audio/speech")
        assert (await client.answer())[0] == 200
        await client.post(body)
        assert (await client.answer())[0] == 413


async def test_anthropic_s_routes_have_its_errors() -> None:
    async with router(e.dies_in_the_stream) as it, it.client() as client:
        for model, status, kind in (("nope", 404, "not_found_error"), ("empty", 503, "overloaded_error")):
            await client.post(json.dumps({"model": model}).encode(), b"/v1/messages")
            found, _, body = await client.answer()
            error = json.loads(body)
            assert (found, error["type"], error["error"]["type"]) == (status, "error", kind)
            assert set(error["error"]) == {"type", "message"}
        await client.post(path=b"/v1/messages")
        events = (await client.rest()).decode()
        assert 'event: error\ndata: {"type":"error","error":{"type":"api_error"' in events


async def test_a_wrong_request_keeps_the_connection_where_its_end_is_known() -> None:
    async with router(e.answers) as it, it.client() as client:
        await client.post(b'{"model": "nope"}')
        assert (await client.answer())[0] == 404
        await client.post()
        assert (await client.answer())[0] == 200


async def test_chunked_requests_expectations_and_old_clients() -> None:
    async with router(e.answers) as it, it.client() as client:
        await client.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n"
        )
        assert (await client.head())[0] == 100
        await client.send(b'd\r\n{"model":"m"}\r\n0\r\n\r\n')
        assert (await client.answer())[0] == 200
        assert it.engines[0].requests[0][1] == b'{"model":"m"}'
        assert b"content-length: 13" in it.engines[0].requests[0][0]
        head = b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 13\r\nexpect: 100-continue\r\n\r\n{"
        await client.send(head)
        await trio.testing.wait_all_tasks_blocked()
        await client.send(b'"model":"m"}')
        assert (await client.answer())[0] == 200, "what is on its way is not asked for"
        async with it.client() as old:
            await old.send(b'POST /v1/completions HTTP/1.0\r\ncontent-length: 13\r\n\r\n{"model":"m"}')
            status, fields, _ = await old.answer()
            assert (status, fields[b"connection"]) == (200, b"close")
            assert await old.rest() == b""


async def test_a_stream_is_passed_on_as_it_comes_and_to_its_end() -> None:
    async def script(visit: e.Visit) -> None:
        await visit.request()
        await visit.send(interim + e.EVENTS + e.event(b"1"))
        with trio.fail_after(5):
            await go_on.wait()
        await visit.send(e.event(b"[DONE]") + b"0\r\n\r\n")

    interim = b"HTTP/1.1 102 Processing\r\n\r\n"
    go_on = trio.Event()
    async with router(script) as it, it.client() as client:
        await client.post()
        status, fields = await client.head()
        assert (status, fields[b"content-type"]) == (200, b"text/event-stream")
        while e.event(b"1") not in client.buffer:
            client.buffer += await client.stream.receive_some()
        go_on.set()
        while not client.buffer.endswith(b"0\r\n\r\n"):
            client.buffer += await client.stream.receive_some()
        assert client.buffer == e.event(b"1") + e.event(b"[DONE]") + b"0\r\n\r\n"


async def test_a_body_that_ends_with_the_connection_is_chunked_for_the_client() -> None:
    async def script(visit: e.Visit) -> None:
        await visit.request()
        await visit.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nhello ")
        await visit.send(b"you")

    async with router(script) as it, it.client() as client:
        await client.post()
        status, fields = await client.head()
        assert (status, fields[b"transfer-encoding"]) == (200, b"chunked")
        while not client.buffer.endswith(b"0\r\n\r\n"):
            client.buffer += await client.stream.receive_some()
        assert b"".join(client.buffer.split(b"\r\n")[1::2][:-1]) == b"hello you"


async def test_a_chunked_answer_is_taken_apart_for_an_old_client() -> None:
    async def script(visit: e.Visit) -> None:
        await visit.request()
        await visit.send(e.EVENTS + e.event(b"1") + b"0\r\n\r\n")

    async with router(script) as it, it.client() as old:
        await old.send(b'POST /v1/completions HTTP/1.0\r\ncontent-length: 13\r\n\r\n{"model":"m"}')
        _, fields = await old.head()
        assert b"transfer-encoding" not in fields
        assert await old.rest() == b"data: 1\n\n"
    async with router(e.dies_in_the_stream) as it, it.client() as old:
        await old.send(b'POST /v1/completions HTTP/1.0\r\ncontent-length: 13\r\n\r\n{"model":"m"}')
        await old.head()
        await old.rest()
        assert it.metric('llmgw_router_broken_total{endpoint="e0",model="m"} 1.0'), "it cannot be told, and is counted"


async def sends_no_chunks(visit: e.Visit) -> None:
    """A body that is not what its head says."""
    await visit.request()
    await visit.send(e.EVENTS + b"zz\r\n")


async def speaks_no_http(visit: e.Visit) -> None:
    """Another protocol."""
    await visit.request()
    await visit.send(b"+OK ready\r\n\r\n")
    await visit.gone()


async def never_ends_its_head(visit: e.Visit) -> None:
    """A head without an end."""
    await visit.request()
    await visit.send(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 10_000)
    await visit.gone()


@pytest.mark.parametrize(
    "dies", [e.dies_at_once, e.dies_after_its_head, sends_no_chunks, speaks_no_http, never_ends_its_head]
)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_dies_before_its_first_byte_of_body_is_replaced(dies: Script, stream: bool) -> None:
    async with router(dies, e.answers) as it:
        for _ in range(6):
            async with it.client() as client:
                await client.post(json.dumps({"model": "m", "stream": stream}).encode())
                assert (await client.answer())[0] == 200
        assert len(it.engines[1].requests) == 6
        assert it.engines[0].requests, "it was tried"
        assert it.metric('llmgw_router_retries_total{endpoint="e0",model="m"}')


async def test_no_engine_is_left() -> None:
    async with router(e.dies_at_once, e.dies_after_its_head) as it, it.client() as client:
        await client.post()
        status, _, body = await client.answer()
        assert status == 502
        assert json.loads(body)["error"]["code"] == "engine_failed"
        assert [len(x.requests) for x in it.engines] == [1, 1], "never the one that failed"


async def test_a_stream_cut_short_ends_as_an_error_and_not_as_complete() -> None:
    async with router(e.dies_in_the_stream) as it, it.client() as client:
        await client.post()
        assert (await client.head())[0] == 200
        rest = await client.rest()
        assert rest.startswith(e.event(b'{"n":1}') + e.event(b'{"n":2}'))
        last = rest[len(e.event(b'{"n":1}') * 2) :]
        error = json.loads(last.split(b"data: ", 1)[1].split(b"\n\n")[0])["error"]
        assert error["code"] == "upstream_error"
        assert b"[DONE]" not in rest
        assert not rest.endswith(b"0\r\n\r\n")
        assert it.metric('llmgw_router_broken_total{endpoint="e0",model="m"} 1.0')


WHOLE_EVENTS = e.EVENTS + e.event(b'{"n":1}') + e.event(b'{"n":2}') + e.event(b"[DONE]") + b"0\r\n\r\n"


@pytest.mark.parametrize("answer", [WHOLE_EVENTS, e.whole()], ids=["stream", "sized"])
async def test_an_engine_killed_at_any_byte_of_its_answer(answer: bytes) -> None:
    """Before a byte of the body: another one answers. After it: what came, never looking complete."""
    body_at = answer.index(b"\r\n\r\n") + 4

    async def script(visit: e.Visit) -> None:
        _, body = await visit.request()
        name = json.loads(body)["model"]
        if name in died:
            await visit.send(e.whole(b"of the other one"))
        died.add(name)
        await visit.send(answer[: int(name)])

    died: set[str] = set()
    async with router(script, script) as it:
        ports = [engine.port for engine in it.engines]
        names = [str(cut) for cut in range(len(answer))]
        # A model for each, since engines that fail are left alone and only so many requests are tried again.
        it.server.use(
            Table(
                2,
                tuple(
                    Route(n, tuple(Endpoint(f"{n}-{at}", "127.0.0.1", port) for at, port in enumerate(ports)))
                    for n in names
                ),
            )
        )
        for name in names:
            cut = int(name)
            async with it.client() as client:
                await client.post(json.dumps({"model": name, "stream": answer is WHOLE_EVENTS}).encode())
                if cut <= body_at:
                    assert (await client.answer())[::2] == (200, b"of the other one"), answer[:cut]
                    continue
                status, fields = await client.head()
                got = await client.rest()
                sent = answer[body_at:cut]
                assert status == 200
                if answer is not WHOLE_EVENTS:
                    assert (got, int(fields[b"content-length"])) == (sent, len(answer) - body_at)
                    continue
                assert got.startswith(sent), answer[:cut]
                assert not got.endswith(b"0\r\n\r\n"), answer[:cut]
                said = got[len(sent) :]
                ends_a_chunk = sent.endswith(b"\n\n\r\n")
                assert (b"upstream_error" in said) == ends_a_chunk, (sent, said)
                assert b"[DONE]" not in said
        await it.quiet()


REQUESTS = {
    "sized": b'POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 13\r\n\r\n{"model":"m"}',
    "chunked": b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n"
    b'6;x=y\r\n{"mode\r\n7\r\nl":"m"}\r\n0\r\na: b\r\n\r\n',
}


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
async def test_a_request_cut_at_any_byte(request_: bytes) -> None:
    async with router(e.answers) as it, it.client() as client:
        for cut in range(1, len(request_)):
            await client.send(request_[:cut])
            await trio.testing.wait_all_tasks_blocked()
            await client.send(request_[cut:])
            assert (await client.answer())[0] == 200, request_[:cut]
        assert {body for _, body in it.engines[0].requests} == {b'{"model":"m"}'}


@pytest.mark.parametrize("answer", [WHOLE_EVENTS, e.whole()], ids=["stream", "sized"])
async def test_an_answer_cut_at_any_byte(answer: bytes) -> None:
    body = answer.partition(b"\r\n\r\n")[2]

    async def script(visit: e.Visit) -> None:
        for cut in range(1, len(answer)):
            await visit.request()
            await visit.send(answer[:cut])
            await trio.testing.wait_all_tasks_blocked()
            await visit.send(answer[cut:])

    async with router(script) as it, it.client() as client:
        for cut in range(1, len(answer)):
            await client.post()
            assert (await client.head())[0] == 200
            while len(client.buffer) < len(body):
                client.buffer += await client.stream.receive_some()
            assert client.buffer == body, answer[:cut]
            client.buffer = b""
        assert it.engines[0].connections == 1


async def test_an_engine_s_own_error_before_its_done_is_no_success() -> None:
    async def crashes_as_vllm_does(visit: e.Visit) -> None:
        while True:
            await visit.request()
            await visit.send(e.EVENTS + e.event(b'{"n":1}'))
            await visit.send(e.event(b'{"error": {"message": "EngineCore died", "code": 500}}'))
            await visit.send(e.event(b"[DONE]") + b"0\r\n\r\n")

    async with router(crashes_as_vllm_does) as it, it.client() as client:
        for _ in range(2):
            await client.post()
            await client.head()
            while not client.buffer.endswith(b"0\r\n\r\n"):
                client.buffer += await client.stream.receive_some()
            client.buffer = b""
        assert it.metric('llmgw_router_broken_total{endpoint="e0",model="m"} 2.0')
        assert not it.metric('llmgw_router_requests_total{endpoint="e0"')


async def test_a_chunk_cut_short_is_an_aborted_transfer() -> None:
    async with router(e.dies_in_a_chunk) as it, it.client() as client:
        await client.post()
        await client.head()
        assert await client.rest() == e.event(b'{"n":1}') + b"ff\r\ndata: {"


async def test_a_sized_answer_cut_short_is_an_aborted_transfer() -> None:
    async def script(visit: e.Visit) -> None:
        await visit.request()
        await visit.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")

    async with router(script) as it, it.client() as client:
        await client.post()
        _, fields = await client.head()
        assert fields[b"content-length"] == b"100"
        assert await client.rest() == b"half"


@pytest.mark.parametrize("script", [e.says_nothing, e.begins_a_stream, e.streams_for_ever])
async def test_a_client_that_leaves_ends_the_engines_work_at_once(script: Script) -> None:
    async with router(script) as it:
        async with it.client() as client:
            await client.post()
            with trio.fail_after(2):
                while not it.engines[0].requests:
                    await trio.sleep(0.001)
            if script is not e.says_nothing:
                await client.head()
        began = trio.current_time()
        with trio.fail_after(1):
            await it.engines[0].left.wait()
        assert trio.current_time() - began < 0.5
        await it.quiet()
        with trio.fail_after(1):
            while not it.metric('llmgw_router_client_gone_total{model="m"} 1.0'):
                await trio.sleep(0.005)


async def test_a_silent_engine_is_given_up_in_time() -> None:
    async with router(e.says_nothing, first_byte_timeout_s=0.3) as it, it.client() as client:
        await client.post()
        status, _, body = await client.answer()
        assert (status, json.loads(body)["error"]["code"]) == (504, "engine_timeout")
        with trio.fail_after(1):
            await it.engines[0].left.wait()


async def test_an_engine_that_takes_requests_and_answers_none_gets_no_more(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Clients leave after ten seconds, long before the engine's own time is over; three of them are enough. From then
    on it is the router that asks it, and no client's request goes there until it says something."""
    autojump_clock.autojump_threshold = 0.01  # real sockets need a moment of real time
    heals = trio.Event()

    async def hangs(visit: e.Visit) -> None:
        await visit.request()
        if heals.is_set():
            await visit.send(e.whole())
        else:
            await visit.gone()

    async with router(hangs, e.answers) as it:
        sent: list[float] = []
        late: list[float] = []

        async def ask() -> None:
            began = trio.current_time()
            sent.append(began)
            with trio.move_on_after(10) as patience:
                async with it.client() as client:
                    await client.post(b'{"model": "m", "messages": [{"role": "user", "content": "%d"}]}' % len(sent))
                    assert (await client.answer())[0] == 200
            if patience.cancelled_caught:
                late.append(began)

        async with trio.open_nursery() as nursery:
            for _ in range(110):
                nursery.start_soon(ask)
                await trio.sleep(0.5)
        assert late, "it was asked"
        assert max(late) - sent[0] < 11
        paths = [head.split(b" ")[1] for head, _ in it.engines[0].requests]
        assert paths.count(b"/v1/chat/completions") == len(late)
        assert 2 <= paths.count(b"/health") <= 6, "ever more seldom"
        heals.set()
        asked = len(late)
        with trio.fail_after(130):
            while paths.count(b"/v1/chat/completions") == asked:
                await ask()
                await trio.sleep(0.5)
                paths = [head.split(b" ")[1] for head, _ in it.engines[0].requests]
        assert len(late) == asked


async def begins_a_body_without_a_length(visit: e.Visit) -> None:
    """One event, and then silence."""
    await visit.request()
    await visit.send(e.EVENTS.replace(b"transfer-encoding: chunked\r\n", b"") + b"data: 1\n\n")
    await visit.gone()


@pytest.mark.parametrize("script", [e.begins_a_stream, begins_a_body_without_a_length])
async def test_a_stream_that_stands_still_is_cut(script: Script) -> None:
    async with router(script, idle_timeout_s=0.3) as it, it.client() as client:
        await client.post()
        await client.head()
        rest = await client.rest()
        assert b"sent nothing for 0.3 s" in rest
        assert not rest.endswith(b"0\r\n\r\n")


async def test_a_kept_connection_that_was_closed_meanwhile_costs_nothing() -> None:
    async def once(visit: e.Visit) -> None:
        await visit.request()
        await visit.send(e.whole())

    async with router(once) as it, it.client() as client:
        for _ in range(5):
            await client.post()
            assert (await client.answer())[0] == 200
            await trio.sleep(0.01)
        assert it.engines[0].connections == 5
        assert not it.metric("llmgw_router_retries_total{")


@pytest.mark.parametrize("first", [e.whole(b"{}"), e.whole(b"{}")[:-1], e.EVENTS + b"2\r\n{}\r\n0\r\n\r\n"])
async def test_answers_with_something_behind_them_do_not_poison_the_connection(first: bytes) -> None:
    begun = first.endswith(b"{")

    async def generous(visit: e.Visit) -> None:
        await visit.request()
        if begun:
            await visit.send(first)
            await trio.testing.wait_all_tasks_blocked(0.01)
        await visit.send((b"}" if begun else first) + b"HTTP/1.1 500 evil\r\n\r\n")
        await visit.gone()

    async with router(generous) as it, it.client() as client:
        for _ in range(3):
            await client.post()
            assert (await client.head())[0] == 200
            while not client.buffer.endswith((b"{}", b"0\r\n\r\n")):
                client.buffer += await client.stream.receive_some()
            client.buffer = b""
        assert it.engines[0].connections == 3


async def test_an_engine_that_refuses_a_request_before_it_has_all_of_it_is_heard() -> None:
    async def refuses(visit: e.Visit) -> None:
        visit.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await visit.stream.receive_some(1000)
        await trio.testing.wait_all_tasks_blocked(0.01)
        await visit.send(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 2\r\n\r\n{}")

    async with router(refuses) as it, it.client() as client:
        for _ in range(4):
            await client.post(json.dumps({"model": "m", "prompt": "x" * 8_000_000}).encode())
            assert (await client.answer())[::2] == (413, b"{}")
        assert it.engines[0].connections == 4
        assert not it.metric("llmgw_router_retries_total{"), "that is no fault of the engine's"


@pytest.mark.parametrize("unasked", [b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n", b"\r\n"])
async def test_what_an_engine_says_unasked_is_no_answer_to_the_next_request(unasked: bytes) -> None:
    async def script(visit: e.Visit) -> None:
        await visit.request()
        await visit.send(e.whole())
        await told.wait()
        await visit.send(unasked)
        await visit.gone()

    async with router(script) as it, it.client() as client:
        for _ in range(2):
            told = trio.Event()
            await client.post()
            with trio.fail_after(5):
                assert (await client.answer())[::2] == (200, e.whole().partition(b"\r\n\r\n")[2])
            told.set()
            await trio.testing.wait_all_tasks_blocked(0.01)
        assert it.engines[0].connections == 2


async def test_a_kept_connection_is_used_again_though_its_bytes_were_seen_twice() -> None:
    async with router(e.answers) as it, it.client() as client:
        for _ in range(3):
            await client.post()
            assert (await client.answer())[0] == 200
            ((peer, _),) = next(iter(it.server.directory._engines.values()))._idle
            peer.told(select.EPOLLIN)  # as when they came between the event and the read
        assert it.engines[0].connections == 1


async def test_the_least_loaded_engine_is_taken() -> None:
    async with (
        router(e.begins_a_stream, e.begins_a_stream) as it,
        it.client() as one,
        it.client() as two,
        it.client() as three,
    ):
        route = it.server.directory.table.routes[0]
        it.server.use(Table(2, (evolve(route, routing=Routing(balance=Balance.LEAST)),)))
        for client in (one, two):
            await client.post()
            await client.head()
        assert [len(x.requests) for x in it.engines] == [1, 1]
        await three.post()
        await three.head()
        assert sorted(it.server.directory.outstanding().values()) == [1, 2]


async def test_a_slow_reader_holds_the_engine_back_and_nobody_else() -> None:
    async with router(e.streams_for_ever) as it, it.client() as slow:
        await slow.post()
        await slow.head()
        async with it.client() as other:
            with trio.fail_after(2):
                await other.get(b"/v1/models")
                assert (await other.answer())[0] == 200


async def test_draining_ends_idle_connections_finishes_streams_and_takes_nothing_new() -> None:
    async def script(visit: e.Visit) -> None:
        await visit.request()
        await visit.send(e.EVENTS + e.event(b"1"))
        await go_on.wait()
        await visit.send(e.event(b"[DONE]") + b"0\r\n\r\n")

    go_on = trio.Event()
    async with router(script) as it, it.client() as busy, it.client() as idle:
        await idle.get(b"/readyz")
        await idle.answer()
        await busy.post()
        await busy.head()
        it.server.drain(5)
        with trio.fail_after(1):
            assert await idle.rest() == b""
        go_on.set()
        with trio.fail_after(2):
            assert (await busy.rest()).endswith(b"0\r\n\r\n")
        with pytest.raises(OSError):
            async with it.client():
                pass


async def test_a_new_table_holds_for_the_next_request_and_ends_nothing() -> None:
    async with router(e.begins_a_stream, e.answers) as it, it.client() as old, it.client() as new:
        first, second = it.server.directory.table.routes[0].endpoints
        it.server.use(Table(2, (Route("m", (first,)),)))
        await old.post()
        await old.head()
        it.server.use(Table(3, (Route("m", (evolve(first, draining=True), second)),)))
        await new.post()
        assert (await new.answer())[0] == 200
        it.server.use(Table(4, (Route("other", (second,)),)))
        assert it.server.directory.outstanding()["e0"] == 1, "still counted until it ends"
        await new.post()
        assert (await new.answer())[0] == 404


async def test_a_request_waits_for_the_first_engine_where_one_is_started_for_it() -> None:
    async with router(e.answers) as it, it.client() as client:
        route = it.server.directory.table.routes[0]
        held = Route("m", (), "is starting", hold_s=60)
        it.server.use(Table(2, (held,)))
        await client.post()
        with trio.fail_after(2):
            while it.server.directory.waiting != {"m": 1}:
                await trio.sleep(0.001)
        it.server.use(Table(3, (evolve(held, endpoints=(evolve(route.endpoints[0], draining=True),)),)))
        await trio.testing.wait_all_tasks_blocked()
        assert it.server.directory.waiting == {"m": 1}, "one that drains is none"
        it.server.use(Table(4, (evolve(held, endpoints=route.endpoints),)))
        assert (await client.answer())[0] == 200
        assert it.server.directory.waiting == {}
        assert it.server.directory.asked == {"m": 1}


async def test_a_held_request_ends_with_its_time_its_client_or_its_model(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with router() as it:
        it.server.use(Table(2, (Route("m", (), "is starting", hold_s=60),)))
        async with it.client() as client:
            began = trio.current_time()
            await client.post()
            status, fields, body = await client.answer()
            assert (status, b"retry-after" in fields) == (503, True)
            assert "is starting" in json.loads(body)["error"]["message"]
            assert 60 <= trio.current_time() - began < 61
        async with it.client() as client:
            await client.post()
            await trio.sleep(1)
            it.server.use(Table(3, ()))
            assert (await client.answer())[0] == 503
        it.server.use(Table(4, (Route("m", (), "is starting", hold_s=60),)))
        async with it.client() as client:
            await client.post()
            await trio.sleep(1)
            assert it.server.directory.waiting == {"m": 1}
        await trio.sleep(1)
        assert it.server.directory.waiting == {}, "its client is gone"


async def test_only_so_many_requests_wait() -> None:
    async with router() as it, it.client() as first, it.client() as second:
        it.server.use(Table(2, (Route("m", (), "is starting", hold_s=60, routing=Routing(queue=1)),)))
        await first.post()
        with trio.fail_after(2):
            while it.server.directory.waiting != {"m": 1}:
                await trio.sleep(0.001)
            await second.post()
            status, fields, body = await second.answer()
        assert (status, json.loads(body)["error"]["code"]) == (503, "overloaded")
        assert 1 <= int(fields[b"retry-after"]) <= 5


async def test_an_engine_has_no_more_requests_than_it_may_have_and_the_next_takes_the_place() -> None:
    async with router(e.begins_a_stream, e.answers) as it, it.client() as one, it.client() as two, it.client() as three:
        first = it.server.directory.table.routes[0].endpoints[0]
        route = Route("m", (first,), routing=Routing(concurrency=1))
        it.server.use(Table(2, (route,)))
        await one.post()
        await one.head()
        for client, count in ((two, 1), (three, 2)):
            await client.post()
            with trio.fail_after(2):
                while it.server.directory.waiting != {"m": count}:
                    await trio.sleep(0.001)
        await trio.aclose_forcefully(one.stream)
        with trio.fail_after(2):
            await two.head()
        assert it.server.directory.waiting == {"m": 1}
        assert it.server.directory.outstanding()["e0"] == 1
        second = Endpoint("e1", "127.0.0.1", it.engines[1].port)
        it.server.use(Table(3, (evolve(route, endpoints=(first, second)),)))
        with trio.fail_after(2):
            assert (await three.answer())[0] == 200, "a new engine takes those that wait"
        assert it.server.directory.waiting == {}


async def test_a_request_that_leaves_when_its_turn_has_come_gives_the_place_to_the_next() -> None:
    async with router(e.begins_a_stream) as it, it.client() as one, it.client() as two, it.client() as three:
        route = Route("m", it.server.directory.table.routes[0].endpoints, routing=Routing(concurrency=1))
        it.server.use(Table(2, (route,)))
        await one.post()
        await one.head()
        for client, count in ((two, 1), (three, 2)):
            await client.post()
            with trio.fail_after(2):
                while it.server.directory.waiting != {"m": count}:
                    await trio.sleep(0.001)
        # Both in one turn of the loop: the place is given to the second, which is gone at the same time.
        await trio.aclose_forcefully(one.stream)
        await trio.aclose_forcefully(two.stream)
        with trio.fail_after(2):
            await three.head()


async def test_nobody_waits_longer_for_an_engine_than_the_queue_s_time(autojump_clock: trio.testing.MockClock) -> None:
    async with router(e.says_nothing) as it, it.client() as one, it.client() as two:
        route = Route("m", it.server.directory.table.routes[0].endpoints, routing=Routing(concurrency=1, queue_s=7))
        it.server.use(Table(2, (route,)))
        await one.post()
        await trio.sleep(1)
        await two.post()
        began = trio.current_time()
        status, _, body = await two.answer()
        assert (status, json.loads(body)["error"]["code"]) == (503, "overloaded")
        assert 7 <= trio.current_time() - began < 8
        assert it.server.directory.waiting == {}


async def test_a_request_that_takes_too_long_in_all_is_ended(autojump_clock: trio.testing.MockClock) -> None:
    async def drips(visit: e.Visit) -> None:
        await visit.request()
        await visit.send(e.EVENTS)
        while True:
            await visit.send(e.event(b'{"n":1}'))
            await trio.sleep(1)

    async with router(drips, total_timeout_s=20) as it, it.client() as client:
        began = trio.current_time()
        await client.post()
        events = await client.rest()
        assert 20 <= trio.current_time() - began < 21
        assert b"took longer than 20 s" in events
        assert b"[DONE]" not in events


async def test_an_engine_without_room_is_passed_over_and_its_own_word_passed_on_where_it_is_the_only_one() -> None:
    async def full(visit: e.Visit) -> None:
        while True:
            await visit.request()
            await visit.send(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nfull")

    async with router(full, e.answers) as it, it.client() as client:
        for n in range(6):
            await client.post(json.dumps({"model": "m", "prompt": str(n)}).encode())
            assert (await client.answer())[0] == 200
        assert it.engines[0].requests, "it was tried"
        route = it.server.directory.table.routes[0]
        it.server.use(Table(2, (evolve(route, endpoints=route.endpoints[:1]),)))
        await client.post()
        assert (await client.answer())[::2] == (503, b"full")


async def test_an_engine_that_answers_with_errors_is_left_alone_but_not_for_a_client_s_mistakes() -> None:
    def with_status(status: int) -> Script:
        async def script(visit: e.Visit) -> None:
            while True:
                await visit.request()
                await visit.send(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % status)

        return script

    for status, asked in ((500, ERRORS), (400, 20)):
        async with router(with_status(status), e.answers) as it, it.client() as client:
            found = [0, 0]
            for n in range(60):
                await client.post(b'{"model":"m","prompt":"%d"}' % n)
                found[(await client.answer())[0] == 200] += 1
            assert found[1] >= 20
            assert len(it.engines[0].requests) == asked if status == 500 else len(it.engines[0].requests) >= asked


async def test_failures_of_all_engines_are_not_made_worse_by_trying_again() -> None:
    async with router(e.dies_at_once, e.dies_at_once, e.dies_at_once) as it:
        for _ in range(100):
            async with it.client() as client:
                await client.post()
                assert (await client.answer())[0] == 502
        assert sum(len(x.requests) for x in it.engines) <= 100 + RETRIES_SAVED + 100 * RETRY_SHARE


async def test_a_conversation_stays_with_its_engine() -> None:
    async with router(e.answers, e.answers, e.answers) as it, it.client() as client:
        for n in range(12):
            body = {"model": "m", "messages": [{"role": "user", "content": "hello"}, *[{"role": "x"}] * n]}
            await client.post(json.dumps(body).encode())
            await client.answer()
        assert sorted(len(x.requests) for x in it.engines) == [0, 0, 12]
        for n in range(12):
            await client.post(b'{"model":"m","prompt":"%d"}' % n, fields=b"x-llmgw-session: s-1\r\n")
            await client.answer()
        assert sum(len(x.requests) == 12 for x in it.engines) == 2 or max(len(x.requests) for x in it.engines) == 24
        assert all(b"x-llmgw" not in head.lower() for x in it.engines for head, _ in x.requests)
        assert it.metric('llmgw_router_choices_total{model="m",reason="affinity"} 24.0')


async def test_clients_that_come_and_go_leave_nothing_behind() -> None:
    async with router(e.answers, e.begins_a_stream, e.dies_in_the_stream, first_byte_timeout_s=5) as it:

        async def come_and_go(number: int) -> None:
            for turn in range(12):
                with trio.move_on_after(0.002 * ((number * 7 + turn * 3) % 11)):
                    async with it.client() as client:
                        await client.post()
                        await client.head()
                        await client.rest()

        gc.collect()  # what other tests left
        gc.disable()
        try:
            async with trio.open_nursery() as nursery:
                for number in range(20):
                    nursery.start_soon(come_and_go, number)
            await it.quiet()
            with trio.fail_after(2):
                while it.server._connections:
                    await trio.sleep(0.005)
            assert not [x for x in gc.get_objects() if isinstance(x, Exchange)], "none waits for the collector"
        finally:
            gc.enable()


async def test_engines_that_fail_leave_nothing_behind() -> None:
    async def nonsense(visit: e.Visit) -> None:
        await visit.request()
        await visit.stream.send_all(b"HTTP/9.9 nonsense\r\n\r\n")

    async with router(nonsense, nonsense) as it:
        (route,) = (r for r in it.server.directory.table.routes if r.model == "m")
        unreachable = tuple(
            evolve(endpoint, id=f"u{n}", port=free_ports(1)[0]) for n, endpoint in enumerate(route.endpoints)
        )
        both = (evolve(route, endpoints=route.endpoints), evolve(route, model="u", endpoints=unreachable))
        it.server.use(Table(2, both))
        gc.collect()  # what other tests left
        gc.disable()
        try:
            for model in ("m", "u"):
                async with it.client() as client:
                    await client.post(json.dumps({"model": model}).encode())
                    assert (await client.answer())[0] == 502
            await it.quiet()
            while it.server._connections:
                await trio.sleep(0.005)
            assert not [x for x in gc.get_objects() if isinstance(x, Exchange)], "none waits for the collector"
        finally:
            gc.enable()


async def test_a_head_that_comes_byte_by_byte_has_one_deadline(autojump_clock: trio.testing.MockClock) -> None:
    autojump_clock.autojump_threshold = 0.01  # real sockets need a moment of real time
    async with router(e.answers) as it, it.client() as client:

        async def dribble() -> None:
            for byte in b"POST /v1/completions HTTP/1.1\r\nhost: gw\r\nx-slow: 1\r\n" * 3:
                await client.send(bytes([byte]))
                await trio.sleep(1)

        began = trio.current_time()
        with pytest.raises(trio.BrokenResourceError):
            await dribble()
        assert 10 <= trio.current_time() - began < 13


async def test_an_idle_client_is_let_go_after_a_while(autojump_clock: trio.testing.MockClock) -> None:
    autojump_clock.autojump_threshold = 0.01
    async with router(e.answers) as it, it.client() as client:
        await client.get(b"/healthz")
        await client.answer()
        began = trio.current_time()
        assert await client.rest() == b""
        assert 75 <= trio.current_time() - began < 77
