"""One client's connection: requests come in, go to an engine, and its answer goes back as it arrives.

One task and one cancel scope a connection. No nursery, scope or time-out a request or chunk: deadlines are plain
attributes that the server's sweeper looks at. Bytes are waited for outside of Trio, see :mod:`llmgw.router.steps`, so
whatever awaits something of Trio's goes to its own task first.
"""

from __future__ import annotations

import socket
from functools import partial

import orjson
import trio
from attrs import evolve

from llmgw.router import errors
from llmgw.router.body import asked_in_json
from llmgw.router.choose import conversation
from llmgw.router.chunks import ChunkDecoder
from llmgw.router.errors import ApiError, Dialect
from llmgw.router.exchange import Exchange
from llmgw.router.form import asked_in_form, renamed
from llmgw.router.http1 import MAX_HEAD_BYTES, BadMessage, RequestHead, parse_request
from llmgw.router.keys import Holder
from llmgw.router.requests import Kind, Target, target_of
from llmgw.router.rewrite import SALTED, rewritten
from llmgw.router.shared import Shared
from llmgw.router.sockets import Peer
from llmgw.router.steps import Steps, own_task
from llmgw.router.table import Route
from llmgw.router.telling import Told
from llmgw.settings.catalog import Balance

HEAD_S = 10.0
IDLE_S = 75.0
STALL_S = 60.0
"""A client that takes or sends nothing for this long is cut; nobody else is slowed by it."""


LINGER_S = 5.0

_READ_ANYWAY_BYTES = 64 * 1024
"""So much of a refused client's body is read, so that it hears why on a connection that lives on; with more of it on
its way, closing would take the answer with it."""

_LARGE_BYTES = 256 * 1024
"""What is larger is read in a thread: one that consists of tiny things takes longer than others may wait."""

_CHUNKS_A_TURN = 500
"""So many chunks of a body are taken apart before others have their turn: half a millisecond."""

_ANSWER_TOKENS = 256
"""How many new tokens a request counts for that does not bound them."""


