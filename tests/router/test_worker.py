"""The router's process, seen from the control plane: started, fed, adopted, drained."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import trio
from attrs import evolve

from llmgw.cli.demo_files import fakes_dir, free_ports
from llmgw.errors import OperatorError
from llmgw.router.table import Endpoint, Route, Table
from llmgw.router.worker import SILENT_S
from llmgw.router.workers import RouterWorkers
from llmgw.settings.daemon import Address, Log, RouterListener
from llmgw.settings.document import Tracing
from tests.router import engines as e
from tests.router.load import REQUEST


@asynccontextmanager
async def control(
    folder: Path, port: int, drain_s: float = 2.0, silent_s: float = SILENT_S, **more: Any
) -> AsyncIterator[RouterWorkers]:
    """A control plane's end of it; leaving the block is a control plane that dies without a word."""
    listener = evolve(RouterListener(Address("127.0.0.1", port), drain_s, workers=1), **more)
    worker = RouterWorkers(folder, listener, Log(), silent_s)
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        try:
            yield worker
        except BaseException:
            for left in worker.workers:
                if left.pid is not None:
                    os.kill(left.pid, signal.SIGKILL)
            raise
        nursery.cancel_scope.cancel(reason="the control plane dies")


async def answers(port: int, path: str = "/readyz") -> bytes:
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(f"GET {path} HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n".encode())
        return b"".join([chunk async for chunk in stream])


async def ready(port: int) -> None:
    """Wait until it has its table."""
    with trio.fail_after(5):
        while b"200 OK" not in await answers(port):
            await trio.sleep(0.01)


async def refused(port: int) -> None:
    """Wait until nobody listens there any more."""
    with trio.fail_after(5):
        while True:
            try:
                await answers(port)
            except (OSError, trio.BrokenResourceError):
                return
            await trio.sleep(0.01)


async def until(done: object, seconds: float = 8.0) -> None:
    assert callable(done)
    with trio.fail_after(seconds):
        while not done():
            await trio.sleep(0.01)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # Longer than a socket's address may be.
    place = tmp_path / ("long-" * 30)
    place.mkdir(mode=0o700)
    return place


async def test_started_fed_adopted_and_drained(folder: Path) -> None:
    (port,) = free_ports(1)
    async with control(folder, port) as worker:
        assert worker.state.state == "serving"
        assert b"503" in await answers(port), "no table yet"
        worker.push(Table(1, (Route("m", (), "nothing yet"),)))
        pid = worker.state.pid
        with trio.fail_after(5):
            while b"200 OK" not in await answers(port):
                await trio.sleep(0.01)
        assert (folder / "router.sock").stat().st_mode & 0o777 == 0o600
    assert b"200 OK" in await answers(port), "it serves on without a control plane"
    async with control(folder, port) as worker:
        assert worker.state.pid == pid, "adopted"
        worker.push(Table(2, (Route("other", ()),)))
        with trio.fail_after(5):
            while b"other" not in await answers(port, "/v1/models"):
                await trio.sleep(0.01)
        await worker.drain(1.0)
        assert worker.state.state == "draining"
        with pytest.raises(OSError):
            await answers(port)


async def test_whoever_started_it_may_be_gone_already(tmp_path: Path) -> None:
    """As when the control plane is killed in that moment: it goes on, and nothing is complained about."""
    reads, writes = os.pipe()
    os.close(reads)
    program = "from llmgw.router.main import detach; detach(); open('there', 'w').close()"
    starter = await trio.run_process(
        [sys.executable, "-c", program],
        stdout=writes,
        capture_stderr=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    os.close(writes)
    assert starter.stderr == b""
    with trio.fail_after(10):
        while not (tmp_path / "there").exists():
            await trio.sleep(0.01)


async def test_one_that_listens_elsewhere_is_replaced(folder: Path) -> None:
    first, second = free_ports(2)
    async with control(folder, first) as worker:
        pid = worker.state.pid
    async with control(folder, second) as worker:
        assert worker.state.pid != pid
        assert b"503" in await answers(second)
        await refused(first)
        await worker.drain(0.5)


async def test_one_that_dies_is_started_again_and_gets_its_table(folder: Path) -> None:
    (port,) = free_ports(1)
    async with control(folder, port) as worker:
        worker.push(Table(1, (Route("m", ()),)))
        pid = worker.state.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: worker.state.state == "serving" and worker.state.pid != pid)
        with trio.fail_after(5):
            while b'"m"' not in await answers(port, "/v1/models"):
                await trio.sleep(0.01)
        await worker.drain(0.5)


