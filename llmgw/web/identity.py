"""The admin API's routes for identities: join tokens, the deny list, which CAs nodes need, events, forgotten nodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Protocol

import attrs
from attrs import frozen
from cryptography import x509
from starlette.requests import Request
from starlette.routing import Route

from llmgw.errors import OperatorError
from llmgw.link.identity import DenyKind
from llmgw.link.tokens import LONGEST_S, SHORTEST_S
from llmgw.settings.bounds import NAME, REASON_MOST, declared, line
from llmgw.store.identity import DenyRow, Event, HeldRow, TokenRow
from llmgw.web.bodies import actor, structured
from llmgw.web.jobs import Guard
from llmgw.web.source import Source


@frozen
class NodeNeed:
    """A node that stands in the way of a step, and why."""

    node: str
    reason: str


@frozen
class CaView:
    """A CA that is trusted. ``lacking`` do not trust it yet, ``needing`` would be cut off without it."""

    subject: str
    sha256: str
    not_after: float
    issuing: bool
    ours: bool
    lacking: tuple[NodeNeed, ...]
    needing: tuple[NodeNeed, ...]


class Identities(Protocol):
    """Who knows the identities; refusals are :class:`OperatorError`."""

    async def create_token(self, node: str, ttl_s: float, by: str) -> tuple[str, TokenRow]: ...

    async def tokens(self) -> tuple[tuple[TokenRow, str], ...]:
        """Each with its state in a word."""
        ...

    async def revoke_token(self, token: str, by: str) -> None: ...

    async def deny(self, kind: DenyKind, value: str, reason: str, by: str) -> DenyRow: ...

    async def lift(self, kind: DenyKind, value: str, by: str) -> None: ...

    async def denied(self) -> tuple[DenyRow, ...]: ...

    async def forget(self, node: str, by: str) -> None: ...

    async def events(self, limit: int) -> tuple[Event, ...]: ...

    def cas(self) -> tuple[CaView, ...]: ...

    def held(self) -> tuple[HeldRow, ...]: ...


_SERIAL = "^(0[xX])?(:?[0-9A-Fa-f]){1,40}$"
_KEY = "^([sS][hH][aA]256:)?(:?[0-9A-Fa-f]){64}$"
_VALUES = {
    "anyOf": [
        {"properties": {"kind": {"const": "node"}, "value": {"pattern": NAME}}},
        {"properties": {"kind": {"const": "serial"}, "value": {"pattern": _SERIAL}}},
        {"properties": {"kind": {"const": "key"}, "value": {"pattern": _KEY}}},
    ]
}


@frozen
class NewToken:
    """The body of ``POST /api/v1/tokens``."""

    node: str = declared(pattern=NAME)
    ttl_s: float = declared(900.0, minimum=SHORTEST_S, maximum=LONGEST_S)


@frozen
class NewDenial:
    """The body of ``POST /api/v1/deny``."""

    SCHEMA_RULES: ClassVar = _VALUES
    kind: DenyKind
    value: str
    reason: str = declared(**line(REASON_MOST, blank=False))


@frozen
class Lifted:
    """The body of ``POST /api/v1/deny/lift``."""

    SCHEMA_RULES: ClassVar = _VALUES
    kind: DenyKind
    value: str


def token_view(row: TokenRow, state: str) -> dict[str, Any]:
    """A token as JSON; neither the secret nor its digest is in it."""
    return {
        "id": row.id,
        "node": row.node,
        "state": state,
        "created": row.created,
        "expires": row.expires,
        "by": row.by,
        "used": row.used or None,
        "used_from": row.used_from,
        "revoked": row.revoked or None,
    }


def ca_view(ca: x509.Certificate, sha256: str, *, issuing: bool, ours: bool,
            lacking: tuple[NodeNeed, ...], needing: tuple[NodeNeed, ...]) -> CaView:  # fmt: skip
    """A CA as it is shown."""
    subject, ends = ca.subject.rfc4514_string(), ca.not_valid_after_utc.timestamp()
    return CaView(subject, sha256, ends, issuing, ours, lacking, needing)


def identity_routes(people: Identities, source: Source, guarded: Guard) -> list[Route]:
    """``tokens``, ``deny``, ``identities``, ``identities/events`` and ``nodes/ID/forget`` under ``/api/v1/``."""

    async def tokens(_request: Request) -> Any:
        return {"tokens": [token_view(*found) for found in await people.tokens()], "now": source.now()}

    async def new_token(request: Request) -> Any:
        asked: NewToken = await structured(request, NewToken)
        text, row = await people.create_token(asked.node, asked.ttl_s, actor(request))
        return {"token": text, **token_view(row, "open")}

    async def revoke(request: Request) -> Any:
        token = request.path_params["id"]
        await people.revoke_token(token, actor(request))
        return {"revoked": token}

    async def denied(_request: Request) -> Any:
        return {"denied": [attrs.asdict(row) for row in await people.denied()]}

    async def deny(request: Request) -> Any:
        asked: NewDenial = await structured(request, NewDenial)
        return {"denied": [attrs.asdict(await people.deny(asked.kind, asked.value, asked.reason, actor(request)))]}

    async def lift(request: Request) -> Any:
        asked: Lifted = await structured(request, Lifted)
        await people.lift(asked.kind, asked.value, actor(request))
        return {"lifted": attrs.asdict(asked)}

    async def identities(_request: Request) -> Any:
        return {
            "cas": [attrs.asdict(ca) for ca in people.cas()],
            "nodes": [attrs.asdict(row) for row in people.held()],
            "now": source.now(),
        }

    async def forget(request: Request) -> Any:
        node = request.path_params["node"]
        await people.forget(node, actor(request))
        return {"forgotten": node}

    async def events(request: Request) -> Any:
        text = request.query_params.get("limit", "50")
        if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= 1000):
            raise OperatorError("limit", f"must be a whole number from 1 to 1000, found {text[:20]!r}")
        return {"events": [attrs.asdict(event) for event in await people.events(int(text))], "now": source.now()}

    routes: tuple[tuple[str, Callable[[Request], Awaitable[Any]], str], ...] = (
        ("tokens", tokens, "GET"),
        ("tokens", new_token, "POST"),
        ("tokens/{id}/revoke", revoke, "POST"),
        ("deny", denied, "GET"),
        ("deny", deny, "POST"),
        ("deny/lift", lift, "POST"),
        ("identities", identities, "GET"),
        ("nodes/{node}/forget", forget, "POST"),
        ("identities/events", events, "GET"),
    )
    return [Route(f"/api/v1/{path}", guarded(answer), methods=[method]) for path, answer, method in routes]
