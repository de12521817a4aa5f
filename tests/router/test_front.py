"""What clients meet besides answers: TLS, web pages of other origins, request ids, the log of requests, and its bounds."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import shutil
import socket
import ssl
import struct
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path

import pytest
import trio
import trio.testing
from attrs import evolve
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from llmgw.cli.demo_files import free_ports
from llmgw.errors import OperatorError
from llmgw.router.cors import CorsRules
from llmgw.router.server import RouterServer, listen
from llmgw.router.sockets import UNSENT_BYTES
from llmgw.router.table import Endpoint, Route, Table
from llmgw.router.telling import Teller
from llmgw.router.tls import Identity, context_of
from llmgw.settings.daemon import Address, Log, LogFormat, RouterTls
from llmgw.settings.document import RouterSettings, Tracing
from llmgw.telemetry.logging import Lines, configure
from llmgw.telemetry.tracing import Tracer
from tests.link.samples import Pki, make_pki
from tests.router import engines as e
from tests.router.engines import Script, ScriptedEngine
from tests.router.load import Load
from tests.router.test_server import Client, Router
from tests.router.test_worker import answers, control, until


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return make_pki(tmp_path_factory.mktemp("pki"))


@asynccontextmanager
async def front(*scripts: Script, identity: Identity | None = None) -> AsyncIterator[Router]:
    async with trio.open_nursery() as nursery:
        engines = [ScriptedEngine(script) for script in scripts]
        for engine in engines:
            await nursery.start(engine.run)
        server = RouterServer(identity=identity)
        endpoints = tuple(Endpoint(f"e{n}", "127.0.0.1", engine.port) for n, engine in enumerate(engines))
        server.use(Table(1, (Route("m", endpoints),), RouterSettings()))
        listener = listen(Address("127.0.0.1", 0))
        await nursery.start(server.run, listener)
        yield Router(server, listener.getsockname()[1], engines, nursery)
        nursery.cancel_scope.cancel()


# TLS


def files_of(pki: Pki, folder: Path) -> RouterTls:
    """The server's identity, as files that can be changed."""
    files = RouterTls(str(folder / "cert.pem"), str(folder / "key.pem"))
    shutil.copy(pki.server.certificate, files.certificate)
    shutil.copy(pki.server.key, files.key)
    os.chmod(files.key, 0o600)
    return files


def trusting(pki: Pki, most: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=pki.server.ca)
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    context.set_alpn_protocols(["h2", "http/1.1"])
    context.minimum_version = min(most, ssl.TLSVersion.TLSv1_2)
    context.maximum_version = most
    return context


@asynccontextmanager
async def secure(port: int, context: ssl.SSLContext) -> AsyncIterator[Client]:
    stream = trio.SSLStream(
        await trio.open_tcp_stream("127.0.0.1", port), context, server_hostname="localhost", https_compatible=True
    )
    try:
        yield Client(stream)  # type: ignore[arg-type]
    finally:
        await trio.aclose_forcefully(stream)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_tls(pki: Pki, tmp_path: Path, version: ssl.TLSVersion) -> None:
    async with front(e.answers, identity=Identity(files_of(pki, tmp_path))) as it:
        async with secure(it.port, trusting(pki, version)) as client:
            for size in (10, 3_000_000):
                await client.post(json.dumps({"model": "m", "text": "x" * size}).encode())
                assert (await client.answer())[0] == 200
            assert len(it.engines[0].requests[1][1]) > 3_000_000
            stream = client.stream
            assert isinstance(stream, trio.SSLStream)
            assert stream.selected_alpn_protocol() == "http/1.1"
            assert stream.version() == {"TLSv1_2": "TLSv1.2", "TLSv1_3": "TLSv1.3"}[version.name]


async def test_a_long_stream_over_tls_and_a_client_that_leaves(pki: Pki, tmp_path: Path) -> None:
    async with front(e.streams_for_ever, identity=Identity(files_of(pki, tmp_path))) as it:
        async with secure(it.port, trusting(pki)) as client:
            await client.post()
            await client.head()
            read = 0
            while read < 1_000_000:
                read += len(await client.stream.receive_some())
        began = trio.current_time()
        with trio.fail_after(1):
            await it.engines[0].left.wait()
        assert trio.current_time() - began < 0.1


