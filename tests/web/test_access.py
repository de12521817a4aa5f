"""Who may use the admin API: tokens, certificates over real TLS, roles, and what is said to others."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define

from llmgw.link import ca
from llmgw.settings.daemon import Address, AdminTls
from llmgw.store.opening import sqlite_store
from llmgw.store.sql import SqlStore
from llmgw.web.access import Access
from llmgw.web.admin_tls import AdminTlsContext
from llmgw.web.api import app
from llmgw.web.serve import listen, serve
from tests.web.admin import TOKEN, Picture

DOMAIN = "t.example"


@define
class Bench:
    folder: Path
    port: int
    store: SqlStore
    at: float

    async def ask(
        self, path: str, body: Any = None, token: str | None = TOKEN, person: str = "", **fields: str
    ) -> tuple[int, Any]:
        def work() -> tuple[int, Any]:
            context = ssl.create_default_context(cafile=str(self.folder / "server" / "ca.pem"))
            if person:
                files = self.folder / person
                context.load_cert_chain(files / "cert.pem", files / "key.pem")
            connection = http.client.HTTPSConnection("localhost", self.port, timeout=10, context=context)
            try:
                said = dict(fields) if token is None else {"authorization": f"Bearer {token}", **fields}
                data = None if body is None else json.dumps(body)
                connection.request("GET" if body is None else "POST", f"/api/v1/{path}", data, said)
                answer = connection.getresponse()
                return answer.status, json.loads(answer.read())
            finally:
                connection.close()

        return await trio.to_thread.run_sync(work)


class Clocked(Picture):
    """A picture whose clock is the bench's."""

    bench: Bench

    def now(self) -> float:
        return self.bench.at


@asynccontextmanager
async def bench(folder: Path) -> AsyncIterator[Bench]:
    now = time.time()
    ca.init(folder / "ca", DOMAIN, now - 86400)
    made = ca.issue_server(folder / "ca", ("localhost",), folder / "server", 30, now)
    listener = listen(Address("127.0.0.1", 0))
    async with sqlite_store(folder / "db") as store, trio.open_nursery() as nursery:
        it = Bench(folder, listener.getsockname()[1], store, now)
        access = Access(TOKEN, store.people, lambda: it.at, DOMAIN)
        tls = AdminTlsContext(AdminTls(made.certificate, made.key, made.ca))
        picture = Clocked()
        picture.bench = it
        await nursery.start(serve, app(picture, access, admins=store.people), listener, tls)
        yield it
        nursery.cancel_scope.cancel()


async def test_a_token_has_a_role_an_end_and_rows_in_the_audit(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        status, made = await it.ask("admin-tokens", {"name": "bob", "role": "viewer", "ttl_s": 3600})
        assert status == 200
        token = made["token"]
        told = (await it.ask("whoami", token=token))[1]
        assert told == {"name": "token bob", "role": "viewer"}, told
        status, answer = await it.ask("brake/release", {}, token=token)
        assert (status, answer["error"]["reason"]) == (403, "token bob is a viewer, and this takes an operator")
        status, answer = await it.ask("admin-tokens", {"name": "eve", "role": "admin"}, token=token)
        assert (status, "takes an admin" in answer["error"]["reason"]) == (403, True)
        for wrong in (token[:-1] + ("A" if token[-1] != "A" else "B"), token.replace(".", "_"), ""):
            assert (await it.ask("whoami", token=wrong))[0] == 401
        told = json.dumps((await it.ask("admin-tokens"))[1])
        assert token.partition(".")[2] not in told
        it.at += 3601
        status, answer = await it.ask("whoami", token=token)
        assert (status, "has expired" in answer["error"]["reason"]) == (401, True)
        it.at -= 3601
        assert (await it.ask(f"admin-tokens/{made['id']}/revoke", {}))[0] == 200
        assert "was revoked" in (await it.ask("whoami", token=token))[1]["error"]["reason"]
        assert (await it.ask(f"admin-tokens/{made['id']}/revoke", {}))[0] == 404
        rows = [(row.action, row.object, row.by) for row in await it.store.audit(10)]
        assert rows == [
            ("admin.token.revoke", "bob", "token admin.token"),
            ("admin.token.create", "bob", "token admin.token"),
        ]


@pytest.mark.parametrize(("role", "may"), [("viewer", 403), ("operator", 409), ("admin", 409)])
async def test_a_certificate_is_a_person(tmp_path: Path, role: str, may: int) -> None:
    async with bench(tmp_path) as it:
        ca.issue_person(tmp_path / "ca", "ada", role, tmp_path / "ada", 1, time.time())
        told = await it.ask("whoami", token=None, person="ada")
        assert told == (200, {"name": "certificate ada", "role": role})
        assert (await it.ask("brake/release", {}, token=None, person="ada"))[0] == may
        other = await it.ask("brake/release", {}, token=None, person="ada", origin="https://evil.example")
        assert (other[0], "another site" in other[1]["error"]["reason"] or role == "viewer") == (403, True)


async def test_a_node_is_nobody_and_so_is_who_shows_nothing(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        ca.issue_node(tmp_path / "ca", "admin", tmp_path / "node", 1, time.time())
        status, answer = await it.ask("whoami", token=None, person="node")
        assert (status, "is no person's" in answer["error"]["reason"]) == (401, True)
        assert (await it.ask("whoami", token=None))[0] == 401
        ca.init(tmp_path / "other", DOMAIN, time.time())
        ca.issue_person(tmp_path / "other", "eve", "admin", tmp_path / "eve", 1, time.time())
        with pytest.raises((ssl.SSLError, OSError)):
            await it.ask("whoami", token=None, person="eve")
