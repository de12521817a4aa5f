"""Bodies that routes read by hand, as classes for the document."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen, validators

SCHEMA = "schema"
"""In a field's metadata: what the document says of its values, beside their type."""


def whole(least: int, most: int) -> Any:
    """A field for a whole number between these two, both included."""
    checks = [validators.ge(least), validators.le(most)]
    return field(validator=checks, metadata={SCHEMA: {"minimum": least, "maximum": most}})


@frozen
class Confirmation:
    """The body that releases the brake: the nodes that whoever asks knows to be silent."""

    nodes: tuple[str, ...] | None = None
