"""The engine's log, read without ever holding it: its tail, and what is new since the last look."""

from __future__ import annotations

import os
from pathlib import Path

from llmgw.durable import regular

TAIL_LINES = 30
"""So many lines of the log travel with a failure."""

DIAGNOSED_LINES = 400
"""The cause stands above what an engine says last: so many lines are looked through for it."""

_TAIL_BYTES = 64 * 1024
_NEWS_BYTES = 256 * 1024
_LONGEST_LINE = 500


def tail(folder: Path, lines: int = TAIL_LINES) -> tuple[str, ...]:
    """The last lines of the log, of its older part too when the newer one is short. Blocking."""
    data = b""
    for name in ("engine.log", "engine.log.1"):
        data = _last_bytes(folder / name, _TAIL_BYTES - len(data)) + data
        if len(data) >= _TAIL_BYTES or data.count(b"\n") >= lines:
            break
    found = [line[:_LONGEST_LINE] for line in data.decode(errors="replace").splitlines() if line.strip()]
    return tuple(found[-lines:])


def naming(folder: Path, word: bytes) -> tuple[str, ...]:
    """The first lines in all of the log that have this word: what is said once, long before the tail. Blocking."""
    found: list[str] = []
    for name in ("engine.log.1", "engine.log"):
        try:
            with regular(folder / name) as file:
                # A line without end is looked at in pieces.
                while len(found) < DIAGNOSED_LINES and (line := file.readline(_TAIL_BYTES)):
                    if word in line:
                        found.append(line[:_LONGEST_LINE].decode(errors="replace"))
        except OSError:
            continue
    return tuple(found)


def _last_bytes(path: Path, count: int) -> bytes:
    try:
        with regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - count))
            return file.read(count)
    except OSError:
        return b""


class LogReader:
    """Whole new lines of a log, look by look. A log that was cut is read from its beginning; a flood is skipped."""

    def __init__(self, path: Path, *, from_end: bool) -> None:
        self._path = path
        self._at = 0
        self._rest = b""
        if from_end:
            try:
                self._at = path.stat().st_size
            except OSError:
                self._at = 0

    def lines(self) -> tuple[str, ...]:
        """The lines that were completed since the last look; carriage returns end lines too. Blocking."""
        try:
            with regular(self._path) as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._at:
                    self._at, self._rest = 0, b""
                if size - self._at > _NEWS_BYTES:
                    self._at, self._rest = size - _NEWS_BYTES, b""
                file.seek(self._at)
                data = file.read(size - self._at)
        except OSError:
            return ()
        self._at += len(data)
        # Progress bars overwrite their line with carriage returns.
        *whole, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        self._rest = self._rest[-_LONGEST_LINE:]
        return tuple(line[:_LONGEST_LINE].decode(errors="replace") for line in whole if line.strip())
