"""Errors as the APIs word them, so that every client library raises what its users expect."""

from __future__ import annotations

import math
import secrets
from enum import Enum

import orjson
from attrs import frozen

from llmgw.router.http1 import BadMessage, reason_phrase

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "invalid_request_error",
    405: "invalid_request_error", 411: "invalid_request_error", 413: "invalid_request_error",
    429: "rate_limit_error",
}  # fmt: skip

_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
"""https://docs.anthropic.com/en/api/errors"""


class Dialect(Enum):
    """Whose API a route is of: OpenAI's, or Anthropic's (``/v1/messages``)."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


@frozen
class ApiError(Exception):
    """An answer that is an error. ``code`` is the API's word for it; ``retry_after_s`` becomes ``Retry-After``.

    ``lines`` are further lines of its head.
    """

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None
    allow: str | None = None
    lines: bytes = b""


def again_in(seconds: float) -> int:
    """``Retry-After`` for this time: never less, and up to a tenth more (1 s at least, 5 at most), so that clients that
    were turned away together do not all come back together."""
    least = max(1, math.ceil(seconds))
    return least + secrets.randbelow(1 + min(5, max(1, least // 10)))


def of_message(bad: BadMessage) -> ApiError:
    """A malformed request as an API error."""
    return ApiError(bad.status, bad.reason, "bad_request")


def body(error: ApiError, dialect: Dialect = Dialect.OPENAI) -> bytes:
    """The JSON body: for OpenAI an ``error`` object with message, type, param and code, for Anthropic one with type
    and message."""
    if dialect is Dialect.ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": error.message}})
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return orjson.dumps({"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}})


def response(
    error: ApiError,
    request_id: bytes,
    *,
    close: bool,
    dialect: Dialect = Dialect.OPENAI,
    more: bytes = b"",
    bodiless: bool = False,
) -> bytes:
    """The whole answer; ``more`` are further lines of its head. To HEAD it is ``bodiless``."""
    content = body(error, dialect)
    lines = [
        b"HTTP/1.1 %d %b" % (error.status, reason_phrase(error.status)),
        b"content-type: application/json",
        b"content-length: %d" % len(content),
        b"x-request-id: " + request_id,
    ]
    if error.retry_after_s is not None:
        lines.append(b"retry-after: %d" % error.retry_after_s)
    if error.allow is not None:
        lines.append(b"allow: " + error.allow.encode())
    if error.status == 401:
        lines.append(b"www-authenticate: Bearer")
    if close:
        lines.append(b"connection: close")
    return b"\r\n".join(lines) + b"\r\n" + error.lines + more + b"\r\n" + (b"" if bodiless else content)


def stream_event(message: str, dialect: Dialect = Dialect.OPENAI) -> bytes:
    """The event that ends a stream which broke: it has no ``[DONE]`` after it."""
    if dialect is Dialect.ANTHROPIC:
        payload = orjson.dumps({"type": "error", "error": {"type": "api_error", "message": message}})
        return b"event: error\ndata: " + payload + b"\n\n"
    payload = orjson.dumps(
        {"error": {"message": message, "type": "server_error", "param": None, "code": "upstream_error"}}
    )
    return b"data: " + payload + b"\n\n"
