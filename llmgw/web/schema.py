"""JSON schemas of our classes: for programs that read what ``--json`` prints, and for reviews of the wire."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import attrs

from llmgw.settings.bounds import SCHEMA

Json = dict[str, Any]
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def json_schema(kind: type) -> Json:
    """The schema (draft 2020-12) of an attrs class as the wire has it. Fields of a newer version may be added."""
    defs = Definitions()
    defs.add(kind)
    top = defs.made.pop(kind.__name__)
    return {"$schema": _DRAFT, "title": kind.__name__, **top, "$defs": defs.made}


def wire_schema(title: str, version: int, tables: Mapping[str, Mapping[str, type]]) -> Json:
    """The schema of all that may be said, by direction and tag; what has a default may be left out.

    A message has its tag under ``type`` besides. Fields and tags of a newer version may be added.
    """
    defs = Definitions(may_be_left_out=True)
    said = {way: {tag: defs.add(kind) for tag, kind in table.items()} for way, table in tables.items()}
    return {"$schema": _DRAFT, "title": title, "version": version, **said, "$defs": dict(sorted(defs.made.items()))}


class Definitions:
    """Schemas of classes, each once, to be found at ``place``.

    ``may_be_left_out``: fields with a default need not be there. ``closed``: others may not be there.
    """

    def __init__(self, *, may_be_left_out: bool = False, closed: bool = False, place: str = "#/$defs/") -> None:
        self.made: dict[str, Json] = {}
        self._kinds: dict[str, type] = {}
        self._may_be_left_out = may_be_left_out
        self._closed = closed
        self._place = place

    def add(self, kind: type) -> Json:
        """A reference to the class's schema."""
        name = kind.__name__
        if self._kinds.setdefault(name, kind) is not kind:
            raise TypeError(f"two classes are named {name}")
        if name not in self.made:
            self.made[name] = {}  # a class may hold itself
            hints = get_type_hints(kind)
            fields = attrs.fields(kind)
            self.made[name] = {
                "type": "object",
                "description": _said(kind),
                "properties": {f.name: _with(self._type(hints[f.name]), f.metadata.get(SCHEMA, {})) for f in fields},
                "required": [f.name for f in fields if not self._may_be_left_out or f.default is attrs.NOTHING],
            }
            self.made[name] |= getattr(kind, "SCHEMA_RULES", {})
            if self._closed:
                self.made[name]["additionalProperties"] = False
        return {"$ref": f"{self._place}{name}"}

    def _type(self, kind: Any) -> Json:
        if attrs.has(kind):
            return self.add(kind)
        if isinstance(kind, type) and issubclass(kind, Enum):
            return {"type": "string", "enum": [member.value for member in kind]}
        if kind in _PLAIN:
            return {"type": _PLAIN[kind]}
        origin, args = get_origin(kind), get_args(kind)
        if origin is tuple:
            return {"type": "array", "items": self._type(args[0])}
        if origin in (Union, UnionType):
            return {"anyOf": [self._type(arg) for arg in args]}
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self._type(args[1])}
        raise TypeError(f"no schema for {kind}")


def _with(schema: Json, said: Json) -> Json:
    """What is said of a field's values, where they are not null."""
    if said and "anyOf" in schema:
        return {"anyOf": [part if part == {"type": "null"} else part | said for part in schema["anyOf"]]}
    return schema | said


def _said(kind: type) -> str:
    """The docstring as one line of plain text."""
    return re.sub(r":\w+:|`", "", " ".join((inspect.getdoc(kind) or "").split()))
