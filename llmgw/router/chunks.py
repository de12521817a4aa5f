"""Chunked bodies of HTTP/1.1 (RFC 9112, 7.1), walked through where they go on as they are, or taken apart."""

from __future__ import annotations

import re
import sys

from llmgw.router.http1 import FIELD, BadMessage

_MAX_SIZE_LINE = 256
_MAX_TRAILER_BYTES = 8 * 1024
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")

_sizes: dict[bytes, int] = {}
_SIZES_MOST = 4096


def _size(line: bytes) -> int:
    """The size in a chunk's first line, remembered: most lines of a stream are like others before them.

    ``int(x, 16)`` takes ``0x5``, ``+5``, ``5_0`` and `` 5``; a size here is hexadecimal digits or the body is refused,
    because two readers that disagree on a size read different messages.
    """
    match = _CHUNK_SIZE.fullmatch(line)
    if match is None:
        raise BadMessage(502, "a chunk's size is not hexadecimal")
    size = int(match[1], 16)
    if len(_sizes) < _SIZES_MOST and len(line) <= 8:
        _sizes[line] = size
    return size


def is_one_event(data: bytes) -> bool:
    """Whether this is one whole chunk of a size that was seen before, which ends as an event does."""
    end = data.find(b"\r\n", 0, 10)
    return end > 0 and end + 4 + _sizes.get(data[:end], -4 - end) == len(data) and data.endswith(b"\n\n\r\n")


class ChunkWalker:
    """Finds the end of a chunked body that is passed on as it is."""

    __slots__ = ("_left", "_part", "_trailer_bytes", "boundary", "events", "finished")

    def __init__(self) -> None:
        self._left = 0  # bytes of the present chunk, and of the line end after it, that are still to come
        self._part = b""
        self._trailer_bytes = -1  # below zero until the last chunk was seen
        self.boundary = 0
        """The index in what was fed last behind its last whole chunk; not above 0 where none ended in it."""
        self.events = False
        """Whether every chunk that ended in what was fed last is seen to end with an empty line, as an event does."""
        self.finished = False

    @property
    def between_chunks(self) -> bool:
        """Whether another chunk could begin right here."""
        return not (self._left or self._part or self.finished) and self._trailer_bytes < 0

    def feed(self, data: bytes) -> int:
        """Take in more of the body. Returns the index after its end in ``data``, or -1 while it goes on.

        Raises :class:`BadMessage`.
        """
        size = len(data)
        at = self._left
        self.boundary = 0
        self.events = True
        if at > size:
            self._check_line_end(data, size, at)
            self._left = at - size
            return -1
        if at:
            if at < 4 or data[at - 4 : at] != b"\n\n\r\n":
                self._check_line_end(data, size, at)
                self.events = False
            self._left = 0
        base = len(self._part)
        buffer = data
        if base:  # then nothing of a chunk is left: what was kept is the beginning of a line
            buffer, at, self._part = self._part + data, 0, b""
            size += base
        find, known = buffer.find, _sizes.get
        while True:
            line_end = find(b"\r\n", at, at + _MAX_SIZE_LINE + 2)
            if line_end < 0:
                if size - at > _MAX_SIZE_LINE:
                    raise BadMessage(502, "a chunk's size line is too long")
                self._part = buffer[at:]
                if self._trailer_bytes < 0:
                    self.boundary = at - base
                return -1
            line = buffer[at:line_end]
            begin = at
            at = line_end + 2
            if self._trailer_bytes >= 0:
                self._trailer_bytes += len(line)
                if not line:
                    self.finished = True
                    return at - base
                self.events = False
                if self._trailer_bytes > _MAX_TRAILER_BYTES:
                    raise BadMessage(502, "the trailer is too long")
                continue
            length = known(line)
            if length is None:
                length = _size(line)
            if length == 0:
                self._trailer_bytes = 0
                self.boundary = begin - base
                continue
            after = at + length + 2
            if after > size:
                self._check_line_end(buffer, size, after)
                self._left = after - size
                self.boundary = begin - base
                return -1
            if buffer[after - 4 : after] != b"\n\n\r\n":
                if buffer[after - 2 : after] != b"\r\n":
                    raise BadMessage(502, "a chunk is longer than its size")
                self.events = False
            at = after

    @staticmethod
    def _check_line_end(data: bytes, size: int, after: int) -> None:
        """The two bytes before ``after`` end a chunk's data; check those of them that are in ``data``."""
        first = after - 2
        if 0 <= first < size and data[first] != 13:
            raise BadMessage(502, "a chunk is longer than its size")
        if 0 <= first + 1 < size and data[first + 1] != 10:
            raise BadMessage(502, "a chunk is longer than its size")


class ChunkDecoder:
    """Takes a chunked body apart, for where it cannot be passed on as it is. Holds no more than a line of it.

    ``most`` is how many chunks one :meth:`feed` takes apart. Where that was not all, ``behind`` says so, and what it
    was fed is held; it goes on when it is fed again, with nothing if need be.
    """

    def __init__(self, most: int = sys.maxsize) -> None:
        self._most = most
        self.behind = False
        self._held = b""  # the beginning of a line, or of the end of a chunk
        self._left = 0  # bytes of the present chunk, and of the line end after it, that are still to come
        self._trailer_bytes = -1  # below zero until the last chunk was seen
        self.finished = False
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """Take in more; returns what there is of the content. After the end, ``rest`` is what came behind it.

        Raises :class:`BadMessage` with 400.
        """
        if self._held:
            data, self._held = self._held + data, b""
        made: list[bytes] = []
        at, size, chunks = 0, len(data), 0
        self.behind = False
        while not self.finished:
            if self._left > 2:
                end = min(size, at + self._left - 2)
                made.append(data[at:end])
                self._left -= end - at
                at = end
            if self._left:
                if self._left > 2 or size - at < 2:
                    break
                if data[at : at + 2] != b"\r\n":
                    raise BadMessage(400, "a chunk is longer than its size")
                at += 2
                self._left = 0
            end = data.find(b"\r\n", at, at + _MAX_SIZE_LINE + 2)
            if end < 0:
                if size - at > _MAX_SIZE_LINE:
                    raise BadMessage(400, "a chunk's size line is too long")
                if data.find(b"\n", at) >= 0:
                    raise BadMessage(400, "a line of the request's body ends without CR")
                break
            line = data[at:end]
            at = end + 2
            if self._trailer_bytes >= 0:
                self._trailer_bytes += len(line)
                if self._trailer_bytes > _MAX_TRAILER_BYTES:
                    raise BadMessage(400, "the trailer is too long")
                if line and not FIELD.fullmatch(line):
                    raise BadMessage(400, "the trailer is not valid HTTP/1.1")
                self.finished = not line
                continue
            match = _CHUNK_SIZE.fullmatch(line)
            if match is None:
                raise BadMessage(400, "a chunk's size is not hexadecimal")
            if length := int(match[1], 16):
                self._left = length + 2
            else:
                self._trailer_bytes = 0
            chunks += 1
            if chunks >= self._most:
                self.behind = at < size
                break
        if self.finished:
            self.rest += data[at:]
        else:
            self._held = data[at:]
        return b"".join(made)
