from __future__ import annotations

import contextlib
from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Any

import cattrs
import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from llmgw.settings.convert import strict_converter


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    ONE = 1


@frozen
class Thing:
    text: str = ""
    flag: bool = False
    whole: int = 0
    number: float = 0.0
    colour: Colour = Colour.RED
    level: Level = Level.ONE
    maybe: int | None = None
    items: tuple[int, ...] = ()
    names: Mapping[str, str] = {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("text", 7), ("text", None), ("flag", 1), ("flag", "true"), ("whole", "7"), ("whole", True), ("whole", 7.0),
        ("number", "1.5"), ("number", True), ("number", float("nan")), ("number", float("inf")), ("colour", "blue"),
        ("colour", 1), ("level", True), ("level", "1"), ("maybe", "7"), ("items", "12"), ("items", [1, "2"]),
        ("items", {"a": 1}), ("names", {"a": 1}), ("names", ["a"]), ("nothing", 1),
    ],
)  # fmt: skip
def test_nothing_is_coerced(field: str, value: Any) -> None:
    with pytest.raises(cattrs.BaseValidationError):
        strict_converter().structure({field: value}, Thing)


def test_what_fits_is_taken() -> None:
    made = strict_converter().structure(
        {"text": "a", "whole": 7, "number": 3, "colour": "red", "level": 1, "items": [1], "names": {"a": "b"}}, Thing
    )
    assert (made.whole, made.number, made.colour, made.level) == (7, 3.0, Colour.RED, Level.ONE)
    assert (made.items, dict(made.names)) == ((1,), {"a": "b"})
    assert strict_converter().structure(strict_converter().unstructure(made), Thing) == made


def test_unknown_keys_are_ignored_on_the_wire_only() -> None:
    assert strict_converter(forbid_unknown=False).structure({"whole": 1, "newer": []}, Thing).whole == 1
    with pytest.raises(cattrs.BaseValidationError):
        strict_converter().structure({"whole": 1, "newer": []}, Thing)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(list(Thing.__annotations__)), json_values))
def test_only_validation_errors_come_out(value: dict[str, Any]) -> None:
    with contextlib.suppress(cattrs.BaseValidationError):
        strict_converter().structure(value, Thing)
