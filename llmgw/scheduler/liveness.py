"""How long a node may be silent, and what follows from it. Pure."""

from __future__ import annotations

from attrs import frozen

from llmgw.scheduler.state import NodeState
from llmgw.settings.document import Liveness


@frozen
class Seen:
    """A node's state, since when it holds (epoch seconds), why, and what happens next."""

    state: NodeState
    since: float
    reason: str
    next: str


def node_state(last_heard: float, now: float, liveness: Liveness) -> Seen:
    """Judge a silence. A clock that went backwards counts as no silence."""
    silent = max(0.0, now - last_heard)
    if silent < liveness.unreachable_s:
        return Seen(NodeState.CONNECTED, last_heard, "heartbeats arrive", "")
    reason = f"no heartbeat for {silent:.0f} s"
    if silent < liveness.lost_s:
        return Seen(
            NodeState.UNREACHABLE,
            last_heard + liveness.unreachable_s,
            reason,
            f"lost in {liveness.lost_s - silent:.0f} s unless it is heard; then its replicas are placed elsewhere",
        )
    return Seen(
        NodeState.LOST,
        last_heard + liveness.lost_s,
        reason,
        "connected as soon as its agent registers again; what still runs there is kept or taken back",
    )


def next_change(last_heard: float, now: float, liveness: Liveness) -> float | None:
    """When silence alone will change the state next, or ``None`` when it cannot any more."""
    for after in (liveness.unreachable_s, liveness.lost_s):
        if now < last_heard + after:
            return last_heard + after
    return None
