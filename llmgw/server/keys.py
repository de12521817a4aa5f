"""The keys of a running control plane: made, changed, given to the router; and what they used, kept.

Everything is written to the store before it holds, and the router has it before an answer says so, or the answer says
that it has not.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import trio
from attrs import evolve

from llmgw.errors import ConflictError, OperatorError, UnknownError
from llmgw.router.journal import left_behind, remove
from llmgw.settings.bounds import EXACT, is_line
from llmgw.settings.document import KeyPolicy
from llmgw.settings.keys import (
    ALPHABET,
    ID_LENGTH,
    LATEST,
    SECRET_LENGTH,
    TAGS_MOST,
    TEXT_MOST,
    ApiKey,
    KeyTerms,
    Spent,
    digest_of,
    is_pattern,
    period_start,
    token_of,
)
from llmgw.settings.usage import DAY_S, UsageRow
from llmgw.store.keys import KeyEvent, KeyStore
from llmgw.telemetry.logging import logger

_IN_FORCE_S = 1.0
_COLLECT_EVERY_S = 2.0
_FOLLOW_S = 0.5
_ADD_UP_EVERY_S = 5.0
_SLACK_S = 60.0
"""An end that somebody counted from their own clock."""


class Router(Protocol):
    """Whoever has to hear of changes: see :class:`llmgw.router.workers.RouterWorkers`."""

    def keys_changed(self) -> None: ...

    async def keys_in_force(self, version: int, seconds: float) -> bool: ...


class KeyBook:
    """Every key, by its last change. ``version`` is that of the table."""

    def __init__(
        self,
        store: KeyStore,
        router: Router,
        folder: Path,
        clock: Callable[[], float],
        policy: Callable[[], KeyPolicy] = KeyPolicy,
    ) -> None:
        self.policy = policy
        self._store = store
        self._router = router
        self._folder = folder
        self._clock = clock
        self._keys: dict[str, ApiKey] = {}
        self._changes: list[ApiKey] = []
        self.version = 0
        self._spent: dict[int, tuple[int, Spent]] = {}
        self._mark = 0
        self._turn = trio.Lock()
        self._log = logger("keys")

    async def load(self) -> None:
        """Read the keys, collect what dead workers left, and add up the budgets. Before a worker gets anything."""
        self.version, keys = await self._store.keys()
        for key in keys:
            self._keys[key.id] = key
        self._changes = list(keys)
        await self._collect()
        await self._add_up([key for key in keys if key.limits.budget])

    async def follow(self) -> None:
        """Take over what other control planes do to keys, and what is used through them, until cancelled."""
        added_up = trio.current_time()
        while True:
            await trio.sleep(_FOLLOW_S)
            try:
                if await self._store.version() != self.version:
                    await self._reread()
                if trio.current_time() - added_up > _ADD_UP_EVERY_S:
                    added_up = trio.current_time()
                    await self._add_up([key for key in self._changes if key.limits.budget and key.revoked is None])
            except OperatorError as failed:
                self._log.warning("keys cannot be read; those that are known go on", error=str(failed))

    async def _reread(self) -> None:
        async with self._turn:
            before = self.version
            version, keys = await self._store.keys()
            self._keys = {key.id: key for key in keys}
            self._changes, self.version = list(keys), version
            await self._add_up([key for key in keys if key.version > before and key.limits.budget])
            self._router.keys_changed()

    async def run(self) -> None:
        """Collect what dead workers leave, until cancelled."""
        while True:
            await trio.sleep(_COLLECT_EVERY_S)
            try:
                await self._collect()
            except (OperatorError, OSError) as failed:
                self._log.error("usage of a dead worker cannot be kept yet", error=str(failed))

    # What the router asks for.

    def since(self, version: int) -> tuple[ApiKey, ...]:
        """The keys that changed after this version, in the order of their changes."""
        return tuple(self._changes[bisect_right(self._changes, version, key=lambda key: key.version) :])

    def spent(self, mark: int) -> tuple[int, tuple[Spent, ...]]:
        """The newest mark, and what of the budgets changed after the one that is given."""
        return self._mark, tuple(row for at, row in self._spent.values() if at > mark)

    async def used(self, ledger: str, seq: int, rows: tuple[UsageRow, ...]) -> bool:
        """Keep what a worker used; whether it is kept. The worker says it again if not."""
        try:
            await self._store.add_usage(ledger, ((seq, rows),), self._clock())
            touched = {row.key for row in rows}
            await self._add_up([k for i in touched if (k := self._keys.get(i)) is not None and k.limits.budget])
        except OperatorError as failed:
            self._log.error("usage cannot be kept yet; the router keeps it meanwhile", error=str(failed))
            return False
        return True

    # What operators ask for.

    def rows(self) -> tuple[ApiKey, ...]:
        """Every key, oldest first."""
        return tuple(sorted(self._keys.values(), key=lambda key: key.slot))

    def row(self, ident: str) -> ApiKey:
        """One key, by its id or a token's beginning. Raises :class:`OperatorError`."""
        found = self._keys.get(ident)
        if found is None:
            hint = "llmgw ctl keys list shows the ids"
            raise UnknownError(f"key {ident[:40]!r}", "there is none of this id", hint)
        return found

    async def create(self, terms: KeyTerms, by: str) -> tuple[ApiKey, str, bool]:
        """A new key, its token, and whether it is in force. The token is nowhere afterwards."""
        now = self._clock()
        longest = self.policy().longest_days
        if longest is not None and terms.expires is None:
            terms = evolve(terms, expires=now + longest * DAY_S)
        _check(terms, now, longest)
        ident = _random(ID_LENGTH)
        token = token_of(ident, _random(SECRET_LENGTH))
        key = ApiKey(
            ident, 0, 0, digest_of(token.encode()), now, terms.name, terms.owner, terms.tags, terms.models,
            terms.limits, terms.expires,
        )  # fmt: skip
        async with self._turn:
            made = await self._store.add_key(key, KeyEvent(now, ident, "key.create", by, _said(terms)))
            return made, token, await self._holds(made, "created", by)

    async def change(self, ident: str, terms: KeyTerms, by: str) -> tuple[ApiKey, bool]:
        """The same key on other terms, and whether they are in force."""
        _check(terms, None if terms.expires == self.row(ident).expires else self._clock(), self.policy().longest_days)
        async with self._turn:
            key = self._usable(ident)
            new = evolve(
                key, name=terms.name, owner=terms.owner, tags=terms.tags, models=terms.models, limits=terms.limits,
                expires=terms.expires,
            )  # fmt: skip
            made = await self._store.change_key(new, KeyEvent(self._clock(), ident, "key.change", by, _said(terms)))
            return made, await self._holds(made, "changed", by)

    async def rotate(self, ident: str, keep_old_s: float, by: str) -> tuple[ApiKey, str, bool]:
        """A new secret for a key, its token, and whether it is in force. The old one is good for so many seconds."""
        async with self._turn:
            key = self._usable(ident)
            now = self._clock()
            token = token_of(ident, _random(SECRET_LENGTH))
            new = evolve(key, digest=digest_of(token.encode()), old_digest=key.digest, old_until=now + keep_old_s)
            detail = f"the old secret is good for {keep_old_s:g} s"
            made = await self._store.change_key(new, KeyEvent(now, ident, "key.rotate", by, detail))
            return made, token, await self._holds(made, "rotated", by)

    async def revoke(self, ident: str, by: str) -> tuple[ApiKey, bool]:
        """End a key for good, and whether that is in force."""
        async with self._turn:
            key = self._usable(ident)
            now = self._clock()
            made = await self._store.change_key(evolve(key, revoked=now), KeyEvent(now, ident, "key.revoke", by, ""))
            return made, await self._holds(made, "revoked", by)

    async def events(self, ident: str, limit: int) -> tuple[KeyEvent, ...]:
        """What was done to a key, newest first."""
        return await self._store.key_events(ident, limit)

    async def usage(self, since: int, until: int, key: str | None) -> tuple[UsageRow, ...]:
        """The sums of these days (UTC, since 1970), both included."""
        return await self._store.usage(since, until, key)

    def budget_spent(self, key: ApiKey) -> Spent | None:
        """What of a key's budget is used, as far as it is written down."""
        found = self._spent.get(key.slot)
        return None if found is None or not key.limits.budget else found[1]

    def _usable(self, ident: str) -> ApiKey:
        key = self.row(ident)
        if key.revoked is not None:
            raise ConflictError(f"key {ident}", "is revoked, which is for good", "make a new one")
        return key

    async def _holds(self, key: ApiKey, action: str, by: str) -> bool:
        """Let the router know; whether it does within a second."""
        old = self._keys.get(key.id)
        if old is not None:
            self._changes.remove(old)
        self._keys[key.id] = key
        self._changes.append(key)
        self.version = key.version
        self._log.info(f"key {action}", key=key.id, owner=key.owner, by=by)
        if key.limits.budget and (old is None or old.limits != key.limits):
            await self._add_up([key])
        self._router.keys_changed()
        return await self._router.keys_in_force(key.version, _IN_FORCE_S)

    async def _add_up(self, keys: list[ApiKey]) -> None:
        """Read what these keys used since their budgets began."""
        now = self._clock()
        for key in keys:
            period = key.limits.budget_period
            since = period_start(period, now)
            rows = await self._store.usage(since // DAY_S, int(now // DAY_S), key.id)
            if self._keys[key.id].limits.budget_period is not period:
                continue  # it was changed meanwhile, and whoever did that adds up anew
            row = Spent(key.slot, since, sum(r.prompt + r.completion for r in rows), sum(r.cost for r in rows), period)
            before = self._spent.get(key.slot)
            if before is None or before[1] != row:
                self._mark += 1
                self._spent[key.slot] = self._mark, row
        if keys:
            self._router.keys_changed()

    async def _collect(self) -> None:
        """Take over the ledgers of workers that are gone."""

        for ledger, path, batches in await trio.to_thread.run_sync(left_behind, self._folder):
            await self._store.add_usage(ledger, [(b.seq, b.rows) for b in batches], self._clock())
            # Only once it is in the store; its name is never used again.
            await trio.to_thread.run_sync(remove, path)
            if batches:
                self._log.info("usage of a dead worker collected", ledger=ledger, batches=len(batches))


def _random(length: int) -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(length))


