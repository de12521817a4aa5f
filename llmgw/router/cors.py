"""What web pages of other origins may do: the lines of answers that browsers look at. Pure.

https://fetch.spec.whatwg.org/#http-cors-protocol; without a rule no line is sent, and browsers refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_FIELDS = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+(?:[ \t]*,[ \t]*[!#$%&'*+\-.^_`|~0-9A-Za-z]+)*")
_EXPOSED = (
    b"x-request-id, retry-after, x-should-retry, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
    b"x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
_REMEMBERED_S = 600


class CorsRules:
    """The origins that are let in; ``*`` is every one. Keys come in a field of their own, so no credentials are."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.lower().encode() for origin in origins)
        self._all = b"*" in self._origins

    def lines(self, origin: bytes) -> bytes:
        """The lines of an answer to a page of this origin. Caches have to keep origins apart, let in or not."""
        if self._all:
            return b"access-control-allow-origin: *\r\naccess-control-expose-headers: " + _EXPOSED + b"\r\n"
        if origin.lower() not in self._origins:
            return b"vary: origin\r\n"
        return (
            b"access-control-allow-origin: " + origin + b"\r\nvary: origin\r\n"
            b"access-control-expose-headers: " + _EXPOSED + b"\r\n"
        )

    def preflight(self, origin: bytes, allow: str, fields: bytes) -> bytes:
        """What the answer to a browser's question has besides; ``fields`` are those that it would send."""
        if not self._all and origin.lower() not in self._origins:
            return b""
        lines = b"access-control-allow-methods: %b\r\naccess-control-max-age: %d\r\n" % (allow.encode(), _REMEMBERED_S)
        if fields and _FIELDS.fullmatch(fields):
            lines += b"access-control-allow-headers: " + fields + b"\r\n"
        return lines