@pytest.mark.long
async def test_one_that_is_stuck_is_replaced_and_the_others_go_on(folder: Path) -> None:
    (port,) = free_ports(1)
    listener = RouterListener(Address("127.0.0.1", port), 2.0, workers=2)
    async with control(folder, port, silent_s=3, workers=2) as router:
        router.push(Table(1, (Route("m", ()),)))
        await until(lambda: len([w for w in router.workers if w.state == "serving"]) == 2)
        stuck, other = (w.pid for w in router.workers)
        assert stuck is not None
        os.kill(stuck, signal.SIGSTOP)
        answered = 0

        def replaced() -> bool:
            there = [w.pid for w in router.workers if w.state == "serving"]
            return stuck not in there and len(there) == 2 and other in there

        with trio.fail_after(15):
            while not replaced():
                with trio.move_on_after(1):  # a client that the stuck one had accepted hears of its end
                    answered += b"200 OK" in await answers(port)
        assert answered, "meanwhile the other one answers"
        for pid in (w.pid for w in router.workers):
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
        stopped = {w.pid for w in router.workers}
    # The next control plane finds nobody who could give it the listening socket.
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        again = RouterWorkers(folder, listener, Log(), silent_s=3)
        await nursery.start(again.run)
        assert trio.current_time() - began < 10
        assert not stopped & {w.pid for w in again.workers}
        await again.drain(0.5)
        nursery.cancel_scope.cancel()


