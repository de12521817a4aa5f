"""Changes of a settings document's text: one value set or taken away, everything else as it was. Pure.

ruamel.yaml says where each value begins and ends, and only that piece of the text is written anew: comments, order,
quotes and empty lines elsewhere stay to the byte. (Dumping ruamel's round-trip tree would lose the comments before the
key after a removed one, which it keeps with the removed.) What comes out is read again and must hold just what was to
be changed.
"""

from __future__ import annotations

import json
from typing import Any

from attrs import frozen

from llmgw.errors import OperatorError
from llmgw.settings import keypath
from llmgw.settings.document import Settings
from llmgw.settings.effective import plain
from llmgw.settings.faults import Path
from llmgw.settings.load import load_settings
from llmgw.settings.splice import Spliced, named_item
from llmgw.settings.yaml import read


@frozen
class Found:
    """A value, and whether it is ``written`` in the document; else it is the default that holds."""

    path: Path
    value: Any
    written: bool


@frozen
class Set:
    """This value at this path; the value is YAML, on one line or several."""

    path: str
    value: str


@frozen
class Unset:
    """Nothing at this path any more, so that the default holds."""

    path: str


def get(text: str, path: str) -> Found:
    """What is at a path: as it is written, else as it holds. Raises :class:`OperatorError`."""
    document = read(text, "settings")
    written = keypath.resolve(path, document.value)
    if written in document.places:
        return Found(written, keypath.at(written, document.value), written=True)
    effective = plain(load_settings(text, "settings"))
    found = keypath.resolve(path, effective)
    return Found(found, keypath.at(found, effective), written=False)


def edited(text: str, edits: tuple[Set | Unset, ...], file: str = "settings") -> tuple[str, Settings]:
    """The text with all of these changes, one after the other, and what it says then.

    Raises :class:`OperatorError`, and a ``ConfigError`` with every fault of the text that would result.
    """
    for edit in edits:
        text = put(text, edit.path, edit.value) if isinstance(edit, Set) else removed(text, edit.path)
    return text, load_settings(text, file)


def put(text: str, path: str, value: str) -> str:
    """The text with this value at this path. It may be wrong as settings. Raises :class:`OperatorError`."""
    new = read(value, f"the value of {path}").value
    document = read(text, "settings")
    keys = keypath.resolve(path, document.value)
    whole = _with(document.value, keys, new, path)
    return _checked(Spliced(text).put(keys, new), whole, path)


def removed(text: str, path: str) -> str:
    """The text without what is at this path. Raises :class:`OperatorError` where nothing is."""
    document = read(text, "settings")
    keys = keypath.resolve(path, document.value)
    keypath.at(keys, document.value)
    return _checked(Spliced(text).remove(keys), _without(document.value, keys), path)


def _checked(text: str, whole: Any, path: str) -> str:
    try:
        same = read(text, "settings").value == whole
    except OperatorError:
        same = False
    if not same:
        raise OperatorError(path, "is written in a way that cannot be changed by itself", "use llmgw ctl config edit")
    return text


def _with(value: Any, keys: Path, new: Any, path: str) -> Any:
    """A copy of the value with something else at the keys, and with whatever leads there."""
    if not keys:
        return new
    first, rest = keys[0], keys[1:]
    if isinstance(value, list):
        made = list(value)
        if isinstance(first, int) and first < len(made):
            made[first] = _with(made[first], rest, new, path)
            return made
        if isinstance(first, int) and first > len(made):
            raise OperatorError(path, f"is item {first} of a list that has {len(made)}", "")
        made.append(named_item(first, _with(None, rest, new, path)))
        return made
    if isinstance(value, dict) or value is None:
        return {**(value or {}), str(first): _with((value or {}).get(first), rest, new, path)}
    raise OperatorError(path, f"leads through {json.dumps(value)}, which has nothing below it", "")


def _without(value: Any, keys: Path) -> Any:
    first, rest = keys[0], keys[1:]
    made: Any = list(value) if isinstance(value, list) else dict(value)
    if rest:
        made[first] = _without(made[first], rest)
    else:
        del made[first]
    return made
