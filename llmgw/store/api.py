"""What the control plane remembers, behind one interface.

Every write is durable when it returns. Methods are cancellable while they wait for their turn; a write that
has begun runs to its end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Protocol, Self

from attrs import field, frozen

from llmgw.errors import OperatorError
from llmgw.hardware.inventory import Inventory
from llmgw.scheduler.explain import Decision, Unplaced
from llmgw.scheduler.jobs import Installed, JobReport, JobSpec
from llmgw.scheduler.memory import Learned
from llmgw.scheduler.orders import Drained, Order
from llmgw.scheduler.scale import Scale
from llmgw.scheduler.state import Replica, ShardReport
from llmgw.settings.agent_part import NOTHING_SAID, SettingsSaid
from llmgw.settings.catalog import EngineKind
from llmgw.settings.weight_facts import WeightFacts
from llmgw.store.audit import Act, AuditRow, Chain, Noted

SETTINGS_CHANGED = "settings.change"


@frozen
class SettingsRevision:
    """One version of the settings document, as text. ``revision`` counts from 1; ``at`` is in epoch seconds."""

    revision: int
    text: str
    digest: str
    author: str
    reason: str
    at: float

    @property
    def whole(self) -> bool:
        """Whether the text is the one that the digest is of."""
        return hashlib.sha256(self.text.encode()).hexdigest() == self.digest


class StaleBase(OperatorError):
    """Settings were to be changed that are not the newest any more. ``newest`` is what somebody else made of them."""

    def __init__(self, base: int, newest: SettingsRevision) -> None:
        super().__init__(
            f"revision {base} of the settings",
            f"is not the newest: {newest.author} made revision {newest.revision}"
            + (f" ({newest.reason})" if newest.reason else ""),
            "look at what changed, and make the change on the newest",
        )
        self.newest = newest


@frozen
class NodeRow:
    """A node's last registration, and when it was last heard. ``weights`` are those of the catalog that it has,
    ``settings`` what it said of those that it was sent."""

    id: str
    address: str
    version: str
    inventory: Inventory
    engines: tuple[EngineKind, ...]
    reports: tuple[ShardReport, ...]
    last_heard: float
    weights: tuple[WeightFacts, ...] = ()
    installs: tuple[Installed, ...] = ()
    settings: SettingsSaid = NOTHING_SAID


@frozen
class JobRow:
    """A job with its node and what was last said of it.

    ``seen`` says that the node has said something of it, ``cancel`` why it is wanted no more, empty while it is.
    ``spec`` is missing where a node began it by itself.
    """

    node: str
    report: JobReport
    spec: JobSpec | None = None
    seen: bool = False
    cancel: str = ""


@frozen
class StoredDecision:
    """A decision with the pass and the time that it was made."""

    pass_id: int
    at: float
    decision: Decision


@frozen
class PassRecord:
    """Everything that one reconcile pass changes; written in one transaction or not at all.

    ``over`` are orders that are done; one that was given meanwhile for the same replica stays.
    """

    epoch: int
    at: float
    replicas: tuple[Replica, ...]
    next_serial: int
    decisions: tuple[Decision, ...]
    unplaced: tuple[Unplaced, ...]
    scales: Mapping[str, Scale] = field(factory=dict)
    over: tuple[Order, ...] = ()


class Store(Protocol):
    """Use as an asynchronous context manager; nothing may be called outside of it."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def cluster(self) -> str:
        """The cluster's id, made when the store was."""
        ...

    async def new_epoch(self) -> int:
        """Take and record the next epoch: higher than any that was ever given out."""
        ...

    async def nodes(self) -> tuple[NodeRow, ...]:
        """Every node that ever registered and was not forgotten, by id."""
        ...

    async def save_node(self, row: NodeRow) -> None:
        """Write a node's row whole."""
        ...

    async def learned(self) -> tuple[Learned, ...]:
        """What profiles were measured to need."""
        ...

    async def save_learned(self, rows: Iterable[Learned]) -> None:
        """Write these in place of what was known of the same profiles and classes; the oldest of very many go."""
        ...

    async def jobs(self) -> tuple[JobRow, ...]:
        """The jobs that are remembered, oldest first."""
        ...

    async def save_job(self, row: JobRow, act: Act | None = None) -> None:
        """Write a job's row whole, and into the audit what somebody did to it.

        Of those that have ended only the newest are kept.
        """
        ...

    async def replicas(self) -> tuple[tuple[Replica, ...], int]:
        """The replica rows, by id, and the serial number of the next one."""
        ...

    async def save_pass(self, record: PassRecord) -> int:
        """Write a pass and return its number. Raises ``OperatorError`` when a higher epoch was taken since."""
        ...

    async def scales(self) -> dict[str, Scale]:
        """How many replicas the models that follow their load had in the newest pass."""
        ...

    async def brake_released(self) -> float:
        """Up to when a node must have been heard last to count as gone, as an operator said; 0 if nobody ever did."""
        ...

    async def release_brake(
        self, epoch: int, at: float, by: str, silent_since: float, nodes: tuple[str, ...] = ()
    ) -> int:
        """Record as a decision about ``nodes`` that those which were not heard after ``silent_since`` are gone.

        Raises as :meth:`save_pass` does.
        """
        ...

    async def drains(self) -> dict[str, Drained]:
        """The nodes that operators want to be empty."""
        ...

    async def save_drain(self, epoch: int, node: str, drained: Drained | None, act: Act) -> None:
        """Drain a node, or do not any more, with the decision and the audit row. Raises as :meth:`save_pass` does."""
        ...

    async def orders(self) -> dict[str, Order]:
        """What operators want done to replicas, by replica."""
        ...

    async def save_order(self, epoch: int, model: str, order: Order, act: Act) -> None:
        """Remember an order, in place of one for the same replica; with the rest as :meth:`save_drain`."""
        ...

    async def unplaced(self) -> tuple[Unplaced, ...]:
        """What had no place in the newest pass."""
        ...

    async def decisions(self, limit: int, about: str | None = None) -> tuple[StoredDecision, ...]:
        """The newest decisions, newest first; of those only what names ``about`` as its replica, model or node."""
        ...


class History(Protocol):
    """What was changed by whom: every version of the settings, and the audit. In the same database as the store."""

    async def settings(self) -> SettingsRevision | None:
        """The newest settings, or ``None`` in a new store."""
        ...

    async def add_settings(
        self, text: str, author: str, reason: str, at: float, *, base: int | None = None, action: str = SETTINGS_CHANGED
    ) -> SettingsRevision:
        """Record a new revision and its audit row; the newest one is returned unchanged when its text is the same.

        With a ``base`` that is not the newest (0 before there is any) nothing changes.

        Raises :class:`StaleBase` then.
        """
        ...

    async def revisions(self, limit: int, before: int | None = None) -> tuple[SettingsRevision, ...]:
        """The newest revisions, newest first, of those before one."""
        ...

    async def revision(self, number: int) -> SettingsRevision | None:
        """One revision."""
        ...

    async def record(self, act: Act) -> AuditRow:
        """Add to the audit what changes nothing else in the store."""
        ...

    async def audit(self, limit: int, before: int | None = None) -> tuple[AuditRow, ...]:
        """The newest rows of the audit, newest first, of those before a row."""
        ...

    async def verify_audit(self, noted: Noted | None = None) -> Chain:
        """What is wrong with the audit and where; nothing when every row is there as it was written.

        A row that was noted elsewhere has to be among them.
        """
        ...
