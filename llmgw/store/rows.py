"""Values as the text of a column and back."""

from __future__ import annotations

from functools import cache
from typing import TypeVar

import cattrs
import orjson

from llmgw.errors import BugError
from llmgw.settings.convert import strict_converter

_Row = TypeVar("_Row")


@cache
def _converter() -> cattrs.Converter:
    return strict_converter(forbid_unknown=False)


def to_text(value: object) -> str:
    """A frozen value as JSON."""
    return orjson.dumps(_converter().unstructure(value)).decode()


def from_text(text: str, kind: type[_Row]) -> _Row:
    """The value that was written. Raises :class:`BugError` when the text is no such value."""
    try:
        return _converter().structure(orjson.loads(text), kind)
    except (cattrs.BaseValidationError, ValueError) as wrong:
        raise BugError(f"stored {kind.__name__}", f"cannot be read back: {wrong}") from wrong
