"""Streams that are to say what they used: asked for it, and without that event where the client did not ask. Pure.

An OpenAI stream with ``stream_options.include_usage`` has one more event before its ``[DONE]``: no choices, and the
usage (https://platform.openai.com/docs/api-reference/chat/create, `stream_options`).
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import orjson

from llmgw.router.body import Asked, is_odd

_STREAMED = frozenset({b"/v1/chat/completions", b"/v1/completions"})
"""Where an engine says what it used only if it is asked to; elsewhere the last event has it anyway."""

_WORDLESS = frozenset({b"/v1/embeddings", b"/v1/rerank", b"/v1/score", b"/tokenize", b"/detokenize"})
"""Where the answer has no tokens of its own."""

_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_EVENT = re.compile(rb".*?(?:\r?\n){2}", re.DOTALL)
_MEDIA = re.compile(rb";base64,[A-Za-z0-9+/=]*")
_MEDIA_TOKENS = 1000
_BYTES_A_TOKEN = 4
_LONG_BYTES = 32 * 1024
_HELD_MOST = 256 * 1024
TOKENS_MOST = 2**40
"""More than anybody has; a number that a client or an engine made up must not overflow what counts it."""


class Wish(msgspec.Struct, frozen=True):
    """What a request will need: tokens of its prompt (guessed) and of its answers; whether usage is to be asked for."""

    prompt: int
    answers: int
    ask: bool


def wish_of(path: bytes, body: bytes, asked: Asked) -> Wish:
    """What a request on this path will need."""
    if path in _WORDLESS:
        return Wish(prompt_guess(body), 0, ask=False)
    ask = asked.stream and not asked.usage and path in _STREAMED
    return Wish(prompt_guess(body), min(asked.answers, TOKENS_MOST), ask)


def prompt_guess(body: bytes) -> int:
    """About how many tokens a body's prompt has: a quarter of its bytes, and a flat sum for each medium in it."""
    if len(body) > _LONG_BYTES and b";base64," in body:
        media = [len(found) for found in _MEDIA.findall(body)]
        return (len(body) - sum(media)) // _BYTES_A_TOKEN + _MEDIA_TOKENS * len(media)
    return len(body) // _BYTES_A_TOKEN


def asking(body: bytes) -> bytes:
    """The body of a stream, with usage asked for.

    As a rule so much is put in before its other members; where it has stream options of its own it is written anew.
    """
    if b'"stream_options"' not in body and not is_odd(body):
        at = body.index(b"{") + 1
        return body[:at] + b'"stream_options":{"include_usage":true},' + body[at:]
    try:
        members: dict[str, Any] = orjson.loads(body)
        members["stream_options"] = {**(members.get("stream_options") or {}), "include_usage": True}
        return orjson.dumps(members)
    except (ValueError, TypeError):  # numbers or characters that this cannot write: the usage is guessed then
        return body


class UsageFilter:
    """Takes the usage event out of a stream on its way to a client that did not ask for it.

    Whole events without a usage pass as they came, at the cost of one search. What of a chunk, or of an event, is not
    all there yet is held until it is.
    """

    __slots__ = ("_held", "_raw", "through")

    def __init__(self) -> None:
        self._raw = b""  # the beginning of a chunk
        self._held = b""  # the beginning of an event, out of chunks that were taken apart
        self.through = False
        """Given up: chunks are passed on in whatever pieces they come."""

    @property
    def holds_nothing(self) -> bool:
        """Whether nothing of a chunk or of an event is held."""
        return not (self._raw or self._held)

    def chunks(self, data: bytes, boundary: int, *, events: bool, finished: bool) -> bytes:
        """Some of a chunked body. ``boundary`` is behind its last whole chunk, and ``events`` says that each chunk that
        ended in it ended an event, see :class:`ChunkWalker`; ``finished`` says that the body ends with it. What is
        taken apart is chunked anew."""
        if self.through:
            return data
        if finished or boundary == len(data):
            ready = self._raw + data if self._raw else data
            self._raw = b""
        elif boundary <= 0:
            self._raw += data
            if len(self._raw) <= _HELD_MOST:
                return b""
            self.through = True  # whatever this is, it is no event of an answer
            ready, self._raw = self._raw, b""
            return self._chunk(self._held) + ready
        else:
            ready, self._raw = self._raw + data[:boundary], data[boundary:]
        # Where chunks end as events do, no word stands across two of them.
        at = 0
        if not self._held and events:
            found = _USAGE.search(ready)
            if found is None:
                return ready
            at = _chunk_with(ready, found.start())
        made = self.content(_content(ready, at))
        if finished:
            return ready[:at] + self._chunk(made + self.rest()) + b"0\r\n\r\n"
        return ready[:at] + self._chunk(made)

    @staticmethod
    def _chunk(content: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(content), content) if content else b""

    def content(self, part: bytes) -> bytes:
        """Some of a stream's content: its whole events, without the usage's."""
        held = self._held + part
        end = max(held.rfind(b"\n\n") + 2, held.rfind(b"\n\r\n") + 3)
        if end < 3:
            if len(held) <= _HELD_MOST:
                self._held = held
                return b""
            end = len(held)  # whatever this is, it is no event of an answer
        ready, self._held = held[:end], held[end:]
        if _USAGE.search(ready) is None:
            return ready
        return b"".join(event for event in _pieces(ready) if not _is_usage(event))

    def rest(self) -> bytes:
        """What was held at the end of the stream."""
        held, self._held = self._held, b""
        return b"" if _is_usage(held) else held


def _chunk_with(chunks: bytes, place: int) -> int:
    """Where the chunk begins that has this place in it."""
    at = 0
    while True:
        end = chunks.index(b"\r\n", at)
        size = int(chunks[at:end].partition(b";")[0], 16)
        if not size or end + 4 + size > place:
            return at
        at = end + 4 + size


def _content(chunks: bytes, at: int) -> bytes:
    """What whole chunks hold from there on, which a :class:`ChunkWalker` found right; trailers are dropped."""
    parts = []
    while at < len(chunks):
        end = chunks.index(b"\r\n", at)
        size = int(chunks[at:end].partition(b";")[0], 16)
        if not size:
            break
        parts.append(chunks[end + 2 : end + 2 + size])
        at = end + 4 + size
    return b"".join(parts)


def _pieces(ready: bytes) -> list[bytes]:
    events = _EVENT.findall(ready)
    return [*events, ready[sum(map(len, events)) :]]


def _is_usage(event: bytes) -> bool:
    """Whether an event holds no choice and the usage."""
    if not _USAGE.search(event):
        return False
    text = event.strip()
    try:
        value = orjson.loads(text.removeprefix(b"data:"))
    except orjson.JSONDecodeError:
        return False
    return isinstance(value, dict) and value.get("choices") == [] and isinstance(value.get("usage"), dict)


def answer_guess(passed: int, tail: bytes, *, events: bool) -> int:
    """About how many tokens an answer had of which so many bytes were passed on, by its end: one an event."""
    if not events:
        return passed // _BYTES_A_TOKEN
    count = tail.count(b"data:")
    return round(passed * count / len(tail)) if count else 0
