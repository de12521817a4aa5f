"""The keys that a worker knows: taken over by version, found by what a client presents. Pure."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from llmgw.settings.keys import ApiKey, digest_of, id_in, matcher

_SEEN_MOST = 10_000
_NAMES_MOST = 1000
_NEVER = float("inf")
_NOBODY = "0" * 64


class Holder:
    """A key as the worker uses it, with what can be worked out once."""

    __slots__ = ("_allowed", "key", "limited", "rated", "until")

    def __init__(self, key: ApiKey) -> None:
        self.key = key
        self.limited = key.limits.any
        self.rated = key.limits.rates
        self.until = 0.0 if key.revoked is not None else _NEVER if key.expires is None else key.expires
        self._allowed: dict[str, bool] | None = None

    def allows(self, model: str) -> bool:
        """Whether the key may use this model; says the same whether it exists or not."""
        if self._allowed is None:
            self._allowed = {}  # most keys are silent, and a table of many must be taken over quickly
        known = self._allowed.get(model)
        if known is None:
            known = matcher(self.key.models).fullmatch(model) is not None
            if len(self._allowed) < _NAMES_MOST:
                self._allowed[model] = known
        return known


class KeyRefused(Exception):
    """A client that is not let in: ``reason`` is a label, the text is for the client."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason
        self.text = text


class KeyTable:
    """Every key, as of ``version``. ``complete`` once all of them came; until then nobody can be told apart."""

    def __init__(self) -> None:
        self.version = 0
        self.complete = False
        self._by_id: dict[bytes, Holder] = {}
        self._seen: dict[bytes, tuple[Holder, float]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def apply(self, base: int, upto: int, keys: Iterable[ApiKey], *, last: bool) -> frozenset[str]:
        """Take over the keys that changed after version ``base`` up to ``upto``. Returns the ids that this revoked.

        Each counts only if it is newer than what is known of it, so that no late or stale copy undoes a revocation. A
        page that does not join on to what is here is used all the same and moves no version.
        """
        gone: set[str] = set()
        for key in keys:
            known = self._by_id.get(key.id.encode())
            if known is None or known.key.version < key.version:
                self._by_id[key.id.encode()] = Holder(key)
                if known is not None and key.revoked is not None:
                    gone.add(key.id)
        self._seen.clear()
        if base <= self.version:
            self.version = max(self.version, upto)
            self.complete = self.complete or last
        return frozenset(gone)

    def find(self, authorization: bytes, now: float) -> Holder:
        """The key in an ``Authorization`` field. Raises :class:`KeyRefused`.

        What was found good is remembered by the whole field: a look-up by bytes gives no more away than one by id, and
        only good ones are in it.
        """
        seen = self._seen.get(authorization)
        if seen is not None and now < seen[1]:
            return seen[0]
        holder, until = self._judge(authorization, now)
        if len(self._seen) >= _SEEN_MOST:
            self._seen.clear()
        self._seen[authorization] = holder, until
        return holder

    def _judge(self, authorization: bytes, now: float) -> tuple[Holder, float]:
        if not authorization:
            raise KeyRefused(
                "missing", "You did not provide an API key. Send it as Authorization: Bearer YOUR_KEY or as x-api-key."
            )
        scheme, _, token = authorization.partition(b" ")
        token = token.strip()
        ident = id_in(token) if scheme.lower() == b"bearer" else None
        holder = None if ident is None else self._by_id.get(ident)
        key = None if holder is None else holder.key
        digest = digest_of(token)
        # Both are compared, and one that is not there as well, so that the time says nothing.
        new = hmac.compare_digest(digest, _NOBODY if key is None else key.digest)
        old = hmac.compare_digest(digest, (_NOBODY if key is None else key.old_digest) or _NOBODY)
        if holder is None or key is None or not (new or old):
            raise KeyRefused("wrong", "Incorrect API key provided.")
        if key.revoked is not None:
            raise KeyRefused("revoked", f"The API key {key.id} was revoked.")
        until = holder.until if new else min(holder.until, key.old_until)
        if until <= now:
            what = "has expired" if holder.until <= now else "was rotated, and its old secret has expired"
            raise KeyRefused("expired", f"The API key {key.id} {what}.")
        return holder, until

    def holders(self) -> Iterable[Holder]:
        """Every key that is known, revoked ones too."""
        return self._by_id.values()
