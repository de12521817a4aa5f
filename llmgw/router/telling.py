"""Requests as they are told: a line of the log, a span, or both. Nothing of it runs where neither is wanted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from attrs import define

from llmgw.router.http1 import RequestHead
from llmgw.router.sockets import Peer
from llmgw.telemetry.logging import Lines
from llmgw.telemetry.tracing import Span, Tracer

_TRACE = re.compile(rb"(?im)^(traceparent|tracestate):[ \t]*([^\r\n]*)\r\n")
_LONGEST = 200


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
    """Tells requests to the log in ``lines`` and to the ``tracer``, where there are such."""

    def __init__(self, clock: Callable[[], float], lines: Lines | None = None, tracer: Tracer | None = None) -> None:
        self._clock = clock
        self._lines = lines
        self._tracer = tracer

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
            "request_id": told.request_id, "method": told.method, "path": told.path, "status": status,
            "ms": round((now - told.began) * 1000, 1), "client": told.client,
        }  # fmt: skip
        if told.model:
            fields["model"] = told.model[:_LONGEST]
        if told.key:
            fields["key"] = told.key
        if told.code:
            fields["code"] = told.code
        if answer is not None:
            fields["endpoint"], fields["bytes"] = answer.endpoint, answer.passed
            if answer.first_byte:
                fields["first_byte_ms"] = round((answer.first_byte - told.began) * 1000, 1)
            if answer.usage is not None:
                fields["prompt_tokens"], fields["completion_tokens"] = answer.usage
        cut = answer is not None and answer.status > 0 and not answer.whole
        if gone or cut:
            fields["ended"] = "client gone" if gone else "cut short"
        if self._lines is not None:
            self._lines.add(fields)
        if told.span is not None:
            told.span.end(fields, failed=status >= 500 or cut)

    def flush(self) -> None:
        """Write the lines that are not written yet: a few times a second, and before the end."""
        if self._lines is not None:
            self._lines.flush()
