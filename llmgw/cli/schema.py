"""JSON schemas of our classes, for programs that read what ``--json`` prints."""

from __future__ import annotations

import inspect
import re
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import attrs

Json = dict[str, Any]
_PLAIN: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def json_schema(kind: type) -> Json:
    """The schema (draft 2020-12) of an attrs class as the wire has it. Fields of a newer version may be added."""
    defs: dict[str, Json] = {}
    _class(kind, defs)
    top = defs.pop(kind.__name__)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": kind.__name__, **top, "$defs": defs}


def _class(kind: type, defs: dict[str, Json]) -> Json:
    if kind.__name__ not in defs:
        defs[kind.__name__] = {}  # a class may hold itself
        hints = get_type_hints(kind)
        defs[kind.__name__] = {
            "type": "object",
            "description": _said(kind),
            "properties": {f.name: _type(hints[f.name], defs) for f in attrs.fields(kind)},
            "required": [f.name for f in attrs.fields(kind)],
        }
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _said(kind: type) -> str:
    """The docstring as one line of plain text."""
    return re.sub(r":\w+:|`", "", " ".join((inspect.getdoc(kind) or "").split()))


def _type(kind: Any, defs: dict[str, Json]) -> Json:
    if attrs.has(kind):
        return _class(kind, defs)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"type": "string", "enum": [member.value for member in kind]}
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    origin, args = get_origin(kind), get_args(kind)
    if origin is tuple:
        return {"type": "array", "items": _type(args[0], defs)}
    if origin in (Union, UnionType):
        return {"anyOf": [_type(arg, defs) for arg in args]}
    raise TypeError(f"no schema for {kind}")
