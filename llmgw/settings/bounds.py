"""What the values of a field may be, beside their type: checked where an object is made, and said in schemas. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from attrs import NOTHING, field, validators

from llmgw.errors import OperatorError

SCHEMA = "schema"
"""In a field's metadata: what schemas of its class say of its values."""

NAME = r"^(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}$"
"""Ids of nodes and people."""

EXACT = 2**53
"""Whole numbers up to here are the same in every reader of JSON (RFC 8259, section 6)."""

_LINE = r"^[^\u0000-\u001f\u007f-\u009f\u2028\u2029]*$"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


REASON_MOST = 500
"""Characters of a reason that somebody gives."""


class Ruled(Protocol):
    """A class with rules on several fields at once: ``SCHEMA_RULES`` are further parts of its schema."""

    SCHEMA_RULES: Mapping[str, Any]


def is_line(text: str, most: int) -> bool:
    """Whether this is one line of at most so many characters, without control characters."""
    return len(text) <= most and _CONTROL.search(text) is None


def reason_of(text: str) -> str:
    """A reason as it is kept. Raises :class:`OperatorError` for one that is no line of text."""
    if not is_line(text, REASON_MOST):
        raise OperatorError("the reason", f"should be one line of at most {REASON_MOST} characters")
    return text.strip()


def line(most: int, *, blank: bool = True) -> dict[str, Any]:
    """What a schema says of such a line, and of one that has to say something."""
    return {"pattern": _LINE if blank else r"^(?=.*\S)" + _LINE[1:], "maxLength": most}


def declared(default: Any = NOTHING, **schema: Any) -> Any:
    """A field of which schemas say this, and which somebody else checks."""
    return field(default=default, metadata={SCHEMA: schema})


def between(least: float, most: float, default: Any = NOTHING) -> Any:
    """A field for a number between these two, both included."""
    checks = validators.optional([validators.ge(least), validators.le(most)])
    return field(default=default, validator=checks, metadata={SCHEMA: {"minimum": least, "maximum": most}})
