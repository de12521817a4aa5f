"""Strict conversion between plain values (what YAML and JSON hold) and our frozen classes.

cattrs alone turns ``"7"`` and ``true`` into 7 and 1; a typing mistake in a file or a peer's bug would pass. Here a
value has the type that was asked for or is refused with what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import Enum, StrEnum
from functools import partial
from types import GenericAlias, MappingProxyType, UnionType
from typing import Any, Union, get_args, get_origin

import attrs
import cattrs
from cattrs.gen import make_dict_structure_fn


class WrongValue(ValueError):
    """A value of the wrong kind. ``expected`` and ``found`` are phrases for people."""

    def __init__(self, expected: str, found: object) -> None:
        super().__init__(f"expected {expected}, found {shown(found)}")
        self.expected = expected
        self.found = shown(found)


def shown(value: object) -> str:
    """A value as an error message shows it: its kind in words, and not more of it than helps."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the text {value!r}" if len(value) <= 60 else f"the text {value[:57]!r}…"
        case Mapping():
            return "a mapping"
        case list() | tuple():
            return "a list"
        case _:
            return type(value).__name__


def _text(value: Any, _kind: Any) -> str:
    if isinstance(value, str):
        return str(value)
    raise WrongValue("text", value)


def _flag(value: Any, _kind: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise WrongValue("true or false", value)


def _whole(value: Any, _kind: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        if not -(2**63) <= value < 2**63:  # no store has a place for it
            raise WrongValue("a whole number of at most 64 bits", value)
        return int(value)
    raise WrongValue("a whole number", value)


def _number(value: Any, _kind: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise WrongValue("a number", value)


def _choice(value: Any, kind: type[Enum]) -> Enum:
    # The type counts too: 1 == True would pick a member that nobody wrote.
    for member in kind:
        if type(value) is type(member.value) and value == member.value:
            return member
    raise WrongValue(f"one of {', '.join(str(m.value) for m in kind)}", value)


def _plain_or_choice(hook: Callable[[Any, Any], Any], value: Any, kind: Any) -> Any:
    """A hook by class catches subclasses too, and the members of a ``StrEnum`` are of one of ``str``."""
    return _choice(value, kind) if issubclass(kind, Enum) else hook(value, kind)


def _is_optional(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType) and type(None) in get_args(kind) and len(get_args(kind)) == 2


def _is_texts(kind: Any) -> bool:
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_tuple(kind: Any) -> bool:
    return isinstance(kind, GenericAlias) and kind.__origin__ is tuple


def strict_converter(*, forbid_unknown: bool = True, most_faults: int | None = None) -> cattrs.Converter:
    """A converter that never coerces.

    With ``forbid_unknown`` a key that no class has is refused (what people write); without it such keys are ignored
    (what peers of another version send). Every fault of a value is collected, each with its path, in a
    ``cattrs.BaseValidationError``; with ``most_faults`` so many of each list or mapping, since a fault costs a thousand
    times what a value does, and a peer could send millions.
    """
    converter = cattrs.Converter(forbid_extra_keys=forbid_unknown, detailed_validation=True)
    for plain, hook in ((str, _text), (bool, _flag), (int, _whole), (float, _number)):
        converter.register_structure_hook(plain, partial(_plain_or_choice, hook))
    converter.register_structure_hook_func(lambda kind: isinstance(kind, type) and issubclass(kind, Enum), _choice)
    converter.register_structure_hook_factory(_is_optional, lambda kind: _optional(converter, kind))
    converter.register_structure_hook_factory(_is_texts, lambda kind: _texts(converter, kind, most_faults))
    converter.register_structure_hook_factory(_is_tuple, lambda kind: _tuples(converter, kind, most_faults))
    converter.register_structure_hook_factory(attrs.has, lambda kind: _class(converter, kind, forbid_unknown))
    converter.register_unstructure_hook_factory(
        lambda kind: kind is tuple or _is_tuple(kind),
        lambda _kind: lambda values: [converter.unstructure(v) for v in values],
    )
    converter.register_unstructure_hook(
        MappingProxyType, lambda values: {key: converter.unstructure(value) for key, value in values.items()}
    )
    for kind in (Enum, StrEnum):
        converter.register_unstructure_hook(kind, lambda member: member.value)
    return converter


def _optional(converter: cattrs.Converter, kind: Any) -> Callable[[Any, Any], Any]:
    inner = next(k for k in get_args(kind) if k is not type(None))

    def structure(value: Any, _kind: Any) -> Any:
        return None if value is None else converter.structure(value, inner)

    return structure


def _texts(converter: cattrs.Converter, kind: Any, most_faults: int | None) -> Callable[[Any, Any], Any]:
    key_kind, value_kind = get_args(kind)

    def structure(value: Any, _kind: Any) -> Any:
        if not isinstance(value, Mapping):
            raise WrongValue("a mapping", value)
        made, faults = {}, []
        for key, item in value.items():
            try:
                made[converter.structure(key, key_kind)] = converter.structure(item, value_kind)
            except Exception as fault:  # noqa: BLE001 - every fault of the mapping is collected
                fault.add_note(cattrs.IterableValidationNote(f"at key {key!r}", key, value_kind))
                faults.append(fault)
                if len(faults) == most_faults:
                    break
        if faults:
            raise cattrs.IterableValidationError("mapping", faults, kind)
        return MappingProxyType(made)

    return structure


def _tuples(converter: cattrs.Converter, kind: Any, most_faults: int | None) -> Callable[[Any, Any], Any]:
    inner = get_args(kind)[0]

    def structure(value: Any, _kind: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise WrongValue("a list", value)
        made, faults = [], []
        for index, item in enumerate(value):
            try:
                made.append(converter.structure(item, inner))
            except Exception as fault:  # noqa: BLE001 - every fault of the list is collected
                fault.add_note(cattrs.IterableValidationNote(f"at index {index}", index, inner))
                faults.append(fault)
                if len(faults) == most_faults:
                    break
        if faults:
            raise cattrs.IterableValidationError("list", faults, kind)
        return tuple(made)

    return structure


def _class(converter: cattrs.Converter, kind: Any, forbid_unknown: bool) -> Callable[[Any, Any], Any]:
    generated = make_dict_structure_fn(
        kind,
        converter,
        _cattrs_forbid_extra_keys=forbid_unknown,
        _cattrs_detailed_validation=True,
    )

    def structure(value: Any, asked: Any) -> Any:
        if not isinstance(value, Mapping):
            raise WrongValue("a mapping", value)
        return generated(value, asked)

    return structure
