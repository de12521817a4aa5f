"""The settings' part of the admin API, on a real socket over a real store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve

from llmgw.settings.daemon import Address
from llmgw.settings.load import load_settings
from llmgw.web.api import app
from llmgw.web.serve import listen, serve
from tests.server.test_settings_book import ATTACKS, Plane, plane
from tests.web.admin import TOKEN, Picture
from tests.web.test_jobs_api import Admin

TEXT = """\
models:
  m:
    replicas: 3    # three
    profiles: [{name: p, engine: vllm, weights: /w, device_class: h100-80g}]
  e: {endpoints: ['http://h:1']}
"""


@asynccontextmanager
async def admin(folder: Path) -> AsyncIterator[tuple[Admin, Plane]]:
    listener = listen(Address("127.0.0.1", 0))
    async with plane(folder, TEXT) as it, trio.open_nursery() as nursery:
        picture = Picture()
        picture.catalog = load_settings(TEXT)
        picture.cluster = evolve(picture.cluster, models=tuple(m for m in picture.catalog.models if m.profiles))
        await nursery.start(serve, app(picture, TOKEN, book=it.book), listener)
        yield Admin(listener.getsockname()[1]), it
        nursery.cancel_scope.cancel()


def more(text: str = TEXT, replicas: int = 4) -> str:
    return text.replace("replicas: 3", f"replicas: {replicas}")


async def test_shown_changed_compared_and_taken_back(tmp_path: Path) -> None:
    async with admin(tmp_path) as (it, _):
        status, shown = await it.ask("settings")
        assert (status, shown["revision"], shown["text"], shown["file"]) == (200, 1, TEXT, "")
        status, made = await it.ask("settings", {"text": more(), "base": 1, "reason": "load"})
        assert (status, made["changed"], made["differences"]) == (200, True, ["~ models.m.replicas: 3 -> 4"])
        assert (made["settings"]["revision"], made["settings"]["author"]) == (2, "token admin.token")
        _, old = await it.ask("settings?revision=1")
        assert (old["text"], old["newest"]) == (TEXT, 2)
        _, diff = await it.ask("settings/diff?from=1&to=2")
        assert diff["differences"] == ["~ models.m.replicas: 3 -> 4"]
        assert "+    replicas: 4    # three" in diff["text"]
        assert (await it.ask("settings/diff"))[1] == diff, "the newest against the one before"
        status, back = await it.ask("settings/rollback", {"revision": 1, "base": 2})
        assert (status, back["settings"]["reason"]) == (200, "back to revision 1")
        _, history = await it.ask("settings/history")
        assert [row["revision"] for row in history["revisions"]] == [3, 2, 1]
        assert "text" not in history["revisions"][0]
        assert [r["revision"] for r in (await it.ask("settings/history?limit=1&before=3"))[1]["revisions"]] == [2]
        _, same = await it.ask("settings", {"text": TEXT, "base": 3})
        assert (same["changed"], same["settings"]["revision"]) == (False, 3)


async def test_a_check_says_what_would_change_and_changes_nothing(tmp_path: Path) -> None:
    async with admin(tmp_path) as (it, there):
        text = more() + "nodes: {n1: {taints: [old]}}\n"
        status, found = await it.ask("settings/check", {"text": text})
        assert (status, found["ok"], found["revision"]) == (200, True, 1)
        assert (found["models"], found["nodes"]) == (["m"], ["n1"])
        assert "~ models.m.replicas: 3 -> 4" in found["differences"]
        assert found["plan"]["lacking"] == ["m"]
        text = TEXT + "agents: {default: {log: {level: debug}}, nodes: {n9: {weights_dir: /w}}}\n"
        _, found = await it.ask("settings/check", {"text": text})
        assert (found["models"], found["nodes"]) == ([], ["n1", "n9"]), "what is said to all agents is said to each"
        status, found = await it.ask("settings/check", {"text": more(replicas=-1)})
        assert (status, found["ok"]) == (200, False)
        assert [(f["line"], f["column"], f["path"]) for f in found["faults"]] == [(3, 5, "models.m.replicas")]
        assert there.book.revision == 1


async def test_a_stale_base_is_refused_with_what_both_did(tmp_path: Path) -> None:
    async with admin(tmp_path) as (it, there):
        await it.ask("settings", {"text": more(), "base": 1})
        mine = TEXT + "liveness: {lost_s: 90}\n"
        status, answer = await it.ask("settings", {"text": mine, "base": 1})
        assert (status, answer["newest"]["revision"], answer["newest"]["text"]) == (409, 2, more())
        assert answer["merge"]["theirs"] == ["~ models.m.replicas: 3 -> 4"]
        assert answer["merge"]["mine_only"] == ['+ liveness: {"lost_s": 90}']
        assert (await it.ask("settings", {"text": answer["merge"]["merged"], "base": 2}))[0] == 200
        assert there.book.settings.liveness.lost_s == 90
        assert there.book.newest.text.startswith(more())
        status, answer = await it.ask("settings", {"text": more(replicas=7), "base": 1})
        assert (status, answer["merge"]["merged"]) == (409, None)
        assert answer["merge"]["conflicts"] == [
            {"theirs": ["~ models.m.replicas: 3 -> 4"], "mine": ["~ models.m.replicas: 3 -> 7"]}
        ]
        status, answer = await it.ask("settings/rollback", {"revision": 1, "base": 1})
        assert status == 409


@pytest.mark.parametrize("name", ["aliases", "keys twice", "50,000 keys", "deep flow"])
async def test_an_attack_is_answered_with_its_line(tmp_path: Path, name: str) -> None:
    text, said = ATTACKS[name]
    async with admin(tmp_path) as (it, there):
        status, answer = await it.ask("settings", {"text": text, "base": 1})
        assert (status, said in answer["error"]["reason"]) == (400, True)
        assert answer["error"]["faults"][0]["line"] >= 1
        status, answer = await it.ask("settings/check", {"text": text})
        assert (status, answer["ok"]) == (200, False)
        assert (there.book.revision, there.book.newest.text) == (1, TEXT)


async def test_what_is_refused(tmp_path: Path) -> None:
    async with admin(tmp_path) as (it, there):
        bodies: list[tuple[str, Any, int, str]] = [
            ("settings", b"{", 400, "not valid JSON"),
            ("settings", {"text": TEXT}, 400, "base"),
            ("settings", {"text": 5, "base": 1}, 400, "text"),
            ("settings", {"text": TEXT, "base": 1, "why": ""}, 400, "why"),
            ("settings", {"text": more(), "base": 1, "reason": "x" * 501}, 400, "at most 500"),
            ("settings", {"text": "x" * 3_000_000, "base": 1}, 413, "larger than"),
            ("settings", {"text": more(), "base": 2**64 - 1}, 400, "base"),
            ("settings", {"text": more(), "base": -1}, 400, "base"),
            ("settings/rollback", {"revision": 2**64 - 1, "base": 1}, 400, "revision"),
            ("settings/rollback", {"revision": 2**40, "base": 1}, 400, "revision"),
            ("settings/rollback", {"revision": 7, "base": 1}, 404, "none of this number"),
        ]
        for path, body, code, said in bodies:
            status, answer = await it.ask(path, body)
            assert (status, said in answer["error"]["reason"]) == (code, True), answer
        assert (await it.ask("settings?revision=9"))[0] == 404
        for path in ("settings?revision=x", "settings/diff?from=0"):
            assert (await it.ask(path))[0] == 400
        for path in ("settings", "settings/history", "settings/diff"):
            assert (await it.ask(path, token="x"))[0] == 401
        assert (await it.ask("settings", {"text": more(), "base": 1}, token="x"))[0] == 401
        assert there.book.revision == 1
