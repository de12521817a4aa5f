"""The admin API's routes for API keys and for what was used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import date
from typing import Any, Protocol, TypeVar

from attrs import asdict, frozen
from starlette.requests import Request
from starlette.routing import Route

from llmgw.errors import OperatorError
from llmgw.settings.bounds import between, declared, line
from llmgw.settings.document import KeyDefaults, KeyPolicy
from llmgw.settings.keys import (
    LATEST,
    PATTERN,
    TAGS_MOST,
    TEXT_MOST,
    ApiKey,
    KeyTerms,
    Limits,
    Spent,
    period_end,
    period_start,
)
from llmgw.settings.usage import DAY_S, UsageRow
from llmgw.store.keys import KeyEvent
from llmgw.web.bodies import actor, json_of, shaped
from llmgw.web.jobs import Guard

_Kind = TypeVar("_Kind")

_EVENTS = 50
_KEEP_MOST_S = 400 * 86400.0
_GROUPS = ("key", "owner", "model", "day")
_MICRO = 1_000_000


class Keys(Protocol):
    """Who knows the keys; see :class:`llmgw.server.keys.KeyBook`. Refusals are :class:`OperatorError`."""

    def rows(self) -> tuple[ApiKey, ...]: ...

    def row(self, ident: str) -> ApiKey: ...

    @property
    def policy(self) -> Callable[[], KeyPolicy]: ...

    async def create(self, terms: KeyTerms, by: str) -> tuple[ApiKey, str, bool]: ...

    async def change(self, ident: str, terms: KeyTerms, by: str) -> tuple[ApiKey, bool]: ...

    async def rotate(self, ident: str, keep_old_s: float, by: str) -> tuple[ApiKey, str, bool]: ...

    async def revoke(self, ident: str, by: str) -> tuple[ApiKey, bool]: ...

    async def events(self, ident: str, limit: int) -> tuple[KeyEvent, ...]: ...

    async def usage(self, since: int, until: int, key: str | None) -> tuple[UsageRow, ...]: ...

    def budget_spent(self, key: ApiKey) -> Spent | None: ...


@frozen
class KeyRequest(KeyDefaults):
    """The body that makes a key, and what of it may be given to change one; ``null`` is no limit.

    ``budget_cost`` is in the unit that ``router.prices`` are in, ``expires`` in epoch seconds.
    """

    name: str = declared("", **line(TEXT_MOST))
    owner: str = declared("", **line(TEXT_MOST))
    tags: tuple[str, ...] = declared((), maxItems=TAGS_MOST, items={"type": "string"} | line(TEXT_MOST))
    models: tuple[str, ...] = declared(("*",), minItems=1, items={"type": "string", "pattern": PATTERN})
    expires: float | None = declared(None, minimum=0, maximum=LATEST)

    def terms(self) -> KeyTerms:
        """What is said of the key."""
        if self.budget_cost is not None and self.budget_cost < 0:
            # Rounded to millionths it might be nothing, which is a budget.
            raise OperatorError("the budget of cost", f"expected 0 or more, found {self.budget_cost:g}", "")
        cost = None if self.budget_cost is None else round(self.budget_cost * _MICRO)
        limits = Limits(
            self.requests_per_minute, self.tokens_per_minute, self.concurrent, self.budget_tokens, cost,
            self.budget_period,
        )  # fmt: skip
        return KeyTerms(self.name, self.owner, self.tags, self.models, limits, self.expires)


@frozen
class RotateRequest:
    """The body of a rotation: for how long the old secret is good."""

    keep_old_s: float = between(0.0, _KEEP_MOST_S, 0.0)


def said(terms: KeyTerms) -> dict[str, Any]:
    """The body that would make a key of these terms."""
    limits = terms.limits
    return {
        "name": terms.name,
        "owner": terms.owner,
        "tags": list(terms.tags),
        "models": list(terms.models),
        "requests_per_minute": limits.requests_per_minute,
        "tokens_per_minute": limits.tokens_per_minute,
        "concurrent": limits.concurrent,
        "budget_tokens": limits.budget_tokens,
        "budget_cost": None if limits.budget_cost is None else limits.budget_cost / _MICRO,
        "budget_period": limits.budget_period.value,
        "expires": terms.expires,
    }


def usual(policy: KeyPolicy) -> dict[str, Any]:
    """What the body that makes a key says where nobody says it; an explicit ``null`` is no limit."""
    limits = policy.limits
    return asdict(limits) | {"budget_period": limits.budget_period.value}


def key_view(key: ApiKey, spent: Spent | None, now: float) -> dict[str, Any]:
    """A key as JSON, without anything that would help to use it."""
    budget = None
    if key.limits.budget:
        start = period_start(key.limits.budget_period, now)
        fresh = spent is not None and spent.since == start
        budget = {
            "since": start,
            "ends": period_end(key.limits.budget_period, now),
            "tokens": spent.tokens if spent is not None and fresh else 0,
            "cost": spent.cost / _MICRO if spent is not None and fresh else 0.0,
        }
    return {
        "id": key.id,
        "state": key.state(now),
        **said(key.terms),
        "created": key.created,
        "revoked": key.revoked,
        "old_secret_until": key.old_until if key.old_until > now else None,
        "budget": budget,
    }


def usage_view(rows: Iterable[UsageRow], groups: tuple[str, ...], owners: Callable[[str], str]) -> list[dict[str, Any]]:
    """The rows summed by these groups, the most tokens first; by days, in their order."""
    sums: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        names = {
            "key": row.key,
            "owner": owners(row.key),
            "model": row.model,
            "day": date.fromordinal(_EPOCH + row.day).isoformat(),
        }
        into = sums.setdefault(tuple(names[g] for g in groups), {g: names[g] for g in groups} | dict.fromkeys(_SUMS, 0))
        for name in _SUMS:
            into[name] += getattr(row, name)
    shown = sorted(sums.values(), key=lambda r: (r.get("day", ""), -(r["prompt"] + r["completion"])))
    for row_ in shown:
        row_["cost"] = row_["cost"] / _MICRO
    return shown


_EPOCH = date(1970, 1, 1).toordinal()
_SUMS = ("requests", "failed", "estimated", "prompt", "completion", "cost")


def _day(request: Request, name: str, usual: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return usual
    try:
        return date.fromisoformat(text).toordinal() - _EPOCH
    except ValueError:
        raise OperatorError(name, f"expected a day such as 2026-01-31, found {text[:20]!r}") from None


def key_routes(keys: Keys, now: Callable[[], float], guarded: Guard) -> list[Route]:
    """``/api/v1/keys`` and what is below it, and ``/api/v1/usage``."""

    def answer(key: ApiKey, in_force: bool, token: str | None = None) -> dict[str, Any]:
        shown = {"key": key_view(key, keys.budget_spent(key), now()), "in_force": in_force}
        return shown if token is None else shown | {"token": token}

    def found(request: Request) -> ApiKey:
        return keys.row(request.path_params["key"])

    async def every(_request: Request) -> Any:
        return {"keys": [key_view(key, keys.budget_spent(key), now()) for key in keys.rows()]}

    async def create(request: Request) -> Any:
        given = await json_of(request)
        if isinstance(given, dict):
            given = usual(keys.policy()) | given
        made, token, in_force = await keys.create(shaped(given, KeyRequest).terms(), actor(request))
        return answer(made, in_force, token)

    async def one(request: Request) -> Any:
        key = found(request)
        events = await keys.events(key.id, _EVENTS)
        shown = {"key": key_view(key, keys.budget_spent(key), now())}
        return shown | {"events": [asdict(event) for event in events]}

    async def change(request: Request) -> Any:
        key, given = found(request), await json_of(request)
        if not isinstance(given, dict):
            raise OperatorError("the body", "should be an object with what is to change", "")
        made, in_force = await keys.change(key.id, shaped(said(key.terms) | given, KeyRequest).terms(), actor(request))
        return answer(made, in_force)

    async def rotate(request: Request) -> Any:
        key, asked = found(request), shaped(await json_of(request), RotateRequest)
        made, token, in_force = await keys.rotate(key.id, asked.keep_old_s, actor(request))
        return answer(made, in_force, token)

    async def revoke(request: Request) -> Any:
        key = found(request)
        made, in_force = await keys.revoke(key.id, actor(request))
        return answer(made, in_force)

    async def usage(request: Request) -> Any:
        asked = request.query_params
        groups = tuple(asked.get("by", "key,model").split(","))
        if not groups or not set(groups) <= set(_GROUPS):
            raise OperatorError("by", f"expected some of {', '.join(_GROUPS)}, found {asked.get('by', '')[:40]!r}")
        today = int(now() // DAY_S)
        since, until = _day(request, "since", today - 30), _day(request, "until", today)
        owners = {key.id: key.owner for key in keys.rows()}
        rows = await keys.usage(since, until, asked.get("key"))
        if (model := asked.get("model")) is not None:
            rows = tuple(row for row in rows if row.model == model)
        if (owner := asked.get("owner")) is not None:
            rows = tuple(row for row in rows if owners.get(row.key, "") == owner)
        days = [date.fromordinal(_EPOCH + day).isoformat() for day in (since, until)]
        return {"since": days[0], "until": days[1], "by": groups,
                "usage": usage_view(rows, groups, lambda key: owners.get(key, ""))}  # fmt: skip

    return [
        Route("/api/v1/keys", guarded(every), methods=["GET"]),
        Route("/api/v1/keys", guarded(create), methods=["POST"]),
        Route("/api/v1/keys/{key}", guarded(one), methods=["GET"]),
        Route("/api/v1/keys/{key}", guarded(change), methods=["POST"]),
        Route("/api/v1/keys/{key}/rotate", guarded(rotate), methods=["POST"]),
        Route("/api/v1/keys/{key}/revoke", guarded(revoke), methods=["POST"]),
        Route("/api/v1/usage", guarded(usage), methods=["GET"]),
    ]
