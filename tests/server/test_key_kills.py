"""Keys through real processes: the openai client, revocations, and what kills leave."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import openai
import pytest
import trio
from attrs import evolve

from llmgw.cli.demo_files import free_ports
from llmgw.router.counts import COUNTS_FOLDER
from llmgw.router.table import Endpoint, Route, Table
from llmgw.router.workers import RouterWorkers
from llmgw.server.keys import KeyBook
from llmgw.settings.daemon import Address, Log, RouterListener
from llmgw.settings.document import Auth, RouterSettings
from llmgw.settings.keys import ApiKey, KeyTerms, Limits, digest_of, token_of
from llmgw.store.keys import KeyEvent
from llmgw.store.opening import sqlite_store
from llmgw.store.sql import SqlStore
from tests.router import engines as e
from tests.router.engines import ScriptedEngine, Visit


class Plane:
    """A control plane as far as keys go. ``dies`` ends it without a word; its router serves on."""

    def __init__(self, store: SqlStore, folder: Path, port: int) -> None:
        self.router = RouterWorkers(folder, RouterListener(Address("127.0.0.1", port), 2.0, workers=1), Log())
        self.book = KeyBook(store.keys, self.router, folder / COUNTS_FOLDER, time.time)
        self.folder, self.port = folder, port

    async def requests(self, key: str | None = None) -> int:
        return sum(r.requests for r in await self.book.usage(0, 10**6, key))


@asynccontextmanager
async def plane(folder: Path, port: int, engine: ScriptedEngine) -> AsyncIterator[Plane]:
    async with sqlite_store(folder / "db") as store:
        made = Plane(store, folder, port)
        await made.book.load()
        made.router.serve_keys(made.book)
        served = Route("m", (Endpoint("e", "127.0.0.1", engine.port),))
        made.router.push(Table(1, (served, Route("other", ())), RouterSettings(auth=Auth.KEYS)))
        async with trio.open_nursery() as nursery:
            await nursery.start(made.router.run)
            nursery.start_soon(made.book.run)
            yield made
            nursery.cancel_scope.cancel(reason="dies")


@asynccontextmanager
async def engine_of(script: e.Script = e.answers) -> AsyncIterator[ScriptedEngine]:
    async with trio.open_nursery() as nursery:
        engine = ScriptedEngine(script)
        await nursery.start(engine.run)
        yield engine
        nursery.cancel_scope.cancel()


async def ask(port: int, token: str, times: int = 1, model: str = "m") -> list[int]:
    """The statuses of so many requests, one after the other."""
    body = b'{"model":"%b"}' % model.encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b" % (
        token.encode(), len(body), body,
    )  # fmt: skip
    found = []
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        for _ in range(times):
            await stream.send_all(request)
            data = b""
            while not data.endswith(b"}}"):
                more = await stream.receive_some()
                assert more
                data += more
            found.append(int(data.split(b" ")[1]))
    return found


async def until(done: object, seconds: float = 30.0) -> None:
    assert callable(done)
    with trio.fail_after(seconds):
        while not await done():
            await trio.sleep(0.02)


async def counted(it: Plane, requests: int) -> None:
    async def there() -> bool:
        return await it.requests() >= requests

    await until(there)
    assert await it.requests() == requests


async def end(it: Plane) -> None:
    await it.router.drain(1)


async def reuse(visit: Visit) -> None:
    """A stream that says its usage when it is asked to, and plain answers."""
    while True:
        _, body = await visit.request()
        if b'"stream":true' not in body.replace(b" ", b""):
            await visit.send(e.whole())
            continue
        usage = b'{"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":2}}'
        asked = e.event(usage) if b"include_usage" in body else b""
        word = b'{"id":"x","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"w"}}]}'
        await visit.send(e.EVENTS + e.event(word) + e.event(word) + asked + e.event(b"[DONE]") + b"0\r\n\r\n")


async def test_the_openai_client_raises_what_its_users_expect(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    async with engine_of(reuse) as engine, plane(tmp_path, port, engine) as it:
        _, token, _ = await it.book.create(KeyTerms(models=("m",), limits=Limits(requests_per_minute=3)), "me")
        await trio.to_thread.run_sync(use_client, port, token)
        await counted(it, 3)
        (row,) = await it.book.usage(0, 10**6, None)
        assert (row.prompt, row.completion, row.estimated) == (4 + 4 + 2, 2 + 2 + 1, 0)
        await end(it)


def use_client(port: int, token: str) -> None:
    client = partial(openai.OpenAI, base_url=f"http://127.0.0.1:{port}/v1", max_retries=0, timeout=10)
    with client(api_key="sk-wrong") as stranger, pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
        stranger.models.list()
    with client(api_key=token) as mine:
        ask_as_its_users(mine)


def ask_as_its_users(mine: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "hi"}]
    chat = mine.chat.completions.with_raw_response.create
    assert [m.id for m in mine.models.list()] == ["m"]
    with pytest.raises(openai.PermissionDeniedError, match="not for the model 'other'"):
        chat(model="other", messages=messages)  # type: ignore[call-overload]
    chunks = list(mine.chat.completions.create(model="m", messages=messages, stream=True))  # type: ignore[call-overload]
    assert [c.choices[0].delta.content for c in chunks] == ["w", "w"]
    chunks = list(mine.chat.completions.create(model="m", messages=messages, stream=True,
                                               stream_options={"include_usage": True}))  # type: ignore[call-overload]  # fmt: skip
    assert chunks[-1].usage.completion_tokens == 2
    assert mine.post("/completions", body={"model": "m", "prompt": "x"}, cast_to=dict[str, object])
    with pytest.raises(openai.RateLimitError, match="3 requests a minute") as limited:
        chat(model="m", messages=messages)  # type: ignore[call-overload]
    assert limited.value.code == "rate_limit_exceeded"
    assert 55 <= int(limited.value.response.headers["retry-after"]) <= 67
    assert limited.value.response.headers["x-ratelimit-remaining-requests"] == "0"


async def test_a_change_holds_within_a_second(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    async with engine_of() as engine, plane(tmp_path, port, engine) as it:
        for _ in range(5):
            began = trio.current_time()
            key, token, in_force = await it.book.create(KeyTerms(), "me")
            assert in_force
            assert await ask(port, token) == [200]
            assert (await it.book.change(key.id, evolve(key.terms, models=("x",)), "me"))[1]
            assert await ask(port, token) == [403]
            assert (await it.book.revoke(key.id, "me"))[1]
            assert await ask(port, token) == [401]
            assert trio.current_time() - began < 1.0
        await end(it)


async def test_a_router_that_is_killed(tmp_path: Path) -> None:
    """Its requests are in the store, its limits go on, its successor has the keys."""
    (port,) = free_ports(1)
    async with engine_of() as engine, plane(tmp_path, port, engine) as it:
        key, token, _ = await it.book.create(KeyTerms(limits=Limits(requests_per_minute=30, concurrent=1)), "me")
        gone, other, _ = await it.book.create(KeyTerms(), "me")
        await it.book.revoke(gone.id, "me")
        assert await ask(port, token, 25) == [200] * 25
        pid = it.router.state.pid
        assert pid is not None
        await trio.sleep(0.8)  # the last second is what may be lost
        os.kill(pid, signal.SIGKILL)

        async def another() -> bool:
            return it.router.state.state == "serving" and it.router.state.pid != pid

        await until(another)
        assert await it.router.keys_in_force(it.book.version, 3.0)
        await counted(it, 25)
        assert await ask(port, token, 6) == [200] * 5 + [429], "five were left"
        assert await ask(port, other) == [401]
        await counted(it, 30)
        assert key.id in {r.key for r in await it.book.usage(0, 10**6, None)}
        await end(it)


async def test_a_control_plane_that_dies(tmp_path: Path) -> None:
    """Keys hold on without it, and what is used meanwhile is counted by the next one, once."""
    (port,) = free_ports(1)
    async with engine_of() as engine:
        async with plane(tmp_path, port, engine) as it:
            key, token, _ = await it.book.create(KeyTerms(limits=Limits(budget_tokens=10**6)), "me")
            revoked, other, _ = await it.book.create(KeyTerms(), "me")
            await it.book.revoke(revoked.id, "me")
            assert await ask(port, token, 10) == [200] * 10
            pid = it.router.state.pid
        assert await ask(port, token, 7) == [200] * 7
        assert await ask(port, other) == [401]
        async with plane(tmp_path, port, engine) as it:
            assert it.router.state.pid == pid, "adopted"
            await counted(it, 17)
            assert it.book.budget_spent(it.book.row(key.id)) is not None
            assert it.book.budget_spent(it.book.row(key.id)).tokens == 17 * 3  # type: ignore[union-attr]
            await end(it)


def listens(pid: int) -> bool:
    """Whether a process may still hold its sockets: one that is dead has closed them."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_both_are_killed(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    async with engine_of() as engine:
        async with plane(tmp_path, port, engine) as it:
            _, token, _ = await it.book.create(KeyTerms(), "me")
            pid = it.router.state.pid
        assert await ask(port, token, 9) == [200] * 9
        await trio.sleep(0.8)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with trio.fail_after(10):
            while listens(pid):  # until then the address is its own
                await trio.sleep(0.01)
        async with plane(tmp_path, port, engine) as it:
            assert it.router.state.pid != pid
            await counted(it, 9)
            assert await it.router.keys_in_force(1, 3.0)
            assert await ask(port, token) == [200]
            await end(it)


