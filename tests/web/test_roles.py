"""Who may use which route: every route that there is, asked by everybody that there may be."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import define
from starlette.applications import Starlette
from starlette.routing import Route, WebSocketRoute

from llmgw.store.opening import sqlite_store
from llmgw.store.people import AdminToken
from llmgw.web.access import Access, Role, new_token
from llmgw.web.api import app
from tests.web.admin import TOKEN, Picture

AT = 1000.0
ANYBODY = ("GET /", "GET /console.js", "GET /console.css", "GET /healthz", "GET /readyz", "GET /metrics")
VIEWER = (
    "GET status", "GET nodes", "GET models", "GET replicas", "GET decisions", "GET why/{name:path}", "POST plan",
    "GET brake", "GET jobs", "GET jobs/{job}", "GET tokens", "GET deny", "GET identities", "GET identities/events",
    "GET keys", "GET keys/{key}", "GET usage", "GET audit", "GET audit/verify", "POST doctor",
    "GET replicas/{replica}/logs", "GET settings/history", "GET admin-tokens", "GET openapi.json", "GET whoami",
    "GET names", "POST watch/ticket", "WS watch",
)  # fmt: skip
OPERATOR = (
    "POST brake/release", "POST jobs", "POST jobs/{job}/cancel", "POST nodes/{node}/drain",
    "POST nodes/{node}/undrain", "POST replicas/{replica}/restart", "POST replicas/{replica}/stop", "POST keys",
    "POST keys/{key}", "POST keys/{key}/rotate", "POST keys/{key}/revoke", "GET settings", "POST settings",
    "PUT settings", "GET settings/diff", "POST settings/check", "POST settings/rollback",
)  # fmt: skip
ADMIN = (
    "POST tokens", "POST tokens/{id}/revoke", "POST deny", "POST deny/lift", "POST nodes/{node}/forget",
    "GET backup", "POST admin-tokens", "POST admin-tokens/{id}/revoke",
)  # fmt: skip
ROWS = {row: least for least, rows in ((1, VIEWER), (2, OPERATOR), (3, ADMIN)) for row in rows}
ASKING = {"nobody": 0, "expired": 0, "viewer": 1, "operator": 2, "admin": 3}


class Nothing:
    """A part of the control plane that can do nothing: whoever gets as far as it was let in."""


@define
class Bench:
    app: Starlette
    tokens: dict[str, str | None]

    async def answer(self, row: str, who: str) -> int:
        """The status; 0 for who was let in to a part that can do nothing."""
        method, _, path = row.partition(" ")
        for name in ("{name:path}", "{job}", "{key}", "{node}", "{replica}", "{id}"):
            path = path.replace(name, "x")
        token = self.tokens[who]
        fields = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        said: list[Any] = []
        asks = [{"type": "websocket.connect"}, {"type": "websocket.disconnect", "code": 1000}]

        async def receive() -> Any:
            return asks.pop(0) if method == "WS" else {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            said.append(message)

        where = path if path.startswith("/") else f"/api/v1/{path}"
        scope = {"path": where, "raw_path": where.encode(), "query_string": b"", "headers": fields, "state": {},
                 "root_path": ""}  # fmt: skip
        if method == "WS":
            scope |= {"type": "websocket", "scheme": "ws", "subprotocols": [],
                      "extensions": {"websocket.http.response": {}}}  # fmt: skip
        else:
            scope |= {"type": "http", "method": method, "scheme": "http"}
        try:
            await self.app(scope, receive, send)
        except AttributeError as reached:
            assert "Nothing" in str(reached)
            return 0
        return next((m["status"] for m in said if m["type"].endswith("http.response.start")), 101)


@asynccontextmanager
async def bench(folder: Path) -> AsyncIterator[Bench]:
    async with sqlite_store(folder / "db") as store:
        tokens: dict[str, str | None] = {"nobody": None}
        for who, role in (("expired", Role.ADMIN), ("viewer", Role.VIEWER), ("operator", Role.OPERATOR),
                          ("admin", Role.ADMIN)):  # fmt: skip
            ident, tokens[who], digest = new_token()
            expires = AT if who == "expired" else AT + 60
            await store.people.add(AdminToken(ident, who, role.value, digest, 0.0, expires, "t"))
        part: Any = Nothing()
        access = Access(TOKEN, store.people, lambda: AT)
        yield Bench(app(Picture(), access, part, part, part, (part, folder), part, part, part, part), tokens)


async def test_every_route_has_a_row(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        there = []
        for route in it.app.routes:
            assert isinstance(route, Route | WebSocketRoute)
            methods = (route.methods or set()) - {"HEAD"} if isinstance(route, Route) else {"WS"}
            there += [f"{method} {route.path.removeprefix('/api/v1/')}" for method in methods]
    assert sorted(there) == sorted((*ANYBODY, *ROWS))


@pytest.mark.parametrize("who", ASKING)
async def test_who_may_use_which(tmp_path: Path, who: str) -> None:
    role = ASKING[who]
    async with bench(tmp_path) as it:
        for row in ANYBODY:
            assert await it.answer(row, who) == 200, row
        for row, least in ROWS.items():
            refused = 401 if role == 0 else 403 if role < least else None
            for each in (row, row.replace("GET", "HEAD")):
                status = await it.answer(each, who)
                assert (status if status in (401, 403) else None) == refused, (each, status)
