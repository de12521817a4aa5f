"""The state that the scheduler decides on: what is wanted, what was placed, and what was reported.

Times are seconds since the epoch. Every state carries since when it holds, why, and what happens next, so
that whoever shows it needs no knowledge of the rules behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType

from attrs import field, frozen

from llmgw.hardware.inventory import Inventory
from llmgw.scheduler.jobs import Installed
from llmgw.scheduler.memory import Learned
from llmgw.scheduler.orders import Drained, Order
from llmgw.scheduler.scale import Demand, Scale
from llmgw.settings.agent_part import NOTHING_HELD, SettingsHeld
from llmgw.settings.catalog import EngineKind, Model, Profile
from llmgw.settings.daemon import Address
from llmgw.settings.document import Liveness
from llmgw.settings.weight_facts import WeightFacts

_NO_LOAD: Mapping[str, int] = MappingProxyType({})
_NO_TIMES: Mapping[str, float] = MappingProxyType({})
_NO_LABELS: Mapping[str, str] = MappingProxyType({})
_NO_QUOTAS: Mapping[str, Mapping[str, int]] = MappingProxyType({})
_NO_DEMANDS: Mapping[str, Demand] = MappingProxyType({})
_NO_SCALES: Mapping[str, Scale] = MappingProxyType({})
_NO_ORDERS: Mapping[str, Order] = MappingProxyType({})


class ShardState(StrEnum):
    """Where a shard is in its life. ``STOPPED`` and ``FAILED`` are ends: no process is left."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether the engine's processes are gone for good."""
        return self in (ShardState.STOPPED, ShardState.FAILED)


class NodeState(StrEnum):
    """How long ago the node was heard: now, longer than ``unreachable_s``, longer than ``lost_s``."""

    CONNECTED = "connected"
    UNREACHABLE = "unreachable"
    LOST = "lost"


class Goal(StrEnum):
    """What the control plane wants of a replica. A row at ``STOP`` is removed once its shards have ended."""

    RUN = "run"
    DRAIN = "drain"
    STOP = "stop"


@frozen
class Exit:
    """How an engine ended: an exit code, or the signal that killed it; both ``None`` when nobody saw it."""

    code: int | None = None
    signal: int | None = None

    def __str__(self) -> str:
        if self.signal is not None:
            return f"killed by signal {self.signal}"
        return "exit code unknown" if self.code is None else f"exit code {self.code}"


class WaitsFor(StrEnum):
    """What a shard waits for before its engine is launched."""

    NOTHING = ""
    WEIGHTS = "weights"
    RANKS = "ranks"


@frozen
class ShardReport:
    """What an agent says of one shard.

    ``shard`` is ``<replica>.<rank>``; ``generation`` counts the starts of the replica, so that a report of an
    earlier start is never taken for the present one. ``devices`` are the placement numbers at the launch and ``uuids``
    what they were, see :func:`placed_on`. After a failure ``remedy`` says what to do about it, and ``final`` that the
    same profile would fail there again. ``since`` is on the node's clock; the control plane keeps by its own when it
    first heard of the state. ``endpoint`` is ``http://host:port`` of the engine's API (rank 0 only); ``api_key`` is
    what it wants as a bearer token and is never logged. ``progress`` goes from 0 to 1 while loading, where the engine
    says. ``rendezvous`` is where rank 0
    of a replica over several nodes waits for the others. ``load_mib`` and ``serving_mib`` are the most memory that its
    own processes were seen holding of each device, in the order of ``devices``; ``None`` where that cannot be told.
    ``warnings`` are what an operator should know though it serves. ``log_path`` is where its log is on the node as long
    as this report stands. ``ended`` is when its engine ended or was found to be no good, on the node's clock, and
    ``lost_peer`` says that it did so because another rank was gone. ``waits_for`` is what keeps it from being launched.
    """

    shard: str
    replica: str
    generation: int
    model: str
    rank: int
    cluster: str
    profile_digest: str
    devices: tuple[int, ...]
    state: ShardState
    reason: str
    next: str
    since: float
    pid: int | None = None
    endpoint: str | None = None
    api_key: str | None = field(default=None, repr=False)
    progress: float | None = None
    exit: Exit | None = None
    log_tail: tuple[str, ...] = ()
    uuids: tuple[str, ...] = ()
    remedy: str = ""
    final: bool = False
    rendezvous: Address | None = None
    load_mib: tuple[int, ...] | None = None
    serving_mib: tuple[int, ...] | None = None
    warnings: tuple[str, ...] = ()
    log_path: str = ""
    ended: float | None = None
    lost_peer: bool = False
    waits_for: WaitsFor = WaitsFor.NOTHING


@frozen
class Assignment:
    """The place of one shard: its node, and its devices there by placement number and by UUID."""

    shard: str
    rank: int
    node: str
    devices: tuple[int, ...]
    uuids: tuple[str, ...] = ()


def placed_on(inventory: Inventory, devices: tuple[int, ...], uuids: tuple[str, ...]) -> tuple[int, ...]:
    """The placement numbers that these devices have now.

    Identity is the UUID: a MIG instance gets another number when one is made beside it, and cards do when one of them
    is taken out. A device that is not there any more keeps the number that it had.
    """
    if len(uuids) != len(devices):
        return devices
    found = (inventory.by_uuid(uuid) for uuid in uuids)
    return tuple(old if now is None else now.number for old, now in zip(devices, found, strict=True))


