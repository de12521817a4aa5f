"""What one peer may cost: frames counted before the HTTP/2 library sees them, and time.

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

_SMALL_BYTES = 64
_MOST_SMALL_PER_S = 500
"""DATA frames of a few bytes: each costs as much as one of 16 KiB. Heartbeats and results are that small."""


class FrameMeter:
    """Watches one direction of a connection. ``preface`` bytes come before the first frame."""

    def __init__(self, preface: int, most_frame_bytes: int) -> None:
        self._skip = preface
        self._most_frame_bytes = most_frame_bytes
        self._header = bytearray()
        self._counts: Counter[int] = Counter()
        self._small = 0
        self._second = float("-inf")

    def feed(self, data: bytes, now: float) -> str | None:
        """Look at received bytes; returns why the connection must end, if it must."""
        if now - self._second >= 1:
            self._second = now
            self._counts.clear()
            self._small = 0
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
            self._small += length < _SMALL_BYTES
            if self._small > _MOST_SMALL_PER_S:
                return f"more than {_MOST_SMALL_PER_S} DATA frames below {_SMALL_BYTES} bytes within a second"
            return None
        self._counts[kind] += 1
        most = _MOST_PER_S.get(kind, _MOST_OTHERS_PER_S)
        if self._counts[kind] <= most:
            return None
        return f"more than {most} {_NAMES.get(kind, f'type {kind}')} frames within a second"


class Pace:
    """How much of this process's time one peer may take: ``share`` of it, and ``burst_s`` seconds at once.

    Beyond that its next bytes and messages wait; flow control then stops the peer itself.
    """

    def __init__(self, now: float, share: float = 0.1, burst_s: float = 0.25, most_s: float = 5.0) -> None:
        self._share = share
        self._burst_s = burst_s
        self._most_s = most_s
        self._left_s = burst_s
        self._at = now

    def spent(self, seconds: float, now: float) -> float:
        """So much processor time was spent for the peer; returns how long to wait before more is, 0 if not at all."""
        self._left_s = min(self._burst_s, self._left_s + self._share * (now - self._at)) - seconds
        self._at = now
        return min(self._most_s, max(0.0, -self._left_s / self._share))
