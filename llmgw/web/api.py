"""The admin API's routes. Everything under ``/api/`` wants the admin token; health and metrics do not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Match, Route, WebSocketRoute, compile_path

from llmgw.errors import ConflictError, OperatorError, UnknownError
from llmgw.store.database import StoreError
from llmgw.web import planning, views
from llmgw.web.access import Access, NobodyKnown, Role, same_origin
from llmgw.web.audit import History, audit_routes
from llmgw.web.bodies import RefusedBody, actor, json_of, named, structured
from llmgw.web.doctor import Doctors, doctor_routes
from llmgw.web.identity import Identities, identity_routes
from llmgw.web.jobs import Jobs, job_routes
from llmgw.web.keys import Keys, key_routes
from llmgw.web.openapi import document
from llmgw.web.operations import Operations, operation_routes
from llmgw.web.people import People, people_routes
from llmgw.web.settings import Book, settings_routes
from llmgw.web.source import Source
from llmgw.web.table import BY_ROUTE, needs_leader
from llmgw.web.watch import Watch
from llmgw.web.why import model_of_adapter, unknown, why_view

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


_STATUSES = {UnknownError: 404, ConflictError: 409}


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, _HEADERS, "application/json")


def _error(status: int, reason: str, remedy: str) -> Response:
    answer = _json({"error": {"reason": reason, "remedy": remedy}}, status)
    if status == 401:
        answer.headers["www-authenticate"] = "Bearer"
    return answer


def _not_leader(leader: str) -> Response:
    """RFC 9110, section 15.5.20: the request is for another one, who is named where there is one."""
    remedy = f"ask the one that does, at {leader}" if leader else "none does at the moment: try again in a few seconds"
    reason = "this control plane does not lead: it changes nothing and has no nodes"
    return _json({"error": {"reason": reason, "remedy": remedy}, "leader": leader}, 421)


def _asset(name: str) -> Callable[[Request], Awaitable[Response]]:
    body = files("llmgw.web").joinpath("static", name).read_bytes()

    async def asset(_request: Request) -> Response:
        return Response(body, 200, _HEADERS, _STATIC[name])

    return asset


def _limit(request: Request, usual: int) -> int:
    text = request.query_params.get("limit", str(usual))
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= 1000):
        raise OperatorError("limit", f"must be a whole number from 1 to 1000, found {text[:20]!r}")
    return int(text)


def app(
    source: Source,
    token: str | Access,
    jobs: Jobs | None = None,
    people: Identities | None = None,
    keys: Keys | None = None,
    history: tuple[History, Path] | None = None,
    doctors: Doctors | None = None,
    operations: Operations | None = None,
    book: Book | None = None,
    admins: People | None = None,
    watch: Watch | None = None,
) -> Starlette:
    """The admin side as an ASGI application. With ``history`` comes a folder for what is on its way out."""

    plans = trio.CapacityLimiter(1)  # one at a time: each takes a whole processor while it lasts

    def guarded(answer: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if needs_leader(request.method, request.url.path):
                asked = source.identity()
                if not asked.leads:
                    return _not_leader(asked.leader)
            try:
                found = await answer(request)
            except RefusedBody as refused:
                return _error(refused.status, f"{refused.thing} {refused.reason}", refused.remedy)
            except StoreError as failed:
                return _error(503, f"{failed.thing}: {failed.reason}", failed.remedy)
            except OperatorError as wrong:
                status = next((s for kind, s in _STATUSES.items() if isinstance(wrong, kind)), 400)
                return _error(status, f"{wrong.thing}: {wrong.reason}", wrong.remedy)
            return found if isinstance(found, Response) else _json(found)

        return endpoint

    async def status(_request: Request) -> Any:
        return views.status_view(
            source.identity(), source.router(), source.settings(), source.state(), source.unplaced(), source.now(),
            source.ready(),
        )  # fmt: skip

    async def nodes(_request: Request) -> Any:
        state = source.state()
        return {"now": source.now(), "nodes": views.nodes_view(state), "brake": views.brake_view(state)}

    async def models(_request: Request) -> Any:
        state = source.state()
        shown = views.models_view(source.settings(), state, source.unplaced(), source.now())
        return {"now": source.now(), "models": shown, "brake": views.brake_view(state)}

    async def replicas(_request: Request) -> Any:
        state, now = source.state(), source.now()
        return {"now": now, "replicas": views.replicas_view(state, now), "brake": views.brake_view(state)}

    async def decisions(request: Request) -> Any:
        return {"decisions": views.decisions_view(await source.decisions(_limit(request, 50)))}

    async def why(request: Request) -> Any:
        name = request.path_params["name"]
        base = model_of_adapter(name, source.settings())
        stored = await source.decisions(_limit(request, 20), name if base is None else base.name)
        settings, state = source.settings(), source.state()
        found = why_view(name, settings, state, source.unplaced(), source.now(), stored, source.routed)
        return _error(404, *unknown(name, settings, state)) if found is None else found

    async def plan(request: Request) -> Any:
        asked = planning.checked(await structured(request, planning.Question))
        work = partial(planning.answer, asked, source.settings(), source.state(), source.now())
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=plans)

    async def brake(_request: Request) -> Any:
        return {"brake": views.brake_view(source.state()), "now": source.now()}

    async def release(request: Request) -> Any:
        confirmed = named(await json_of(request))
        held = views.brake_view(source.state())
        if held is None:
            return _error(409, "the brake is not on", "there is nothing to release")
        if more := [name for name in held["nodes"] if confirmed is not None and name not in confirmed]:
            return _error(409, f"meanwhile {', '.join(more[:10])} fell silent as well", "look again, and confirm anew")
        try:
            return {"released": await source.release_brake(actor(request)), "nodes": held["nodes"]}
        except OperatorError as failed:
            return _error(503, f"the brake stays on: {failed.thing}: {failed.reason}", failed.remedy)

    async def healthz(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_request: Request) -> Response:
        reason = source.ready()
        return PlainTextResponse(f"{reason or 'ready'}\n", 503 if reason else 200)

    async def metrics(_request: Request) -> Response:
        return Response(source.metrics(), 200, None, "text/plain; version=0.0.4; charset=utf-8")

    async def openapi(_request: Request) -> Any:
        return document()

    async def whoami(request: Request) -> Any:
        return {"name": request.state.actor, "role": request.state.role.value}

    async def names(_request: Request) -> Any:
        state = source.state()
        return {
            "models": [name for model in source.settings().models for name in model.names],
            "nodes": [node.id for node in state.nodes],
            "replicas": [row.id for row in state.replicas],
        }

    made = [
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
        Route("/api/v1/why/{name:path}", guarded(why)),
        Route("/api/v1/plan", guarded(plan), methods=["POST"]),
        Route("/api/v1/brake", guarded(brake)),
        Route("/api/v1/brake/release", guarded(release), methods=["POST"]),
        *(() if jobs is None else job_routes(jobs, source, guarded)),
        *(() if people is None else identity_routes(people, source, guarded)),
        *(() if keys is None else key_routes(keys, source.now, guarded)),
        *(() if history is None else audit_routes(*history, source.now, guarded)),
        *(() if doctors is None else doctor_routes(doctors, guarded)),
        *(() if operations is None else operation_routes(operations, source, guarded)),
        *(() if book is None else settings_routes(book, source, guarded)),
        *(() if admins is None else people_routes(admins, source.now, guarded)),
        Route("/api/v1/openapi.json", guarded(openapi)),
        Route("/api/v1/whoami", guarded(whoami)),
        Route("/api/v1/names", guarded(names)),
    ]
    access = token if isinstance(token, Access) else Access(token)
    watch = Watch(source, jobs, access) if watch is None else watch
    made += watch.routes(guarded)
    open_to = [admitted(route, access) if route.path.startswith("/api/") else route for route in made]
    every = [*open_to, WebSocketRoute("/api/v1/watch", watch.endpoint)]
    return Starlette(routes=every, exception_handlers={404: _missing, 405: _not_possible})


def admitted(route: Route, access: Access) -> Route:
    """The route for those who may use it, as the table says. It has to be in it."""
    methods = (route.methods or set()) - {"HEAD"}
    roles = {method: BY_ROUTE[method, route.path].role for method in methods}

    async def endpoint(request: Request) -> Response:
        wanted = roles.get(request.method, roles.get("GET", Role.ADMIN))
        try:
            who = await access.who(request.headers.get("authorization"), getattr(request.state, "chain", ()))
        except NobodyKnown as nobody:
            return _error(401, f"{nobody.thing} {nobody.reason}", nobody.remedy)
        except OperatorError as failed:
            return _error(503, f"{failed.thing}: {failed.reason}", failed.remedy)
        if not who.role.may(wanted):
            remedy = "ask somebody who may, or for a token of that role: llmgw ctl admin-token create"
            return _error(403, f"{who.name} is {_a(who.role)}, and this takes {_a(wanted)}", remedy)
        if who.by_certificate and not same_origin(request.headers):
            return _error(403, "a page of another site asks, with a certificate that the browser shows by itself",
                          "use the console of this control plane, or a token")  # fmt: skip
        request.state.actor, request.state.role = who.name, who.role
        answer: Response = await route.endpoint(request)
        return answer

    return Route(route.path, endpoint, methods=sorted(methods))


def _a(role: Role) -> str:
    return f"a {role.value}" if role is Role.VIEWER else f"an {role.value}"


_FORMS = tuple((method, compile_path(path)[0]) for method, path in BY_ROUTE)
"""Of everything that a control plane serves: what is left out is a router's."""


async def _missing(request: Request, _error_: Exception) -> Response:
    path = request.url.path
    if methods := {method for method, form in _FORMS if form.match(path)}:
        if request.method not in methods | ({"HEAD"} if "GET" in methods else set()):
            return _only(request.method, methods)
        remedy = (
            "begin with a model that has a profile (llmgw ctl config edit) and link in server.yaml; then nodes can join"
        )
        return _error(404, "this server is a router alone, since no model of its settings has a profile", remedy)
    return _error(404, f"there is no {path[:200]}", "the API is under /api/v1/")


async def _not_possible(request: Request, _error_: Exception) -> Response:
    matching = (r for r in request.app.routes if isinstance(r, Route) and r.matches(request.scope)[0] != Match.NONE)
    return _only(request.method, {name for route in matching for name in route.methods or ()})


def _only(method: str, usable: set[str]) -> Response:
    names = " or ".join(name for name in sorted(usable) if name != "HEAD")
    answer = _error(405, f"{method} is not possible here", f"use {names}")
    answer.headers["allow"] = ", ".join(sorted(usable | ({"HEAD"} if "GET" in usable else set())))
    return answer
