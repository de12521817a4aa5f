"""``/api/v1/watch``: the cluster over a WebSocket, first as it is, then what changes.

One task looks at the memory of the daemon for all who watch, twice a second at most and never for more than a tenth of
the time. Each client has a queue of a few messages; who does not keep up is closed with a reason. Close codes:
https://www.iana.org/assignments/websocket/websocket.xhtml.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import orjson
import trio
from attrs import define, field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.websockets import WebSocket, WebSocketDisconnect

from llmgw.errors import OperatorError
from llmgw.link.identity import Certificate
from llmgw.web import views
from llmgw.web.access import Access, NobodyKnown, same_origin
from llmgw.web.changes import PARTS, change
from llmgw.web.jobs import Guard, Jobs, job_view
from llmgw.web.source import Source

SUBPROTOCOL = "llmgw.watch.v1"
TICKET = "llmgw.ticket."
PERIOD_S = 0.5
DECISIONS = 50
QUEUE = 8
MOST = 64
_TICKET_S = 30.0
_RECHECK_S = 10.0
_CLOSE_S = 2.0

GOING_AWAY = 1001
REFUSED = 1008
TRY_LATER = 1013


@define(eq=False)
class _Client:
    """Somebody who watches. ``seen`` is the picture that the queue ends with."""

    parts: frozenset[str]
    send: trio.MemorySendChannel[dict[str, Any]]
    seen: dict[str, Any]
    reason: str = ""
    sending: trio.CancelScope = field(factory=trio.CancelScope)


class Watch:
    """Who watches, and the tickets with which browsers begin to."""

    def __init__(self, source: Source, jobs: Jobs | None, access: Access) -> None:
        self._source, self._jobs, self._access = source, jobs, access
        self._clients: set[_Client] = set()
        self._arrived = trio.Event()
        self._tickets: dict[str, tuple[float, str]] = {}

    def routes(self, guarded: Guard) -> list[Route]:
        """``watch/ticket``: browsers cannot set a header on a WebSocket."""

        async def ticket(request: Request) -> Any:
            now = trio.current_time()
            self._tickets = {t: held for t, held in self._tickets.items() if held[0] > now}
            if len(self._tickets) >= 1000:
                raise OperatorError("watch", "has too many tickets open", "try again in half a minute")
            made = secrets.token_urlsafe(32)
            self._tickets[made] = (now + _TICKET_S, request.headers.get("authorization", ""))
            return {"ticket": made, "expires": self._source.now() + _TICKET_S}

        return [Route("/api/v1/watch/ticket", guarded(ticket), methods=["POST"])]

    async def run(self) -> None:
        """Tell those who watch what changes, until cancelled."""
        while True:
            await self._arrived.wait()
            while self._clients:
                began = trio.current_time()
                await self._look()
                await trio.sleep(max(PERIOD_S, 10 * (trio.current_time() - began)))
            self._arrived = trio.Event()

    async def _look(self) -> None:
        picture = await self._picture(frozenset().union(*(c.parts for c in self._clients)))
        for client in tuple(self._clients):
            seen = {part: picture[part] for part in client.parts if part in picture}
            told = change(client.seen, seen)
            if told is None:
                continue
            client.seen = seen
            try:
                client.send.send_nowait({"type": "change", "now": self._source.now(), **told})
            except trio.WouldBlock:
                client.reason = f"too slow: {QUEUE} messages wait"
                self._clients.discard(client)
                client.send.close()
                # Who reads nothing at all does not take what waits for it either.
                client.sending.deadline = trio.current_time() + _CLOSE_S

    async def _picture(self, parts: frozenset[str]) -> dict[str, Any]:
        source = self._source
        state, now, settings = source.state(), source.now(), source.settings()
        made: dict[str, Any] = {}
        if "nodes" in parts:
            made["nodes"] = views.nodes_view(state)
        if "models" in parts:
            made["models"] = views.models_view(settings, state, source.unplaced(), now)
        if "replicas" in parts:
            made["replicas"] = views.replicas_view(state, now)
        if "brake" in parts:
            made["brake"] = views.brake_view(state)
        if "status" in parts:
            made["status"] = views.status_view(
                source.identity(), source.router(), settings, state, source.unplaced(), now, source.ready()
            )
            del made["status"]["now"]
        if "jobs" in parts and self._jobs is not None:
            made["jobs"] = [job_view(row, now) for row in self._jobs.rows()]
        if "decisions" in parts:
            made["decisions"] = views.decisions_view(await source.decisions(DECISIONS))
        return made

    async def endpoint(self, socket: WebSocket) -> None:
        """Serve one client."""
        headers = socket.headers
        if not same_origin(headers):
            await _refuse(socket, 403, "a page of another site asks", "use the console of this control plane")
            return
        chain: Sequence[Certificate] = getattr(socket.state, "chain", ())
        header = headers.get("authorization") or self._by_ticket(socket.scope.get("subprotocols", ()))
        parts = frozenset(socket.query_params.get("parts", ",".join(PARTS)).split(","))
        try:
            await self._access.who(header, chain)
        except NobodyKnown as nobody:
            await _refuse(socket, 401, f"{nobody.thing} {nobody.reason}", nobody.remedy)
            return
        except OperatorError as failed:
            await _refuse(socket, 503, f"{failed.thing}: {failed.reason}", failed.remedy)
            return
        if not parts <= set(PARTS):
            await _refuse(socket, 400, f"parts: expected some of {', '.join(PARTS)}", "")
            return
        if len(self._clients) >= MOST:
            await _refuse(socket, 503, f"{MOST} watch already", "try again later")
            return
        offered = socket.scope.get("subprotocols", ())
        await socket.accept(subprotocol=SUBPROTOCOL if SUBPROTOCOL in offered else None)
        await self._serve(socket, header, chain, parts)

    def _by_ticket(self, offered: Sequence[str]) -> str | None:
        for word in offered:
            if word.startswith(TICKET):
                ends, header = self._tickets.pop(word.removeprefix(TICKET), (0.0, ""))
                # Who came without a header has a certificate, and shows it here too.
                return (header or None) if trio.current_time() < ends else "Bearer nothing"
        return None

    async def _serve(
        self, socket: WebSocket, header: str | None, chain: Sequence[Certificate], parts: frozenset[str]
    ) -> None:
        send, receive = trio.open_memory_channel[dict[str, Any]](QUEUE)
        client = _Client(parts, send, await self._picture(parts))
        send.send_nowait({"type": "snapshot", "now": self._source.now(), **client.seen})
        self._clients.add(client)
        self._arrived.set()
        code, reason = GOING_AWAY, "the control plane stops"
        try:
            async with trio.open_nursery() as nursery:

                async def hear() -> None:
                    try:
                        while True:
                            await socket.receive_text()
                    except (WebSocketDisconnect, KeyError):
                        nursery.cancel_scope.cancel()

                async def still() -> None:
                    nonlocal code, reason
                    while True:
                        await trio.sleep(_RECHECK_S)
                        try:
                            await self._access.who(header, chain)
                        except OperatorError as wrong:
                            code, reason = REFUSED, f"{wrong.thing} {wrong.reason}"
                            nursery.cancel_scope.cancel()

                nursery.start_soon(hear)
                nursery.start_soon(still)
                with client.sending:
                    async for message in receive:
                        await socket.send_text(orjson.dumps(message).decode())
                code, reason = TRY_LATER, client.reason
                nursery.cancel_scope.cancel()
        except WebSocketDisconnect:
            return
        finally:
            self._clients.discard(client)
            send.close()
        with trio.move_on_after(_CLOSE_S):
            with suppress(WebSocketDisconnect, RuntimeError):  # it left by itself
                await socket.close(code, reason[:120])


async def _refuse(socket: WebSocket, status: int, reason: str, remedy: str) -> None:
    body = orjson.dumps({"error": {"reason": reason, "remedy": remedy}})
    await socket.send_denial_response(Response(body, status, {"cache-control": "no-store"}, "application/json"))
