"""The admin API's routes for the settings: what holds, what held, what another text would do, and changes of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import orjson
import trio
from attrs import frozen
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmgw.errors import OperatorError
from llmgw.settings.bounds import REASON_MOST, between, declared, line
from llmgw.settings.convert import strict_converter
from llmgw.settings.difference import affected, differences
from llmgw.settings.document import Settings
from llmgw.settings.faults import ConfigError
from llmgw.settings.merge3 import Merge, merge, merged
from llmgw.settings.text_diff import text_diff
from llmgw.store.api import SettingsRevision, StaleBase
from llmgw.web import planning
from llmgw.web.audit import number
from llmgw.web.bodies import actor, structured
from llmgw.web.jobs import Guard
from llmgw.web.source import Source
from llmgw.web.views import Json

_CONVERTER = strict_converter(forbid_unknown=True)
_PLAN_S = 5.0
_MOST = 2**31


class Book(Protocol):
    """Who has the settings; see :class:`llmgw.server.settings_book.SettingsBook`. Refusals are ``OperatorError``."""

    settings: Settings
    revision: int
    apart: str

    @property
    def newest(self) -> SettingsRevision: ...

    async def row(self, number: int) -> SettingsRevision: ...

    async def rows(self, limit: int, before: int | None = None) -> tuple[SettingsRevision, ...]: ...

    async def read(self, text: str, name: str = "settings") -> Settings: ...

    async def change(self, text: str, base: int, author: str, reason: str) -> SettingsRevision: ...

    async def rollback(self, revision: int, base: int, author: str, reason: str) -> SettingsRevision: ...


@frozen
class CheckRequest:
    """The body of a check: the text that could be the settings."""

    text: str


@frozen
class ChangeRequest:
    """The body of a change: the text, the revision that it was made from, and why."""

    text: str
    base: int = between(0, _MOST)
    reason: str = declared("", **line(REASON_MOST))


@frozen
class RollbackRequest:
    """The body of a rollback: the revision whose text is to hold again, the newest one, and why."""

    revision: int = between(1, _MOST)
    base: int = between(0, _MOST)
    reason: str = declared("", **line(REASON_MOST))


def revision_view(row: SettingsRevision, *, text: bool = False) -> Json:
    """A revision as JSON."""
    shown: Json = {
        "revision": row.revision, "author": row.author, "reason": row.reason, "at": row.at, "digest": row.digest,
    }  # fmt: skip
    return shown | ({"text": row.text} if text else {})


async def _text_diff(before: SettingsRevision, after: str, name: str) -> list[str]:
    return await trio.to_thread.run_sync(text_diff, before.text, after, f"revision {before.revision}", name)


def settings_routes(book: Book, source: Source, guarded: Guard) -> list[Route]:
    """``settings`` and what is below it, under ``/api/v1/``."""
    plans = trio.CapacityLimiter(1)

    async def shown(request: Request) -> Any:
        asked = number(request, "revision", None, _MOST)
        row = book.newest if asked is None else await book.row(asked)
        return revision_view(row, text=True) | {"newest": book.revision, "file": book.apart, "now": source.now()}

    async def history(request: Request) -> Any:
        rows = await book.rows(number(request, "limit", 50, 1000) or 50, number(request, "before", None, _MOST))
        return {"revisions": [revision_view(row) for row in rows], "newest": book.revision, "now": source.now()}

    async def diff(request: Request) -> Any:
        to = number(request, "to", book.revision, _MOST) or book.revision
        before, after = await book.row(number(request, "from", max(1, to - 1), _MOST) or 1), await book.row(to)
        return {
            "from": revision_view(before), "to": revision_view(after),
            "differences": await _differences(book, before.text, after.text),
            "text": await _text_diff(before, after.text, f"revision {after.revision}"),
        }  # fmt: skip

    async def check(request: Request) -> Any:
        asked = await structured(request, CheckRequest)
        base = book.newest
        try:
            after = await book.read(asked.text)
        except ConfigError as wrong:
            return {"ok": False, "faults": [f.as_dict() for f in wrong.faults], "revision": base.revision}
        models, nodes = affected(book.settings, after, [node.id for node in source.state().nodes])
        return {
            "ok": True, "faults": [], "revision": base.revision,
            "differences": [str(d) for d in differences(book.settings, after)],
            "text": await _text_diff(base, asked.text, "this"),
            "models": list(models), "nodes": list(nodes),
            "plan": await planned(asked.text),
        }  # fmt: skip

    async def planned(text: str) -> Json | None:
        """What would be placed, stopped and moved; nothing where that takes too long to tell."""
        question = planning.Question(settings=text)
        work = partial(planning.answer, question, source.settings(), source.state(), source.now())
        with trio.move_on_after(_PLAN_S):
            return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=plans)
        return None

    async def change(request: Request) -> Any:
        asked = await structured(request, ChangeRequest)
        before = book.newest
        return await _made(book, asked.text, asked.base, before,
                           partial(book.change, asked.text, asked.base, actor(request), asked.reason))  # fmt: skip

    async def rollback(request: Request) -> Any:
        asked = await structured(request, RollbackRequest)
        text, before = (await book.row(asked.revision)).text, book.newest
        work = partial(book.rollback, asked.revision, asked.base, actor(request), asked.reason)
        return await _made(book, text, asked.base, before, work)

    return [
        Route("/api/v1/settings", guarded(shown), methods=["GET"]),
        Route("/api/v1/settings", guarded(change), methods=["POST", "PUT"]),
        Route("/api/v1/settings/history", guarded(history)),
        Route("/api/v1/settings/diff", guarded(diff)),
        Route("/api/v1/settings/check", guarded(check), methods=["POST"]),
        Route("/api/v1/settings/rollback", guarded(rollback), methods=["POST"]),
    ]


async def _made(book: Book, text: str, base: int, before: SettingsRevision, make: Callable[[], Any]) -> Any:
    try:
        made: SettingsRevision = await make()
    except StaleBase as stale:
        ways = await _three_ways(book, base, stale.newest, text)
        answer = {
            "error": {"reason": f"{stale.thing} {stale.reason}", "remedy": stale.remedy},
            "newest": revision_view(stale.newest, text=True), "merge": ways,
        }  # fmt: skip
        return Response(orjson.dumps(answer), 409, {"cache-control": "no-store"}, "application/json")
    except ConfigError as wrong:
        error = {"reason": f"{wrong.thing}: {wrong.reason}", "remedy": "correct it; the old settings stay"}
        body = {"error": error | {"faults": [f.as_dict() for f in wrong.faults]}}
        return Response(orjson.dumps(body), 400, {"cache-control": "no-store"}, "application/json")
    return {
        "settings": revision_view(made), "changed": made.revision != before.revision,
        "differences": await _differences(book, before.text, made.text),
    }  # fmt: skip


async def _three_ways(book: Book, base: int, newest: SettingsRevision, text: str) -> Json | None:
    """What both changed since the base; nothing where the base is no revision."""
    try:
        found = await trio.to_thread.run_sync(merge, (await book.row(base)).text, newest.text, text)
    except OperatorError:
        return None
    taken: str | None = None
    if not found.conflicts:
        try:
            taken = await trio.to_thread.run_sync(merged, newest.text, found)
        except OperatorError:
            taken = None
    return merge_view(found) | {"merged": taken}


def merge_view(found: Merge) -> Json:
    """A comparison of three versions as JSON."""
    return {
        "theirs": [str(c) for c in found.theirs],
        "mine": [str(c) for c in found.mine],
        "mine_only": [str(c) for c in found.mine_only],
        "conflicts": [
            {"theirs": [str(c) for c in conflict.theirs], "mine": [str(c) for c in conflict.mine]}
            for conflict in found.conflicts
        ],
    }


async def _differences(book: Book, before: str, after: str) -> list[str]:
    """What differs between two texts; nothing of one that this version cannot read."""
    try:
        return [str(d) for d in differences(await book.read(before), await book.read(after))]
    except OperatorError:
        return []