@pytest.mark.parametrize("dies", [True, False])
async def test_an_answer_that_ends_with_its_connection_ends_by_tls_only_if_it_is_whole(
    pki: Pki, tmp_path: Path, dies: bool
) -> None:
    async def script(visit: e.Visit) -> None:
        await visit.request()
        await visit.send(e.EVENTS + e.event(b"1") + (b"" if dies else b"0\r\n\r\n"))

    context = trusting(pki)
    context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF
    identity = Identity(files_of(pki, tmp_path))
    async with front(script, identity=identity) as it, secure(it.port, context) as old:
        await old.send(b'POST /v1/completions HTTP/1.0\r\ncontent-length: 13\r\n\r\n{"model":"m"}')
        await old.head()
        ended = False
        with contextlib.suppress(trio.BrokenResourceError):
            while await old.stream.receive_some():
                pass
            ended = True
        assert ended is not dies


async def test_old_versions_plain_http_and_silence_are_let_go(
    pki: Pki, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    autojump_clock.autojump_threshold = 0.02
    async with front(e.answers, identity=Identity(files_of(pki, tmp_path))) as it:
        async with it.client() as plain:
            await plain.get(b"/healthz")
            assert b"HTTP" not in await plain.rest()
        async with it.client() as silent:
            began = trio.current_time()
            assert await silent.rest() == b""
            assert 5 <= trio.current_time() - began < 6
        old = trusting(pki, ssl.TLSVersion.TLSv1_3)
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(trio.BrokenResourceError):
            async with secure(it.port, old) as client:
                await client.get(b"/healthz")
        async with secure(it.port, trusting(pki)) as client:
            await client.get(b"/healthz")
            assert (await client.answer())[0] == 200, "others are served"


async def test_clients_in_the_middle_of_a_handshake_hold_nobody_up(pki: Pki, tmp_path: Path) -> None:
    async with front(e.answers, identity=Identity(files_of(pki, tmp_path))) as it:
        hello = ssl.MemoryBIO()
        outgoing = ssl.MemoryBIO()
        with pytest.raises(ssl.SSLWantReadError):
            trusting(pki).wrap_bio(hello, outgoing, server_hostname="localhost").do_handshake()
        record = outgoing.read()
        silent = [await trio.open_tcp_stream("127.0.0.1", it.port) for _ in range(60)]
        for stream in silent:
            await stream.send_all(record)  # each of them has an answer made for it, and says nothing more
        with trio.fail_after(2):
            async with secure(it.port, trusting(pki)) as client:
                await client.get(b"/healthz")
                assert (await client.answer())[0] == 200
        for stream in silent:
            await trio.aclose_forcefully(stream)


async def test_a_new_certificate_holds_for_new_connections_and_drops_none(pki: Pki, tmp_path: Path) -> None:
    files = files_of(pki, tmp_path)
    identity = Identity(files)
    async with front(e.answers, identity=identity) as it, secure(it.port, trusting(pki)) as old:
        await old.get(b"/healthz")
        await old.answer()
        Path(files.certificate).write_text("half a certi")
        await identity.look()
        async with secure(it.port, trusting(pki)) as client:
            await client.get(b"/healthz")
            assert (await client.answer())[0] == 200, "one that is wrong is not used"
        other = make_pki(tmp_path)
        shutil.copy(other.server.certificate, files.certificate)
        shutil.copy(other.server.key, files.key)
        await identity.look()
        async with secure(it.port, trusting(other)) as client:
            await client.get(b"/healthz")
            assert (await client.answer())[0] == 200
        with pytest.raises(trio.BrokenResourceError):
            async with secure(it.port, trusting(pki)) as client:
                await client.get(b"/healthz")
        await old.get(b"/healthz")
        assert (await old.answer())[0] == 200, "open connections go on"


def test_files_of_tls_are_checked(pki: Pki, tmp_path: Path) -> None:
    files = files_of(pki, tmp_path)
    context_of(files)
    os.chmod(files.key, 0o640)
    with pytest.raises(OperatorError, match="has mode 0640"):
        context_of(files)
    os.chmod(files.key, 0o600)
    with pytest.raises(OperatorError, match=r"missing\.pem"):
        context_of(evolve(files, certificate=str(tmp_path / "missing.pem")))
    shutil.copy(pki.node().key, files.key)
    with pytest.raises(OperatorError, match="is not the key of the certificate"):
        context_of(files)
    Path(files.certificate).write_text("x")
    with pytest.raises(OperatorError, match="no certificate"):
        context_of(files)


@pytest.mark.soak
async def test_workers_with_tls_are_replaced_and_nobody_notices(pki: Pki, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    files = files_of(pki, tmp_path)
    load = Load(port, trusting(pki))
    async with trio.open_nursery() as nursery:
        engine = ScriptedEngine(e.answers)
        await nursery.start(engine.run)
        table = Table(1, (Route("m", (Endpoint("e", "127.0.0.1", engine.port),)),))
        first: int | None = None
        for drain_s in (4.0, 5.0):
            async with control(tmp_path, port, drain_s, tls=files) as router:
                router.push(table)
                if first is None:
                    first = router.state.pid
                    await until(lambda: router.state.state == "serving")
                    for _ in range(4):
                        nursery.start_soon(load.client)
                    await until(lambda: load.answered > 20)
                else:
                    await until(lambda: router.state.pid != first and len(router.workers) == 1)  # noqa: B023
                    await load.stop()
                    await router.drain(1)
        nursery.cancel_scope.cancel()
    assert not load.failed
    assert load.answered > 20


# Web pages of other origins


async def test_without_a_rule_no_page_may_look_at_answers() -> None:
    async def like_vllm(visit: e.Visit) -> None:
        while True:
            await visit.request()
            await visit.send(e.whole().replace(b"\r\n\r\n", b"\r\naccess-control-allow-origin: *\r\n\r\n", 1))

    async with front(like_vllm) as it, it.client() as client:
        await client.post(fields=b"origin: https://chat.example\r\n")
        status, fields, _ = await client.answer()
        assert status == 200
        assert not [name for name in fields if name.startswith(b"access-control")]
        assert b"origin" not in it.engines[0].requests[0][0].lower()
        await client.get(b"/v1/models", b"OPTIONS")
        status, fields = await client.head()
        assert (status, fields[b"allow"]) == (204, b"GET, HEAD, OPTIONS")
        await client.get(b"/v1/chat/completions", b"OPTIONS")
        assert (await client.head())[1][b"allow"] == b"POST, OPTIONS"
        await client.get(b"*", b"OPTIONS")
        assert (await client.head())[0] == 204
        await client.get(b"/pause", b"OPTIONS")
        assert (await client.answer())[0] == 404


async def test_pages_of_origins_that_are_let_in() -> None:
    async with front(e.answers) as it, it.client() as client:
        it.server.front.cors = CorsRules(("https://chat.example",))
        asks = b"origin: https://chat.example\r\naccess-control-request-method: POST\r\naccess-control-request-headers: authorization, content-type\r\n"
        await client.send(b"OPTIONS /v1/chat/completions HTTP/1.1\r\nhost: gw\r\n%b\r\n" % asks)
        status, fields = await client.head()
        assert status == 204
        assert fields[b"access-control-allow-origin"] == b"https://chat.example"
        assert fields[b"access-control-allow-methods"] == b"POST, OPTIONS"
        assert fields[b"access-control-allow-headers"] == b"authorization, content-type"
        assert fields[b"vary"] == b"origin"
        await client.post(fields=b"origin: https://chat.example\r\n")
        _, fields, _ = await client.answer()
        assert fields[b"access-control-allow-origin"] == b"https://chat.example"
        assert b"x-request-id" in fields[b"access-control-expose-headers"]
        await client.post(b'{"model":"nope"}', fields=b"origin: https://chat.example\r\n")
        status, fields, _ = await client.answer()
        assert (status, fields[b"access-control-allow-origin"]) == (404, b"https://chat.example")
        await client.send(b"OPTIONS /v1/models HTTP/1.1\r\nhost: gw\r\norigin: https://evil.example\r\n\r\n")
        status, fields = await client.head()
        assert status == 204
        assert not [name for name in fields if name.startswith(b"access-control")]
        await client.post()
        assert b"vary" not in (await client.answer())[1], "none was left from the request before"


async def test_an_answer_to_head_has_no_body_whatever_it_is() -> None:
    async with front(e.answers) as it, it.client() as client:
        for path, status in (
            (b"/nope", 404),
            (b"/v1/models/nope", 404),
            (b"/v1/chat/completions", 405),
            (b"/readyz", 200),
        ):
            await client.get(path, b"HEAD")
            assert (await client.head())[0] == status
        await client.get(b"/healthz")
        status, _, body = await client.answer()
        assert (status, body) == (200, b"ok\n")


# Requests that are told


async def test_the_id_of_a_request_is_on_its_answer_its_line_and_at_the_engine() -> None:
    lines = StringIO()
    configure(Log(format=LogFormat.JSON), "router", lines)
    async with front(e.answers) as it, it.client() as client:
        it.server.front.teller = Teller(trio.current_time, Lines("access", "request"))
        await client.post(fields=b"x-request-id: r-7\r\n", path=b"/v1/chat/completions?api_key=secret")
        status, fields, _ = await client.answer()
        assert (status, fields[b"x-request-id"]) == (200, b"r-7")
        assert b"x-request-id: r-7" in it.engines[0].requests[0][0]
        await client.get(b"/nope")
        own = (await client.answer())[1][b"x-request-id"].decode()
        await client.get(b"/healthz")
        await client.answer()
        await client.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: g\r\nx-request-id: r-8\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"
        )
        assert (await client.answer())[1][b"x-request-id"] == b"r-8"
    told = [json.loads(line) for line in lines.getvalue().splitlines()]
    first, missing, health, odd = [line for line in told if line["event"] == "request"]
    assert (first["request_id"], first["status"], first["model"], first["endpoint"]) == ("r-7", 200, "m", "e0")
    assert (first["prompt_tokens"], first["completion_tokens"], first["client"]) == (2, 1, "127.0.0.1")
    assert first["ms"] >= first["first_byte_ms"] >= 0
    assert "ended" not in first
    assert "secret" not in lines.getvalue()
    assert (missing["request_id"], missing["status"], missing["code"]) == (own, 404, "not_found")
    assert (health["path"], health["status"]) == ("/healthz", 200)
    assert (odd["request_id"], odd["status"]) == ("r-8", 400)


async def test_what_ended_early_is_told_so() -> None:
    lines = StringIO()
    configure(Log(format=LogFormat.JSON), "router", lines)

    def told() -> list[dict[str, object]]:
        return [line for line in map(json.loads, lines.getvalue().splitlines()) if line["event"] == "request"]

    for script, ended in ((e.begins_a_stream, "client gone"), (e.dies_in_the_stream, "cut short")):
        async with front(script) as it:
            it.server.front.teller = Teller(trio.current_time, Lines("access", "request"))
            async with it.client() as client:
                await client.post()
                await client.head()
                if ended == "cut short":
                    await client.rest()
            await until(lambda: told())
            line = told()[0]
            assert (line["ended"], line["status"], line["endpoint"]) == (ended, 200, "e0")
            lines.truncate(0)
            lines.seek(0)


async def test_spans_go_on_from_the_caller_s_and_to_the_engine() -> None:
    spans = InMemorySpanExporter()
    tracer = Tracer(Tracing("http://127.0.0.1:9/v1/traces"), "router", SimpleSpanProcessor(spans))
    caller = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    async with front(e.answers) as it, it.client() as client:
        it.server.front.teller = Teller(trio.current_time, tracer=tracer)
        await client.post(fields=b"TraceParent: %b\r\nx-request-id: r-9\r\n" % caller.encode())
        await client.answer()
        await client.post(b'{"model":"nope"}')
        await client.answer()
        head = it.engines[0].requests[0][0].lower()
        assert head.count(b"traceparent") == 1
        with trio.fail_after(2):
            while len(found := spans.get_finished_spans()) < 2:
                await trio.sleep(0.01)
    first, second = found
    assert first.context is not None
    assert first.parent is not None
    assert f"{first.context.trace_id:032x}" == "a" * 32
    assert f"{first.parent.span_id:016x}" == "b" * 16
    assert f"traceparent: 00-{'a' * 32}-{first.context.span_id:016x}-01".encode() in head
    assert first.attributes is not None
    assert (first.attributes["llmgw.request_id"], first.attributes["http.response.status_code"]) == ("r-9", 200)
    assert second.parent is None
    tracer.close()


async def test_without_tracing_a_caller_s_trace_goes_on_untouched() -> None:
    caller = b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"
    async with front(e.answers) as it, it.client() as client:
        await client.post(fields=b"traceparent: %b\r\n" % caller)
        await client.answer()
        assert b"traceparent: " + caller in it.engines[0].requests[0][0]


# Bounds


def held(it: Router) -> tuple[int, int, int]:
    """Bytes that the router holds for its one client: unsent to it, unread from its engine; and those it passed on."""
    (connection,) = it.server._connections
    exchange = connection.exchange
    assert exchange is not None
    assert exchange._upstream is not None
    unsent = fcntl.ioctl(connection._client.sock, 0x894B, b"\0" * 4)  # SIOCOUTQNSD, linux/sockios.h
    unread = fcntl.ioctl(exchange._upstream.sock, termios.FIONREAD, b"\0" * 4)
    return struct.unpack("i", unsent)[0], struct.unpack("i", unread)[0], exchange.passed


async def test_a_slow_reader_is_cut_and_until_then_little_is_held_for_it() -> None:
    clock = [0.0]
    async with trio.open_nursery() as nursery:
        engine = ScriptedEngine(e.streams_for_ever)
        await nursery.start(engine.run)
        server = RouterServer(clock=lambda: clock[0])
        server.use(Table(1, (Route("m", (Endpoint("e0", "127.0.0.1", engine.port),)),), RouterSettings()))
        listener = listen(Address("127.0.0.1", 0))
        await nursery.start(server.run, listener)
        it = Router(server, listener.getsockname()[1], [engine], nursery)
        async with it.client() as slow:
            await slow.post()
            await slow.head()
            read = 0
            while read < 3_000_000:  # by now every buffer is as large as it will be
                read += len(await slow.stream.receive_some(65536))
            passed = -1
            while (now := held(it))[2] != passed:
                passed = now[2]
                await trio.sleep(0.4)
            assert passed > 2_900_000
            # A piece that could not be sent whole is partly in the kernel, partly in the router.
            assert now[0] <= UNSENT_BYTES + 65536, now
            assert UNSENT_BYTES + 65536 + now[1] <= 256 * 1024, now
            clock[0] = 59.0
            await trio.sleep(0.6)
            assert it.server._connections
            clock[0] = 61.0
            with trio.fail_after(10):
                await engine.left.wait()
            assert not it.server._connections
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("script", "stream"),
    [(e.says_nothing, True), (e.says_nothing, False), (e.begins_a_stream, True), (e.streams_for_ever, True)],
)
async def test_an_engine_is_let_go_in_no_time_when_its_client_is_gone(
    script: Script, stream: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """No deadline, sweep or probe has a part in it: the clock goes on only when nothing else is left to happen."""
    autojump_clock.autojump_threshold = 0.5
    async with front(script) as it:
        async with it.client() as client:
            await client.post(json.dumps({"model": "m", "stream": stream}).encode())
            while not it.engines[0].requests:
                await trio.lowlevel.checkpoint()
            if script is not e.says_nothing:
                await client.head()
        with trio.fail_after(0.1):
            await it.engines[0].left.wait()


@pytest.mark.parametrize("secured", [False, True])
async def test_no_small_piece_waits_for_the_one_before_it_on_either_side(
    pki: Pki, tmp_path: Path, secured: bool
) -> None:
    """Without TCP_NODELAY a stream on a kept connection stands still for 40 ms."""
    identity = Identity(files_of(pki, tmp_path)) if secured else None
    async with front(e.begins_a_stream, identity=identity) as it:
        async with secure(it.port, trusting(pki)) if secured else it.client() as client:
            await client.post()
            await client.head()
            (connection,) = it.server._connections
            exchange = connection.exchange
            assert exchange is not None
            assert exchange._upstream is not None
            for peer in (connection._client, exchange._upstream):
                assert peer.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_client_that_is_gone_before_anybody_read_its_request(autojump_clock: trio.testing.MockClock) -> None:
    """Its request and its end are one event."""
    autojump_clock.autojump_threshold = 0.5
    async with front(e.says_nothing) as it:
        with socket.create_connection(("127.0.0.1", it.port)) as client:
            while not it.server._connections:
                await trio.lowlevel.checkpoint()
            await trio.testing.wait_all_tasks_blocked()
            client.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 13\r\n\r\n{"model":"m"}')
        with trio.fail_after(0.1):
            await trio.testing.wait_all_tasks_blocked()
            assert not it.server._connections
            if it.engines[0].requests:
                await it.engines[0].left.wait()


async def test_clients_wait_while_no_file_is_left_and_then_are_served(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with trio.open_nursery() as nursery:
        engine = ScriptedEngine(e.says_nothing)
        await nursery.start(engine.run)
        async with control(tmp_path, port) as router:
            router.push(Table(1, (Route("m", (Endpoint("e", "127.0.0.1", engine.port),)),)))
            await until(lambda: router.state.state == "serving")
            pid = router.state.pid
            assert pid is not None
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (96, before[1]))
            clients = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(60)]
            for client in clients:
                await client.send_all(
                    b'POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 13\r\n\r\n{"model":"m"}'
                )
            await until(lambda: engine.connections >= 10)
            await trio.sleep(0.3)
            files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            assert files < 96, "it stops before there is none left"
            late = await trio.open_tcp_stream("127.0.0.1", port)
            await late.send_all(b"GET /metrics HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n")
            for client in clients:
                await trio.aclose_forcefully(client)
            with trio.fail_after(10):
                said = b"".join([part async for part in late])
            await late.aclose()
            assert said.startswith(b"HTTP/1.1 200"), said[:100]
            assert b'llmgw_router_retries_total{endpoint="e"' not in said, "and blames no engine for it"
            assert b"200 OK" in await answers(port, "/healthz")
            assert router.state.pid == pid
            await router.drain(0.5)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("secured", [False, True])
