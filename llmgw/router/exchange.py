"""One request at the engines: which one, and its answer passed on as it arrives.

No nursery, scope or time-out a request or chunk: the deadline for the engine's next bytes is a plain attribute that
the server's sweeper looks at.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

import trio

from llmgw.router import errors
from llmgw.router.choose import choose
from llmgw.router.errors import ApiError, Dialect
from llmgw.router.http1 import (
    MAX_HEAD_BYTES,
    BadMessage,
    RequestHead,
    ResponseHead,
    parse_response,
)
from llmgw.router.passage import Cut, Passage
from llmgw.router.pool import Engine, Served, Timeouts
from llmgw.router.shared import Shared
from llmgw.router.sockets import Peer
from llmgw.router.steps import Steps, own_task
from llmgw.router.usage import TAIL_BYTES, own_error, usage_of
from llmgw.router.usage_filter import UsageFilter
from llmgw.telemetry.logging import logger

_RETRIES = 2
_RETRY_AFTER_S = 2
_JOIN_BYTES = 64 * 1024

_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOMEM})
"""That no file, or no room to watch one, is left here is no fault of an engine's."""

_log = logger("router")


class EngineFailed(Exception):
    """An engine gave no answer, or not all of it; nothing of it was passed on yet. ``busy``: it has no room."""

    def __init__(self, reason: str, *, timed_out: bool = False, busy: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.timed_out = timed_out
        self.busy = busy


class Exchange:
    """One request of one client. ``put`` writes to it what can be written at once, ``send`` all of what is left;
    ``connection_line`` is what its answer's head says.

    For whoever settles: the ``endpoint`` that was asked last, ``status`` of the engine's answer (0: none came), its
    ``usage``, the bytes of its body that were ``passed`` on and their ``tail``, whether it was ``whole``, and whether
    it consists of ``events``.
    """

    # What a request begins with stands here once: most of it is never set for a request that goes well.
    endpoint = ""
    status = 0
    usage: tuple[int, int] | None = None
    whole = False
    events = False
    tail = b""
    _passed = 0
    _first_byte = 0.0
    _tried: tuple[int, ...] = ()
    _upstream: Peer | None = None
    _deadline: float | None = None
    _patience_s = 0.0
    _ends = math.inf
    _gave_up = ""
    _engines: Sequence[Engine] = ()
    _passage: Passage | None = None
    _timeouts: Timeouts

    def __init__(
        self,
        shared: Shared,
        steps: Steps | None,
        put: Callable[[bytes], bytes | memoryview],
        send: Callable[[bytes | memoryview], Awaitable[None]],
        head: RequestHead,
        request_id: bytes,
        model: str,
        connection_line: bytes,
        events_filter: UsageFilter | None = None,
        dialect: Dialect = Dialect.OPENAI,
    ) -> None:
        self.model = model
        self._filter = events_filter
        self._dialect = dialect
        self._shared = shared
        self._steps = steps
        self._ticker = shared.ticker
        self._put = put
        self._send = send
        self._head = head
        self._request_id = request_id
        self._connection_line = connection_line
        self._began = shared.clock()

    @property
    def passed(self) -> int:
        """Bytes of the answer's body that were passed on."""
        return self._passed if self._passage is None else self._passage.passed

    @property
    def first_byte(self) -> float:
        """When the first byte of an answer's body came; 0: none did."""
        return self._first_byte

    def sweep(self, now: float) -> None:
        """Give an engine up that was silent for too long, or a request that took too long in all."""
        if self._upstream is None or self._gave_up:
            return
        if self._passage is not None and (heard := self._passage.heard) is not None:
            self._deadline = heard + self._timeouts.idle_s
        if now > self._ends:
            self._gave_up = f"took longer than {self._timeouts.total_s:g} s"
        elif self._deadline is not None and now > self._deadline:
            self._gave_up = f"sent nothing for {self._patience_s:g} s"
        else:
            return
        self._deadline, self._ends = None, math.inf
        self._upstream.abort()

    async def run(self, served: Served, body: bytes, tokens: int, key: int | None) -> bool:
        """Find an engine and pass its answer on. Returns whether the client's connection can go on after it.

        ``tokens`` is about how many the request has, and ``key`` that of its conversation. Raises :class:`ApiError`
        when no engine gave an answer; nothing was sent to the client then.
        """
        head, request_id, model = self._head, self._request_id, served.route.model
        directory, engines = self._shared.directory, served.engines
        start = head.method + b" " + head.target + b" HTTP/1.1\r\n"
        fields = head.forwarded + b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (request_id, len(body))
        self._engines = engines
        self._timeouts = served.timeouts
        self._ends = self._began + served.timeouts.total_s
        served.budget.request()
        failed: EngineFailed | None = None
        while len(self._tried) <= _RETRIES and (failed is None or served.budget.retry()):
            now = self._shared.clock()
            choice = choose(engines, (*self._tried, *served.busy_ones()), now, directory.draw(), key)
            if choice is None and (choice := choose(engines, self._tried, now, 0.0)) is None:
                break
            index = choice.at
            engine = engines[index]
            self.endpoint = engine.endpoint.id
            self._shared.metrics.chosen(model, choice.reason)
            self._tried += (index,)
            directory.began(engine, tokens)
            try:
                return await self._ask(engine, start + engine.head_lines + fields, body)
            except EngineFailed as caught:
                failed = caught.with_traceback(None)  # its frames are this one's, and would stay with it
                if not failed.busy:
                    engine.health.failed(self._shared.clock(), silent=failed.timed_out)
            except trio.Cancelled:
                if not self._first_byte:
                    engine.health.abandoned(now, self._shared.clock())
                raise
            finally:
                directory.ended(engine, tokens)
            self._shared.metrics.retried(model, engine.endpoint.id)
            _log.warning(
                "engine failed", model=model, endpoint=engine.endpoint.id, reason=failed.reason,
                request_id=request_id.decode(),
            )  # fmt: skip
            if failed.timed_out:
                raise ApiError(504, f"The engine of {model} did not answer in time.", "engine_timeout") from failed
        if failed is not None:
            raise ApiError(502, f"No engine of {model} gave an answer; the last one {failed.reason}.", "engine_failed")
        why = f": it {served.route.public}" if served.route.public else ""
        raise ApiError(
            503,
            f"No replica of {model} is ready{why}.",
            "no_ready_replica",
            retry_after_s=errors.again_in(_RETRY_AFTER_S),
        )

    async def _ask(self, engine: Engine, head: bytes, body: bytes) -> bool:
        """One engine, on a kept connection or a new one. Raises :class:`EngineFailed` as long as it can be retried."""
        timeouts = self._timeouts
        request = head + body if len(body) < _JOIN_BYTES else head
        while True:
            peer = engine.take_idle(self._ticker.now)
            reused = peer is not None
            if peer is None:
                await own_task()
                try:
                    peer = await engine.connect(timeouts.connect_s)
                    self._shared.watch.watch(peer)
                except OSError as failed:
                    if peer is not None:
                        peer.close()
                    ours = failed.errno in _OURS
                    raise EngineFailed(f"cannot be reached ({failed.strerror or failed})", busy=ours) from failed
            keep, sent = False, True
            self._upstream, self._gave_up = peer, ""
            peer.steps = self._steps
            try:
                self._wait(timeouts.first_byte_s)
                try:
                    try:
                        if left := peer.put(request):
                            await peer.send(left)
                        if len(body) >= _JOIN_BYTES:
                            await peer.send(body)
                    except OSError:
                        sent = False  # it may have refused the request before it had all of it
                    first = await peer.receive()
                except OSError as failed:
                    first, cause = b"", failed.strerror or str(failed)
                else:
                    cause = "closed the connection before its answer"
                if not first:
                    if self._gave_up:
                        raise EngineFailed(self._gave_up, timed_out=True)
                    if reused:
                        continue  # it had closed the kept connection meanwhile; that says nothing about the engine
                    raise EngineFailed(cause)
                keep = await self._answer(peer, first, engine) and sent
                return keep or self._head.minor == 1
            except _Broken:
                return False
            finally:
                self._upstream, self._deadline = None, None
                peer.steps = None
                if keep:
                    engine.give_back(peer, self._ticker.now)
                else:
                    peer.close()

    def _another(self) -> bool:
        """Whether there is an engine that was not asked yet."""
        return len(self._tried) <= _RETRIES and any(
            not engine.draining for n, engine in enumerate(self._engines) if n not in self._tried
        )

    def _wait(self, seconds: float) -> None:
        self._patience_s = seconds
        self._deadline = self._ticker.now + seconds

    async def _more(self, peer: Peer) -> bytes:
        """More of the engine's answer; its time to the next bytes begins anew."""
        self._wait(self._timeouts.idle_s)
        try:
            return await peer.receive()
        except OSError:
            return b""

    async def _answer(self, peer: Peer, data: bytes, engine: Engine) -> bool:
        """Pass one answer on. Returns whether the engine's connection can be kept.

        The head is held until the first bytes of the body are there: an engine that dies in between is retried.
        """
        try:
            while True:
                while (end := data.find(b"\r\n\r\n")) < 0:
                    if len(data) > MAX_HEAD_BYTES:
                        raise BadMessage(502, "the engine's head is too long")
                    if not (more := await self._more(peer)):
                        raise EngineFailed(
                            self._gave_up or "closed the connection within its head", timed_out=bool(self._gave_up)
                        )
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
                    raise EngineFailed(
                        self._gave_up or "closed the connection before its answer's body",
                        timed_out=bool(self._gave_up),
                    )
        except BadMessage as bad:
            raise EngineFailed(bad.reason) from bad
        self._first_byte, self._deadline = self._shared.clock(), None
        if response.status == 503 and self._another():
            raise EngineFailed("has no room (503)", busy=True)
        self.status, self.events = response.status, response.event_stream
        if response.status < 500:
            engine.health.worked(self._first_byte)
        else:
            engine.health.erred(self._first_byte)
        try:
            if response.length == len(data) and not bodiless:
                # As a rule all of an answer that is no stream is there.
                self._passed, self.tail, keep = len(data), data[-TAIL_BYTES:], True
                if left := self._put(response.start + self._lines() + data):
                    await self._send(left)
            elif bodiless:
                await self._send(response.start + self._lines())
                keep = not data
            else:
                keep = await self._pass_on(peer, response, data, engine)
            self.whole = not (response.event_stream and own_error(self.tail))
        finally:
            self.usage = usage_of(self.tail)
        now = self._shared.clock()
        if not self.whole:
            self._count_broken(engine, "ended its answer with an error of its own")
            return keep and response.keep_alive
        self._shared.metrics.answered(
            self.model,
            engine.endpoint.id,
            response.status,
            now - self._began,
            self._first_byte - self._began,
            self.usage,
        )
        return keep and response.keep_alive

    def _lines(self) -> bytes:
        """What the router adds to the answer's head, and its end."""
        return b"x-request-id: %b\r\n%b\r\n" % (self._request_id, self._connection_line)

    async def _pass_on(self, peer: Peer, response: ResponseHead, data: bytes, engine: Engine) -> bool:
        """Head and body, as they come. Returns whether the body ended exactly where it said."""
        lines, minor = self._lines(), self._head.minor

        async def more() -> bytes:
            self._wait(self._timeouts.idle_s)
            try:
                got = await peer.receive()
            except OSError as failed:
                raise Cut(self._gave_up or f"broke its connection ({failed.strerror or failed})") from failed
            if self._gave_up:
                raise Cut(self._gave_up)
            self._deadline = None  # while the client takes it, the engine need not say anything
            return got

        events = self._filter if response.event_stream else None
        passage = self._passage = Passage(self._put, self._send, more, events, chunks_out=minor == 1)
        try:
            if response.chunked and minor == 1:
                self._patience_s = self._timeouts.idle_s
                return await passage.chunked(peer, self._shared.watch, self._ticker, response.start + lines, data)
            if response.length is not None:
                return await passage.sized(response.length, response.start + lines, data)
            await passage.rest(response, lines, data)
        except BadMessage as bad:  # then nothing of it was sent
            self.status = 0
            raise EngineFailed(bad.reason) from bad
        except Cut as cut:
            self.tail = passage.tail
            await self._break(engine, response, self._gave_up or cut.reason, between_chunks=passage.between_chunks)
        finally:
            self._passage = None
            self.tail, self._passed = passage.tail, passage.passed
        return False

    def _count_broken(self, engine: Engine, why: str) -> None:
        self._shared.metrics.broken(self.model, engine.endpoint.id)
        engine.health.failed(self._shared.clock())
        _log.warning(
            "answer cut short", model=self.model, endpoint=engine.endpoint.id, reason=why,
            request_id=self._request_id.decode(),
        )  # fmt: skip

    async def _break(self, engine: Engine, response: ResponseHead, why: str, *, between_chunks: bool) -> NoReturn:
        """An answer ends in its middle: say so in the stream where that is possible, and never end it cleanly."""
        self._count_broken(engine, why)
        if response.event_stream and between_chunks and self._head.minor == 1:
            gap = b"" if _ends_event(self.tail) else b"\n\n"
            event = gap + errors.stream_event(f"The engine of {self.model} {why}.", self._dialect)
            await self._send(b"%x\r\n%b\r\n" % (len(event), event))
        raise _Broken


class _Broken(Exception):
    """The answer was cut short: the client's connection has to end without looking complete."""


def _ends_event(tail: bytes) -> bool:
    """Whether a chunked event stream's last chunk ended an event, so that a new one can begin."""
    return tail.endswith((b"\n\n\r\n", b"\r\n\r\n\r\n"))
