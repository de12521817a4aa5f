"""Structured logs on standard error: lines for people on a terminal, JSON elsewhere."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, MutableMapping
from typing import Any, TextIO

import orjson
import structlog

from llmgw.settings.daemon import Log, LogFormat

_SECRET_KEYS = frozenset({"api_key", "authorization", "token", "secret", "password", "key_pem"})

_MOST_CHARS = 4000


def _redact(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Blank every value whose key says that it is a secret."""
    for key in event.keys() & _SECRET_KEYS:
        event[key] = "[redacted]"
    return event


def _tame(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Cut every text to a bounded length: much of what is logged was said by somebody else."""
    for key, value in event.items():
        if isinstance(value, str) and len(value) > _MOST_CHARS:
            event[key] = f"{value[:_MOST_CHARS]}… ({len(value)} characters)"
    return event


def _printable(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape what would steer a terminal or begin a line; JSON does that by itself."""
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[key] = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)
    return event


def _json(event: dict[str, Any], default: Callable[[Any], Any], **_more: Any) -> str:
    """A line of ASCII; the standard library writes, and escapes, what cannot be had in C as quickly."""
    try:
        line = orjson.dumps(event, default)
    except TypeError:  # long numbers, halves of a character
        return json.dumps(event, default=default)
    return line.decode() if line.isascii() else json.dumps(event, default=default)


def _traceback(out: TextIO, about: structlog.typing.ExcInfo) -> None:
    """An exception may quote what somebody said."""
    whole = io.StringIO()
    structlog.dev.plain_traceback(whole, about)
    out.write("".join(c if c.isprintable() or c == "\n" else "?" for c in whole.getvalue()))


def configure(log: Log, daemon: str, stream: TextIO | None = None) -> None:
    """Set up logging for this process; ``daemon`` (``server``, ``agent``, ``router``) is on every line."""
    out = sys.stderr if stream is None else stream
    text = log.format is LogFormat.TEXT or (log.format is LogFormat.AUTO and out.isatty())
    renderer: Any
    if text:
        renderer = structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=_traceback)
    else:
        renderer = structlog.processors.JSONRenderer(_json)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _redact,
            _tame,
            _printable if text else structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[log.level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(file=out),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(daemon=daemon)


def logger(subject: str) -> structlog.typing.FilteringBoundLogger:
    """A logger whose lines carry ``subject`` (``link``, ``shard``, ``reconcile``)."""
    bound: structlog.typing.FilteringBoundLogger = structlog.get_logger(subject=subject)
    return bound