async def test_a_client_that_sends_too_much_hears_so(pki: Pki, tmp_path: Path, secured: bool) -> None:
    """It reads nothing before all of it is sent, as most client libraries do."""
    identity = Identity(files_of(pki, tmp_path)) if secured else None
    async with front(e.answers, identity=identity) as it:
        for fields in (b"", b"x-long: %b\r\n" % (b"x" * 20000)):
            async with secure(it.port, trusting(pki)) if secured else it.client() as client:
                await client.post(b"x" * 20_000_000, fields=fields)
                status, _ = await client.head()
                assert status == (431 if fields else 413)


async def test_a_thousand_slow_streams_slow_nobody() -> None:
    """1,000 streams of a byte a second beside one client that asks in a row: its median hardly changes."""
    enough = trio.Event()

    async def script(visit: e.Visit) -> None:
        while True:
            _, body = await visit.request()
            if b"slow" not in body:
                await visit.send(e.whole())
                continue
            await visit.send(e.EVENTS)
            while not enough.is_set():
                await visit.send(b"1\r\nx\r\n")
                with trio.move_on_after(1):
                    await enough.wait()
            await visit.send(b"0\r\n\r\n")

    async def median(client: Client) -> float:
        took = []
        for _ in range(300):
            began = trio.current_time()
            await client.post()
            await client.answer()
            took.append(trio.current_time() - began)
        return sorted(took)[150]

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    whole = 0

    async def slow(it: Router) -> None:
        nonlocal whole
        async with it.client() as client:
            await client.post(json.dumps({"model": "m", "slow": 1}).encode(), fields=b"connection: close\r\n")
            await client.head()
            rest = await client.rest()
            whole += rest.endswith(b"1\r\nx\r\n0\r\n\r\n")

    try:
        async with front(script) as it, it.client() as fast, trio.open_nursery() as nursery:
            alone = await median(fast)
            for _ in range(1000):
                nursery.start_soon(slow, it)
            with trio.fail_after(30):
                while sum(it.server.directory.outstanding().values()) < 1000:
                    await trio.sleep(0.1)
            beside = min([await median(fast) for _ in range(3)])
            enough.set()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert whole == 1000
    assert beside < 3 * alone, (alone, beside)
