"""HTTP/1.1 heads, strictly: what could be read in two ways is refused, never repaired.

A head is judged whole, by one regular expression for its shape and one pass over its fields (RFC 9112). What is
forwarded is built anew from the fields that were understood.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from attrs import frozen

MAX_HEAD_BYTES = 16 * 1024
MAX_FIELDS = 100
_SESSION_BYTES = 256
_MEMO_HEAD_BYTES = 2048
"""Heads up to this size are remembered: a client's heads are alike but for their length, and parsing is pure."""

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_LINE = _TOKEN + rb":[ \t]*[\x21-\x7e\x80-\xff \t]*"
FIELD = re.compile(_LINE)
_FIELDS = rb"(?P<fields>(?:" + _LINE + rb"\r\n)*)\r\n"
_REQUEST = re.compile(rb"(?P<method>[A-Z]{1,20}) (?P<target>[\x21-\x7e]{1,8192}) HTTP/1\.(?P<minor>[01])\r\n" + _FIELDS)
_RESPONSE = re.compile(
    rb"HTTP/1\.(?P<minor>[01]) (?P<status>[1-9][0-9][0-9])(?: [\x20-\x7e\x80-\xff\t]*)?\r\n" + _FIELDS
)
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")

_HOP_BY_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade", b"transfer-encoding",
        b"proxy-authenticate", b"proxy-authorization",
    }
)  # fmt: skip
_NOT_FORWARDED = _HOP_BY_HOP | {
    b"host", b"authorization", b"x-api-key", b"content-length", b"expect", b"accept-encoding", b"cookie",
    b"x-request-id", b"origin", b"access-control-request-method", b"access-control-request-headers",
}  # fmt: skip
"""Fields of a request that the engine gets anew or not at all; credentials of clients never reach an engine."""


class BadMessage(Exception):
    """A message that is refused: ``status`` for the client, and why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


@frozen
class RequestHead:
    """What a request's head says. ``forwarded`` are its end-to-end fields as lines, ready for the engine.

    ``session`` is what the client calls the conversation: ``x-llmgw-session``. ``origin`` is that of the page that asks
    from a browser, ``asks_fields`` are those that it would send.
    """

    method: bytes
    target: bytes
    minor: int
    keep_alive: bool
    length: int | None
    chunked: bool
    expects_continue: bool
    authorization: bytes
    request_id: bytes
    content_type: bytes
    session: bytes
    origin: bytes
    asks_fields: bytes
    forwarded: bytes


@frozen
class ResponseHead:
    """What an engine's head says. ``start`` is the status line and the end-to-end fields, framing included."""

    status: int
    keep_alive: bool
    length: int | None
    chunked: bool
    event_stream: bool
    start: bytes
    start_unframed: bytes


