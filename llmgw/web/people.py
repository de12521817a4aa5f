"""The admin API's routes for tokens of the admin API itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from attrs import frozen
from starlette.requests import Request
from starlette.routing import Route

from llmgw.errors import UnknownError
from llmgw.settings.bounds import NAME, declared
from llmgw.store.people import AdminToken
from llmgw.web.access import LONGEST_S, SHORTEST_S, Role, check_new, new_token
from llmgw.web.bodies import structured
from llmgw.web.jobs import Guard

_DAY_S = 86400.0


class People(Protocol):
    """Where admin tokens are kept; see :class:`llmgw.store.people.SqlAdminTokens`."""

    async def all(self) -> tuple[AdminToken, ...]: ...

    async def add(self, row: AdminToken) -> None: ...

    async def revoke(self, token: str, by: str, at: float) -> AdminToken | None: ...


@frozen
class NewAdminToken:
    """The body that makes a token of the admin API."""

    name: str = declared(pattern=NAME)
    role: Role = Role.VIEWER
    ttl_s: float = declared(90 * _DAY_S, minimum=SHORTEST_S, maximum=LONGEST_S)


def admin_token_view(row: AdminToken, now: float) -> dict[str, Any]:
    """A token as JSON; neither the secret nor its digest is in it."""
    state = "revoked" if row.revoked else "active" if now < row.expires else "expired"
    return {"id": row.id, "name": row.name, "role": row.role, "state": state, "created": row.created,
            "expires": row.expires, "by": row.by, "used": row.used or None, "revoked": row.revoked or None}  # fmt: skip


def people_routes(people: People, now: Callable[[], float], guarded: Guard) -> list[Route]:
    """``admin-tokens`` under ``/api/v1/``."""

    async def every(_request: Request) -> Any:
        return {"tokens": [admin_token_view(row, now()) for row in await people.all()], "now": now()}

    async def create(request: Request) -> Any:
        asked: NewAdminToken = await structured(request, NewAdminToken)
        check_new(asked.name, asked.ttl_s)
        ident, text, digest = new_token()
        at = now()
        row = AdminToken(ident, asked.name, asked.role.value, digest, at, at + asked.ttl_s, request.state.actor)
        await people.add(row)
        return {"token": text, **admin_token_view(row, at)}

    async def revoke(request: Request) -> Any:
        token = request.path_params["id"]
        row = await people.revoke(token, request.state.actor, now())
        if row is None:
            raise UnknownError(f"token {token[:40]}", "is not there, or revoked already", "llmgw ctl admin-token list")
        return {"revoked": row.id, "name": row.name}

    return [
        Route("/api/v1/admin-tokens", guarded(every), methods=["GET"]),
        Route("/api/v1/admin-tokens", guarded(create), methods=["POST"]),
        Route("/api/v1/admin-tokens/{id}/revoke", guarded(revoke), methods=["POST"]),
    ]
