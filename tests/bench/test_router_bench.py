"""What the router adds to a request and to a chunk, as ratios of one run. On request: ``pytest -m bench -s tests/bench``.

Engine, router and client each have a process of their own, as in real life; on a machine with few cores they share
them, so only the ratios mean something.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from llmgw.cli.demo_files import fakes_dir, free_ports
from llmgw.router.table import Endpoint, Route, Table
from llmgw.router.workers import RouterWorkers
from llmgw.settings.daemon import Address, Log, RouterListener

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


async def plain(port: int) -> float:
    """Requests a second over kept connections."""
    request, each = post({"max_tokens": 1}), REQUESTS // CONNECTIONS

    async def client() -> None:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
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


async def streamed(port: int) -> float:
    """Chunks a second over several streams."""
    request = post({"max_tokens": TOKENS, "stream": True})

    async def client() -> None:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
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
