"""YAML 1.2 as plain values, with the place of each: a small, safe part of the language.

What configuration does not need is refused by name, before anything is built: anchors, aliases, tags, merge keys,
duplicate keys, keys that are not text, several documents, documents over :data:`MAX_BYTES`, deeper than
:data:`MAX_DEPTH` or of more than :data:`MAX_NODES` values. Plain scalars follow the core schema of YAML 1.2
(https://yaml.org/spec/1.2.2/#103-core-schema), so ``no`` and ``12:30`` are text.
"""

from __future__ import annotations

import re
from typing import Any

from attrs import define, field, frozen
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from llmgw.settings.faults import ConfigError, ConfigFault, Path, Place, dotted

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 32
MAX_NODES = 20_000
"""Keys and values together. The parser takes about 30,000 a second, and a wrong file must fail within one."""

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff]")
_NO_TEXT = re.compile("[\x00\ud800-\udfff]")
"""What an escape can write, and neither a command line nor JSON can hold."""
_LONGEST_NUMBER = 40


@frozen
class Document:
    """A document's value, and where each key path in it stands."""

    file: str
    value: Any
    places: dict[Path, Place] = field(repr=False)

    def place(self, path: Path) -> Place:
        """Where a path stands; for one that is not in the document, its nearest parent that is."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, Place(1, 1))

    def fault(self, path: Path, problem: str, hint: str = "") -> ConfigFault:
        """A fault of the value at this path."""
        place = self.place(path)
        return ConfigFault(self.file, place.line, place.column, dotted(path), problem, hint)


@define
class _Open:
    """A mapping or list that is being read. ``key`` is the mapping's key whose value comes next."""

    value: Any
    path: Path
    key: str | None = None


def read(text: str, file: str) -> Document:
    """Read one document. Raises :class:`ConfigError` with line and column."""

    def refuse(place: Place, problem: str, hint: str = "", path: Path = ()) -> ConfigError:
        return ConfigError(file, [ConfigFault(file, place.line, place.column, dotted(path), problem, hint)])

    if len(text) > MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise refuse(Place(1, 1), f"the document is larger than {MAX_BYTES} bytes", "split or shorten it")
    if bad := _CONTROL.search(text):
        line = text.count("\n", 0, bad.start()) + 1
        column = bad.start() - text.rfind("\n", 0, bad.start())
        raise refuse(Place(line, column), f"control character U+{ord(bad.group()):04X}", "this is not a text file")
    parser = YAML(typ="safe", pure=True)
    places: dict[Path, Place] = {}
    stack: list[_Open] = []
    root: list[Any] = []
    nodes = documents = 0
    try:
        for event in parser.parse(text):
            place = _place(event)
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise refuse(place, "a second document begins here", "keep one document in the file")
                if event.tags or event.version:
                    raise refuse(place, "YAML directives are not allowed", "remove the line that begins with %")
            elif isinstance(event, MappingEndEvent | SequenceEndEvent):
                stack.pop()
            elif isinstance(event, NodeEvent):
                nodes += 1
                path = _path_of_next(stack)
                if nodes > MAX_NODES:
                    raise refuse(place, f"the document has more than {MAX_NODES} keys and values", path=path)
                if isinstance(event, AliasEvent):
                    raise refuse(place, f"aliases are not allowed (*{event.anchor})", "write the value out", path)
                if event.anchor is not None:
                    raise refuse(place, f"anchors are not allowed (&{event.anchor})", "write the value out", path)
                if tag := str(getattr(event, "ctag", None) or ""):
                    raise refuse(place, f"tags are not allowed ({tag})", "remove the tag", path)
                _take(event, place, path, stack, root, places, refuse)
    except MarkedYAMLError as wrong:
        mark = wrong.problem_mark or wrong.context_mark
        place = Place(mark.line + 1, mark.column + 1) if mark is not None else Place(1, 1)
        raise refuse(place, f"not valid YAML: {wrong.problem or wrong.context}") from wrong
    except (YAMLError, ValueError, RecursionError) as wrong:
        raise refuse(Place(1, 1), f"not valid YAML: {str(wrong).splitlines()[0] if str(wrong) else wrong!r}") from wrong
    return Document(file, root[0] if root else None, places)


def _place(event: Event) -> Place:
    mark = event.start_mark
    return Place(1, 1) if mark is None else Place(mark.line + 1, mark.column + 1)


def _path_of_next(stack: list[_Open]) -> Path:
    if not stack:
        return ()
    top = stack[-1]
    if isinstance(top.value, list):
        return (*top.path, len(top.value))
    return top.path if top.key is None else (*top.path, top.key)


def _take(event: Any, place: Place, path: Path, stack: list[_Open], root: list[Any], places: Any, refuse: Any) -> None:
    """Put one node where it belongs: a key, a mapping's value, a list's item, or the document itself."""
    top = stack[-1] if stack else None
    wants_key = top is not None and isinstance(top.value, dict) and top.key is None
    if isinstance(event, ScalarEvent):
        if bad := _NO_TEXT.search(event.value):
            # JSON writes what is beyond U+FFFF as two of them.
            event.value = event.value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        if bad and (bad := _NO_TEXT.search(event.value)):
            raise refuse(place, f"U+{ord(bad.group()):04X} is no character of a text", "write what it stands for", path)
        if wants_key:
            assert top is not None
            value = _scalar(event) if event.style is None else event.value
            if not isinstance(value, str):
                raise refuse(place, f"the key {event.value} is not text", f'write "{event.value}"', path)
            if value == "<<":
                raise refuse(place, "merge keys are not allowed (<<)", "write the keys out", path)
            if value in top.value:
                first = places[(*path, value)]
                raise refuse(place, f"the key {value} stands here twice", f"first in line {first.line}", path)
            places[(*path, value)] = place
            top.key = value
            return
        made: Any = _scalar(event) if event.style is None else event.value
    elif wants_key:
        raise refuse(place, "a key must be text", path=path)
    else:
        if len(stack) >= MAX_DEPTH:
            raise refuse(place, f"nested deeper than {MAX_DEPTH} levels", path=path)
        made = {} if isinstance(event, MappingStartEvent) else []
        assert isinstance(event, MappingStartEvent | SequenceStartEvent)
    places.setdefault(path, place)
    if top is None:
        root.append(made)
    elif isinstance(top.value, list):
        top.value.append(made)
    else:
        top.value[top.key] = made
        top.key = None
    if not isinstance(event, ScalarEvent):
        stack.append(_Open(made, path))


def _scalar(event: ScalarEvent) -> Any:
    """A plain scalar by the core schema."""
    text: str = event.value
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if len(text) <= _LONGEST_NUMBER:
        if _INT.fullmatch(text):
            return int(text)
        if _OCTAL.fullmatch(text):
            return int(text[2:], 8)
        if _HEX.fullmatch(text):
            return int(text, 16)
        if _FLOAT.fullmatch(text):
            return float(text)
    return text
