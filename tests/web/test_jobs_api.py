"""The jobs' part of the admin API, on a real socket."""

from __future__ import annotations

import http.client
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from llmgw.settings.daemon import Address
from llmgw.store.opening import sqlite_store
from llmgw.web.api import app
from llmgw.web.serve import listen, serve
from tests.server.test_jobs import Plane
from tests.web.admin import TOKEN, Picture


class Admin:
    def __init__(self, port: int) -> None:
        self.port = port

    async def ask(self, path: str, value: Any = None, token: str = TOKEN) -> tuple[int, Any]:
        def work() -> tuple[int, Any]:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            try:
                body = None if value is None else value if isinstance(value, bytes) else json.dumps(value)
                connection.request(
                    "GET" if value is None else "POST", f"/api/v1/{path}", body, {"authorization": f"Bearer {token}"}
                )
                answer = connection.getresponse()
                return answer.status, json.loads(answer.read())
            finally:
                connection.close()

        return await trio.to_thread.run_sync(work)


@asynccontextmanager
async def admin(folder: Path) -> AsyncIterator[Admin]:
    listener = listen(Address("127.0.0.1", 0))
    port = listener.getsockname()[1]
    async with sqlite_store(folder / "db") as store, trio.open_nursery() as nursery:
        await nursery.start(serve, app(Picture(), TOKEN, Plane(store).jobs), listener)
        yield Admin(port)
        nursery.cancel_scope.cancel()


async def test_begun_seen_and_cancelled(tmp_path: Path) -> None:
    async with admin(tmp_path) as it:
        assert (await it.ask("jobs"))[1]["jobs"] == []
        status, answer = await it.ask("jobs", {"node": "n1", "fetch": {"weights": "m"}})
        assert status == 200
        (made,) = answer["jobs"]
        assert (made["subject"], made["state"], made["node"]) == ("hf:org/a@v1", "queued", "n1")
        assert (await it.ask(f"jobs/{made['id']}"))[1]["jobs"] == [made]
        _, answer = await it.ask(f"jobs/{made['id']}/cancel", {})
        assert answer["jobs"][0]["cancel"] == "cancelled by an operator"
        assert len((await it.ask("jobs"))[1]["jobs"]) == 1
        lock = "vllm==0.12 --hash=sha256:5ec4e7"
        install = {"engine": "vllm", "name": "vllm", "version": "0.12", "lock": lock}
        status, answer = await it.ask("jobs", {"node": "n1", "install": install})
        assert (status, answer["jobs"][0]["subject"]) == (200, "vllm vllm-0.12")
        assert "5ec4e7" not in json.dumps((await it.ask("jobs"))[1])


async def test_what_is_refused(tmp_path: Path) -> None:
    async with admin(tmp_path) as it:
        for value, reason in (
            (b"{", "is not valid JSON"),
            ({"node": "n1"}, "either fetch or install"),
            ({"node": "n1", "fetch": {"weights": "hf:evil/x"}}, "is not in weights.sources"),
            ({"node": "n1", "fetch": {"weights": 7}}, "expected text, found the number 7 @ $.fetch.weights"),
            ({"node": "n1", "fetch": {"weights": "m"}, "more": 1}, "more"),
            (b" " * (2 * 1024 * 1024 + 1), "is larger than"),
        ):
            status, answer = await it.ask("jobs", value)
            refused = 413 if len(value) > 2**20 else 400
            assert (status, reason in answer["error"]["reason"]) == (refused, True), answer
        status, answer = await it.ask("jobs", {"node": "n9", "fetch": {"weights": "m"}})
        assert (status, "has never registered" in answer["error"]["reason"]) == (404, True)
        assert (await it.ask("jobs/nope"))[0] == 404
        assert (await it.ask("jobs/nope/cancel", {}))[0] == 404
        assert (await it.ask("jobs", {"node": "n1", "fetch": {"weights": "m"}}, token="x"))[0] == 401
        assert (await it.ask("jobs"))[1]["jobs"] == []
