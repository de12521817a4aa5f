"""Structured logs on standard error: lines for people on a terminal, JSON elsewhere."""

from __future__ import annotations

import contextlib
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
_LINES_MOST = 64

_stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)

_json_out: TextIO | None = None
"""Where lines at level info go as JSON; none where they are not wanted, or wanted otherwise."""


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
    global _json_out
    out = sys.stderr if stream is None else stream
    text = log.format is LogFormat.TEXT or (log.format is LogFormat.AUTO and out.isatty())
    level = logging.getLevelNamesMapping()[log.level.upper()]
    _json_out = None if text or level > logging.INFO else out
    renderer: Any
    if text:
        renderer = structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=_traceback)
    else:
        renderer = structlog.processors.JSONRenderer(_json)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            _stamp,
            _redact,
            _tame,
            _printable if text else structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(file=out),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(daemon=daemon)


def logger(subject: str) -> structlog.typing.FilteringBoundLogger:
    """A logger whose lines carry ``subject`` (``link``, ``shard``, ``reconcile``)."""
    bound: structlog.typing.FilteringBoundLogger = structlog.get_logger(subject=subject)
    return bound


class Lines:
    """Many lines of one kind at level info. As JSON they are put together in C and written together, 64 at the latest,
    by whoever calls :meth:`flush`: a line by itself takes some thirty microseconds. As text each is written at once."""

    def __init__(self, subject: str, event: str) -> None:
        self._event = event
        self._log = logger(subject).bind()  # made once: a logger is put together anew for each line else
        self._out = _json_out
        self._always = {**structlog.contextvars.get_contextvars(), "subject": subject, "event": event, "level": "info"}
        self._lines: list[str] = []

    def add(self, fields: dict[str, object]) -> None:
        """One more. Texts among its fields are short, and none is a secret."""
        if self._out is None:
            self._log.info(self._event, **fields)
            return
        self._lines.append(_json(dict(_stamp(None, "info", {**fields, **self._always})), repr))
        if len(self._lines) >= _LINES_MOST:
            self.flush()

    def flush(self) -> None:
        """Write what there is. What cannot be written is lost: there is nobody to be told."""
        if self._lines and self._out is not None:
            lines, self._lines = self._lines, []
            with contextlib.suppress(OSError):
                print(*lines, sep="\n", file=self._out, flush=True)
