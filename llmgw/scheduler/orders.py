"""What an operator wants of nodes and replicas beside the settings: nodes that are to be empty, replicas to start anew.

Both are level-triggered: they hold until they are taken back or done, and every pass looks at them anew.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen


@frozen
class Drained:
    """A node gets nothing new, and what is there goes elsewhere; ``at`` in epoch seconds.

    What has no other place serves on; with ``force`` it is stopped.
    """

    by: str
    at: float
    reason: str = ""
    force: bool = False

    def __str__(self) -> str:
        return f"drained by {self.by}{f': {self.reason}' if self.reason else ''}"


class OrderKind(StrEnum):
    """What is to be done to a replica: end and begin anew, or end."""

    RESTART = "restart"
    STOP = "stop"


@frozen
class Order:
    """Something to be done to this start of a replica: one of a later ``generation`` is not meant. ``at`` as above."""

    replica: str
    kind: OrderKind
    generation: int
    by: str
    at: float
    reason: str = ""

    def __str__(self) -> str:
        word = "restarted" if self.kind is OrderKind.RESTART else "stopped"
        return f"{word} by {self.by}{f': {self.reason}' if self.reason else ''}"
