"""Requests as they are told: a line of the log, a span, or both. Nothing of it runs where neither is wanted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from attrs import define

from llmgw.router.http1 import RequestHead
from llmgw.router.sockets import Peer
from llmgw.telemetry.logging import logger
from llmgw.telemetry.tracing import Span, Tracer

_TRACE = re.compile(rb"(?im)^(traceparent|tracestate):[ \t]*([^\r\n]*)\r\n")
_LONGEST = 200

_log = logger("access")


class Answered(Protocol):
    """What is told of an answer: see :class:`llmgw.router.exchange.Exchange`."""

    endpoint: str
    status: int
    usage: tuple[int, int] | None
    whole: bool

    @property
    def passed(self) -> int: ...

    @property
    def first_byte(self) -> float: ...


@define(eq=False)
class Told:
    """One request; ``status`` is 0 as long as nothing was answered. ``key`` is the id of its API key."""

    request_id: str
    method: str
    path: str
    client: str
    began: float
    teller: Teller
    model: str = ""
    key: str = ""
    status: int = 0
    code: str = ""
    answer: Answered | None = None
    span: Span | None = None


class Teller:
    """Tells requests to the log where ``access_log`` is on, and to ``tracer`` where there is one."""

    def __init__(self, clock: Callable[[], float], *, access_log: bool, tracer: Tracer | None) -> None:
        self._clock = clock
        self._access_log = access_log
        self._tracer = tracer
        self._log = _log.bind()  # made once: a logger is put together anew for each line else

    def begin(self, head: RequestHead, request_id: bytes, peer: Peer) -> Told:
        """A request has come."""
        path = head.target.split(b"?", 1)[0][:_LONGEST].decode("latin-1")
        told = Told(request_id.decode(), head.method.decode(), path, peer.address, self._clock(), self)
        if self._tracer is not None:
            found = {name.lower().decode(): value.decode("latin-1") for name, value in _TRACE.findall(head.forwarded)}
            told.span = self._tracer.begin(f"{told.method} {told.path}", found)
        return told

    def passed_on(self, told: Told, forwarded: bytes) -> bytes:
        """The fields that an engine gets: in place of the caller's span it is told of ours."""
        if told.span is None:
            return forwarded
        return _TRACE.sub(b"", forwarded) + told.span.fields

    def end(self, told: Told, *, gone: bool) -> None:
        """A request has ended; ``gone`` when its client left before its answer was whole."""
        answer, now = told.answer, self._clock()
        status = told.status or (0 if answer is None else answer.status)
        fields: dict[str, object] = {
            "method": told.method, "path": told.path, "status": status, "ms": round((now - told.began) * 1000, 1),
            "client": told.client,
        }  # fmt: skip
        more = {"model": told.model[:_LONGEST], "key": told.key, "code": told.code}
        fields |= {name: value for name, value in more.items() if value}
        if answer is not None:
            fields |= {"endpoint": answer.endpoint, "bytes": answer.passed}
            if answer.first_byte:
                fields["first_byte_ms"] = round((answer.first_byte - told.began) * 1000, 1)
            if answer.usage is not None:
                fields["prompt_tokens"], fields["completion_tokens"] = answer.usage
        cut = answer is not None and answer.status > 0 and not answer.whole
        if gone or cut:
            fields["ended"] = "client gone" if gone else "cut short"
        if self._access_log:
            self._log.info("request", request_id=told.request_id, **fields)
        if told.span is not None:
            told.span.end({"request_id": told.request_id, **fields}, failed=status >= 500 or cut)
