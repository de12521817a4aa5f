"""The admin side on a real socket: who may ask, what it answers, and what is never in it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import trio

from llmgw.errors import OperatorError
from llmgw.settings.daemon import Address
from llmgw.web.auth import read_token, token_of
from llmgw.web.serve import listen
from tests.web.admin import TOKEN, admin


async def test_everything_under_api_wants_the_token() -> None:
    async with admin() as it:
        for path in ("status", "nodes", "models", "replicas", "decisions", "why/m", "brake"):
            for wrong in (None, "", "llmgw_admin_tesT", TOKEN + "x"):
                status, fields, body = await it.ask(f"/api/v1/{path}", token=wrong)
                assert (status, fields["www-authenticate"]) == (401, "Bearer")
                assert "admin.token" in json.loads(body)["error"]["remedy"]
            assert (await it.ask(f"/api/v1/{path}"))[0] == 200


async def test_answers() -> None:
    async with admin() as it:
        _, _, body = await it.ask("/api/v1/models")
        first, static = json.loads(body)["models"]
        assert (first["state"], first["ready"], first["wanted"]) == ("degraded", 1, 3)
        assert first["unplaced"]["candidates"][0]["refusals"][0]["reason"].startswith("1 of 1 devices short")
        assert (static["state"], static["endpoints"]) == ("static", ["http://h:1"])
        _, _, body = await it.ask("/api/v1/nodes")
        (here,) = json.loads(body)["nodes"]
        assert [d["shard"] for d in here["devices"]] == ["m-1.0", "m-100.0"]
        _, _, body = await it.ask("/api/v1/replicas")
        assert json.loads(body)["replicas"][0]["pid"] == 42
        _, _, body = await it.ask("/api/v1/status")
        status = json.loads(body)
        assert (status["healthy"], status["problems"]) == (False, ["model m lacks replicas"])
        _, _, body = await it.ask("/api/v1/decisions?limit=2")
        assert len(json.loads(body)["decisions"]) == 2


async def test_no_secret_is_in_any_answer() -> None:
    async with admin() as it:
        for path in ("status", "nodes", "models", "replicas", "decisions", "why/m", "why/m-1", "why/n1"):
            assert b"sk-secret" not in (await it.ask(f"/api/v1/{path}"))[2]


async def test_health_metrics_and_the_console_do_not_want_it() -> None:
    async with admin() as it:
        assert (await it.ask("/healthz", token=None))[::2] == (200, b"ok\n")
        assert (await it.ask("/metrics", token=None))[::2] == (200, b"x 1\n")
        assert (await it.ask("/readyz", token=None))[0] == 200
        it.picture.reason = "the router is down"
        assert (await it.ask("/readyz", token=None))[::2] == (503, b"the router is down\n")
        for path, kind in (("/", "text/html"), ("/console.js", "text/javascript"), ("/console.css", "text/css")):
            status, fields, body = await it.ask(path, token=None)
            assert (status, kind in fields["content-type"], bool(body)) == (200, True, True)
            assert "default-src 'self'" in fields["content-security-policy"]


async def test_what_is_not_there_and_what_cannot_be() -> None:
    async with admin() as it:
        for path in ("/nothing", "/api/v1/nothing", "/../etc/passwd", "/console.js/../auth.py"):
            assert (await it.ask(path))[0] == 404
        status, _, body = await it.ask("/api/v1/tokens", "POST")
        assert (status, "a router alone" in json.loads(body)["error"]["reason"]) == (404, True)
        # What is possible nowhere is so here.
        status, head, body = await it.ask("/api/v1/tokens", "PUT")
        assert (status, json.loads(body)["error"]["remedy"]) == (405, "use GET or POST")
        assert head["allow"] == "GET, HEAD, POST"
        assert (await it.ask("/api/v1/nodes", "POST"))[0] == 405
        for limit in ("0", "-1", "x", "1e3", "99999"):
            status, _, body = await it.ask(f"/api/v1/decisions?limit={limit}")
            assert (status, "whole number" in json.loads(body)["error"]["reason"]) == (400, True)


async def test_it_ends_at_once_whoever_is_connected() -> None:
    began = 0.0
    async with admin() as it:
        stream = await trio.open_tcp_stream("127.0.0.1", it.port)
        await stream.send_all(b"GET /metrics HTTP/1.1\r\n")
        await it.ask("/healthz")
        began = trio.current_time()
    assert trio.current_time() - began < 2
    await trio.aclose_forcefully(stream)


def test_an_address_that_is_taken_is_named() -> None:
    with listen(Address("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OperatorError, match=f"admin.listen 127.0.0.1:{port}: cannot listen there"):
            listen(Address("127.0.0.1", port))


def test_the_token_file(tmp_path: Path) -> None:
    token = token_of(tmp_path)
    path = tmp_path / "admin.token"
    assert path.stat().st_mode & 0o777 == 0o600
    assert token_of(tmp_path) == read_token(path) == token
    assert len(token) > 40
    path.chmod(0o644)
    with pytest.raises(OperatorError, match="chmod 600"):
        read_token(path)
    os.truncate(path, 0)
    path.chmod(0o600)
    with pytest.raises(OperatorError, match="is empty"):
        read_token(path)
    with pytest.raises(OperatorError, match="cannot be read"):
        read_token(tmp_path / "none")
