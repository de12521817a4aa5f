"""Three versions of a settings document: the base, what they made of it, what I made of it. Pure.

Values are compared, key by key; things with names by their names. A value that both changed, and differently, is a
conflict; so is one that the one removed and the other changed something in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen

from llmgw.settings.edit import put, removed
from llmgw.settings.faults import Path
from llmgw.settings.yaml import read

_LONGEST = 200
_HIDDEN = "env"


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()
"""Where there is no value: ``null`` is one."""


@frozen
class Change:
    """A value that is another: ``before`` and ``after`` are :data:`ABSENT` where there is none."""

    path: Path
    before: Any
    after: Any

    def __str__(self) -> str:
        here = quoted(self.path)
        if self.before is ABSENT:
            return f"+ {here}: {_shown(self.path, self.after)}"
        if self.after is ABSENT:
            return f"- {here}: {_shown(self.path, self.before)}"
        return f"~ {here}: {_shown(self.path, self.before)} -> {_shown(self.path, self.after)}"


@frozen
class Conflict:
    """What both changed at, or below, a path."""

    path: Path
    theirs: tuple[Change, ...]
    mine: tuple[Change, ...]


@frozen
class Merge:
    """Both sets of changes, and where they get in each other's way. ``mine_only`` can be made on theirs."""

    theirs: tuple[Change, ...]
    mine: tuple[Change, ...]
    mine_only: tuple[Change, ...]
    conflicts: tuple[Conflict, ...]


def changes(before: str, after: str) -> tuple[Change, ...]:
    """Every difference between two texts' values. Raises ``ConfigError`` for what is no YAML."""
    return tuple(_changes((), _named(read(before, "before").value), _named(read(after, "after").value)))


def merge(base: str, theirs: str, mine: str) -> Merge:
    """What both made of the base. Raises ``ConfigError`` for what is no YAML."""
    they, i = changes(base, theirs), changes(base, mine)
    conflicts = []
    free = []
    for change in i:
        against = tuple(t for t in they if _meet(t.path, change.path) and t != change)
        if against:
            shortest = min((change.path, *(t.path for t in against)), key=len)
            conflicts.append(Conflict(shortest, against, (change,)))
        elif change not in they:
            free.append(change)
    return Merge(they, i, tuple(free), tuple(conflicts))


def merged(theirs: str, found: Merge) -> str:
    """Their text with my changes that are in nobody's way. Raises ``OperatorError`` where it cannot be edited."""
    for change in found.mine_only:
        path = quoted(change.path)
        theirs = removed(theirs, path) if change.after is ABSENT else put(theirs, path, _plain_text(change.after))
    return theirs


def quoted(path: Path) -> str:
    """A path that :mod:`llmgw.settings.keypath` reads as this very one: names with dots in quotes."""
    return ".".join(f'"{step}"' if set(str(step)) & set(".[]'") or not str(step) else str(step) for step in path)


def _meet(one: Path, other: Path) -> bool:
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def _changes(path: Path, before: Any, after: Any) -> Iterator[Change]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in {**before, **after}:
            yield from _changes((*path, key), before.get(key, ABSENT), after.get(key, ABSENT))
    elif path == () and (before is None or after is None):
        yield from _changes(path, before or {}, after or {}) if before != after else ()
    elif type(before) is not type(after) or before != after:
        yield Change(path, before, after)


class _Named(dict[str, Any]):
    """A list of things with names, by name."""


def _named(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _named(inner) for key, inner in value.items()}
    if isinstance(value, list):
        names = [item.get("name") if isinstance(item, dict) else None for item in value]
        if value and all(isinstance(name, str) for name in names) and len(set(names)) == len(names):
            return _Named((str(name), _named(item)) for name, item in zip(names, value, strict=True))
        return [_named(item) for item in value]
    return value


def _listed(value: Any) -> Any:
    if isinstance(value, _Named):
        return [_listed(dict(item)) for item in value.values()]
    if isinstance(value, dict):
        return {key: _listed(inner) for key, inner in value.items()}
    return [_listed(item) for item in value] if isinstance(value, list) else value


def _plain_text(value: Any) -> str:
    return json.dumps(_listed(value), ensure_ascii=False)


def _shown(path: Path, value: Any) -> str:
    if _HIDDEN in path:
        return "(not shown)"
    text = json.dumps(_hidden(_listed(value)), ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _hidden(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: "(not shown)" if key == _HIDDEN and inner else _hidden(inner) for key, inner in value.items()}
    return [_hidden(item) for item in value] if isinstance(value, list) else value
