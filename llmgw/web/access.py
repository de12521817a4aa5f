"""Who uses the admin API, and what they may: bearer tokens and client certificates, and three roles.

A viewer reads, an operator changes what runs, an admin also says who may do what. A token is
``llmgw_admin_ID.SECRET``; the first one, in the 0600 file of the state folder, is ``llmgw_admin_SECRET``. A person's
certificate has exactly one name, the URI ``spiffe://<trust domain>/llmgw/<role>/<name>``: a node's or a control plane's
is nobody's here.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol
from urllib.parse import urlsplit

from attrs import frozen

from llmgw.errors import OperatorError
from llmgw.link.identity import Certificate, identity, is_id, person_uri
from llmgw.store.people import AdminToken
from llmgw.telemetry.logging import logger

_TOKEN = re.compile(r"llmgw_admin_([0-9a-f]{12})\.([A-Za-z0-9_-]{43})", re.ASCII)
_NOBODY = "0" * 64
_USED_EVERY_S = 60.0
SHORTEST_S = 60.0
LONGEST_S = 400 * 86400.0
_WAYS = (
    "send Authorization: Bearer with the token of the file admin.token in the server's state folder, one of"
    " llmgw ctl admin-token create, or a certificate of llmgw ca issue --person"
)


class Role(StrEnum):
    """What somebody may do; each may also what those before it may."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def may(self, wanted: Role) -> bool:
        """Whether this role is enough where ``wanted`` is asked for."""
        order = list(Role)
        return order.index(self) >= order.index(wanted)


@frozen
class Actor:
    """Who asks: ``token NAME`` or ``certificate NAME``."""

    name: str
    role: Role
    by_certificate: bool = False


class NobodyKnown(OperatorError):
    """Whoever asks is nobody that may."""


class AdminTokens(Protocol):
    """Where admin tokens are kept."""

    async def find(self, token: str) -> AdminToken | None: ...

    async def used(self, token: str, at: float) -> None: ...


def new_token() -> tuple[str, str, str]:
    """The id, the text and the digest of a new token. 256 random bits need no slow hash."""
    ident, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    return ident, f"llmgw_admin_{ident}.{secret}", digest(secret)


def digest(secret: str) -> str:
    """What is stored of a token's secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def check_new(name: str, ttl_s: float) -> None:
    """Raise :class:`OperatorError` when there may be no token of this name and time."""
    if not is_id(name):
        raise OperatorError(f"name {name[:64]!r}", "may have letters, digits, dots, dashes and underscores, at most 64")
    if not SHORTEST_S <= ttl_s <= LONGEST_S:
        raise OperatorError("ttl", f"expected {SHORTEST_S:.0f} s to {LONGEST_S / 86400:.0f} days, found {ttl_s:g} s")


def person_of(chain: Sequence[Certificate], trust_domain: str) -> Actor | None:
    """The person that a verified chain is about, if it is about one."""
    for role in Role:
        name = identity(chain[0], person_uri(trust_domain, role.value, "")) if chain else None
        if name is not None:
            return Actor(f"certificate {name}", role, by_certificate=True)
    return None


def same_origin(headers: Mapping[str, str]) -> bool:
    """Whether no page of another site makes a browser ask this (RFC 6454, section 7)."""
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host", "")


class Access:
    """Says who asks. ``first`` is the token of the 0600 file; ``denied`` why a certificate is kept out."""

    def __init__(
        self,
        first: str,
        tokens: AdminTokens | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        trust_domain: str = "",
        denied: Callable[[Sequence[Certificate]], str | None] = lambda _chain: None,
    ) -> None:
        self._first, self._tokens, self._clock = first, tokens, clock
        self._trust_domain, self._denied = trust_domain, denied
        self._log = logger("access")

    async def who(self, authorization: str | None, chain: Sequence[Certificate] = ()) -> Actor:
        """Who asks, from the header ``Authorization``, else from the certificate of the connection.

        Raises :class:`NobodyKnown`, and :class:`OperatorError` when the store does not answer.
        """
        if authorization is not None:
            kind, _, text = authorization.partition(" ")
            if kind.lower() != "bearer":
                raise NobodyKnown("the header Authorization", "is not Bearer and a token", _WAYS)
            return await self._by_token(text.strip())
        if not chain:
            raise NobodyKnown("the request", "comes without a token: a valid admin token is needed", _WAYS)
        return self._by_certificate(chain)

    async def _by_token(self, text: str) -> Actor:
        if hmac.compare_digest(text.encode(), self._first.encode()):
            return Actor("token admin.token", Role.ADMIN)
        wrong = NobodyKnown("the token", "is none of this control plane: a valid admin token is needed", _WAYS)
        if self._tokens is None or (match := _TOKEN.fullmatch(text)) is None:
            raise wrong
        row = await self._tokens.find(match[1])
        if not hmac.compare_digest(digest(match[2]), _NOBODY if row is None else row.digest) or row is None:
            raise wrong
        now = self._clock()
        if row.revoked:
            raise NobodyKnown(f"the token {row.name}", "was revoked: a valid admin token is needed", _WAYS)
        if now >= row.expires:
            raise NobodyKnown(f"the token {row.name}", "has expired: a valid admin token is needed", _WAYS)
        if now - row.used >= _USED_EVERY_S:
            try:
                await self._tokens.used(row.id, now)
            except OperatorError as failed:
                # A full disk is when somebody has to be able to look.
                self._log.warning("it is not noted that a token was used", token=row.name, error=str(failed))
        return Actor(f"token {row.name}", Role(row.role))

    def _by_certificate(self, chain: Sequence[Certificate]) -> Actor:
        found = person_of(chain, self._trust_domain)
        if found is None:
            wanted = f"spiffe://{self._trust_domain}/llmgw/ROLE/NAME"
            remedy = f"its only name has to be {wanted}: llmgw ca issue --person NAME --role ROLE"
            raise NobodyKnown("the certificate", f"is no person's ({', '.join(chain[0].names) or 'no name'})", remedy)
        if not chain[0].not_before <= self._clock() < chain[0].not_after:
            raise NobodyKnown("the certificate", "is not valid now", "issue one: llmgw ca issue --person NAME")
        if (why := self._denied(chain)) is not None:
            raise NobodyKnown("the certificate", f"is denied: {why}", "see llmgw ctl deny list")
        return found
