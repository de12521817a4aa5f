"""The admin API's routes for what operators do to nodes and replicas."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import attrs
from attrs import frozen
from starlette.requests import Request
from starlette.routing import Route

from llmgw.scheduler.drains import Effect
from llmgw.scheduler.orders import OrderKind
from llmgw.settings.bounds import REASON_MOST, declared, line
from llmgw.web.bodies import actor, structured
from llmgw.web.jobs import Guard
from llmgw.web.logs import Logs, log_routes
from llmgw.web.source import Source
from llmgw.web.views import drained_view, unplaced_view


class Operations(Logs, Protocol):
    """Who does it; see :class:`llmgw.server.operations.Operations`. Refusals are :class:`OperatorError`."""

    async def drain(self, node: str, reason: str, by: str, *, force: bool) -> Effect: ...

    async def undrain(self, node: str, reason: str, by: str) -> bool: ...

    async def order(self, replica: str, kind: OrderKind, reason: str, by: str) -> Effect: ...


@frozen
class DrainRequest:
    """The body of ``POST /api/v1/nodes/NODE/drain``; ``force`` stops what has no other place."""

    reason: str = declared("", **line(REASON_MOST))
    force: bool = False


@frozen
class Why:
    """The body of the others."""

    reason: str = declared("", **line(REASON_MOST))


def effect_view(effect: Effect) -> dict[str, Any]:
    """What follows in the next pass."""
    return {
        "replicas": [attrs.asdict(fate) | {"to": list(fate.to)} for fate in effect.fates],
        "unplaced": [{"model": item.model} | unplaced_view(item) for item in effect.unplaced],
    }


def operation_routes(operations: Operations, source: Source, guarded: Guard) -> list[Route]:
    """``nodes/NODE/drain`` and ``undrain``, ``replicas/ID/restart``, ``stop``, ``logs`` under ``/api/v1/``."""

    async def drain(request: Request) -> Any:
        node = request.path_params["node"]
        asked: DrainRequest = await structured(request, DrainRequest)
        effect = await operations.drain(node, asked.reason, actor(request), force=asked.force)
        state = source.state()
        found = state.node(node)
        told = None if found is None else drained_view(found, state)
        return {"node": node, "now": source.now(), "drained": told} | effect_view(effect)

    async def undrain(request: Request) -> Any:
        node = request.path_params["node"]
        asked: Why = await structured(request, Why)
        return {"node": node, "undrained": await operations.undrain(node, asked.reason, actor(request))}

    def order(kind: OrderKind) -> Callable[[Request], Awaitable[Any]]:
        async def work(request: Request) -> Any:
            replica = request.path_params["replica"]
            asked: Why = await structured(request, Why)
            effect = await operations.order(replica, kind, asked.reason, actor(request))
            return {"replica": replica, "now": source.now()} | effect_view(effect)

        return work

    routes: tuple[tuple[str, Callable[[Request], Awaitable[Any]]], ...] = (
        ("nodes/{node}/drain", drain),
        ("nodes/{node}/undrain", undrain),
        ("replicas/{replica}/restart", order(OrderKind.RESTART)),
        ("replicas/{replica}/stop", order(OrderKind.STOP)),
    )
    posts = [Route(f"/api/v1/{path}", guarded(answer), methods=["POST"]) for path, answer in routes]
    return [*posts, *log_routes(operations, guarded)]
