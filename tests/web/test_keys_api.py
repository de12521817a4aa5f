"""The keys' and the usage's part of the admin API, on a real socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from llmgw.settings.daemon import Address
from llmgw.settings.document import KeyDefaults, KeyPolicy
from llmgw.settings.keys import Period
from llmgw.web.api import app
from llmgw.web.serve import listen, serve
from tests.server.test_key_book import NOW, Plane, plane, row
from tests.web.admin import TOKEN, Picture
from tests.web.test_jobs_api import Admin


class Clock(Picture):
    def now(self) -> float:
        return NOW


@asynccontextmanager
async def admin(folder: Path) -> AsyncIterator[tuple[Admin, Plane]]:
    listener = listen(Address("127.0.0.1", 0))
    port = listener.getsockname()[1]
    async with plane(folder) as it, trio.open_nursery() as nursery:
        await nursery.start(serve, app(Clock(), TOKEN, keys=it.book), listener)
        yield Admin(port), it
        nursery.cancel_scope.cancel()


async def test_made_shown_changed_rotated_revoked(tmp_path: Path) -> None:
    async with admin(tmp_path) as (it, _):
        assert await it.ask("keys") == (200, {"keys": []})
        asked = {"owner": "ada", "models": ["m*"], "requests_per_minute": 5, "budget_cost": 1.5, "expires": NOW + 60}
        status, made = await it.ask("keys", asked)
        assert (status, made["in_force"]) == (200, True)
        assert made["token"].startswith(f"llmgw_{made['key']['id']}_")
        ident = made["key"]["id"]
        shown = (await it.ask("keys"))[1]["keys"]
        assert shown == [made["key"]]
        assert {name: shown[0][name] for name in asked} == asked
        assert (shown[0]["state"], shown[0]["budget"]["cost"]) == ("active", 0.0)
        assert "digest" not in json.dumps(shown)
        _, changed = await it.ask(f"keys/{ident}", {"requests_per_minute": None, "tags": ["x"]})
        assert changed["key"]["requests_per_minute"] is None
        assert (changed["key"]["owner"], changed["key"]["tags"], changed["key"]["budget_cost"]) == ("ada", ["x"], 1.5)
        _, rotated = await it.ask(f"keys/{ident}/rotate", {"keep_old_s": 60})
        assert rotated["token"] != made["token"]
        assert rotated["key"]["old_secret_until"] == NOW + 60
        _, revoked = await it.ask(f"keys/{ident}/revoke", {})
        assert revoked["key"]["state"] == "revoked"
        _, one = await it.ask(f"keys/{ident}")
        assert [event["action"] for event in one["events"]] == ["key.revoke", "key.rotate", "key.change", "key.create"]
        assert made["token"] not in json.dumps(one)


async def test_what_is_refused(tmp_path: Path) -> None:
    async with admin(tmp_path) as (it, _):
        ident = (await it.ask("keys", {}))[1]["key"]["id"]
        for path, body, said in (
            ("keys", b"{", "not valid JSON"),
            ("keys", {"rpm": 5}, "unknown key rpm"),
            ("keys", {"requests_per_minute": "5"}, "requests_per_minute"),
            ("keys", {"models": []}, "are none"),
            ("keys", {"budget_period": "year"}, "budget_period"),
            ("keys", {"budget_cost": -1e-9}, "the budget of cost"),
            (f"keys/{ident}", [], "should be an object"),
            (f"keys/{ident}", {"models": ["a b"]}, "neither a model's name nor a pattern"),
            (f"keys/{ident}/rotate", {"keep_old_s": "x"}, "keep_old_s"),
        ):
            status, answer = await it.ask(path, body)
            assert (status, said in answer["error"]["reason"]) == (400, True), answer
        for path in ("keys/nope", "keys/nope/rotate", "keys/nope/revoke"):
            assert (await it.ask(path, {}))[0] == 404
        assert (await it.ask("keys/nope"))[0] == 404
        assert (await it.ask("keys", {}, token="x"))[0] == 401
        assert (await it.ask("usage", token="x"))[0] == 401


async def test_usage_by_whatever_is_asked(tmp_path: Path) -> None:
    async with admin(tmp_path) as (it, plane_):
        key = (await it.ask("keys", {"owner": "ada"}))[1]["key"]["id"]
        await plane_.book.used("w", 1, (row(key, 5), row(key, 7, 19_999), row("", 100), row("gone", 1, 10)))
        _, answer = await it.ask("usage")
        assert answer["by"] == ["key", "model"]
        assert [(r["key"], r["requests"], r["prompt"]) for r in answer["usage"]] == [("", 1, 100), (key, 2, 12)]
        _, answer = await it.ask("usage?by=owner,day&owner=ada")
        assert [(r["owner"], r["day"], r["prompt"], r["cost"]) for r in answer["usage"]] == [
            ("ada", "2024-10-03", 7, 14e-6), ("ada", "2024-10-04", 5, 1e-5),
        ]  # fmt: skip
        _, answer = await it.ask(f"usage?by=model&key={key}&since=2024-10-04")
        assert [(r["model"], r["prompt"]) for r in answer["usage"]] == [("m", 5)]
        assert (await it.ask("usage?model=other"))[1]["usage"] == []
        for query, said in (("by=week", "expected some of"), ("since=soon", "expected a day")):
            status, answer = await it.ask(f"usage?{query}")
            assert (status, said in answer["error"]["reason"]) == (400, True)


async def test_what_nobody_says_of_a_key_is_the_policy_s(tmp_path: Path) -> None:
    async with admin(tmp_path) as (it, book):
        limits = KeyDefaults(requests_per_minute=60, budget_cost=2.5, budget_period=Period.WEEK)
        book.policy = KeyPolicy(limits, 1.0)
        _, made = await it.ask("keys", {"owner": "ada", "tokens_per_minute": 7})
        found = {name: made["key"][name] for name in ("requests_per_minute", "tokens_per_minute", "budget_cost")}
        assert found == {"requests_per_minute": 60, "tokens_per_minute": 7, "budget_cost": 2.5}
        assert (made["key"]["budget_period"], made["key"]["expires"]) == ("week", NOW + 86400)
        _, free = await it.ask("keys", {"requests_per_minute": None, "budget_cost": None})
        assert (free["key"]["requests_per_minute"], free["key"]["budget"]) == (None, None), "said is said"
        status, answer = await it.ask("keys", {"expires": NOW + 86400 * 3})
        assert (status, "keys.longest_days" in answer["error"]["remedy"]) == (409, True)