async def test_an_address_that_is_taken_is_named(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = rf"router\.listen 127\.0\.0\.1:{port}: cannot listen there: Address already in use"
        with pytest.RaisesGroup(pytest.RaisesExc(OperatorError, match=said), flatten_subgroups=True):
            async with control(folder, port):
                pass


async def test_sigterm_lets_a_stream_end_without_a_control_plane_too(folder: Path) -> None:
    (port,) = free_ports(1)
    goes_on = trio.Event()

    async def script(visit: e.Visit) -> None:
        await visit.request()
        await visit.send(e.EVENTS + e.event(b"1"))
        await goes_on.wait()
        await visit.send(e.event(b"[DONE]") + b"0\r\n\r\n")

    async with trio.open_nursery() as nursery:
        engine = e.ScriptedEngine(script)
        await nursery.start(engine.run)
        async with control(folder, port, drain_s=20) as worker:
            worker.push(Table(1, (Route("m", (Endpoint("e", "127.0.0.1", engine.port),)),)))
            await until(lambda: worker.state.state == "serving")
            await ready(port)
            pid = worker.state.pid
        assert pid is not None
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(REQUEST)
            said = await stream.receive_some(65536)
            os.kill(pid, signal.SIGTERM)
            await refused(port)
            goes_on.set()
            with trio.fail_after(5):
                async for part in stream:
                    said += part
        assert said.endswith(e.event(b"[DONE]") + b"0\r\n\r\n")
        nursery.cancel_scope.cancel()


async def test_a_thousand_idle_clients_take_little_memory(folder: Path) -> None:
    """Each asked something and keeps its connection: less than 8 kB for it."""
    (port,) = free_ports(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    body = b'{"model": "nope"}'
    request = b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    streams: list[trio.SocketStream] = []

    async def ask(stream: trio.SocketStream) -> None:
        await stream.send_all(request)
        assert b"model_not_found" in await stream.receive_some(65536)

    try:
        async with control(folder, port) as worker:
            worker.push(Table(1, (Route("m", ()),)))
            await ready(port)
            memory = Path(f"/proc/{worker.state.pid}/statm")
            first, sizes = 64, [0, 0]
            for turn in range(2):
                for _ in range(first if turn == 0 else 1000):
                    streams.append(await trio.open_tcp_stream("127.0.0.1", port))
                    await ask(streams[-1])
                sizes[turn] = int(memory.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            await ask(streams[0])
            each = (sizes[1] - sizes[0]) / 1000
            assert each < 8192, each
            print(f"{each / 1000:.1f} kB for each idle client")
            await worker.drain(0.1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for stream in streams:
            await trio.aclose_forcefully(stream)


async def test_the_openai_client(folder: Path) -> None:
    port, engine_port = free_ports(2)
    command = [sys.executable, str(fakes_dir() / "engine.py"), "serve", "x", "--served-model-name", "org/m",
               "--host", "127.0.0.1", "--port", str(engine_port), "--lora-modules", "org/m:sql=/x"]  # fmt: skip
    async with trio.open_nursery() as nursery:
        engine = await nursery.start(lambda task_status: trio.run_process(
            command, env={**os.environ, "VLLM_API_KEY": "sk-engine"}, task_status=task_status, check=False,
            stdout=subprocess.DEVNULL))  # fmt: skip
        with trio.fail_after(10):
            while True:
                try:
                    if b"200" in (await answers(engine_port, "/health"))[:15]:
                        break
                except OSError:
                    await trio.sleep(0.02)
        async with control(folder, port) as worker:
            endpoint = Endpoint("m-1.0", "127.0.0.1", engine_port, "sk-engine")
            served = (Route("org/m", (endpoint,)), Route("org/m:sql", (endpoint,)), Route("down", (), "is loading"))
            worker.push(Table(1, served))
            await trio.to_thread.run_sync(use_client, port)
            counted = await answers(port, "/metrics")
            assert b'llmgw_router_tokens_total{kind="completion",model="org/m"}' in counted
            await until(lambda: worker.in_flight == {"m-1.0": 0})
            await worker.drain(1)
        engine.terminate()


def use_client(port: int) -> None:
    url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=url, api_key="client", max_retries=0, timeout=10) as client:
        ask_as_its_users(client)


def ask_as_its_users(client: openai.OpenAI) -> None:
    deadline = time.monotonic() + 5
    while "org/m" not in [m.id for m in client.models.list()]:
        assert time.monotonic() < deadline
    assert client.models.retrieve("org/m").id == "org/m"
    said = client.chat.completions.create(model="org/m", messages=[{"role": "user", "content": "hi"}], max_tokens=5)
    words = said.choices[0].message.content
    chunks = client.chat.completions.create(
        model="org/m", messages=[{"role": "user", "content": "hi"}], max_tokens=5, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    text, usage = "", None
    for chunk in chunks:
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == words
    assert usage is not None
    assert usage.completion_tokens == 5
    assert client.completions.create(model="org/m", prompt="x", max_tokens=3).choices[0].text
    assert client.completions.create(model="org/m:sql", prompt="x", max_tokens=3).choices[0].text
    assert len(client.embeddings.create(model="org/m", input=["a", "b"]).data) == 2
    asked = {"model": "org/m", "query": "x", "documents": ["a", "b"]}
    assert len(client.post("/rerank", body=asked, cast_to=dict[str, Any])["results"]) == 2
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="nope", messages=[])
    with pytest.raises(openai.InternalServerError, match="No replica of down is ready: it is loading"):
        client.chat.completions.create(model="down", messages=[])
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="org/m", prompt="x", max_tokens=0.5)  # type: ignore[arg-type]


@pytest.mark.long
async def test_tracing_comes_and_goes_with_the_table(folder: Path) -> None:
    """Spans go to a collector of ours while the settings name it, and to nobody before and after."""
    (port,) = free_ports(1)
    told: list[bytes] = []

    async def collect(stream: trio.SocketStream) -> None:
        async with stream:
            text = b""
            async for part in stream:
                text += part
                head, _, body = text.partition(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: (\d+)", head)
                if length is not None and len(body) >= int(length[1]):
                    told.append(body)
                    await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                    return

    async def asked(path: str) -> None:
        assert b"404" in await answers(port, f"/v1/models/{path}")

    async def has(model: str) -> None:
        with trio.fail_after(5):
            while model.encode() not in await answers(port, "/v1/models"):
                await trio.sleep(0.01)

    async with trio.open_nursery() as nursery:
        (listening,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, collect, [listening])
        traced = Tracing(f"http://127.0.0.1:{listening.socket.getsockname()[1]}/v1/traces")
        async with control(folder, port) as worker:
            worker.push(Table(1, (Route("first", ()),)))
            await has("first")
            await asked("before")
            worker.push(Table(2, (Route("second", ()),), tracing=traced))
            with trio.fail_after(20):  # spans are sent every few seconds
                while not any(b"/v1/models/while" in body for body in told):
                    await asked("while")
                    await trio.sleep(0.2)
            worker.push(Table(3, (Route("third", ()),)))
            await has("third")
            await asked("after")
            await worker.drain(1.0)
        assert not any(path in body for body in told for path in (b"/v1/models/before", b"/v1/models/after"))
        nursery.cancel_scope.cancel()
