"""What happened in a run: a digest of all of it, and its last lines."""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog
import trio
from trio.testing import MockClock

_KEPT = 80


class Trace:
    """Takes in one line an event. Two runs were the same when their digests are."""

    def __init__(self, *, echo: bool = False) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._echo = echo
        self.last: deque[str] = deque(maxlen=_KEPT)
        self.events = 0

    def say(self, what: str) -> None:
        """Write an event down, with the virtual time."""
        line = f"{trio.current_time():12.3f} {what}"
        self._hash.update(line.encode())
        self.last.append(line)
        self.events += 1
        if self._echo:
            sys.stdout.write(f"{line}\n")

    @property
    def digest(self) -> str:
        """Of everything that was said so far."""
        return self._hash.hexdigest()


class Failed(Exception):
    """An invariant does not hold."""


_LEFT_OUT = frozenset({"exc_info", "subject", "daemon", "version", "cluster"})


@contextmanager
def logs_into(trace: Trace, broken: Any) -> Iterator[None]:
    """Everything that llmgw logs is an event; ``broken`` is told of an exception that was logged and survived."""

    def tap(_logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        said = " ".join(f"{k}={v}" for k, v in event.items() if k != "event" and k not in _LEFT_OUT)
        trace.say(f"  log {event.get('subject', '')}: {event['event']} {said}")
        if event.get("exc_info"):
            wrong = sys.exc_info()[1]
            broken(f"an exception was logged by {event.get('subject')}: {event['event']}: {wrong!r}")
        raise structlog.DropEvent

    was = structlog.is_configured()
    before = structlog.get_config()
    structlog.configure(processors=[tap], wrapper_class=structlog.make_filtering_bound_logger(20))
    try:
        yield
    finally:
        if was:
            structlog.configure(**before)
        else:
            structlog.reset_defaults()


@contextmanager
def repeatable(seed: int) -> Iterator[MockClock]:
    """Trio schedules by the seed, and time passes when nothing else does. Trio's own switch for Hypothesis."""
    core: Any = trio._core._run
    before = core._ALLOW_DETERMINISTIC_SCHEDULING
    state = core._r.getstate()
    core._ALLOW_DETERMINISTIC_SCHEDULING = True
    core._r.seed(seed)
    try:
        yield MockClock(autojump_threshold=0)
    finally:
        core._ALLOW_DETERMINISTIC_SCHEDULING = before
        core._r.setstate(state)
