"""Errors as the OpenAI API words them, so that every client library raises what its users expect."""

from __future__ import annotations

import orjson
from attrs import frozen

from llmgw.router.http1 import BadMessage, reason_phrase

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "invalid_request_error",
    405: "invalid_request_error", 411: "invalid_request_error", 413: "invalid_request_error",
    429: "rate_limit_error",
}  # fmt: skip


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


def of_message(bad: BadMessage) -> ApiError:
    """A malformed request as an API error."""
    return ApiError(bad.status, bad.reason, "bad_request")


def body(error: ApiError) -> bytes:
    """The JSON body: an ``error`` object with message, type, param and code."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return orjson.dumps({"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}})


def response(error: ApiError, request_id: bytes, *, close: bool) -> bytes:
    """The whole answer."""
    content = body(error)
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
    return b"\r\n".join(lines) + b"\r\n" + error.lines + b"\r\n" + content


def stream_event(message: str) -> bytes:
    """The event that ends a stream which broke: it has no ``[DONE]`` after it."""
    payload = orjson.dumps(
        {"error": {"message": message, "type": "server_error", "param": None, "code": "upstream_error"}}
    )
    return b"data: " + payload + b"\n\n"
