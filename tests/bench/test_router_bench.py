"""What the router adds to a request and to a chunk, as ratios of one run. On request: ``pytest -m bench -s tests/bench``.

Engine, router and client each have a process of their own, as in real life; on a machine with few cores they share
them, so only the ratios mean something.
"""

from __future__ import annotations

import json
import os
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from llmgw.cli.demo_files import fakes_dir, free_ports
from llmgw.router.table import Endpoint, Route, Table
from llmgw.router.workers import RouterWorkers
from llmgw.settings.daemon import Address, Log, RouterListener
from tests.bench.front_tls import front_tls

pytestmark = pytest.mark.bench

CONNECTIONS, REQUESTS, STREAMS, TOKENS = 16, 1500, 16, 400


def post(body: dict[str, object]) -> bytes:
    content = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **body}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: b\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


@pytest.fixture
def engine() -> Iterator[int]:
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [sys.executable, str(fakes_dir() / "engine.py"), "serve", "x", "--served-model-name", "m", "--port", str(port)],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield port
    finally:
        process.terminate()
        process.wait()


@asynccontextmanager
async def connected(port: int, tls: ssl.SSLContext | None) -> AsyncIterator[trio.abc.Stream]:
    stream: trio.abc.Stream = await trio.open_tcp_stream("127.0.0.1", port)
    if tls is not None:
        stream = trio.SSLStream(stream, tls, server_hostname="localhost", https_compatible=True)
    async with stream:
        yield stream


async def plain(port: int, tls: ssl.SSLContext | None = None) -> float:
    """Requests a second over kept connections."""
    request, each = post({"max_tokens": 1}), REQUESTS // CONNECTIONS

    async def client() -> None:
        async with connected(port, tls) as stream:
            for _ in range(each):
                await stream.send_all(request)
                data = b""
                while b'"usage"' not in data or not data.endswith(b"}}"):
                    more = await stream.receive_some()
                    assert more
                    data += more

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(CONNECTIONS):
            nursery.start_soon(client)
    return each * CONNECTIONS / (time.perf_counter() - began)


async def streamed(port: int, tls: ssl.SSLContext | None = None) -> float:
    """Chunks a second over several streams."""
    request = post({"max_tokens": TOKENS, "stream": True})

    async def client() -> None:
        async with connected(port, tls) as stream:
            await stream.send_all(request)
            tail = b""
            while not tail.endswith(b"0\r\n\r\n"):
                more = await stream.receive_some(65536)
                assert more
                tail = (tail + more)[-64:]

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(STREAMS):
            nursery.start_soon(client)
    return TOKENS * STREAMS / (time.perf_counter() - began)


async def one_by_one(port: int) -> float:
    """Median of a single request, in microseconds."""
    request, took = post({"max_tokens": 1}), []
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        for _ in range(300):
            began = time.perf_counter()
            await stream.send_all(request)
            data = b""
            while not data.endswith(b"}}"):
                data += await stream.receive_some()
            took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e6


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_what_the_router_adds(engine: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    with trio.fail_after(10):
        while True:
            try:
                await one_by_one(engine)
                break
            except OSError:
                await trio.sleep(0.05)
    worker = RouterWorkers(tmp_path, RouterListener(Address("127.0.0.1", port), workers=1), Log())
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        worker.push(Table(1, (Route("m", (Endpoint("e", "127.0.0.1", engine),)),)))
        await trio.sleep(0.3)
        pid = worker.state.pid
        assert pid is not None
        rows = []
        for name, measure, amount in (
            ("requests/s", plain, REQUESTS),
            ("chunks/s", streamed, TOKENS * STREAMS),
            ("one request, µs", one_by_one, 300),
        ):
            direct = await measure(engine)
            before = cpu_s(pid)
            routed = await measure(port)
            used = (cpu_s(pid) - before) / amount * 1e6
            rows.append(
                f"{name:>16}  direct {direct:>9.0f}  routed {routed:>9.0f}  ratio {routed / direct:5.2f}  router CPU {used:6.1f} µs each"
            )
        await worker.drain(1)
        nursery.cancel_scope.cancel()
    with capsys.disabled():
        print("\n" + "\n".join(rows))


async def test_what_tls_and_a_second_worker_cost(
    engine: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, trusting = front_tls(tmp_path)

    async def handshakes(port: int, tls: ssl.SSLContext | None) -> float:
        began = time.perf_counter()
        for _ in range(200):
            async with connected(port, tls) as stream:
                await stream.send_all(b"GET /healthz HTTP/1.1\r\nhost: b\r\nconnection: close\r\n\r\n")
                assert await stream.receive_some()
        return 200 / (time.perf_counter() - began)

    rows = []
    for name, workers, tls in (("one worker", 1, None), ("two workers", 2, None), ("one worker, TLS", 1, files)):
        (port,) = free_ports(1)
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        router = RouterWorkers(folder, RouterListener(Address("127.0.0.1", port), workers=workers, tls=tls), Log())
        context = None if tls is None else trusting
        async with trio.open_nursery() as nursery:
            await nursery.start(router.run)
            router.push(Table(1, (Route("m", (Endpoint("e", "127.0.0.1", engine),)),)))
            await trio.sleep(0.5)
            pids = [w.pid for w in router.workers if w.pid is not None]
            for what, measure, amount in (
                ("request", plain, REQUESTS), ("chunk", streamed, TOKENS * STREAMS), ("connection", handshakes, 200),
            ):  # fmt: skip
                before, rate = sum(map(cpu_s, pids)), 0.0
                for _ in range(3):
                    rate = max(rate, await measure(port, context))
                used = (sum(map(cpu_s, pids)) - before) / 3 / amount * 1e6
                rows.append(f"{name:>16} {what:>10}  {rate:>9.0f} a second, router CPU {used:6.1f} µs each")
            await router.drain(1)
            nursery.cancel_scope.cancel()
    with capsys.disabled():
        print("\n" + "\n".join(rows))
