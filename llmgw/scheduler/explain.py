"""Explanations are data: rows that the CLI, the console and the planner read alike."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from attrs import field, frozen

from llmgw.scheduler.brake import Brake
from llmgw.scheduler.orders import Order
from llmgw.scheduler.scale import Scale
from llmgw.scheduler.state import Assignment, Replica
from llmgw.settings.daemon import Address


@frozen
class Refusal:
    """Why one candidate was turned down: the filter that did it, the reason, and what would have to change."""

    filter: str
    reason: str
    remedy: str = ""


@frozen
class Candidate:
    """A node (or, joined by ``+``, a set of nodes) that was looked at for a profile."""

    node: str
    profile: str
    refusals: tuple[Refusal, ...] = ()


@frozen
class Unplaced:
    """A replica that is wanted and has no place, since when, with everything that was tried for it."""

    model: str
    wanted: int
    running: int
    reason: str
    candidates: tuple[Candidate, ...]
    since: float = 0.0


class DecisionKind(StrEnum):
    """What a reconcile pass can decide."""

    PLACE = "place"
    DRAIN = "drain"
    STOP = "stop"
    RESTART = "restart"
    EVICT = "evict"
    REAP = "reap"
    FORGET = "forget"
    PREEMPT = "preempt"
    ROLLBACK = "rollback"
    BRAKE = "brake"
    SCALE = "scale"


@frozen
class Decision:
    """One thing that a pass decided, and why.

    ``node`` is the one that it is about first: of a replica over several the one where it happened, else rank 0's;
    ``others`` are the further ones that it concerns. No node is named where there is none.
    """

    kind: DecisionKind
    model: str
    replica: str
    node: str
    reason: str
    others: tuple[str, ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Every node that it concerns."""
        return tuple(name for name in (self.node, *self.others) if name)


@frozen
class StartCommand:
    """Start this shard of this replica; sent again in every pass until the agent reports it.

    Over several nodes ``rendezvous`` is where rank 0 waits for the others, and ``addresses`` has each rank's node. With
    ``hold`` it gets its weights, and is launched by the same command without that.
    """

    replica: Replica
    assignment: Assignment
    rendezvous: Address | None = None
    addresses: tuple[str, ...] = ()
    hold: bool = False


@frozen
class DrainCommand:
    """Tell the agent that the router no longer sends to this shard."""

    node: str
    shard: str
    generation: int
    reason: str


@frozen
class StopCommand:
    """Stop this shard and everything that it started."""

    node: str
    shard: str
    generation: int
    reason: str
    grace_s: float


Command = StartCommand | DrainCommand | StopCommand


@frozen
class Outcome:
    """What a pass comes to: the rows as they shall be, what to send, and the reasons for both.

    ``replicas`` is the whole new set; a row of the state that is missing from it is to be deleted. ``over`` are the
    orders that need not be looked at any more.
    """

    replicas: tuple[Replica, ...]
    next_serial: int
    commands: tuple[Command, ...]
    decisions: tuple[Decision, ...]
    unplaced: tuple[Unplaced, ...]
    wake_at: float | None = None
    brake: Brake | None = None
    scales: Mapping[str, Scale] = field(factory=dict, hash=False)
    over: tuple[Order, ...] = ()
