"""Which engine a request goes to. Pure: what is known of each engine goes in, the choice and its reason come out."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from llmgw.router.health import Health

ROOM = 1.25
"""A conversation stays with its engine while that has at most so many times its share of the requests."""

ROOM_LEAST = 4
"""And always while it has fewer than so many: a share of almost nothing is no reason to lose a cache."""

_START_BYTES = 4096
"""How much of what a conversation begins with, and of the user's first message, tells it from others."""

_LOOKED_AT_BYTES = 256 * 1024
"""How far that message is looked for: a tenth of a millisecond."""


class Reason(StrEnum):
    """Why this engine: ``only`` there is no other, ``affinity`` it had the conversation's beginning, ``room`` the one
    that had it has too much to do, ``least`` it has the fewest tokens outstanding of two."""

    ONLY = "only"
    AFFINITY = "affinity"
    ROOM = "room"
    LEAST = "least"

    __hash__ = str.__hash__  # an enumeration's own is written in Python, and every request is counted by its reason


class Load(Protocol):
    """What the choice looks at.

    ``tokens`` is an estimate for the ``outstanding`` requests. ``full`` engines let requests wait or have no KV cache
    left, by their own word. ``seed`` is the same number in every worker.
    """

    @property
    def draining(self) -> bool: ...

    @property
    def outstanding(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def full(self) -> bool: ...

    @property
    def health(self) -> Health: ...

    @property
    def seed(self) -> int: ...


class Choice(msgspec.Struct, frozen=True, gc=False):
    """An engine, ``at`` this index, and why."""

    at: int
    reason: Reason


def choose(
    engines: Sequence[Load], tried: Collection[int], now: float, draw: float, key: int | None = None
) -> Choice | None:
    """The engine for a request, or ``None`` when none is left. ``draw`` is a random number below 1.

    Engines that drain or were ``tried`` are not asked. Those that are out are asked only when no other is left: a wrong
    guess costs one failed connection, no guess at all costs the request. Requests with the same ``key`` go to the same
    engine as long as that has room (rendezvous hashing with bounded loads), and then all to the same next one; those
    without go to the less loaded of two drawn ones, since what other workers do is not seen here and everybody's
    favourite would be overrun.
    """
    fit = [
        n for n, e in enumerate(engines) if not (e.draining or n in tried or (e.health.troubled and e.health.out(now)))
    ]
    if not fit:
        fit = [n for n, e in enumerate(engines) if not e.draining and n not in tried]
        if not fit:
            return None
    count = len(fit)
    if count == 1:
        return Choice(fit[0], Reason.ONLY)
    if key is not None:
        return _affine(engines, fit, key)
    first = int(draw * count)
    second = int((draw * count - first) * (count - 1))
    second += second >= first
    one, two = engines[fit[first]], engines[fit[second]]
    better = (two.full, two.tokens) < (one.full, one.tokens)
    return Choice(fit[second if better else first], Reason.LEAST)


def _affine(engines: Sequence[Load], fit: Sequence[int], key: int) -> Choice:
    first, highest, outstanding = -1, -1, 1
    for n in fit:
        engine = engines[n]
        outstanding += engine.outstanding
        mixed = _mixed(key, engine.seed)
        if mixed >= highest:
            first, highest = n, mixed
    most = max(ROOM_LEAST, ROOM * outstanding / len(fit))
    favourite = engines[first]
    if favourite.outstanding < most and not favourite.full:
        return Choice(first, Reason.AFFINITY)  # as a rule; the others need not be put in order
    ranked = sorted([(_mixed(key, engines[n].seed), n) for n in fit], reverse=True)
    for place, (_, n) in enumerate(ranked):
        engine = engines[n]
        if engine.outstanding < most and not engine.full:
            return Choice(n, Reason.ROOM if place else Reason.AFFINITY)
    return Choice(min(fit, key=lambda n: (engines[n].full, engines[n].tokens)), Reason.ROOM)


def _mixed(key: int, seed: int) -> int:
    """A number that has nothing to do with either (the finalizer of splitmix64)."""
    mixed = (key ^ seed) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return mixed ^ (mixed >> 31)


def seed_of(name: str) -> int:
    """An engine's seed, from its id."""
    data = name.encode()
    return zlib.crc32(data) << 32 | zlib.crc32(data[::-1], 0x5EED)


def conversation(start: bytes, session: bytes = b"") -> int | None:
    """The key of a conversation: what its ``session`` is called, or else how it begins.

    ``start`` is the JSON of its messages, prompt or input. Every turn of a conversation repeats its messages up to the
    first of the user, and what comes before those is what an engine has in its cache. That message is not taken apart:
    up to the first brace that closes behind its role all turns have the same bytes.
    """
    if session:
        return zlib.crc32(session) + (1 << 32)
    if not start:
        return None
    user = start.find(b'"user"', 0, _LOOKED_AT_BYTES)
    if user < 0:
        return zlib.crc32(start[:_START_BYTES])
    end = start.find(b"}", user, user + _START_BYTES) + 1 or user + _START_BYTES
    if user < _START_BYTES:
        return zlib.crc32(start[:end])
    return zlib.crc32(start[max(_START_BYTES, user - _START_BYTES) : end], zlib.crc32(start[:_START_BYTES]))
