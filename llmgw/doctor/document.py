"""The facts and what follows from them as one JSON document, read back to the same facts. Pure.

Only the facts are read back: verdicts are made anew, so that the same report comes of them anywhere.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator, Sequence
from typing import Any, get_type_hints

import attrs
import cattrs

from llmgw.doctor.facts import Facts, Unread
from llmgw.doctor.network import plans
from llmgw.doctor.verdict import Check, Severity, judge
from llmgw.errors import OperatorError
from llmgw.settings.convert import strict_converter

FORMAT = 1
_REMEDY = "make it with: llmgw doctor --json"
_MOST = 1 << 63
_VOLATILE = frozenset(
    {"now", "counters", "counted_s", "kernel_log", "fabric_manager_log", "unread", "peer_path", "plane_ahead_s"}
)
"""Facts that differ at every reading, and those that are lists of lines: their findings are compared instead."""

_NAMES = ("name", "label", "path", "adapter")


@attrs.frozen
class Document:
    """What `--json` prints, but for what is made of the facts. ``llmgw`` is the version that read them."""

    llmgw: str
    redacted: bool
    facts: Facts


def as_json(document: Document, checks: Sequence[Check]) -> dict[str, Any]:
    """The document as plain values, in an order that is always the same."""
    convert = strict_converter()
    return {
        "format": FORMAT,
        "llmgw": document.llmgw,
        "redacted": document.redacted,
        "findings": [convert.unstructure(v) for v in judge(document.facts, checks)],
        "network": [convert.unstructure(plan) for plan in plans(document.facts)],
        "facts": convert.unstructure(document.facts),
    }


def read_text(data: str | bytes, thing: str) -> Document:
    """The same of a file's content. Raises :class:`OperatorError`, whatever it holds."""
    try:
        said = json.loads(data)
    except (ValueError, RecursionError) as wrong:
        raise OperatorError(thing, f"is no JSON that can be read ({type(wrong).__name__})", _REMEDY) from wrong
    return from_json(said, thing)


def from_json(said: Any, thing: str) -> Document:
    """Read a document, also of an older version: facts that it lacks are unread. Raises :class:`OperatorError`."""
    if not isinstance(said, dict) or not isinstance(facts := said.get("facts"), dict):
        raise OperatorError(thing, "is no report of llmgw doctor", _REMEDY)
    number = said.get("format")
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= FORMAT:
        raise OperatorError(thing, f"has format {str(number)[:20]}, {FORMAT} is known", "use the llmgw that made it")
    convert = strict_converter(forbid_unknown=False)
    known: dict[str, Any] = {}
    unread: list[Unread] = []
    hints = get_type_hints(Facts)
    try:
        _bounded(facts)
        for field in attrs.fields(Facts):
            if field.name in facts:
                known[field.name] = convert.structure(facts[field.name], hints[field.name])
            else:
                unread.append(Unread(field.name, "the report is of an older version that did not read it"))
        _addresses(Facts(**known))
    except (ValueError, TypeError, KeyError, RecursionError, cattrs.BaseValidationError) as wrong:
        raise OperatorError(thing, f"has facts of another shape ({type(wrong).__name__})", _REMEDY) from wrong
    known["unread"] = (*known.get("unread", ()), *unread)
    return Document(str(said.get("llmgw", "")), said.get("redacted") is True, Facts(**known))


def _bounded(value: Any) -> None:
    """Raise ``ValueError`` for numbers and text that no machine has: checks calculate with them and show them."""
    if isinstance(value, dict):
        for inner in value.values():
            _bounded(inner)
    elif isinstance(value, list):
        for inner in value:
            _bounded(inner)
    elif isinstance(value, str):
        value.encode()
    elif isinstance(value, int | float) and not -_MOST < value < _MOST:
        raise ValueError("a number that cannot be")


def _addresses(facts: Facts) -> None:
    """Raise ``ValueError`` for an address that is none: checks count on them."""
    for things in (facts.netdevs, facts.adapters):
        for thing in things:
            for address in thing.addresses:
                ipaddress.ip_interface(address)
    path = facts.peer_path
    for address in (*facts.host_addresses, *path.named_here, *path.named_there):
        ipaddress.ip_address(address)


def difference(a: Document, b: Document, checks: Sequence[Check]) -> Iterator[str]:
    """What changed from one report to another: findings first, then facts, each on a line."""
    one, two = ({v.id: v for v in judge(d.facts, checks)} for d in (a, b))
    for name in one:
        before, after = one[name], two[name]
        if (before.severity, before.text) != (after.severity, after.text):
            for mark, verdict in (("-", before), ("+", after)):
                if verdict.severity is not Severity.OK:
                    yield f"{mark} {verdict.severity.value} {name}: {verdict.text}"
    convert = strict_converter()
    for field in attrs.fields(Facts):
        if field.name in _VOLATILE:
            continue
        old, new = (dict(_flat(convert.unstructure(getattr(d.facts, field.name)), field.name)) for d in (a, b))
        for path in dict.fromkeys((*old, *new)):
            was, is_now = _shown(old.get(path)), _shown(new.get(path))
            if was != is_now:
                yield f"  {path}: {was} -> {is_now}"


def _shown(value: Any) -> str:
    return "nothing" if value in (None, "") else str(value)


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every leaf with its path. Things of a list go by their name where each has one of its own."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        names = [_name(inner) for inner in value]
        by_name = all(names) and len(set(names)) == len(names)
        for number, inner in enumerate(value):
            yield from _flat(inner, f"{path}[{names[number] if by_name else number}]")
    else:
        yield path, value


def _name(thing: Any) -> str:
    return next((str(thing[key]) for key in _NAMES if thing.get(key)), "") if isinstance(thing, dict) else ""
