"""Values as YAML text: on one line where they fit, else as blocks. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

from llmgw.settings.faults import Path
from llmgw.settings.yaml import read

STEP = 2
"""Columns that a block is indented by."""

_PLAIN = re.compile(r"[A-Za-z_/.][A-Za-z0-9_./@+-]*(?::[A-Za-z0-9/][A-Za-z0-9_./@+-]*)*")
_WIDTH = 100


def nested(keys: Path, value: Any) -> Any:
    """The value below these keys."""
    for key in reversed(keys):
        value = {str(key): value}
    return value


def scalar(value: Any) -> str:
    """A single value, or a key: plain where that is sure to be read back, else as in JSON."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and read(value, "").value == value:
        return value
    return json.dumps(value, ensure_ascii=False)


def flow(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{scalar(key)}: {flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(flow(item) for item in value) + "]"
    return scalar(value)


def value_lines(value: Any, indent: int, used: int) -> list[str]:
    """What stands behind a key that takes ``used`` columns: a line, or an empty one and lines below it."""
    line = flow(value)
    if not isinstance(value, dict | list) or not value or used + len(line) <= _WIDTH:
        return [line]
    return ["", *block(value, indent)]


def block(value: Any, indent: int) -> list[str]:
    """A mapping or list that is not empty as lines."""
    lines = []
    if isinstance(value, dict):
        for key, inner in value.items():
            lines += pair_lines((key,), inner, indent)
    else:
        for item in value:
            lines += item_lines(item, indent)
    return lines


def pair_lines(keys: Path, value: Any, indent: int) -> list[str]:
    """A key and its value as lines of a block, further keys nested below it."""
    head = f"{' ' * indent}{scalar(str(keys[0]))}:"
    if len(keys) > 1:
        return [head, *pair_lines(keys[1:], value, indent + STEP)]
    first, *rest = value_lines(value, indent + STEP, len(head) + 1)
    return [f"{head} {first}" if first else head, *rest]


def item_lines(item: Any, indent: int) -> list[str]:
    """A list's item as lines of a block."""
    line = flow(item)
    if not isinstance(item, dict) or not item or indent + 2 + len(line) <= _WIDTH:
        return [f"{' ' * indent}- {line}"]
    first, *rest = block(item, indent + 2)
    return [f"{' ' * indent}- {first.lstrip()}", *rest]
