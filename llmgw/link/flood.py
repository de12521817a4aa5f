"""Counting frames before the HTTP/2 library sees them.

h2 4.4.1 limits only CONTINUATION frames: rapid resets, pings, settings, empty data, window updates and
priorities are all processed, and several of them leave no event behind. So frames are counted here, from their
nine-byte headers (RFC 9113, section 4.1), by kind and second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

_HEADER = 9
_DATA = 0x0
_NAMES: Mapping[int, str] = MappingProxyType(
    {
        _DATA: "empty DATA",
        0x1: "HEADERS",
        0x2: "PRIORITY",
        0x3: "RST_STREAM",
        0x4: "SETTINGS",
        0x5: "PUSH_PROMISE",
        0x6: "PING",
        0x7: "GOAWAY",
        0x8: "WINDOW_UPDATE",
        0x9: "CONTINUATION",
    }
)
# The link needs one HEADERS frame each way, a few SETTINGS, a PING every few seconds. Window updates follow the
# data: two for each half window.
_MOST_PER_S: Mapping[int, int] = MappingProxyType({0x8: 1000, 0x6: 20})
_MOST_OTHERS_PER_S = 10


class FrameMeter:
    """Watches one direction of a connection. ``preface`` bytes come before the first frame."""

    def __init__(self, preface: int, most_frame_bytes: int) -> None:
        self._skip = preface
        self._most_frame_bytes = most_frame_bytes
        self._header = bytearray()
        self._counts: Counter[int] = Counter()
        self._second = float("-inf")

    def feed(self, data: bytes, now: float) -> str | None:
        """Look at received bytes; returns why the connection must end, if it must."""
        if now - self._second >= 1:
            self._second = now
            self._counts.clear()
        at = 0
        while at < len(data):
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
                at += step
                continue
            step = min(_HEADER - len(self._header), len(data) - at)
            self._header += data[at : at + step]
            at += step
            if len(self._header) < _HEADER:
                break
            length, kind = int.from_bytes(self._header[:3], "big"), self._header[3]
            self._header.clear()
            self._skip = length
            if length > self._most_frame_bytes:
                return f"a frame of {length} bytes, at most {self._most_frame_bytes} were agreed"
            if (reason := self._count(kind, length)) is not None:
                return reason
        return None

    def _count(self, kind: int, length: int) -> str | None:
        if kind == _DATA and length:
            return None
        self._counts[kind] += 1
        most = _MOST_PER_S.get(kind, _MOST_OTHERS_PER_S)
        if self._counts[kind] <= most:
            return None
        return f"more than {most} {_NAMES.get(kind, f'type {kind}')} frames within a second"