async def test_a_router_that_ends_in_good_order_loses_nothing(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    async with engine_of() as engine:
        async with plane(tmp_path, port, engine) as it:
            _, token, _ = await it.book.create(KeyTerms(), "me")
            assert await ask(port, token, 8) == [200] * 8
            await end(it)
        async with plane(tmp_path, port, engine) as it:
            await counted(it, 8)
            await end(it)


async def test_a_stale_store_undoes_no_revocation(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    async with engine_of() as engine:
        async with plane(tmp_path, port, engine) as it:
            key, token, _ = await it.book.create(KeyTerms(), "me")
        shutil.copy(tmp_path / "db", tmp_path / "backup")
        async with plane(tmp_path, port, engine) as it:
            assert await ask(port, token) == [200]
            await it.book.revoke(key.id, "me")
            assert await ask(port, token) == [401]
        shutil.copy(tmp_path / "backup", tmp_path / "db")
        async with plane(tmp_path, port, engine) as it:
            assert it.book.row(key.id).revoked is None
            await trio.sleep(0.5)
            assert await ask(port, token) == [401]
            await end(it)


async def test_more_keys_than_a_page(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    tokens = [token_of(f"{chr(97 + n // 26) * 11}{chr(97 + n % 26)}", "s" * 40) for n in range(250)]
    async with sqlite_store(tmp_path / "db") as store:
        for token in tokens:
            ident = token.split("_")[1]
            key = ApiKey(ident, 0, 0, digest_of(token.encode()), 0.0)
            await store.keys.add_key(key, KeyEvent(0.0, ident, "created", "me", ""))
    async with engine_of() as engine:
        async with plane(tmp_path, port, engine) as it:
            assert await it.router.keys_in_force(250, 3.0)
            for token in (tokens[0], tokens[99], tokens[100], tokens[249]):
                assert await ask(port, token) == [200]
        async with plane(tmp_path, port, engine) as it:
            assert it.router.keys_held == 250, "what the worker has is not sent again"
            await it.book.revoke(tokens[100].split("_")[1], "me")
            assert [await ask(port, token) for token in (tokens[99], tokens[100])] == [[200], [401]]
            await end(it)


async def test_workers_that_start_before_their_keys_send_nobody_away_for_good(tmp_path: Path) -> None:
    """A control plane that has a table and no keys yet."""
    (port,) = free_ports(1)
    async with engine_of() as engine, sqlite_store(tmp_path / "db") as store:
        it = Plane(store, tmp_path, port)
        served = Route("m", (Endpoint("e", "127.0.0.1", engine.port),))
        it.router.push(Table(1, (served,), RouterSettings(auth=Auth.KEYS)))
        async with trio.open_nursery() as nursery:
            await nursery.start(it.router.run)
            await it.book.load()
            _, token, in_force = await it.book.create(KeyTerms(), "me")
            assert not in_force
            assert await ask(port, token) == [503]
            it.router.serve_keys(it.book)
            assert await it.router.keys_in_force(1, 3.0)
            assert await ask(port, token) == [200]
            await end(it)
            nursery.cancel_scope.cancel()
