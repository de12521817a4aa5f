"""One client's connection: requests come in, go to an engine, and its answer goes back as it arrives.

One task and one cancel scope a connection. No nursery, scope or time-out a request or chunk: deadlines are plain
attributes that the server's sweeper looks at.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import NoReturn

import orjson
import trio
from attrs import define, field, frozen

from llmgw.router import errors
from llmgw.router.choose import choose
from llmgw.router.errors import ApiError
from llmgw.router.http1 import (
    MAX_HEAD_BYTES,
    BadMessage,
    ChunkDecoder,
    ChunkWalker,
    RequestHead,
    ResponseHead,
    parse_request,
    parse_response,
)
from llmgw.router.metrics import RouterMetrics
from llmgw.router.pool import Directory, Engine
from llmgw.router.requests import Kind, kind_of, model_of, read_body
from llmgw.router.sockets import Peer
from llmgw.router.usage import TAIL_BYTES, usage_of
from llmgw.telemetry.logging import logger

HEAD_S = 10.0
IDLE_S = 75.0
STALL_S = 60.0
"""A client that takes or sends nothing for this long is cut; nobody else is slowed by it."""

_RETRIES = 2
_RETRY_AFTER_S = 2
_JOIN_BYTES = 64 * 1024

_log = logger("router")


@frozen
class Shared:
    """What every connection of a worker shares."""

    directory: Directory
    metrics: RouterMetrics
    clock: Callable[[], float]
    ready: Callable[[], str]
    draining: Callable[[], bool]


class EngineFailed(Exception):
    """An engine gave no answer, or not all of it; nothing of it was passed on yet."""

    def __init__(self, reason: str, *, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.timed_out = timed_out


@define(eq=False)
class Exchange:
    """One request at one engine."""

    head: RequestHead
    request_id: bytes
    model: str
    stream: bool
    began: float
    sent_to_client: bool = False
    first_byte: float = 0.0
    tail: bytes = b""
    tried: set[int] = field(factory=set)


class Connection:
    """A client. ``deadline`` is when the sweeper cuts it; ``engine_deadline`` when it gives the engine up.

    ``model`` is the one whose engine is being asked right now.
    """

    def __init__(self, peer: Peer, shared: Shared, scope: trio.CancelScope) -> None:
        self._client = peer
        self._shared = shared
        self._scope = scope
        self.deadline: float | None = None
        self.engine_deadline: float | None = None
        self._upstream: Peer | None = None
        self._gave_up = False
        self.idle = True
        self.model: str | None = None

    def sweep(self, now: float) -> None:
        """Cut what has stood still for too long."""
        if self.deadline is not None and now > self.deadline:
            self._scope.cancel(reason="the client stood still")
        if self.engine_deadline is not None and now > self.engine_deadline and self._upstream is not None:
            self._gave_up = True
            self.engine_deadline = None
            self._upstream.abort()

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
            body, rest = await self._body(head, buffer[end:])
            if kind is Kind.ENGINE:
                whole = await self._exchange(head, request_id, body)
            else:
                await self._own(kind, path, head, request_id)
                whole = True
        except ApiError as error:
            # A body of which nobody knows the end would be read as the next request.
            keep = head.keep_alive and rest is not None and not self._shared.draining()
            self._shared.metrics.rejected(error.status)
            await self._send(errors.response(error, request_id, close=not keep))
            return rest if keep else None
        self.model = None
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

    async def _own(self, kind: Kind, path: bytes, head: RequestHead, request_id: bytes) -> None:
        status, content, content_type = 200, b"", b"application/json"
        directory = self._shared.directory
        match kind:
            case Kind.MODELS:
                listed = [_model_object(r.model, r.created) for r in directory.routes()]
                content = orjson.dumps({"object": "list", "data": listed})
            case Kind.MODEL:
                name = model_of(path)
                found = directory.find(name)
                if found is None:
                    raise _unknown_model(name)
                content = orjson.dumps(_model_object(name, found[0].created))
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

    # What engines answer.

    async def _exchange(self, head: RequestHead, request_id: bytes, body: bytes) -> bool:
        """Find an engine and pass its answer on. Returns whether the connection can go on after it."""
        if head.length is None and not head.chunked:
            raise ApiError(411, "The request has no body.", "length_required")
        model, stream = read_body(body)
        found = self._shared.directory.find(model)
        if found is None:
            raise _unknown_model(model)
        route, engines = found
        self.model = model
        exchange = Exchange(head, request_id, model, stream, self._shared.clock())
        start = head.method + b" " + head.target + b" HTTP/1.1\r\n"
        fields = head.forwarded + b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (request_id, len(body))
        last = ""
        for _ in range(1 + _RETRIES):
            now = self._shared.clock()
            index = choose(engines, exchange.tried, int(now * 1000) + len(exchange.tried), now)
            if index is None:
                break
            engine = engines[index]
            exchange.tried.add(index)
            with engine.busy():
                try:
                    return await self._ask(engine, exchange, start + engine.head_lines + fields, body)
                except EngineFailed as failed:
                    last = failed.reason
                    engine.failed(self._shared.clock())
                    self._shared.metrics.retried(model, engine.endpoint.id)
                    _log.warning(
                        "engine failed", model=model, endpoint=engine.endpoint.id, reason=last,
                        request_id=request_id.decode(),
                    )  # fmt: skip
                    if failed.timed_out:
                        raise ApiError(
                            504, f"The engine of {model} did not answer in time.", "engine_timeout"
                        ) from failed
        if last:
            raise ApiError(502, f"No engine of {model} gave an answer; the last one {last}.", "engine_failed")
        why = f": {route.reason}" if route.reason else ""
        raise ApiError(503, f"No replica of {model} is ready{why}.", "no_ready_replica", retry_after_s=_RETRY_AFTER_S)

    async def _ask(self, engine: Engine, exchange: Exchange, head: bytes, body: bytes) -> bool:
        """One engine, on a kept connection or a new one. Raises :class:`EngineFailed` as long as it can be retried."""
        settings = self._shared.directory.table.settings
        request = head + body if len(body) < _JOIN_BYTES else head
        while True:
            peer = engine.take_idle(self._shared.clock())
            reused = peer is not None
            if peer is None:
                try:
                    peer = await engine.connect(settings.connect_timeout_s)
                except OSError as failed:
                    raise EngineFailed(f"cannot be reached ({failed.strerror or failed})") from failed
            keep = False
            self._upstream, self._gave_up = peer, False
            try:
                self.engine_deadline = self._shared.clock() + settings.first_byte_timeout_s
                try:
                    await peer.send(request)
                    if len(body) >= _JOIN_BYTES:
                        await peer.send(body)
                    first = await peer.receive()
                except OSError as failed:
                    first, cause = b"", failed.strerror or str(failed)
                else:
                    cause = "closed the connection before its answer"
                if not first:
                    if self._gave_up:
                        raise EngineFailed(f"sent nothing for {settings.first_byte_timeout_s:g} s", timed_out=True)
                    if reused:
                        continue  # it had closed the kept connection meanwhile; that says nothing about the engine
                    raise EngineFailed(cause)
                keep = await self._answer(peer, first, engine, exchange)
                return keep or exchange.head.minor == 1
            except _Broken:
                return False
            finally:
                self._upstream, self.engine_deadline = None, None
                if keep:
                    engine.give_back(peer, self._shared.clock())
                else:
                    peer.close()

    async def _more(self, peer: Peer) -> bytes:
        """More of the engine's answer; its time to the next bytes begins anew."""
        self.engine_deadline = self._shared.clock() + self._shared.directory.table.settings.idle_timeout_s
        try:
            return await peer.receive()
        except OSError:
            return b""

    async def _answer(self, peer: Peer, data: bytes, engine: Engine, exchange: Exchange) -> bool:
        """Pass one answer on. Returns whether the engine's connection can be kept.

        The head is held until the first bytes of the body are there: an engine that dies in between is retried.
        """
        try:
            while True:
                while (end := data.find(b"\r\n\r\n")) < 0:
                    if len(data) > MAX_HEAD_BYTES:
                        raise BadMessage(502, "the engine's head is too long")
                    if not (more := await self._more(peer)):
                        raise EngineFailed("closed the connection within its head", timed_out=self._gave_up)
                    data += more
                response = parse_response(data[: end + 4])
                data = data[end + 4 :]
                if response.status >= 200:
                    break
            bodiless = response.status in (204, 304) or response.length == 0
            while not data and not bodiless:
                if not (data := await self._more(peer)):
                    if not response.chunked and response.length is None and not self._gave_up:
                        break  # a body that ends with the connection, and is empty
                    raise EngineFailed("closed the connection before its answer's body", timed_out=self._gave_up)
        except BadMessage as bad:
            raise EngineFailed(bad.reason) from bad
        exchange.first_byte = self._shared.clock()
        engine.worked()
        keep = await self._relay(peer, response, data, engine, exchange, bodiless=bodiless)
        now = self._shared.clock()
        self._shared.metrics.answered(
            exchange.model,
            engine.endpoint.id,
            response.status,
            now - exchange.began,
            exchange.first_byte - exchange.began,
            usage_of(exchange.tail),
        )
        return keep and response.keep_alive

    async def _relay(
        self, peer: Peer, response: ResponseHead, data: bytes, engine: Engine, exchange: Exchange, *, bodiless: bool
    ) -> bool:
        """Head and body, as they come. Returns whether the body ended exactly where it said."""
        more = b"x-request-id: " + exchange.request_id + b"\r\n" + self._connection_line(exchange.head) + b"\r\n"
        if bodiless:
            await self._send(response.start + more)
            return not data
        if response.chunked and exchange.head.minor == 1:
            return await self._relay_chunked(peer, response, response.start + more, data, engine, exchange)
        if response.length is not None:
            return await self._relay_sized(peer, response, response.start + more, data, engine, exchange)
        return await self._relay_rest(peer, response, more, data, engine, exchange)

    async def _relay_chunked(
        self, peer: Peer, response: ResponseHead, head: bytes, data: bytes, engine: Engine, exchange: Exchange
    ) -> bool:
        walker = ChunkWalker()
        send = head
        while True:
            try:
                end = walker.feed(data)
            except BadMessage as bad:
                await self._break(engine, exchange, response, bad.reason, between_chunks=False, sent=not send)
            if end >= 0:
                exact = end == len(data)
                data = data[:end]
            exchange.tail = data[-TAIL_BYTES:] if len(data) >= TAIL_BYTES else (exchange.tail + data)[-TAIL_BYTES:]
            await self._send(send + data if send else data)
            send = b""
            if end >= 0:
                return exact
            if not (data := await self._more(peer)):
                why = "stood still for too long" if self._gave_up else "ended the connection within its answer"
                await self._break(engine, exchange, response, why, between_chunks=walker.between_chunks, sent=True)

    async def _relay_sized(
        self, peer: Peer, response: ResponseHead, head: bytes, data: bytes, engine: Engine, exchange: Exchange
    ) -> bool:
        assert response.length is not None
        left = response.length
        exact = len(data) <= left
        data = data[:left]
        send = head
        while True:
            left -= len(data)
            exchange.tail = (exchange.tail + data)[-TAIL_BYTES:]
            await self._send(send + data if send else data)
            send = b""
            if left == 0:
                return exact
            if not (data := await self._more(peer)):
                why = "stood still for too long" if self._gave_up else "ended the connection within its answer"
                await self._break(engine, exchange, response, why, between_chunks=False, sent=True)
            exact = exact and len(data) <= left
            data = data[:left]

    async def _relay_rest(
        self, peer: Peer, response: ResponseHead, more: bytes, data: bytes, engine: Engine, exchange: Exchange
    ) -> bool:
        """A body that ends with the engine's connection, or a chunked one for a client that knows no chunks."""
        chunks_out = exchange.head.minor == 1
        decoder = ChunkDecoder() if response.chunked else None
        framing = b"transfer-encoding: chunked\r\n" if chunks_out else b"connection: close\r\n"
        send = response.start_unframed + framing + more.replace(b"connection: keep-alive\r\n", b"")
        try:
            while True:
                part = data if decoder is None else decoder.feed(data)
                exchange.tail = (exchange.tail + part)[-TAIL_BYTES:]
                if part or send:
                    framed = b"%x\r\n%b\r\n" % (len(part), part) if chunks_out and part else part
                    await self._send(send + framed)
                    send = b""
                finished = decoder is not None and decoder.finished
                if finished or not (data := await self._more(peer)):
                    break
        except BadMessage as bad:
            await self._break(engine, exchange, response, bad.reason, between_chunks=False, sent=True)
        if self._gave_up or (decoder is not None and not decoder.finished):
            await self._break(
                engine, exchange, response, "ended within its answer", between_chunks=chunks_out, sent=True
            )
        if chunks_out:
            await self._send(b"0\r\n\r\n")
        return False

    async def _break(
        self, engine: Engine, exchange: Exchange, response: ResponseHead, why: str, *, between_chunks: bool, sent: bool
    ) -> NoReturn:
        """An answer ends in its middle: say so in the stream where that is possible, and never end it cleanly."""
        self._shared.metrics.broken(exchange.model, engine.endpoint.id)
        engine.failed(self._shared.clock())
        _log.warning(
            "answer cut short", model=exchange.model, endpoint=engine.endpoint.id, reason=why,
            request_id=exchange.request_id.decode(),
        )  # fmt: skip
        if sent and response.event_stream and between_chunks and exchange.head.minor == 1:
            gap = b"" if _ends_event(exchange.tail) else b"\n\n"
            event = gap + errors.stream_event(f"The engine of {exchange.model} {why}.")
            await self._send(b"%x\r\n%b\r\n" % (len(event), event))
        raise _Broken


class _Broken(Exception):
    """The answer was cut short: the client's connection has to end without looking complete."""


def _ends_event(tail: bytes) -> bool:
    """Whether a chunked event stream's last chunk ended an event, so that a new one can begin."""
    return tail.endswith((b"\n\n\r\n", b"\r\n\r\n\r\n"))


def _model_object(name: str, created: int) -> dict[str, object]:
    return {"id": name, "object": "model", "created": created, "owned_by": "llmgw"}


def _unknown_model(name: str) -> ApiError:
    return ApiError(404, f"The model {name[:200]!r} does not exist.", "model_not_found", "model")
