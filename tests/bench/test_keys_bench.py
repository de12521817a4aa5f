"""What keys and limits cost a request and a chunk: one router process, its ways taken in turn, ratios of one run.

On request: ``pytest -m bench -s tests/bench/test_keys_bench.py``. The engine answers from memory, so that the router has
most of the machine; what other work does to it shows in all ways alike, and the least of several turns is printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio

from llmgw.cli.demo_files import free_ports
from llmgw.router.counts import COUNTS_FOLDER
from llmgw.router.table import Endpoint, Route, Table
from llmgw.router.workers import RouterWorkers
from llmgw.server.keys import KeyBook
from llmgw.settings.daemon import Address, Log, RouterListener
from llmgw.settings.keys import KeyTerms, Limits
from llmgw.store.opening import sqlite_store

pytestmark = pytest.mark.bench

CONNECTIONS, REQUESTS, STREAMS, CHUNKS, TURNS = 8, 4000, 8, 2000, 8

ENGINE = """
import socket, sys, threading
USAGE = b'"usage":{"prompt_tokens":9,"completion_tokens":9}}'
WHOLE = b'{"id":"x","choices":[{"text":"' + b"w" * 200 + b'"}],' + USAGE
PLAIN = b"HTTP/1.1 200 OK\\r\\ncontent-type: application/json\\r\\ncontent-length: %d\\r\\n\\r\\n%b" % (len(WHOLE), WHOLE)
HEAD = b"HTTP/1.1 200 OK\\r\\ncontent-type: text/event-stream\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n"
def chunk(text):
    data = b"data: " + text + b"\\n\\n"
    return b"%x\\r\\n%b\\r\\n" % (len(data), data)
WORD = chunk(b'{"id":"x","choices":[{"delta":{"content":"' + b"w" * 150 + b'"}}]}')
END = chunk(b'{"id":"x","choices":[],' + USAGE) + chunk(b"[DONE]") + b"0\\r\\n\\r\\n"
def serve(sock):
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = b""
    while True:
        while (at := buffer.find(b"\\r\\n\\r\\n")) < 0:
            more = sock.recv(65536)
            if not more: return
            buffer += more
        head, buffer = buffer[:at].lower(), buffer[at + 4:]
        length = int(head.split(b"content-length:")[1].split(b"\\r\\n")[0])
        while len(buffer) < length: buffer += sock.recv(65536)
        body, buffer = buffer[:length], buffer[length:]
        if b'"stream": true' in body:
            sock.sendall(HEAD)
            for _ in range(CHUNKS): sock.sendall(WORD)
            sock.sendall(END)
        else:
            sock.sendall(PLAIN)
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=64)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
""".replace("CHUNKS", str(CHUNKS))


def cpu_s(pid: int) -> float:
    """Of its one thread, to the nanosecond (proc_pid_schedstat(5)); ticks would be too coarse."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def post(token: str, body: dict[str, object]) -> bytes:
    content = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 200}], **body}).encode()
    auth = f"authorization: Bearer {token}\r\n" if token else ""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: b\r\n{auth}content-length: {len(content)}\r\n\r\n"
    return head.encode() + content


@pytest.fixture
def engine() -> Iterator[int]:
    (port,) = free_ports(1)
    process = subprocess.Popen([sys.executable, "-c", ENGINE, str(port)])
    try:
        time.sleep(0.5)
        yield port
    finally:
        process.kill()
        process.wait()


async def plain(port: int, token: str) -> None:
    request = post(token, {"max_tokens": 9})

    async def one() -> None:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            for _ in range(REQUESTS // CONNECTIONS):
                await stream.send_all(request)
                data = b""
                while not data.endswith(b"}}"):
                    data += await stream.receive_some(65536)
                assert data.startswith(b"HTTP/1.1 200"), data

    async with trio.open_nursery() as nursery:
        for _ in range(CONNECTIONS):
            nursery.start_soon(one)


async def streamed(port: int, token: str) -> None:
    request = post(token, {"max_tokens": 9, "stream": True})

    async def one() -> None:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(request)
            tail = b""
            while not tail.endswith(b"0\r\n\r\n"):
                more = await stream.receive_some(65536)
                assert more
                tail = (tail + more)[-64:]

    async with trio.open_nursery() as nursery:
        for _ in range(STREAMS):
            nursery.start_soon(one)


async def test_what_keys_add(engine: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    worker = RouterWorkers(tmp_path, RouterListener(Address("127.0.0.1", port), workers=1), Log())
    async with sqlite_store(tmp_path / "db") as store, trio.open_nursery() as nursery:
        book = KeyBook(store.keys, worker, tmp_path / COUNTS_FOLDER, time.time)
        await book.load()
        worker.serve_keys(book)
        await nursery.start(worker.run)
        worker.push(Table(1, (Route("m", (Endpoint("e", "127.0.0.1", engine),)),)))
        big = 10**9
        _, free, _ = await book.create(KeyTerms(), "bench")
        _, rate, _ = await book.create(KeyTerms(limits=Limits(big)), "bench")
        _, limited, _ = await book.create(KeyTerms(limits=Limits(big, big, 1000, big * 1000, big * 1000)), "bench")
        ways = (("no key", ""), ("a key", free), ("and a rate", rate), ("every limit", limited))
        pid = worker.state.pid
        assert pid is not None
        lines = []
        measured: tuple[tuple[str, Callable[[int, str], Awaitable[None]], int], ...] = (
            ("request", plain, REQUESTS), ("chunk", streamed, STREAMS * CHUNKS),
        )  # fmt: skip
        for what, measure, amount in measured:
            least: dict[str, float] = {}
            for _ in range(TURNS):
                for name, token in ways:
                    before = cpu_s(pid)
                    await measure(port, token)
                    used = (cpu_s(pid) - before) / amount * 1e6
                    least[name] = min(least.get(name, 1e9), used)
            for name, used in least.items():
                lines.append(f"{what:>8}  {name:>12}  router CPU {used:6.2f} µs  ratio {used / least['no key']:5.2f}")
        await worker.drain(1)
        nursery.cancel_scope.cancel()
    with capsys.disabled():
        print("\n" + "\n".join(lines))