def _each(fields: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
    for line in fields.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        yield name.lower(), value.strip(b" \t"), line


def _tokens(value: bytes) -> list[bytes]:
    return [token.strip(b" \t").lower() for token in value.split(b",")]


def parse_request(head: bytes) -> RequestHead:
    """A request's head with its blank line. Raises :class:`BadMessage`."""
    return _remembered_request(head) if len(head) <= _MEMO_HEAD_BYTES else _request(head)


def _request(head: bytes) -> RequestHead:
    match = _REQUEST.fullmatch(head)
    if match is None:
        raise BadMessage(400, "the request's head is not valid HTTP/1.1")
    minor = int(match["minor"])
    keep_alive, length, chunked, expects, authorization, ident = minor == 1, None, False, False, b"", b""
    content_type, session, origin, asks_fields = b"", b"", b"", b""
    forwarded: list[tuple[bytes, bytes]] = []
    named: set[bytes] = set()
    seen: set[bytes] = set()
    count = 0
    for name, value, line in _each(match["fields"]):
        count += 1
        if count > MAX_FIELDS:
            raise BadMessage(431, f"more than {MAX_FIELDS} header fields")
        if name not in _NOT_FORWARDED:
            if name == b"content-type":
                if name in seen:
                    raise BadMessage(400, "the header field content-type stands there twice")
                seen.add(name)
                content_type = value
            elif name == b"content-encoding" and value.lower() != b"identity":
                raise BadMessage(415, "bodies are taken as they are here, without Content-Encoding")
            if not name.startswith(b"x-llmgw-"):
                forwarded.append((name, line))
            elif name == b"x-llmgw-session":
                session = value[:_SESSION_BYTES]
            continue
        if name in seen and name in (
            b"host",
            b"content-length",
            b"transfer-encoding",
            b"authorization",
            b"x-api-key",
            b"expect",
        ):
            raise BadMessage(400, f"the header field {name.decode()} stands there twice")
        seen.add(name)
        match name:
            case b"content-length":
                if not _LENGTH.fullmatch(value):
                    raise BadMessage(400, "Content-Length is not a number")
                length = int(value)
            case b"transfer-encoding":
                if value.lower() != b"chunked" or minor == 0:
                    raise BadMessage(400, "the only Transfer-Encoding here is chunked, with HTTP/1.1")
                chunked = True
            case b"host":
                if not _HOST.fullmatch(value):
                    raise BadMessage(400, "Host is not a host name")
            case b"authorization":
                authorization = value
            case b"x-api-key":
                authorization = authorization or b"Bearer " + value
            case b"expect":
                if value.lower() != b"100-continue":
                    raise BadMessage(417, "the only expectation here is 100-continue")
                expects = minor == 1
            case b"x-request-id":
                ident = value if _REQUEST_ID.fullmatch(value) else b""
            case b"connection":
                tokens = _tokens(value)
                keep_alive = b"close" not in tokens and (keep_alive or b"keep-alive" in tokens)
                named.update(tokens)
            case b"origin":
                origin = value
            case b"access-control-request-headers":
                asks_fields = value
            case b"upgrade":
                pass  # nothing is upgraded here: the request is answered as HTTP/1.1
    if chunked and length is not None:
        raise BadMessage(400, "both Content-Length and Transfer-Encoding")
    if minor == 1 and b"host" not in seen:
        raise BadMessage(400, "Host is missing")
    if b"authorization" in seen and b"x-api-key" in seen:
        raise BadMessage(400, "both Authorization and x-api-key")
    return RequestHead(
        method=match["method"],
        target=match["target"],
        minor=minor,
        keep_alive=keep_alive,
        length=length,
        chunked=chunked,
        expects_continue=expects,
        authorization=authorization,
        request_id=ident,
        content_type=content_type,
        session=session,
        origin=origin,
        asks_fields=asks_fields,
        forwarded=b"".join(line + b"\r\n" for name, line in forwarded if name not in named),
    )


_remembered_request = lru_cache(4096)(_request)


def parse_response(head: bytes) -> ResponseHead:
    """An engine's head with its blank line. Raises :class:`BadMessage` with 502."""
    return _remembered_response(head) if len(head) <= _MEMO_HEAD_BYTES else _response(head)


def _response(head: bytes) -> ResponseHead:
    match = _RESPONSE.fullmatch(head)
    if match is None:
        raise BadMessage(502, "the engine's head is not valid HTTP/1.1")
    keep_alive, length, chunked, events = match["minor"] == b"1", None, False, False
    lines: list[tuple[bytes, bytes]] = []
    named: set[bytes] = set()
    for name, value, line in _each(match["fields"]):
        match name:
            case b"content-length":
                if length is not None or not _LENGTH.fullmatch(value):
                    raise BadMessage(502, "the engine's Content-Length is wrong")
                length = int(value)
            case b"transfer-encoding":
                if chunked or value.lower() != b"chunked":
                    raise BadMessage(502, "the engine's Transfer-Encoding is not chunked")
                chunked = True
            case b"connection":
                tokens = _tokens(value)
                keep_alive = keep_alive and b"close" not in tokens
                named.update(tokens)
            case _ if (
                name in _HOP_BY_HOP or name == b"x-request-id" or name.startswith((b"x-llmgw-", b"access-control-"))
            ):
                pass  # who may look at answers from a browser is for the router to say
            case _:
                events = events or (name == b"content-type" and value.lower().startswith(b"text/event-stream"))
                lines.append((name, line))
    if chunked and length is not None:
        raise BadMessage(502, "the engine sent both Content-Length and Transfer-Encoding")
    fields = b"".join(line + b"\r\n" for name, line in lines if name not in named)
    unframed = b"HTTP/1.1 " + match["status"] + b" " + _REASONS.get(int(match["status"]), b"") + b"\r\n" + fields
    framing = (
        b"transfer-encoding: chunked\r\n" if chunked else b"" if length is None else b"content-length: %d\r\n" % length
    )
    return ResponseHead(int(match["status"]), keep_alive, length, chunked, events, unframed + framing, unframed)


_remembered_response = lru_cache(4096)(_response)

_REASONS = {
    200: b"OK", 201: b"Created", 204: b"No Content", 400: b"Bad Request", 401: b"Unauthorized", 403: b"Forbidden",
    404: b"Not Found", 405: b"Method Not Allowed", 408: b"Request Timeout", 411: b"Length Required",
    413: b"Content Too Large", 415: b"Unsupported Media Type", 417: b"Expectation Failed",
    422: b"Unprocessable Content", 429: b"Too Many Requests",
    431: b"Request Header Fields Too Large", 500: b"Internal Server Error",
    502: b"Bad Gateway", 503: b"Service Unavailable", 504: b"Gateway Timeout",
}  # fmt: skip


def reason_phrase(status: int) -> bytes:
    """The words after a status code."""
    return _REASONS.get(status, b"")
