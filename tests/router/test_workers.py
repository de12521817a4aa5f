"""Several workers of one router: one address, one set of numbers, and replaced without anybody noticing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from llmgw.cli.demo_files import free_ports
from llmgw.router.counts import COUNTS_FOLDER
from llmgw.router.sight import EngineSight
from llmgw.router.table import Endpoint, Route, Table
from llmgw.router.worker import shared_out
from llmgw.router.workers import RouterWorkers, stop_left
from llmgw.server.keys import KeyBook
from llmgw.settings.catalog import Balance, Routing
from llmgw.settings.daemon import Address, Log, RouterListener
from llmgw.settings.keys import KeyTerms, Limits
from llmgw.store.opening import sqlite_store
from tests.router import engines as e
from tests.router.engines import ScriptedEngine
from tests.router.load import BODY, REQUEST, Load, chat
from tests.router.test_worker import answers, control, ready, refused, until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@asynccontextmanager
async def engine() -> AsyncIterator[ScriptedEngine]:
    async def script(visit: e.Visit) -> None:
        """A stream of some time for every third request, a plain answer for the others."""
        while True:
            await visit.request()
            if len(visit.engine.requests) % 3:
                await visit.send(e.whole())
                continue
            await visit.send(e.EVENTS)
            for _ in range(3):
                await visit.send(e.event(b"{}"))
                await trio.sleep(0.05)
            await visit.send(e.event(b"[DONE]") + b"0\r\n\r\n")

    made = ScriptedEngine(script)
    async with trio.open_nursery() as nursery:
        await nursery.start(made.run)
        yield made
        nursery.cancel_scope.cancel()


def table(made: ScriptedEngine) -> Table:
    return Table(1, (Route("m", (Endpoint("m-1.0", "127.0.0.1", made.port),)), Route("empty", ())))


async def answered(port: int, request: bytes) -> bytes:
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(request)
        return await stream.receive_some(65536)


def pids(router: RouterWorkers) -> set[int]:
    return {w.pid for w in router.workers if w.pid is not None and w.state == "serving"}


@asynccontextmanager
async def under(load: Load) -> AsyncIterator[Load]:
    """Eight clients that go on until the block ends."""
    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(load.client)
        yield load
        await load.stop()


async def count(port: int, name: str) -> float:
    text = (await answers(port, "/metrics")).decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.MULTILINE))


async def test_one_dies_the_others_go_on_and_no_number_goes_back(folder: Path) -> None:
    (port,) = free_ports(1)
    async with engine() as made, control(folder, port, workers=2) as router:
        router.push(table(made))
        await ready(port)
        await until(lambda: len(pids(router)) == 2)
        async with under(Load(port)) as load:
            await until(lambda: load.answered > 100)
        name, shown = "llmgw_router_requests_total", 0.0
        with trio.fail_after(5):
            while (shown := await count(port, name)) != load.answered:
                await trio.sleep(0.05)
        killed = pids(router).pop()
        async with under(Load(port)) as load:
            await until(lambda: load.answered > 50)
            os.kill(killed, signal.SIGKILL)
            before = load.answered
            await until(lambda: load.answered > before + 50)
            assert await count(port, name) > shown
            await until(lambda: len(pids(router)) == 2 and killed not in pids(router))
            assert await count(port, name) > shown
        # Its own clients were cut; nobody was refused, and nobody had to wait for another worker.
        assert sum(load.failed.values()) <= 8, load.failed
        assert not any("refused" in why for why in load.failed)
        await until(lambda: sum(router.in_flight.values()) == 0)
        assert await count(port, "llmgw_router_keys") == 0
        await router.drain(1)
    await refused(port)


async def test_all_are_adopted_by_the_next_control_plane(folder: Path) -> None:
    (port,) = free_ports(1)
    async with engine() as made:
        async with control(folder, port, workers=2) as router:
            router.push(table(made))
            await ready(port)
            await until(lambda: len(pids(router)) == 2)
            first = pids(router)
        assert b"200 OK" in await answers(port)
        async with control(folder, port, workers=2) as router:
            assert pids(router) == first
            router.push(table(made))
            killed = first.copy().pop()
            os.kill(killed, signal.SIGKILL)
            await until(lambda: len(pids(router)) == 2 and killed not in pids(router))
            assert len(pids(router) & first) == 1, "started with the listening socket that the other one kept"
        async with control(folder, port, workers=1) as router:
            router.push(table(made))
            await until(lambda: len(router.workers) == 1)
            assert b"200 OK" in await answers(port)
            await router.drain(1)
    await refused(port)


async def test_the_load_of_all_is_one(folder: Path) -> None:
    (port,) = free_ports(1)
    said = []
    async with trio.open_nursery() as nursery:
        silent = ScriptedEngine(e.says_nothing)
        await nursery.start(silent.run)
        async with control(folder, port, workers=2) as router:
            router.on_load(said.append)
            router.push(table(silent))
            await ready(port)
            await until(lambda: len(pids(router)) == 2)
            streams = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(24)]
            for stream in streams:
                await stream.send_all(REQUEST)
            await until(lambda: said and said[-1].outstanding == {"m-1.0": 24})
            assert said[-1].asked == {"m": 24}
            assert sum(w.streams for w in router.workers) == 24
            await until(lambda: router.sight.engines == {"m-1.0": EngineSight(24 * (256 + len(BODY) // 4))})
            assert router.sight.choices == {"m": {"only": 24}}
            assert b"no_ready_replica" in await answered(port, chat(body=b'{"model": "empty"}'))
            assert b"model_not_found" in await answered(port, chat(body=b'{"model": "nope"}'))
            await until(lambda: router.sight.refused)
            assert [(m, c, r.count) for m, codes in router.sight.refused.items() for c, r in codes.items()] == [
                ("empty", "no_ready_replica", 1)
            ]
            assert min(w.streams for w in router.workers) >= 2, "both take their share of them"
            # One that is gone takes what it had open along, and leaves what it was asked.
            killed = max((w for w in router.workers if w.pid), key=lambda w: w.streams)
            assert killed.pid is not None
            os.kill(killed.pid, signal.SIGKILL)
            await until(lambda: said[-1].outstanding == {"m-1.0": 24 - killed.streams})
            assert said[-1].asked == {"m": 24, "empty": 1}
            for stream in streams:
                await trio.aclose_forcefully(stream)
            await until(lambda: said[-1].outstanding == {"m-1.0": 0})
            await router.drain(1)
        nursery.cancel_scope.cancel()


async def restarts(folder: Path, times: int, workers: int) -> Load:
    """New control planes, each with another setup, so that each replaces all workers; under load all the time."""
    (port,) = free_ports(1)
    load = Load(port)
    async with engine() as made, trio.open_nursery() as nursery:
        before: set[int] = set()
        answered = 0

        def goes_on() -> bool:
            return load.answered > answered + 20

        def all_are_new() -> bool:
            return len(pids(router)) == workers and not pids(router) & before

        for turn in range(times + 1):
            async with control(folder, port, drain_s=5 + turn / 100, workers=workers) as router:
                router.push(table(made))
                if not turn:
                    await ready(port)
                    for _ in range(10):
                        nursery.start_soon(load.client)
                await until(all_are_new, 20)
                before = pids(router)
                await until(goes_on)
                answered = load.answered
                if turn == times:
                    await load.stop()
                    await until(lambda: len(router.workers) == workers, 15)
                    await router.drain(2)
    await refused(port)
    return load


async def test_workers_are_replaced_under_load_and_nobody_notices(folder: Path) -> None:
    load = await restarts(folder, 5, 1)
    assert not load.failed
    assert load.answered > 120


@pytest.mark.soak
async def test_fifty_restarts_under_load(folder: Path) -> None:
    load = await restarts(folder, 50, 2)
    assert not load.failed


@pytest.mark.soak
async def test_memory_is_flat(folder: Path) -> None:
    """``LLMGW_SOAK_S=3600 pytest -m soak -s -k memory_is_flat``: everything that happens to a router, for an hour.

    Keys with every limit, streams, clients that leave, wrong requests, an engine that dies at every stage of an answer.
    """
    seconds = float(os.environ.get("LLMGW_SOAK_S", "60"))
    (port,) = free_ports(1)
    samples: list[tuple[int, int]] = []
    left = 0

    async def tires(visit: e.Visit) -> None:
        for _ in range(20):
            await visit.request()
            await visit.send(e.whole())

    async def dying(visit: e.Visit) -> None:
        stages = (e.dies_at_once, e.dies_after_its_head, e.dies_in_the_stream, e.dies_in_a_chunk, tires)
        await stages[visit.engine.connections % len(stages)](visit)

    async def leaving(request: bytes) -> None:
        nonlocal left
        while True:
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                await stream.send_all(request)
                await stream.receive_some(1000)
            left += 1
            await trio.sleep(0.02)

    async def sample(router: RouterWorkers) -> None:
        while True:
            await trio.sleep(seconds / 200)
            made.requests.clear()
            worn.requests.clear()
            there = [Path(f"/proc/{pid}") for pid in pids(router)]
            pages = sum(int((place / "statm").read_text().split()[1]) for place in there)
            samples.append((pages * 4096 // 1024, sum(len(list((place / "fd").iterdir())) for place in there)))

    worn = ScriptedEngine(dying)
    listener = RouterListener(Address("127.0.0.1", port), 2.0, workers=2)
    router = RouterWorkers(folder, listener, Log())
    async with engine() as made, sqlite_store(folder / "db") as store, trio.open_nursery() as nursery:
        await nursery.start(worn.run)
        book = KeyBook(store.keys, router, folder / COUNTS_FOLDER, time.time)
        await book.load()
        router.serve_keys(book)
        await nursery.start(router.run)
        endpoints = (Endpoint("m-1.0", "127.0.0.1", made.port), Endpoint("m-2.0", "127.0.0.1", worn.port))
        router.push(Table(1, (Route("m", endpoints, routing=Routing(balance=Balance.LEAST)),)))
        await ready(port)
        await until(lambda: len(pids(router)) == 2)
        before = pids(router)
        big = 10**12
        _, token, _ = await book.create(KeyTerms(limits=Limits(big, big, 1000, big, big)), "soak")
        field = b"authorization: Bearer %b\r\n" % token.encode()
        good, wrong = Load(port, pause_s=0.01), Load(port, pause_s=0.01)
        good.request, wrong.request = chat(field), chat(field, b'{"model": "nope"}')
        async with trio.open_nursery() as clients:
            for load, count in ((good, 8), (wrong, 2)):
                for _ in range(count):
                    clients.start_soon(load.client)
            clients.start_soon(leaving, good.request)
            clients.start_soon(sample, router)
            await trio.sleep(seconds)
            clients.cancel_scope.cancel()
        await until(lambda: sum(router.in_flight.values()) == 0)
        assert pids(router) == before, "nobody died"
        await router.drain(1)
        nursery.cancel_scope.cancel()
    fifth = len(samples) // 5
    early, late = (sorted(part)[len(part) // 2] for part in (samples[fifth : 2 * fifth], samples[-fifth:]))
    print(f"\n{seconds:g} s: {good.answered} good, {sum(good.failed.values())} cut, {sum(wrong.failed.values())} refused, "
          f"{left} left; RSS of two workers {early[0]} kB early, {late[0]} kB late, {early[1]} and {late[1]} files")  # fmt: skip
    assert late[0] < early[0] + 2048 + early[0] // 50
    assert max(files for _, files in samples) < 120


def test_what_all_may_have_together_is_shared_out() -> None:
    bounded = Route("m", (), routing=Routing(concurrency=5, queue=10))
    whole = Table(3, (bounded, Route("n", ())))
    assert shared_out(whole, 1) is whole
    part = shared_out(whole, 4)
    assert (part.routes[0].routing.concurrency, part.routes[0].routing.queue) == (2, 3)
    assert part.routes[1] == whole.routes[1]
    assert part.version == whole.version


async def test_workers_that_nobody_adopts_are_told_to_drain_and_killed_if_they_do_not(tmp_path: Path) -> None:
    asleep = "import signal; print(flush=True); signal.pause()"
    stubborn = (
        f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {asleep.replace('pause()', 'sigwait([10])')}"
    )
    words = ((asleep, "router.sock"), (stubborn, "router.sock"), (asleep, "another.sock"))
    made = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path / control)], stdout=subprocess.PIPE)
        for program, control in words
    ]
    try:
        for process in made:
            assert process.stdout is not None
            process.stdout.readline()
        (tmp_path / "router.pid").write_text("".join(f"{process.pid}\n" for process in made))
        await stop_left(tmp_path, -0.6)
        assert [process.wait(5) for process in made[:2]] == [-signal.SIGTERM, -signal.SIGKILL]
        assert made[2].poll() is None, "its number is in the file, and it is no worker of ours"
        await stop_left(tmp_path / "nothing", 1)
    finally:
        for process in made:
            process.kill()
            process.communicate()
