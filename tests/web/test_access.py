"""Who may use the admin API: tokens, certificates over real TLS, roles, and what is said to others."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from llmgw.link import ca
from llmgw.settings.daemon import Address, AdminTls
from llmgw.store.database import StoreError
from llmgw.store.opening import sqlite_store
from llmgw.store.people import AdminToken
from llmgw.store.sql import SqlStore
from llmgw.web.access import Access, Role, new_token
from llmgw.web.admin_tls import AdminTlsContext
from llmgw.web.api import admitted, app
from llmgw.web.serve import listen, serve
from llmgw.web.table import OPERATIONS
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
            connection = http.client.HTTPSConnection("localhost", self.port, timeout=10, context=self.context(person))
            try:
                said = dict(fields) if token is None else {"authorization": f"Bearer {token}", **fields}
                data = None if body is None else json.dumps(body)
                connection.request("GET" if body is None else "POST", f"/api/v1/{path}", data, said)
                answer = connection.getresponse()
                return answer.status, json.loads(answer.read())
            finally:
                connection.close()

        return await trio.to_thread.run_sync(work)

    async def statuses(self, asked: list[str], token: str | None, person: str) -> list[int]:
        """What each ``METHOD path`` is answered with, on one connection."""

        def work() -> list[int]:
            connection = http.client.HTTPSConnection("localhost", self.port, timeout=10, context=self.context(person))
            made = []
            with closing(connection):
                for method, path in (one.split() for one in asked):
                    fields = {} if token is None else {"authorization": f"Bearer {token}"}
                    connection.request(method, f"/api/v1/{path}", None, fields)
                    with connection.getresponse() as answer:
                        answer.read()
                        made.append(answer.status)
            return made

        return await trio.to_thread.run_sync(work)

    def context(self, person: str) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.folder / "server" / "ca.pem"))
        if person:
            context.load_cert_chain(self.folder / person / "cert.pem", self.folder / person / "key.pem")
        return context


class Clocked(Picture):
    """A picture whose clock is the bench's."""

    bench: Bench

    def now(self) -> float:
        return self.bench.at


@asynccontextmanager
async def bench(
    folder: Path, made_of: Callable[[Access, SqlStore, Picture], Any] | None = None
) -> AsyncIterator[Bench]:
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
        asked = app(picture, access, admins=store.people) if made_of is None else made_of(access, store, picture)
        await nursery.start(serve, asked, listener, tls)
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


# Said here a second time, so that nobody changes who may what by accident.
ADMINS = {
    "POST tokens", "POST tokens/x/revoke", "POST deny", "POST deny/lift", "POST nodes/x/forget", "GET backup",
    "POST admin-tokens", "POST admin-tokens/x/revoke",
}  # fmt: skip
OPERATORS_READ = {"GET settings", "GET settings/diff", "POST settings/check"}
VIEWERS_POST = {"POST watch/ticket", "POST plan", "POST doctor"}


def least(asked: str) -> int:
    """0: a viewer may, 1: an operator, 2: an admin."""
    if asked in ADMINS:
        return 2
    return 0 if asked in VIEWERS_POST or (asked.startswith("GET") and asked not in OPERATORS_READ) else 1


def reached(access: Access, *_: Any) -> Starlette:
    """Everything that is in the table, behind the door, with nothing in it."""

    async def inside(_request: Any) -> JSONResponse:
        return JSONResponse({})

    routes = [Route(f"/api/v1/{o.path}", inside, methods=[o.method]) for o in OPERATIONS]
    return Starlette(routes=[admitted(route, access) for route in routes])


async def test_every_operation_for_everybody(tmp_path: Path) -> None:
    """Nobody that is known gets 401 everywhere, and others what their role may: by token as by certificate."""
    async with bench(tmp_path, reached) as it:
        tokens: dict[str, str | None] = {"": None, "the first": TOKEN, "another": "llmgw_admin_0.x", "empty": ""}
        for name, role, ttl in (
            ("viewer", "viewer", 60), ("operator", "operator", 60), ("admin", "admin", 60),
            ("expired", "admin", -1), ("revoked", "admin", 60),
        ):  # fmt: skip
            ident, text, kept = new_token()
            await it.store.people.add(AdminToken(ident, name, role, kept, it.at - 9, it.at + ttl, "me"))
            tokens[name] = text
            if name == "revoked":
                await it.store.people.revoke(ident, "me", it.at)
        may = {"viewer": 0, "operator": 1, "admin": 2, "the first": 2}
        for role in Role:
            ca.issue_person(tmp_path / "ca", "ada", role.value, tmp_path / role.value, 1, time.time())
        ca.issue_node(tmp_path / "ca", "admin", tmp_path / "node", 1, time.time())
        everybody = [(name, token, "") for name, token in tokens.items()]
        everybody += [(name, None, name) for name in ("viewer", "operator", "admin", "node")]
        # A token that is wrong is not made up for by a certificate that is right.
        everybody += [("wrong", "llmgw_admin_0.x", "admin")]
        asked = [f"{o.method} {re.sub(r'{.*?}', 'x', o.path)}" for o in OPERATIONS]
        wrong = []
        for name, token, person in everybody:
            for what, status in zip(asked, await it.statuses(asked, token, person), strict=True):
                wanted = 401 if name not in may else 200 if may[name] >= least(what) else 403
                if status != wanted:
                    wrong.append((name, bool(person), what, status, wanted))
        assert wrong == []
        assert set(asked) >= ADMINS | OPERATORS_READ | VIEWERS_POST


def test_nothing_of_the_api_is_outside_the_table(tmp_path: Path) -> None:
    async def inside(_request: Any) -> JSONResponse:
        return JSONResponse({})

    with pytest.raises(KeyError):
        admitted(Route("/api/v1/secrets", inside), Access(TOKEN))


class FullDisk:
    """Tokens that can be read, and nothing can be written."""

    def __init__(self, row: AdminToken) -> None:
        self._row = row

    async def find(self, token: str) -> AdminToken | None:
        return self._row if token == self._row.id else None

    async def used(self, token: str, at: float) -> None:
        raise StoreError("the store", "the disk is full", "free some space; nothing was changed")


async def test_who_has_a_token_can_look_while_nothing_can_be_written() -> None:
    ident, text, digest = new_token()
    access = Access(TOKEN, FullDisk(AdminToken(ident, "ada", "viewer", digest, 0.0, 2e9, "me")), lambda: 1e9)
    who = await access.who(f"Bearer {text}", ())
    assert (who.name, who.role) == ("token ada", Role.VIEWER)
