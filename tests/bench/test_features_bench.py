"""What each feature costs a request and a chunk, in one table of one run: the router's CPU, all ways taken in turn.

On request: ``pytest -m bench -s tests/bench/test_features_bench.py``; ``LLMGW_BENCH_TURNS`` is how often each way is
taken, and the least of them is printed. Only the ratios mean something.
"""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from attrs import frozen

from llmgw.cli.demo_files import free_ports
from llmgw.router.counts import COUNTS_FOLDER
from llmgw.router.table import Endpoint, Route, Table
from llmgw.router.workers import RouterWorkers
from llmgw.server.keys import KeyBook
from llmgw.settings.catalog import Balance, Routing
from llmgw.settings.daemon import Address, Log, RouterListener
from llmgw.settings.document import Tracing
from llmgw.settings.keys import KeyTerms, Limits
from llmgw.store.opening import sqlite_store
from tests.bench.front_tls import front_tls
from tests.bench.test_keys_bench import CHUNKS, engine

pytestmark = pytest.mark.bench
__all__ = ["engine"]

TURNS = int(os.environ.get("LLMGW_BENCH_TURNS", "5"))
CLIENTS, REQUESTS, STREAMS = 8, 2000, 4


def cpu_s(pid: int) -> float:
    """Of all its threads, to the nanosecond (proc_pid_schedstat(5))."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


@frozen
class Way:
    """A feature: which router has it, and how it is asked."""

    name: str
    router: str
    model: str = "one"
    token: str = ""
    prompt: int = 200


async def ask(port: int, way: Way, tls: ssl.SSLContext | None, count: int, ends: bytes, **more: object) -> None:
    """So many requests in a row on one connection."""
    body = {"model": way.model, "max_tokens": 9, "messages": [{"role": "user", "content": "x" * way.prompt}], **more}
    content = json.dumps(body).encode()
    auth = f"authorization: Bearer {way.token}\r\n" if way.token else ""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{auth}content-length: {len(content)}\r\n\r\n"
    stream: trio.abc.Stream = await trio.open_tcp_stream("127.0.0.1", port)
    if tls is not None:
        stream = trio.SSLStream(stream, tls, server_hostname="localhost", https_compatible=True)
    async with stream:
        for _ in range(count):
            await stream.send_all(head.encode() + content)
            tail = b""
            while not tail.endswith(ends):
                more_bytes = await stream.receive_some(65536)
                assert more_bytes
                tail = (tail + more_bytes)[-64:]


async def refusals(port: int, way: Way, status: bytes, count: int = 1000) -> list[float]:
    """How long each of so many refused requests took in ms, the shortest first, on one connection."""
    content = json.dumps({"model": way.model, "messages": [{"role": "user", "content": "x" * way.prompt}]}).encode()
    auth = f"authorization: Bearer {way.token}\r\n" if way.token else ""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{auth}content-length: {len(content)}\r\n\r\n"
    took = []
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        for _ in range(count):
            began = time.perf_counter()
            await stream.send_all(head.encode() + content)
            answer = await stream.receive_some(65536)
            took.append((time.perf_counter() - began) * 1e3)
            assert answer.startswith(b"HTTP/1.1 " + status), answer
    return sorted(took)


async def together(count: int, one: Callable[[], object]) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(one)  # type: ignore[arg-type]


async def test_what_each_feature_costs(engine: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, trusting = front_tls(tmp_path)
    here = Endpoint("e", "127.0.0.1", engine)
    two = (here, Endpoint("f", "127.0.0.1", engine))
    table = Table(1, (
        Route("one", (here,)), Route("least", two, routing=Routing(Balance.LEAST)), Route("prefix", two), Route("empty", ()),
        Route("bounded", two, routing=Routing(Balance.LEAST, concurrency=1000)),
        Route("full", (), hold_s=600, routing=Routing(queue=1)),
    ))  # fmt: skip
    traced = Tracing(f"http://127.0.0.1:{engine}/v1/traces")
    kinds = {"plain": {}, "log": {"access_log": True}, "tls": {"tls": files}, "traced": {}}
    ports = dict(zip(kinds, free_ports(len(kinds)), strict=True))
    routers: dict[str, RouterWorkers] = {}
    big = 10**9
    async with sqlite_store(tmp_path / "db") as store, trio.open_nursery() as nursery:
        for kind, more in kinds.items():
            folder = tmp_path / kind
            folder.mkdir(mode=0o700)
            listener = RouterListener(Address("127.0.0.1", ports[kind]), workers=1, **more)  # type: ignore[arg-type]
            routers[kind] = RouterWorkers(folder, listener, Log())
        book = KeyBook(store.keys, routers["plain"], tmp_path / "plain" / COUNTS_FOLDER, time.time)
        await book.load()
        for kind, router in routers.items():
            router.serve_keys(book)
            await nursery.start(router.run)
            router.push(Table(2, table.routes, tracing=traced) if kind == "traced" else table)
        _, free, _ = await book.create(KeyTerms(), "bench")
        _, rate, _ = await book.create(KeyTerms(limits=Limits(big)), "bench")
        _, limited, _ = await book.create(KeyTerms(limits=Limits(big, big, 1000, big * 1000, big * 1000)), "bench")
        _, nothing, _ = await book.create(KeyTerms(limits=Limits(0)), "bench")
        _, spent, _ = await book.create(KeyTerms(limits=Limits(budget_tokens=1)), "bench")
        await trio.sleep(2.5)  # spans need what takes a while to import
        ways = (
            Way("nothing", "plain"), Way("two replicas, least", "plain", "least"),
            Way("and prefix affinity", "plain", "prefix"), Way("and concurrency", "plain", "bounded"),
            Way("a key", "plain", token=free), Way("a key with a rate", "plain", token=rate),
            Way("every limit", "plain", token=limited), Way("access log", "log"), Way("TLS", "tls"),
            Way("tracing", "traced"), Way("20 kB prompt", "plain", prompt=20_000),
        )  # fmt: skip
        least: dict[tuple[str, str], float] = {}
        for _ in range(TURNS):
            for way in ways:
                port, pid = ports[way.router], routers[way.router].state.pid
                assert pid is not None
                tls = trusting if way.router == "tls" else None
                before = cpu_s(pid)
                await together(CLIENTS, lambda: ask(port, way, tls, REQUESTS // CLIENTS, b"}}"))  # noqa: B023
                middle = cpu_s(pid)
                await together(STREAMS, lambda: ask(port, way, tls, 1, b"0\r\n\r\n", stream=True))  # noqa: B023
                for what, used in (
                    ("request", (middle - before) / REQUESTS), ("chunk", (cpu_s(pid) - middle) / STREAMS / CHUNKS),
                ):  # fmt: skip
                    least[way.name, what] = min(least.get((way.name, what), 1e9), used * 1e6)
        refused: list[tuple[str, list[float]]] = []
        port = ports["plain"]
        async with trio.open_nursery() as waiting:
            waiting.start_soon(ask, port, Way("", "plain", "full"), None, 1, b"}}")  # it fills the queue
            for name, way, status in (
                ("quota (429)", Way("", "plain", token=nothing), b"429"),
                ("budget (429)", Way("", "plain", token=spent), b"429"),
                ("no replica (503)", Way("", "plain", "empty"), b"503"),
                ("full queue (503)", Way("", "plain", "full"), b"503"),
            ):
                refused.append((name, await refusals(port, way, status)))
                async with trio.open_nursery() as load:
                    for _ in range(CLIENTS):
                        load.start_soon(ask, port, ways[0], None, 10**9, b"}}")
                    refused.append((f"{name}, busy", await refusals(port, way, status)))
                    load.cancel_scope.cancel()
            waiting.cancel_scope.cancel()
        memory = {
            kind: Path(f"/proc/{router.state.pid}/statm").read_text().split()[1] for kind, router in routers.items()
        }
        for router in routers.values():
            await router.drain(1)
        nursery.cancel_scope.cancel()
    with capsys.disabled():
        print(f"\n{'router CPU':>22}  {'a request':>17}  {'a chunk':>17}")
        for way in ways:
            shown = (
                f"{used:7.2f} µs x {used / least['nothing', what]:5.2f}"
                for what in ("request", "chunk")
                for used in (least[way.name, what],)
            )
            print(f"{way.name:>22}  " + "  ".join(shown))
        for name, took in refused:
            print(
                f"{name:>22}  p50 {took[len(took) // 2]:5.2f} ms, p99 {took[-len(took) // 100]:5.2f}, most {took[-1]:5.2f}"
            )
        print(
            "RSS afterwards: " + ", ".join(f"{kind} {int(pages) * 4096 // 10**6} MB" for kind, pages in memory.items())
        )
