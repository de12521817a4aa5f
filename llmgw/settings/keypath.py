"""Paths into a settings document as people write them: ``models.llama-3.1-8b.profiles.one-l40s.tp``. Pure.

A key that the document has is taken as long as it can be, so that names with dots need no quotes; a name that is yet to
come does: ``models."llama-3.3-70b".replicas``. Items of a list are named by their number, ``profiles[0]``, or by their
``name``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmgw.errors import OperatorError
from llmgw.settings.faults import Path, dotted, nearest

_EXAMPLE = 'such as models.NAME.replicas, router.auth, or models."a.name.with.dots".replicas'


def resolve(text: str, value: Any) -> Path:
    """The keys of a path, by the document's value; the last ones may be yet to come.

    Raises :class:`OperatorError` when it is no path.
    """
    path: list[str | int] = []
    rest = text
    while rest:
        word, after = _next(rest, value, text)
        step: str | int = _item(word, value) if isinstance(value, list) else word
        path.append(step)
        value = _inside(value, step)
        if after.startswith("."):
            after = after[1:]
            if not after:
                raise _wrong(text, "ends with a dot")
        rest = after
    if not path:
        raise _wrong(text, "is empty")
    return tuple(path)


def at(path: Path, value: Any) -> Any:
    """The value there. Raises :class:`OperatorError` naming what there is instead."""
    for number, step in enumerate(path):
        here = dotted(path[:number]) or "the document"
        listed = isinstance(value, list) and isinstance(step, int) and step < len(value)
        if listed or (isinstance(value, Mapping) and step in value):
            value = value[step]
        elif isinstance(value, Mapping):
            raise OperatorError(here, f"has no {step}", nearest(str(step), [str(key) for key in value]))
        elif isinstance(value, list):
            names = [str(item["name"]) for item in value if isinstance(item, Mapping) and "name" in item]
            known = nearest(str(step), names) if names else f"it has {len(value)} items"
            raise OperatorError(here, f"has no {step}", known)
        else:
            raise OperatorError(here, f"has nothing below it, so no {step}", "")
    return value


def _next(rest: str, value: Any, whole: str) -> tuple[str, str]:
    """The first word of what is left of a path, and what comes after it."""
    bracket = rest.startswith("[")
    body = rest[1:] if bracket else rest
    if body[:1] in ("'", '"'):
        end = body.find(body[0], 1)
        if end < 0:
            raise _wrong(whole, f"has a {body[0]} that nothing closes")
        word, after = body[1:end], body[end + 1 :]
        if bracket:
            if not after.startswith("]"):
                raise _wrong(whole, "has a [ that nothing closes")
            after = after[1:]
    elif bracket:
        word, found, after = body.partition("]")
        if not found:
            raise _wrong(whole, "has a [ that nothing closes")
    else:
        known = [
            key for key in _names(value) if body.startswith(key) and body[len(key) : len(key) + 1] in ("", ".", "[")
        ]
        word = max(known, key=len) if known else _word(body)
        after = body[len(word) :]
    if not word:
        raise _wrong(whole, "has nothing between two dots")
    if after and after[0] not in ".[":
        raise _wrong(whole, f"goes on with {after[0]!r} where a dot should be")
    return word, after


def _word(body: str) -> str:
    ends = [found for mark in ".[" if (found := body.find(mark)) >= 0]
    return body[: min(ends)] if ends else body


def _names(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [key for key in value if isinstance(key, str) and key]
    if isinstance(value, list):
        return [item["name"] for item in value if isinstance(item, Mapping) and isinstance(item.get("name"), str)]
    return []


def _item(word: str, value: list[Any]) -> str | int:
    """An item's number; the name itself where no item has it yet."""
    for number, item in enumerate(value):
        if isinstance(item, Mapping) and item.get("name") == word:
            return number
    return int(word) if word.isascii() and word.isdigit() and len(word) < 6 else word


def _inside(value: Any, step: str | int) -> Any:
    if isinstance(value, Mapping):
        return value.get(step)
    if isinstance(value, list) and isinstance(step, int) and step < len(value):
        return value[step]
    return None


def _wrong(text: str, why: str) -> OperatorError:
    return OperatorError(f"the path {text[:100]!r}", why, _EXAMPLE)