class Connection:
    """A client. ``deadline`` is when the sweeper cuts it; ``exchange`` the request that is at an engine right now, and
    ``holder`` the key of the one that is under way; ``gone`` whether it left, or stood still for too long."""

    def __init__(self, peer: Peer, shared: Shared, scope: trio.CancelScope) -> None:
        self._client = peer
        self._shared = shared
        self._scope = scope
        self.deadline: float | None = None
        self.steps: Steps | None = None
        self.idle = True
        self.gone = False
        self.exchange: Exchange | None = None
        self.holder: Holder | None = None
        self.request_id = b""
        self._asked = ""
        self._told: Told | None = None
        self._cors = b""
        self._said_close = False
        self._head: RequestHead | None = None
        self._target = Target(Kind.ENGINE)

    def asked_already(self) -> bool:
        """Whether something has arrived that nobody has read yet."""
        try:
            return bool(socket.socket.recv(self._client.sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def sweep(self, now: float) -> None:
        """Cut what has stood still for too long."""
        if self.deadline is not None and now > self.deadline:
            self.gone = True
            self._scope.cancel(reason="the client stood still")
        if self.exchange is not None:
            self.exchange.sweep(now)

    def leave(self) -> None:
        """The client is gone: everything that is done for it ends here."""
        self.gone = True
        self._scope.cancel(reason="the client is gone")

    def cut(self, reason: str) -> None:
        """End everything that is done for it, through no fault of its own."""
        self._scope.cancel(reason=reason)

    async def serve(self) -> None:
        """Requests one after the other, until either side has enough."""
        rest: bytes | None = b""
        while rest is not None:
            try:
                rest = await self._request(rest)
                if rest:
                    await own_task()
                    await trio.lowlevel.checkpoint()  # whoever sends many at once does not keep the others waiting
            except BadMessage as bad:
                await self._refuse(errors.of_message(bad), self.request_id or self._shared.ids())
                return
            except OSError:
                self.gone = True
                raise
            finally:
                if self._told is not None:
                    self._tell(self._told)

    def _tell(self, told: Told) -> None:
        self._told = None
        told.teller.end(told, gone=self.gone)

    async def _refuse(self, error: ApiError, request_id: bytes) -> None:
        self._shared.metrics.rejected(error.status)
        if self._told is not None:
            self._told.status, self._told.code = error.status, error.code or ""
        await self._send(errors.response(error, request_id, close=True, more=self._cors))
        await self._linger()

    async def _linger(self) -> None:
        """Take in, for a moment, what a refused client is still sending: closing over it would take the answer along
        (RFC 9112, 9.6). The sweeper ends it."""
        if self._told is not None:
            self._tell(self._told)
        self._client.finish()
        by = self._shared.clock() + LINGER_S
        while await self._receive(by):
            pass

    async def _send(self, data: bytes | memoryview) -> None:
        left = self._client.put(data)
        while left:
            self.deadline = self._shared.ticker.now + STALL_S
            left = await self._client.send_some(left)
        self.deadline = None

    async def _receive(self, by: float) -> bytes:
        self.deadline = by
        data = await self._client.receive()
        self.deadline = None
        return data

    async def _request(self, buffer: bytes) -> bytes | None:
        """One request. Returns what was read beyond it, or ``None`` when the connection is over."""
        self.idle = not buffer
        self.request_id = self._cors = b""
        # A head has one deadline from its first byte on: a client that sends it byte by byte gains nothing.
        by = self._shared.ticker.now + (IDLE_S if self.idle else HEAD_S)
        while (end := buffer.find(b"\r\n\r\n")) < 0:
            if len(buffer) > MAX_HEAD_BYTES:
                raise BadMessage(431, f"the request's head is longer than {MAX_HEAD_BYTES} bytes")
            ends = buffer.count(b"\r\n")
            if not buffer.count(b"\n") == ends == buffer.count(b"\r") - buffer.endswith(b"\r"):
                raise BadMessage(400, "a line of the request's head ends without CR and LF")  # its end would never come
            self.deadline = by
            data = await self._client.receive()
            self.deadline = None
            if not data:
                return None
            if self.idle:
                self.idle, by = False, self._shared.ticker.now + HEAD_S
            buffer = buffer + data if buffer else data
        self.idle = False
        end += 4
        if end > MAX_HEAD_BYTES:
            raise BadMessage(431, f"the request's head is longer than {MAX_HEAD_BYTES} bytes")
        head = parse_request(buffer[:end])
        request_id = self.request_id = head.request_id or self._shared.ids()
        front = self._shared.front
        if front.cors is not None and head.origin:
            self._cors = front.cors.lines(head.origin)
        if front.teller is not None:
            self._told = front.teller.begin(head, request_id, self._client)
        rest: bytes | None = None if head.length or head.chunked else buffer[end:]
        dialect = Dialect.OPENAI
        try:
            # A client's heads are the same as a rule, and then what was remembered of them is the same object.
            if head is not self._head:
                self._target, self._head = target_of(head), head
            target = self._target
            dialect = target.dialect
            settings = self._shared.directory.table.settings
            limit = settings.max_media_bytes if target.media else settings.max_body_bytes
            holder, refused = None, None
            if target.keyed:
                try:
                    holder = self._shared.gate.known(head.authorization)
                except ApiError as error:
                    refused = error
            # Of nobody in particular only a small body is read, and an expectation is not met.
            small = not head.chunked and not head.expects_continue and (head.length or 0) <= _READ_ANYWAY_BYTES
            if refused is None or small:
                length = head.length
                if length is not None and length <= limit and len(buffer) == end + length:
                    body, rest = buffer[end:], b""  # as a rule all of it is there
                else:
                    body, rest = await self._body(head, buffer[end:], limit)
                    if holder is not None:
                        holder = self._shared.gate.known(head.authorization)  # as it is now that all of it is there
            if refused is not None:
                raise refused
            if target.kind is Kind.ENGINE:
                whole = await self._at_engine(head, target, request_id, body, holder)
            else:
                await self._own(target, head, request_id, holder)
                whole = True
        except ApiError as error:
            self.exchange = self.holder = None
            if self._asked:
                self._shared.directory.refused.add(self._asked, error.code or "", error.message)
                self._asked = ""
            # A body of which nobody knows the end would be read as the next request.
            keep = head.keep_alive and rest is not None and not self._shared.draining()
            self._shared.metrics.rejected(error.status)
            if self._told is not None:
                self._told.status, self._told.code = error.status, error.code or ""
            bodiless = head.method == b"HEAD"
            await self._send(
                errors.response(error, request_id, close=not keep, dialect=dialect, more=self._cors, bodiless=bodiless)
            )
            if rest is None:
                await self._linger()
            return rest if keep else None
        self.exchange = self.holder = None
        self._asked = ""
        # What its answer said holds: a client that was not told goes on with this connection.
        return rest if whole and head.keep_alive and not self._said_close else None

    async def _body(self, head: RequestHead, buffer: bytes, limit: int) -> tuple[bytes, bytes]:
        """The request's whole body, and what came behind it."""
        if head.length is not None and head.length > limit:
            raise _too_large(limit)
        if head.expects_continue and not buffer and (head.length or head.chunked):
            await self._send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if head.chunked:
            decoder, parts, size = ChunkDecoder(_CHUNKS_A_TURN), [], 0
            data = buffer
            while True:
                part = decoder.feed(data)
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
                if decoder.finished:
                    return b"".join(parts), decoder.rest
                if decoder.behind:
                    await own_task()
                    await trio.lowlevel.checkpoint()
                    data = b""
                elif not (data := await self._receive(self._shared.ticker.now + STALL_S)):
                    raise BadMessage(400, "the request's body ended early")
        length = head.length or 0
        if len(buffer) >= length:
            return buffer[:length], buffer[length:]
        pieces, missing = [buffer], length - len(buffer)
        while missing > 0:
            if not (data := await self._receive(self._shared.ticker.now + STALL_S)):
                raise BadMessage(400, "the request's body ended early")
            pieces.append(data)
            missing -= len(data)
        joined = b"".join(pieces)
        return joined[:length], joined[length:]

    # What the router answers by itself.

    async def _own(self, target: Target, head: RequestHead, request_id: bytes, holder: Holder | None) -> None:
        status, content, content_type = 200, b"", b"application/json"
        directory = self._shared.directory
        match target.kind:
            case Kind.MODELS:
                listed = [
                    _model_object(r)
                    for r in directory.routes()
                    if holder is None or holder.allows(r.alias_of or r.model)
                ]
                content = orjson.dumps({"object": "list", "data": listed})
            case Kind.MODEL:
                found = directory.find(target.name)
                self._shared.gate.permit(holder, target.name if found is None else found.route.model)
                if found is None:
                    raise _unknown_model(target.name)
                content = orjson.dumps(_model_object(evolve(found.route, model=target.name)))
            case Kind.HEALTH:
                content, content_type = b"ok\n", b"text/plain; charset=utf-8"
            case Kind.READY:
                reason = self._shared.ready()
                status = 503 if reason else 200
                content, content_type = f"{reason or 'ready'}\n".encode(), b"text/plain; charset=utf-8"
            case Kind.METRICS:
                content, content_type = await self._scrape(), b"text/plain; version=0.0.4; charset=utf-8"
            case Kind.OPTIONS:
                await self._options(target, head, request_id)
                return
            case Kind.ENGINE:
                raise AssertionError("an engine's route")
        if self._told is not None:
            self._told.status = status
        head_bytes = b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\nx-request-id: %b\r\n%b%b\r\n" % (
            status,
            b"OK" if status == 200 else b"Service Unavailable",
            content_type,
            len(content),
            request_id,
            self._cors,
            self._connection_line(head),
        )
        await self._send(head_bytes if head.method == b"HEAD" else head_bytes + content)

    async def _scrape(self) -> bytes:
        await own_task()
        return await self._shared.front.scrape()

    async def _options(self, target: Target, head: RequestHead, request_id: bytes) -> None:
        """What is possible here, and for a browser what a page of its origin may do."""
        cors, lines = self._shared.front.cors, self._cors
        if cors is not None and head.origin:
            lines += cors.preflight(head.origin, target.allow, head.asks_fields)
        if self._told is not None:
            self._told.status = 204
        await self._send(
            b"HTTP/1.1 204 No Content\r\nallow: %b\r\nx-request-id: %b\r\n%b%b\r\n"
            % (target.allow.encode(), request_id, lines, self._connection_line(head))
        )

    def _connection_line(self, head: RequestHead) -> bytes:
        self._said_close = not head.keep_alive or self._shared.draining()
        if self._said_close:
            return b"connection: close\r\n"
        return b"connection: keep-alive\r\n" if head.minor == 0 else b""

    async def _at_engine(
        self, head: RequestHead, target: Target, request_id: bytes, body: bytes, holder: Holder | None
    ) -> bool:
        """Have an engine answer. Returns whether the connection can go on after it."""
        self.holder = holder
        if head.length is None and not head.chunked:
            raise ApiError(411, "The request has no body.", "length_required")
        directory = self._shared.directory
        if target.form:
            asked = asked_in_form(body, head.content_type)
        elif len(body) <= _LARGE_BYTES:
            asked = asked_in_json(body, directory.table.settings.media_hosts)
        else:
            hosts = directory.table.settings.media_hosts
            await own_task()
            asked = await trio.to_thread.run_sync(asked_in_json, body, hosts, limiter=self._shared.readers)
        served = directory.find(asked.model)
        model = asked.model if served is None else served.route.model
        self._asked = "" if served is None else model
        told = self._told
        if told is not None:
            told.model, told.key = model, "" if holder is None else holder.key.id
            if told.span is not None:
                head = evolve(head, forwarded=told.teller.passed_on(told, head.forwarded))
        self._shared.gate.permit(holder, model)
        if served is None:
            raise _unknown_model(model)
        with self._shared.gate.admit(holder, target.path, model, body, asked) as ticket:
            directory.asked[model] += 1
            if not directory.open(served):
                await own_task()
                served = await directory.turn(served, _tenant(holder))
            lines = self._connection_line(head) + self._cors + ticket.lines
            self.exchange = Exchange(
                self._shared,
                self.steps,
                self._client.put,
                self._send,
                head,
                request_id,
                model,
                lines,
                ticket.filter,
                target.dialect,
            )
            ticket.answer = self.exchange
            if told is not None:
                told.answer = self.exchange
            key = None
            if len(served.engines) > 1 and (head.session or served.route.routing.balance is Balance.PREFIX):
                key = conversation(asked.start, head.session)
            tokens = len(body) // 4 + (asked.most_tokens or _ANSWER_TOKENS)
            body = ticket.body
            if target.form:
                body = body if model == asked.model else renamed(body, head.content_type, model)
            else:
                salted = served.salted and target.path in SALTED
                salt = _tenant(holder) if salted else None
                if salted or model != asked.model or asked.salt:
                    made = partial(rewritten, body, None if model == asked.model else model, salt or None)
                    large = len(body) > _LARGE_BYTES
                    if large:
                        await own_task()
                    body = await trio.to_thread.run_sync(made, limiter=self._shared.readers) if large else made()
            try:
                return await self.exchange.run(served, body, tokens, key)
            finally:
                if head.minor == 0 and self.exchange.status and not self.exchange.whole:
                    self._client.reset()  # where the connection's end is that of an answer, it would look complete


def _tenant(holder: Holder | None) -> str:
    """Whose request it is: keys of one owner take turns as one, and share an engine's cache."""
    return "" if holder is None else holder.key.owner or holder.key.id


def _model_object(route: Route) -> dict[str, object]:
    """As the OpenAI API has it; clients ignore what is in ``llmgw``, operators read there how the model is."""
    how = {"state": route.state, "ready": route.ready, "wanted": route.wanted, "status": route.public}
    return {"id": route.model, "object": "model", "created": route.created, "owned_by": "llmgw", "llmgw": how}


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request's body is larger than {limit} bytes.", "body_too_large")


def _unknown_model(name: str) -> ApiError:
    return ApiError(404, f"The model {name[:200]!r} does not exist.", "model_not_found", "model")
