"""The brake: when many nodes fall silent together, we are likelier to be cut off than all of them are to be gone."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from llmgw.scheduler.state import Node, NodeState
from llmgw.settings.document import Liveness


@frozen
class Brake:
    """Nothing is replaced. ``nodes`` fell silent together, of ``of`` that were there, the last at ``since``."""

    nodes: tuple[str, ...]
    of: int
    since: float

    @property
    def reason(self) -> str:
        """Why, and what ends it."""
        some = ", ".join(self.nodes[:5]) + (f" and {len(self.nodes) - 5} more" if len(self.nodes) > 5 else "")
        return (
            f"the brake is on: {len(self.nodes)} of {self.of} nodes fell silent together ({some}), so the control "
            "plane may itself be cut off; nothing is replaced until they are back, or llmgw ctl brake release "
            "confirms that they are gone"
        )


HELD = "the brake is on: nothing is replaced until it is back, or llmgw ctl brake release confirms that it is gone"
"""What happens next to a silent node, and to what runs there, under the brake."""


def brake(nodes: Iterable[Node], liveness: Liveness, released: float) -> Brake | None:
    """Whether more nodes than may be fell silent within one window; those not heard after ``released`` are gone.

    Those that were silent before the others fell silent are no part of what these are a share of.
    """
    everyone = list(nodes)
    silent = sorted((n.heard, n.id) for n in everyone if n.state is not NodeState.CONNECTED)
    best: Brake | None = None
    first = 0
    for at, (heard, _) in enumerate(silent):
        while first <= at and not (released < silent[first][0] >= heard - liveness.brake_window_s):
            first += 1
        some = silent[first : at + 1]
        there = len(everyone) - first
        enough = len(some) >= liveness.brake_nodes and len(some) > liveness.brake_share * there
        if enough and (best is None or len(some) > len(best.nodes)):
            best = Brake(tuple(sorted(name for _, name in some)), there, heard)
    return best