@frozen
class Replica:
    """One row of what is wanted: a serving copy of a model under one profile, and where it was put.

    ``generation`` goes up with every new start; ``failures`` counts the starts that failed in a row and
    ``not_before`` holds the next one back. ``profile`` is a copy, so that an edited catalog shows as a
    difference. A row that is ``superseded_by`` another one serves only until that one is ready. ``other`` is the
    profile that takes over: of a row on its way out the one to come, of a new one the one to go back to should it not
    come up. ``rejected`` is the digest of an edited profile that did not. A row without ``shards`` waits for a place.
    ``placed`` is when it got its devices.
    """

    id: str
    model: str
    profile: Profile
    shards: tuple[Assignment, ...]
    goal: Goal
    reason: str
    since: float
    generation: int = 1
    failures: int = 0
    not_before: float = 0.0
    superseded_by: str | None = None
    fabric: str | None = None
    placed: float = 0.0
    other: Profile | None = None
    rejected: str = ""


@frozen
class Node:
    """A node as the control plane sees it: its last registration, and how long it has been silent.

    ``installs`` are its engines with their versions; ``heard`` is when it was heard last; ``labels`` and ``taints`` are
    what the settings say of it. ``weights`` are those of the catalog that it has, and of ``looking`` it was asked and
    has not answered. ``settings`` says which of its agent's settings it runs on, ``drained`` that an operator wants
    nothing of ours on it.
    """

    id: str
    state: NodeState
    since: float
    reason: str
    next: str
    address: str
    inventory: Inventory
    engines: tuple[EngineKind, ...] = ()
    reports: tuple[ShardReport, ...] = ()
    version: str = ""
    installs: tuple[Installed, ...] = ()
    heard: float = 0.0
    labels: Mapping[str, str] = field(default=_NO_LABELS, hash=False)
    taints: tuple[str, ...] = ()
    weights: tuple[WeightFacts, ...] = ()
    looking: frozenset[str] = frozenset()
    settings: SettingsHeld = NOTHING_HELD
    drained: Drained | None = None


@frozen
class ClusterState:
    """One consistent picture of everything, taken at the start of a reconcile pass.

    ``in_flight`` counts the router's open requests by shard; a shard that is missing from it has an unknown
    number. ``next_serial`` is the number of the next new replica. ``unplaced_since`` says since when a model has had
    replicas without a place, by the pass before. ``brake_released`` is the time up to which nodes were heard that are
    really gone, as an operator said. ``demands`` has what models have to do, as far as anybody knows, and ``scales``
    what came of it in the pass before. ``learned`` is what profiles were measured to need. ``orders`` are what
    operators want done to replicas, by replica, as long as it is not done.
    """

    cluster: str
    models: tuple[Model, ...]
    nodes: tuple[Node, ...]
    replicas: tuple[Replica, ...]
    next_serial: int
    in_flight: Mapping[str, int] = field(default=_NO_LOAD, hash=False)
    unplaced_since: Mapping[str, float] = field(default=_NO_TIMES, hash=False)
    quotas: Mapping[str, Mapping[str, int]] = field(default=_NO_QUOTAS, hash=False)
    liveness: Liveness = field(factory=Liveness)
    brake_released: float = 0.0
    demands: Mapping[str, Demand] = field(default=_NO_DEMANDS, hash=False)
    scales: Mapping[str, Scale] = field(default=_NO_SCALES, hash=False)
    learned: tuple[Learned, ...] = ()
    orders: Mapping[str, Order] = field(default=_NO_ORDERS, hash=False)

    def node(self, node_id: str) -> Node | None:
        """The node of this id, if it ever registered."""
        return self._nodes.get(node_id)

    def report(self, place: Assignment, generation: int) -> ShardReport | None:
        """What was last said of this start of this shard."""
        return self._reports.get((place.node, place.shard, generation))

    @cached_property
    def weights(self) -> dict[str, WeightFacts]:
        """What is known of the catalog's weights, by what profiles call them.

        One name means one model wherever it is; where nodes differ, the larger are whole and the others are not.
        """
        made: dict[str, WeightFacts] = {}
        for node in self.nodes:
            for facts in node.weights:
                known = made.get(facts.name)
                if known is None or (facts.weights_bytes or 0) > (known.weights_bytes or 0):
                    made[facts.name] = facts
        return made

    @cached_property
    def looking(self) -> dict[str, tuple[str, ...]]:
        """Which nodes may still say something of weights, by what profiles call them."""
        made: dict[str, tuple[str, ...]] = {}
        for node in self.nodes:
            for name in node.looking:
                made[name] = (*made.get(name, ()), node.id)
        return made

    @cached_property
    def _nodes(self) -> dict[str, Node]:
        return {n.id: n for n in self.nodes}

    @cached_property
    def _reports(self) -> dict[tuple[str, str, int], ShardReport]:
        return {(n.id, r.shard, r.generation): r for n in self.nodes for r in reversed(n.reports)}

    def model(self, name: str) -> Model | None:
        """The model of this name, if the catalog still has it."""
        return next((m for m in self.models if m.name == name), None)
