"""The reference of the settings: every key of the classes, with its type and default, and what is said of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import attrs
from attrs import frozen

from llmgw.hardware.fabric import FabricRule
from llmgw.settings.agent_part import FILE_ONLY
from llmgw.settings.catalog import Model, Profile
from llmgw.settings.convert import strict_converter
from llmgw.settings.daemon import AgentConfig, EngineInstall
from llmgw.settings.document import AgentSettings, Settings
from llmgw.settings.key_docs import DOCS, SECTIONS, KeyDoc
from llmgw.settings.yaml_text import flow

_HEAD = """\
# Settings

Every key of the settings document. This file is made by `llmgw config reference`; do not edit it. How the settings are
changed: [ctl.md](../ctl.md#settings). What `server.yaml` and `agent.yaml` say: [configuration.md](../configuration.md).

NAME, MODEL, ID and other words in capitals stand for names of yours. A required key has to be given where what it is in
is given. On the command line a path looks like this: `llmgw ctl config get models.llama-3.1-8b.profiles.one-l40s.tp`.
"""
_TABLE = "| key | type | unit | default | meaning | example |\n|---|---|---|---|---|---|\n"
_NONE = ("null", "[]", "{}", '""')
_PLAIN = {str: "text", bool: "true or false", int: "whole number", float: "number"}
_UNITS = {"_s": "seconds", "_gib": "GiB", "_bytes": "bytes", "_days": "days"}
_NAMES = {"nodes": "ID", "prices": "MODEL", "quotas": "GROUP"}
_CONVERTER = strict_converter()


@frozen
class Key:
    """One key: its path with placeholders, what kind of value it has, and its default as YAML, empty where it has
    none."""

    path: str
    kind: Any
    default: str

    @property
    def type(self) -> str:
        """The kind in words."""
        return _words(self.kind)

    @property
    def unit(self) -> str:
        """By the key's name, or as it is said."""
        by_name = next((unit for end, unit in _UNITS.items() if self.path.endswith(end)), "")
        return by_name or DOCS.get(self.path, KeyDoc("", "")).unit


def keys() -> tuple[Key, ...]:
    """Every key that a settings document can have, in the order of the sections."""
    # What is said of a model comes before its profiles, which have twice as much.
    found = sorted(_of(Settings, ""), key=lambda key: "profiles[]" in key.path)
    return tuple(key for section in SECTIONS for key in found if key.path.split(".")[0] == section)


def render() -> str:
    """The reference as Markdown."""
    parts = [_HEAD]
    every = keys()
    for section, meaning in SECTIONS.items():
        parts.append(f"\n## {section}\n\n{meaning}\n\n{_TABLE}")
        for key in every:
            if key.path.split(".")[0] == section:
                doc = DOCS[key.path]
                default = f"`{key.default}`" if key.default else "required"
                default = "none" if key.default in _NONE else default
                cells = (f"`{key.path}`", key.type, key.unit, default, doc.meaning, f"`{doc.example}`")
                parts.append(f"| {' | '.join(cells)} |\n")
    return "".join(parts)


def _of(kind: type, path: str) -> Iterator[Key]:
    hints = get_type_hints(kind)
    for field in attrs.fields(kind):
        here = f"{path}.{field.name}" if path else field.name
        if kind is Settings and field.name == "models":
            yield from (key for key in _of(Model, "models.NAME") if key.path != "models.NAME.name")
        elif kind is Model and field.name == "profiles":
            yield from _of(Profile, f"{path}.profiles[]")
        elif hints[field.name] is AgentSettings:
            yield from _of(AgentConfig, "agents.default")
        elif kind is AgentConfig and field.name in (*FILE_ONLY, "port_last"):
            pass
        elif kind is AgentConfig and field.name == "port_first":
            ports = {f.name: f.default for f in attrs.fields(AgentConfig)}
            yield Key(f"{path}.ports", str, f"{ports['port_first']}-{ports['port_last']}")
        elif kind is AgentConfig and field.name in ("fabrics", "engines"):
            fabric = field.name == "fabrics"
            below = f"{here}.{'LABEL' if fabric else 'KIND'}"
            own = f"{below}.{'label' if fabric else 'kind'}"
            yield from (key for key in _of(FabricRule if fabric else EngineInstall, below) if key.path != own)
        else:
            yield from _value(hints[field.name], here, field.name, field.default)


def _value(kind: Any, path: str, name: str, default: Any) -> Iterator[Key]:
    inner = _without_none(kind)
    if attrs.has(inner):
        yield from _of(inner, path)
    elif _is_mapping(inner) and get_args(inner)[1] is not str:
        below = get_args(inner)[1]
        here = f"{path}.{_NAMES[name]}"
        if attrs.has(below):
            yield from _of(below, here)
        else:
            yield Key(f"{here}.CLASS", get_args(below)[1], "null")
    else:
        yield Key(path, kind, "" if default is attrs.NOTHING else _shown(default))


def _shown(default: Any) -> str:
    value = _CONVERTER.unstructure(default)
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4g}"
    return flow(int(value) if isinstance(value, float) else value)


def _is_mapping(kind: Any) -> bool:
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, UnionType):
        return next(k for k in get_args(kind) if k is not type(None))
    return kind


def _words(kind: Any) -> str:
    kind = _without_none(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(str(member.value) for member in kind)
    if _is_mapping(kind):
        return f"mapping of {_words(get_args(kind)[1])}"
    if get_origin(kind) is tuple:
        return f"list of {_words(get_args(kind)[0])}"
    return _PLAIN[kind]
