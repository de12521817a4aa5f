"""One client's connection: requests come in, go to an engine, and its answer goes back as it arrives.

One task and one cancel scope a connection. No nursery, scope or time-out a request or chunk: deadlines are plain
attributes that the server's sweeper looks at.
"""

from __future__ import annotations

import secrets

import orjson
import trio

from llmgw.router import errors
from llmgw.router.errors import ApiError
from llmgw.router.exchange import Exchange, Shared
from llmgw.router.http1 import MAX_HEAD_BYTES, BadMessage, ChunkDecoder, RequestHead, parse_request
from llmgw.router.keys import Holder
from llmgw.router.requests import Kind, kind_of, model_asked, model_of
from llmgw.router.sockets import Peer
from llmgw.router.table import Route

HEAD_S = 10.0
IDLE_S = 75.0
STALL_S = 60.0
"""A client that takes or sends nothing for this long is cut; nobody else is slowed by it."""


_KEYED = frozenset({Kind.ENGINE, Kind.MODELS, Kind.MODEL})
_READ_ANYWAY_BYTES = 64 * 1024
"""So much of a refused client's body is read, so that it hears why on a connection that lives on; with more of it on
its way, closing would take the answer with it."""


class Connection:
    """A client. ``deadline`` is when the sweeper cuts it; ``exchange`` the request that is at an engine right now, and
    ``holder`` the key that it came with."""

    def __init__(self, peer: Peer, shared: Shared, scope: trio.CancelScope) -> None:
        self._client = peer
        self._shared = shared
        self._scope = scope
        self.deadline: float | None = None
        self.idle = True
        self.exchange: Exchange | None = None
        self.holder: Holder | None = None

    def sweep(self, now: float) -> None:
        """Cut what has stood still for too long."""
        if self.deadline is not None and now > self.deadline:
            self._scope.cancel(reason="the client stood still")
        if self.exchange is not None:
            self.exchange.sweep(now)

    def leave(self) -> None:
        """The client is gone: everything that is done for it ends here."""
        self._scope.cancel(reason="the client is gone")

    async def serve(self) -> None:
        """Requests one after the other, until either side has enough."""
        rest: bytes | None = b""
        while rest is not None:
            if self.idle and self._shared.draining() and not rest:
                return
            try:
                rest = await self._request(rest)
            except BadMessage as bad:
                await self._refuse(errors.of_message(bad), b"req-" + secrets.token_hex(8).encode())
                return

    async def _refuse(self, error: ApiError, request_id: bytes) -> None:
        self._shared.metrics.rejected(error.status)
        await self._send(errors.response(error, request_id, close=True))

    async def _send(self, data: bytes) -> None:
        self.deadline = self._shared.clock() + STALL_S
        await self._client.send(data)
        self.deadline = None

    async def _receive(self, by: float) -> bytes:
        self.deadline = by
        data = await self._client.receive()
        self.deadline = None
        return data

    async def _request(self, buffer: bytes) -> bytes | None:
        """One request. Returns what was read beyond it, or ``None`` when the connection is over."""
        self.idle = not buffer
        # A head has one deadline from its first byte on: a client that sends it byte by byte gains nothing.
        by = self._shared.clock() + (IDLE_S if self.idle else HEAD_S)
        while (end := buffer.find(b"\r\n\r\n")) < 0:
            if len(buffer) > MAX_HEAD_BYTES:
                raise BadMessage(431, f"the request's head is longer than {MAX_HEAD_BYTES} bytes")
            data = await self._receive(by)
            if not data:
                return None
            if self.idle:
                self.idle, by = False, self._shared.clock() + HEAD_S
            buffer += data
        self.idle = False
        end += 4
        if end > MAX_HEAD_BYTES:
            raise BadMessage(431, f"the request's head is longer than {MAX_HEAD_BYTES} bytes")
        head = parse_request(buffer[:end])
        request_id = head.request_id or b"req-" + secrets.token_hex(8).encode()
        rest: bytes | None = None if head.length or head.chunked else buffer[end:]
        try:
            kind, path = kind_of(head)
            holder, refused = None, None
            if kind in _KEYED:
                try:
                    holder = self._shared.gate.known(head.authorization)
                except ApiError as error:
                    refused = error
            # Of nobody in particular only a small body is read, and an expectation is not met.
            small = not head.chunked and not head.expects_continue and (head.length or 0) <= _READ_ANYWAY_BYTES
            if refused is None or small:
                body, rest = await self._body(head, buffer[end:])
            if refused is not None:
                raise refused
            if kind is Kind.ENGINE:
                whole = await self._at_engine(head, path, request_id, body, holder)
            else:
                await self._own(kind, path, head, request_id, holder)
                whole = True
        except ApiError as error:
            self.exchange = None
            # A body of which nobody knows the end would be read as the next request.
            keep = head.keep_alive and rest is not None and not self._shared.draining()
            self._shared.metrics.rejected(error.status)
            await self._send(errors.response(error, request_id, close=not keep))
            return rest if keep else None
        self.exchange = None
        return rest if whole and head.keep_alive and not self._shared.draining() else None

    async def _body(self, head: RequestHead, buffer: bytes) -> tuple[bytes, bytes]:
        """The request's whole body, and what came behind it."""
        limit = self._shared.directory.table.settings.max_body_bytes
        too_large = ApiError(413, f"The request's body is larger than {limit} bytes.", "body_too_large")
        if head.length is not None and head.length > limit:
            raise too_large
        if head.expects_continue and not buffer and (head.length or head.chunked):
            await self._send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if head.chunked:
            decoder, parts, size = ChunkDecoder(), [], 0
            data = buffer
            while True:
                part = decoder.feed(data)
                size += len(part)
                if size > limit:
                    raise too_large
                parts.append(part)
                if decoder.finished:
                    return b"".join(parts), decoder.rest
                if not (data := await self._receive(self._shared.clock() + STALL_S)):
                    raise BadMessage(400, "the request's body ended early")
        length = head.length or 0
        if len(buffer) >= length:
            return buffer[:length], buffer[length:]
        pieces, missing = [buffer], length - len(buffer)
        while missing > 0:
            if not (data := await self._receive(self._shared.clock() + STALL_S)):
                raise BadMessage(400, "the request's body ended early")
            pieces.append(data)
            missing -= len(data)
        joined = b"".join(pieces)
        return joined[:length], joined[length:]

    # What the router answers by itself.

    async def _own(self, kind: Kind, path: bytes, head: RequestHead, request_id: bytes, holder: Holder | None) -> None:
        status, content, content_type = 200, b"", b"application/json"
        directory = self._shared.directory
        match kind:
            case Kind.MODELS:
                listed = [_model_object(r) for r in directory.routes() if holder is None or holder.allows(r.model)]
                content = orjson.dumps({"object": "list", "data": listed})
            case Kind.MODEL:
                name = model_of(path)
                self._shared.gate.permit(holder, name)
                found = directory.find(name)
                if found is None:
                    raise _unknown_model(name)
                content = orjson.dumps(_model_object(found[0]))
            case Kind.HEALTH:
                content, content_type = b"ok\n", b"text/plain; charset=utf-8"
            case Kind.READY:
                reason = self._shared.ready()
                status = 503 if reason else 200
                content, content_type = f"{reason or 'ready'}\n".encode(), b"text/plain; charset=utf-8"
            case Kind.METRICS:
                content, content_type = self._shared.metrics.render(), b"text/plain; version=0.0.4; charset=utf-8"
            case Kind.ENGINE:
                raise AssertionError("an engine's route")
        head_bytes = b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\nx-request-id: %b\r\n%b\r\n" % (
            status,
            b"OK" if status == 200 else b"Service Unavailable",
            content_type,
            len(content),
            request_id,
            self._connection_line(head),
        )
        await self._send(head_bytes if head.method == b"HEAD" else head_bytes + content)

    def _connection_line(self, head: RequestHead) -> bytes:
        if not head.keep_alive or self._shared.draining():
            return b"connection: close\r\n"
        return b"connection: keep-alive\r\n" if head.minor == 0 else b""

    async def _at_engine(
        self, head: RequestHead, path: bytes, request_id: bytes, body: bytes, holder: Holder | None
    ) -> bool:
        """Have an engine answer. Returns whether the connection can go on after it."""
        if head.length is None and not head.chunked:
            raise ApiError(411, "The request has no body.", "length_required")
        model = model_asked(body)
        self._shared.gate.permit(holder, model)
        found = self._shared.directory.find(model)
        if found is None:
            raise _unknown_model(model)
        with self._shared.gate.admit(holder, path, model, body) as ticket:
            self._shared.directory.asked[model] += 1
            if found[0].hold_s and not any(not engine.draining for engine in found[1]):
                await self._shared.directory.engine_of(model, found[0].hold_s)
                found = self._shared.directory.find(model) or found
            lines = self._connection_line(head) + ticket.lines
            self.holder = holder
            self.exchange = Exchange(self._shared, self._send, head, request_id, model, lines, ticket.filter)
            ticket.answer = self.exchange
            return await self.exchange.run(*found, ticket.body)


def _model_object(route: Route) -> dict[str, object]:
    """As the OpenAI API has it; clients ignore what is in ``llmgw``, operators read there how the model is."""
    how = {"state": route.state, "ready": route.ready, "wanted": route.wanted, "status": route.public}
    return {"id": route.model, "object": "model", "created": route.created, "owned_by": "llmgw", "llmgw": how}


def _unknown_model(name: str) -> ApiError:
    return ApiError(404, f"The model {name[:200]!r} does not exist.", "model_not_found", "model")
