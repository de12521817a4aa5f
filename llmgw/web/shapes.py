"""Bodies that routes read by hand, as classes for the document."""

from __future__ import annotations

from attrs import frozen


@frozen
class Confirmation:
    """The body that releases the brake: the nodes that whoever asks knows to be silent."""

    nodes: tuple[str, ...] | None = None
