"""The admin API's routes. Everything under ``/api/`` wants the admin token; health and metrics do not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from llmgw.web import views
from llmgw.web.auth import allowed
from llmgw.web.jobs import Jobs, job_routes
from llmgw.web.source import Source

_STATIC = {
    "console.html": "text/html; charset=utf-8",
    "console.js": "text/javascript; charset=utf-8",
    "console.css": "text/css; charset=utf-8",
}
_HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, _HEADERS, "application/json")


def _error(status: int, reason: str, remedy: str) -> Response:
    answer = _json({"error": {"reason": reason, "remedy": remedy}}, status)
    if status == 401:
        answer.headers["www-authenticate"] = "Bearer"
    return answer


def _asset(name: str) -> Callable[[Request], Awaitable[Response]]:
    body = files("llmgw.web").joinpath("static", name).read_bytes()

    async def asset(_request: Request) -> Response:
        return Response(body, 200, _HEADERS, _STATIC[name])

    return asset


def routes(source: Source, token: str, jobs: Jobs | None = None) -> list[Route]:
    """Every route of the admin listener."""

    def guarded(answer: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if not allowed(request.headers.get("authorization"), token):
                return _error(401, "a valid admin token is needed", "send Authorization: Bearer with the token of the "
                              "file admin.token in the server's state folder")  # fmt: skip
            found = await answer(request)
            return found if isinstance(found, Response) else _json(found)

        return endpoint

    async def status(_request: Request) -> Any:
        return views.status_view(
            source.identity(), source.router(), source.settings(), source.state(), source.unplaced(), source.now(),
            source.ready(),
        )  # fmt: skip

    async def nodes(_request: Request) -> Any:
        return {"nodes": views.nodes_view(source.state())}

    async def models(_request: Request) -> Any:
        return {"models": views.models_view(source.settings(), source.state(), source.unplaced(), source.now())}

    async def replicas(_request: Request) -> Any:
        return {"replicas": views.replicas_view(source.state(), source.now())}

    async def decisions(request: Request) -> Any:
        text = request.query_params.get("limit", "50")
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1000):
            return _error(400, f"limit must be a whole number from 1 to 1000, found {text[:20]!r}", "")
        return {"decisions": views.decisions_view(await source.decisions(int(text)))}

    async def healthz(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_request: Request) -> Response:
        reason = source.ready()
        return PlainTextResponse(f"{reason or 'ready'}\n", 503 if reason else 200)

    async def metrics(_request: Request) -> Response:
        return Response(source.metrics(), 200, None, "text/plain; version=0.0.4; charset=utf-8")

    return [
        Route("/", _asset("console.html")),
        Route("/console.js", _asset("console.js")),
        Route("/console.css", _asset("console.css")),
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", metrics),
        Route("/api/v1/status", guarded(status)),
        Route("/api/v1/nodes", guarded(nodes)),
        Route("/api/v1/models", guarded(models)),
        Route("/api/v1/replicas", guarded(replicas)),
        Route("/api/v1/decisions", guarded(decisions)),
        *(() if jobs is None else job_routes(jobs, source, guarded)),
    ]


def app(source: Source, token: str, jobs: Jobs | None = None) -> Starlette:
    """The admin side as an ASGI application."""

    async def missing(request: Request, _error_: Exception) -> Response:
        return _error(404, f"there is no {request.url.path[:200]}", "the API is under /api/v1/")

    async def method(request: Request, _error_: Exception) -> Response:
        return _error(405, f"{request.method} is not possible here", "use GET; jobs are begun and cancelled with POST")

    return Starlette(routes=routes(source, token, jobs), exception_handlers={404: missing, 405: method})
