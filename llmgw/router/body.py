"""What a request's body asks for, strictly: what two readers could read in two ways is refused. Pure.

A body is looked at once, in C, and passed on as it came. Only one that looks odd is read whole in Python: with the
word ``model`` in it more than once, or with letters that are written as escapes (which only somebody does who wants
to be read differently by different readers), or with addresses of media.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from llmgw.router.errors import ApiError
from llmgw.router.media import refusal

_ESCAPED_LETTERS = re.compile(rb"\\u00(?:[67]|5[fF])").search
"""Small letters and the underscore, which all the names in the APIs consist of."""

_HALF_A_PAIR = re.compile(
    rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]", re.DOTALL
).search

_PARSED_DEPTH = 200
"""Deeper than any tool's schema, and far from what the parsers of engines give up at."""


ANSWER_TOKENS = 256
"""How many new tokens a request counts for that does not bound them."""


class _Options(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    model: str
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()


class _Whole(_Body):
    """With what only an engine judges: where it is wrong, that is for the engine to say."""

    max_output_tokens: int | None = None
    n: int | None = None
    stream_options: _Options | None = None


_decode = msgspec.json.Decoder(_Body).decode
_decode_whole = msgspec.json.Decoder(_Whole).decode


class Asked(msgspec.Struct, frozen=True):
    """What a request asks: for which model, whether as a stream, and how many new tokens at the most (0: not said).

    ``start`` is its text as it stands in the JSON (messages, prompt or input), for telling conversations apart.
    ``answers`` are the new tokens of all its answers, ``usage`` says that its stream is to tell what it used,
    and ``salt`` that it has a ``cache_salt``, in any spelling.
    """

    model: str
    stream: bool = False
    most_tokens: int = 0
    start: bytes = b""
    answers: int = ANSWER_TOKENS
    usage: bool = False
    salt: bool = False


def is_odd(body: bytes) -> bool:
    """Whether letters are written as escapes in it, so that looking for a word does not find every spelling of it."""
    # From the end a word is looked for in a third of the time.
    return body.rfind(b"\\u00") >= 0 and _ESCAPED_LETTERS(body) is not None


def asked_in_json(body: bytes, media_hosts: Sequence[str] = ()) -> Asked:
    """What a JSON body asks for. Raises :class:`ApiError` with 400.

    ``media_hosts`` are those that engines may fetch media from; empty means every public one.
    """
    try:
        body.decode()  # what is skipped over is not looked at by the decoder
        try:
            found: _Body = _decode_whole(body)
        except msgspec.ValidationError:
            found = _decode(body)
        if is_odd(body) or body.find(b'"model"') != body.rfind(b'"model"') or body.rfind(b'url"') >= 0:
            _read_whole(body, media_hosts)
    except msgspec.ValidationError as wrong:
        said = str(wrong)
        param = next((name for name in _Body.__struct_fields__ if f"`{name}`" in said or f"$.{name}" in said), None)
        raise ApiError(400, f"The request's body is wrong: {said}.", "invalid_body", param) from wrong
    except UnicodeDecodeError as wrong:
        raise ApiError(400, "The request's body is not valid JSON: it is not UTF-8.", "invalid_json") from wrong
    except RecursionError as wrong:
        raise _too_deep() from wrong
    except msgspec.DecodeError as wrong:
        # The decoder looks for the other half behind the string, and calls that an early end.
        said = "half of a surrogate pair stands alone" if _HALF_A_PAIR(body) else str(wrong)
        raise ApiError(400, f"The request's body is not valid JSON: {said}.", "invalid_json") from wrong
    most = found.max_completion_tokens or found.max_tokens or 0
    answers, usage = ANSWER_TOKENS, False
    if isinstance(found, _Whole):
        answers = max(0, most or found.max_output_tokens or ANSWER_TOKENS) * max(1, found.n or 1)
        usage = found.stream_options is not None and found.stream_options.include_usage is True
    start = bytes(found.messages or found.prompt or found.input)
    return Asked(found.model, found.stream is True, max(0, most), start, answers, usage, bool(found.cache_salt))


def _too_deep() -> ApiError:
    return ApiError(400, "The request's body is not valid JSON: it is nested too deeply.", "invalid_json")


def _read_whole(body: bytes, media_hosts: Sequence[str]) -> None:
    try:
        whole = json.loads(body, object_pairs_hook=_paired, parse_int=str)
    except RecursionError as wrong:
        raise _too_deep() from wrong
    except ValueError as wrong:
        raise ApiError(400, f"The request's body is not valid JSON: {wrong}.", "invalid_json") from wrong
    twice = _first_twice(name for name, _ in whole)
    if twice is not None:
        raise ApiError(400, f"The request's body has {twice[:100]!r} twice.", "invalid_body", twice[:100])
    for address in _addresses(whole, 0):
        if (reason := refusal(address, media_hosts)) is not None:
            raise ApiError(400, f"The address {address[:200]!r} {reason}.", "invalid_media_url")


class _Pairs(list[tuple[str, Any]]):
    """An object as it stands, with what is in it twice."""

    __slots__ = ()


def _paired(pairs: list[tuple[str, Any]]) -> _Pairs:
    return _Pairs(pairs)  # in Python, so that whoever reads a large body in a thread lets others run


def _first_twice(names: Iterator[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


_MEDIA_KEYS = frozenset({"image_url", "audio_url", "video_url", "file_url", "url"})


def _addresses(value: object, depth: int) -> Iterator[str]:
    """Every address that an engine would fetch: a string under one of the API's names for it, however deep."""
    if depth > _PARSED_DEPTH:
        raise _too_deep()
    if isinstance(value, _Pairs):
        for name, inner in value:
            if name in _MEDIA_KEYS and isinstance(inner, str):
                yield inner
            elif isinstance(inner, list):
                yield from _addresses(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            if isinstance(inner, list):
                yield from _addresses(inner, depth + 1)
