"""What one settings document has otherwise than another, key by key. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from attrs import frozen

from llmgw.settings.agent_part import agent_part
from llmgw.settings.convert import strict_converter
from llmgw.settings.document import NodeRules, Settings

_CONVERTER = strict_converter()
_LONGEST = 200
_HIDDEN = "env"
"""Environments may hold tokens: that one changed is said, and not to what."""


@frozen
class Difference:
    """One key that was added (``before`` is ``None``), removed (``after`` is ``None``) or changed."""

    path: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        if self.before is None:
            return f"+ {self.path}: {self.after}"
        return (
            f"- {self.path}: {self.before}" if self.after is None else f"~ {self.path}: {self.before} -> {self.after}"
        )


def differences(before: Settings, after: Settings) -> tuple[Difference, ...]:
    """Every difference, in the order of the documents; a whole model or profile that comes or goes is one."""
    return tuple(_of("", _plain(before), _plain(after)))


def affected(before: Settings, after: Settings, known: Iterable[str] = ()) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The models, and of these nodes and those that are named the ones, that are treated otherwise than before."""
    models = dict.fromkeys(m.name for s in (before, after) for m in s.models)
    named = [name for s in (before, after) for name in (*s.nodes, *s.agents.nodes)]
    return (
        tuple(name for name in models if before.model(name) != after.model(name)),
        tuple(name for name in dict.fromkeys([*known, *named]) if _of_node(before, name) != _of_node(after, name)),
    )


def _of_node(settings: Settings, name: str) -> tuple[NodeRules | None, dict[str, Any]]:
    return settings.nodes.get(name), agent_part(settings, name)


def _plain(settings: Settings) -> dict[str, Any]:
    made: dict[str, Any] = _CONVERTER.unstructure(settings)
    return {key: _named(value) for key, value in made.items()}


def _named(value: Any) -> Any:
    """Lists of things with names as mappings, so that they are compared by name."""
    if isinstance(value, Mapping):
        return {key: _named(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        if value and all(isinstance(item, Mapping) and "name" in item for item in value):
            return {item["name"]: _named({k: v for k, v in item.items() if k != "name"}) for item in value}
        return [_named(item) for item in value]
    return value


def _of(path: str, before: Any, after: Any) -> Iterator[Difference]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in {**before, **after}:
            here = f"{path}.{key}" if path else str(key)
            if key not in before:
                yield Difference(here, None, _shown(here, after[key]))
            elif key not in after:
                yield Difference(here, _shown(here, before[key]), None)
            else:
                yield from _of(here, before[key], after[key])
        both = [key for key in before if key in after]
        if path.endswith(".profiles") and both != [key for key in after if key in before]:
            yield Difference(f"{path} (order)", ", ".join(before), ", ".join(after))
    elif before != after:
        yield Difference(path, _shown(path, before), _shown(path, after))


def _shown(path: str, value: Any) -> str:
    if _HIDDEN in path.split("."):
        return "(not shown)"
    text = json.dumps(_hidden(value), ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _hidden(value: Any) -> Any:
    """The value without environments, and without what is as nobody set it."""
    if isinstance(value, Mapping):
        return {
            k: _hidden("(not shown)" if k == _HIDDEN and v else v)
            for k, v in value.items()
            if v not in (None, [], {}, "")
        }
    return value