def _said(terms: KeyTerms) -> str:
    """The terms in a line, for the record."""
    given: Mapping[str, Any] = {
        "owner": terms.owner,
        "models": " ".join(terms.models),
        "requests a minute": terms.limits.requests_per_minute,
        "tokens a minute": terms.limits.tokens_per_minute,
        "at once": terms.limits.concurrent,
        "budget tokens": terms.limits.budget_tokens,
        "budget cost": None if terms.limits.budget_cost is None else terms.limits.budget_cost / 1e6,
        "budget period": terms.limits.budget_period.value if terms.limits.budget else None,
        "expires": terms.expires,
    }
    return ", ".join(f"{name} {value}" for name, value in given.items() if value not in (None, ""))


def _check(terms: KeyTerms, now: float | None, longest_days: float | None) -> None:
    """Raises :class:`OperatorError` with the first thing that is wrong.

    ``now``: an expiry must be later, and at most so many days later.
    """
    for name, text in (("name", terms.name), ("owner", terms.owner), *(("tag", tag) for tag in terms.tags)):
        if not is_line(text, TEXT_MOST):
            raise OperatorError(f"the {name}", f"should be one line of at most {TEXT_MOST} characters", "")
    if len(terms.tags) > TAGS_MOST:
        raise OperatorError("the tags", f"are {len(terms.tags)}, more than {TAGS_MOST}", "")
    if not terms.models:
        raise OperatorError("the models", "are none, so that the key is good for nothing", "name some, or * for all")
    for pattern in terms.models:
        if not is_pattern(pattern):
            raise OperatorError(f"{pattern[:60]!r}", "is neither a model's name nor a pattern", "such as llama-3.1-8b*")
    limits = terms.limits
    for name, value in (
        ("requests a minute", limits.requests_per_minute),
        ("tokens a minute", limits.tokens_per_minute),
        ("requests at once", limits.concurrent),
        ("the budget of tokens", limits.budget_tokens),
        ("the budget of cost", limits.budget_cost),
    ):
        if value is not None and not 0 <= value <= EXACT:
            raise OperatorError(name, f"expected 0 to {EXACT}, found {value}", "leave it out for no limit")
    if terms.expires is not None and not 0 <= terms.expires <= LATEST:
        raise OperatorError("the expiry", f"expected seconds since 1970, found {terms.expires:g}", "")
    if now is not None and terms.expires is not None and terms.expires <= now:
        raise ConflictError("the expiry", "is in the past", "")
    if now is not None and longest_days is not None:
        hint = f"keys.longest_days of the settings allows {longest_days:g} days"
        if terms.expires is None:
            raise ConflictError("the expiry", "is none", hint)
        if terms.expires > now + longest_days * DAY_S + _SLACK_S:
            raise ConflictError("the expiry", f"is {(terms.expires - now) / DAY_S:.0f} days from now", hint)
