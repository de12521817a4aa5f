"""API keys: what one looks like, what it may do, and when its budget begins anew. Pure.

A token is ``llmgw_<id>_<secret>``. The id is public and finds the key; of the whole token only its SHA-256 is kept: the
secret has 200 random bits, so that nothing slower would protect it better.
"""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache

from attrs import frozen

PREFIX = "llmgw"
ID_LENGTH = 12
SECRET_LENGTH = 40
ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
"""Of ids and secrets: 5 bits a character, no capital letters, nothing that a double click would not select."""

_TOKEN = re.compile(rb"[a-z][a-z0-9]{0,15}_([a-z2-7]{12})_[A-Za-z0-9]{32,128}")
PATTERN = r"^[A-Za-z0-9._/:*-]{1,128}$"
"""What can stand for models."""

LATEST = 253402300799.0
"""The last second of the year 9999, which every calendar has."""

TEXT_MOST, TAGS_MOST = 128, 32
"""Characters of a name, an owner, a tag; and how many tags."""

_PATTERN = re.compile(PATTERN)


class Period(StrEnum):
    """How often a budget begins anew, in UTC: at midnight, on Monday, on the first of the month, or never."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    TOTAL = "total"

    __hash__ = str.__hash__  # an enumeration's own is written in Python, and each request with a budget asks for it


@frozen
class Limits:
    """What a key may use; ``None`` is no limit.

    ``requests_per_minute`` and ``tokens_per_minute`` hold for every window of 60 s, ``concurrent`` for requests under
    way, ``budget_tokens`` and ``budget_cost`` (millionths of the unit that prices are in) for a ``budget_period``.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    budget_tokens: int | None = None
    budget_cost: int | None = None
    budget_period: Period = Period.MONTH

    @property
    def any(self) -> bool:
        """Whether anything is limited."""
        return self.rates or self.budget

    @property
    def rates(self) -> bool:
        """Whether requests, tokens or requests at once are limited."""
        return (self.requests_per_minute, self.tokens_per_minute, self.concurrent) != (None, None, None)

    @property
    def budget(self) -> bool:
        """Whether there is a budget."""
        return self.budget_tokens is not None or self.budget_cost is not None


UNLIMITED = Limits()


@frozen
class KeyTerms:
    """What an operator says of a key: who has it, what it may do, until when (epoch seconds)."""

    name: str = ""
    owner: str = ""
    tags: tuple[str, ...] = ()
    models: tuple[str, ...] = ("*",)
    limits: Limits = UNLIMITED
    expires: float | None = None


@frozen
class ApiKey:
    """One key. ``version`` is that of the table of keys when this one last changed; ``slot`` is its number, never given
    twice. Times in epoch seconds.

    ``models`` are names or patterns with ``*``. After a rotation ``old_digest`` is good until ``old_until``.
    """

    id: str
    slot: int
    version: int
    digest: str
    created: float
    name: str = ""
    owner: str = ""
    tags: tuple[str, ...] = ()
    models: tuple[str, ...] = ("*",)
    limits: Limits = UNLIMITED
    expires: float | None = None
    revoked: float | None = None
    old_digest: str = ""
    old_until: float = 0.0

    @property
    def terms(self) -> KeyTerms:
        """What was said of it."""
        return KeyTerms(self.name, self.owner, self.tags, self.models, self.limits, self.expires)

    def state(self, now: float) -> str:
        """``active``, ``expired`` or ``revoked``."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else "active"


@frozen
class Spent:
    """What the key of a slot used since its budget of this ``period`` began, so far as it is written down: tokens, and
    millionths."""

    slot: int
    since: int
    tokens: int
    cost: int
    period: Period


def token_of(ident: str, secret: str) -> str:
    """The token that the key's user gets."""
    return f"{PREFIX}_{ident}_{secret}"


def id_in(token: bytes) -> bytes | None:
    """The id in a token, or ``None`` when it has not the form of one."""
    match = _TOKEN.fullmatch(token)
    return None if match is None else match[1]


def digest_of(token: bytes) -> str:
    """What is kept of a token."""
    return hashlib.sha256(token).hexdigest()


def is_pattern(text: str) -> bool:
    """Whether this can stand for models: a name, or one with ``*`` for any characters."""
    return _PATTERN.fullmatch(text) is not None


@lru_cache(1024)
def matcher(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """One expression for all of a key's patterns; use its ``fullmatch``."""
    return re.compile("|".join(re.escape(p).replace(r"\*", ".*") for p in patterns) or r"(?!)")


def period_start(period: Period, now: float) -> int:
    """When the period that ``now`` is in began, in epoch seconds."""
    day = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    match period:
        case Period.DAY:
            pass
        case Period.WEEK:
            day -= timedelta(days=day.weekday())
        case Period.MONTH:
            day = day.replace(day=1)
        case Period.TOTAL:
            return 0
    return int(day.timestamp())


def period_end(period: Period, now: float) -> int | None:
    """When the next period begins, in epoch seconds; ``None``: never."""
    start = datetime.fromtimestamp(period_start(period, now), UTC)
    match period:
        case Period.DAY:
            end = start + timedelta(days=1)
        case Period.WEEK:
            end = start + timedelta(days=7)
        case Period.MONTH:
            end = (start + timedelta(days=32)).replace(day=1)
        case Period.TOTAL:
            return None
    return int(end.timestamp())
