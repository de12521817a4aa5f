"""The brake: when many nodes fall silent together, we are likelier to be cut off than all of them are to be gone."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from llmgw.scheduler.state import Node, NodeState
from llmgw.settings.document import Liveness


@frozen
class Brake:
    """Nothing is replaced. ``nodes`` fell silent together, of ``of`` in all; ``since`` is when the last of them did."""

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


def brake(nodes: Iterable[Node], liveness: Liveness, released: float) -> Brake | None:
    """Whether more nodes than may be are silent since one window of time. Those silent at ``released`` do not count."""
    everyone = list(nodes)
    quiet = sorted((n.heard, n.id) for n in everyone if n.state is not NodeState.CONNECTED and n.heard > released)
    best: list[tuple[float, str]] = []
    first = 0
    for at, (heard, _) in enumerate(quiet):
        while heard - quiet[first][0] > liveness.brake_window_s:
            first += 1
        if at + 1 - first > len(best):
            best = quiet[first : at + 1]
    if len(best) < liveness.brake_nodes or len(best) <= liveness.brake_share * len(everyone):
        return None
    return Brake(tuple(sorted(name for _, name in best)), len(everyone), best[-1][0])
