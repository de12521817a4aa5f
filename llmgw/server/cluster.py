"""The control plane's picture of the cluster, in memory: what agents said last, and what is wanted.

Every method is synchronous, so that a picture taken of it is always consistent. Writing it down is the
callers' part: they hold the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from attrs import evolve, frozen

from llmgw.hardware.delta import InventoryDelta, apply
from llmgw.link.messages import EnginesChanged, Register, SettingsApplied, StartShard, WeightsFound
from llmgw.router.wire import Load
from llmgw.scheduler.explain import Outcome, Unplaced
from llmgw.scheduler.learn import lesson
from llmgw.scheduler.liveness import node_state
from llmgw.scheduler.memory import Learned, absorbed
from llmgw.scheduler.orders import Drained, Order
from llmgw.scheduler.scale import EngineLoad, Scale, scaled
from llmgw.scheduler.state import ClusterState, Goal, Node, NodeState, Replica, ShardReport, ShardState
from llmgw.server.demand import DemandBook
from llmgw.server.node_settings import NodeSettingsBook, applied, registered
from llmgw.server.weights_book import WeightsBook, merged, named_weights
from llmgw.settings.agent_part import NOTHING_SAID, NodeSettings, SettingsSaid, held
from llmgw.settings.document import NodeRules, Settings
from llmgw.settings.weight_facts import WeightFacts
from llmgw.store.api import NodeRow, Store

SHARDS = 300
"""So many shards of one node are known; no machine has as many, and one that says so must not cost the others."""

_NO_RULES = NodeRules()


@frozen
class NodeChange:
    """A node's state as it is now, and the one that it was seen in before (``None`` for a new node)."""

    node: Node
    before: NodeState | None


class Cluster:
    """Nodes, replicas and settings of one cluster.

    ``woken`` is called whenever something changed that a reconcile pass should look at. ``stuck`` is why passes are not
    carried out, empty while they are.
    """

    def __init__(
        self,
        *,
        cluster: str,
        epoch: int,
        settings: Settings,
        nodes: Iterable[NodeRow],
        replicas: tuple[Replica, ...],
        next_serial: int,
        unplaced: tuple[Unplaced, ...],
        started: float,
        woken: Callable[[], None],
        brake_released: float = 0.0,
        scales: Mapping[str, Scale] = MappingProxyType({}),
        learned: Iterable[Learned] = (),
        settings_revision: int = 0,
        drains: Mapping[str, Drained] = MappingProxyType({}),
        orders: Mapping[str, Order] = MappingProxyType({}),
    ) -> None:
        self.id = cluster
        self.epoch = epoch
        self.settings = settings
        self._settings_book = NodeSettingsBook(settings, settings_revision)
        self.started = started
        self._listening = started
        self.stuck = ""
        self.replicas = replicas
        self.unplaced = unplaced
        self.in_flight: Mapping[str, int] | None = None
        self.brake_released = brake_released
        self.scales: Mapping[str, Scale] = scales
        self.drains = dict(drains)
        self.orders = dict(orders)
        self._demand = DemandBook(started)
        self.full: Callable[[tuple[str, ...]], None] = lambda _engines: None
        self._weights = WeightsBook()
        self._learned = {(item.digest, item.device_class): item for item in learned}
        self._next_serial = next_serial
        self._woken = woken
        self._rows = {row.id: row for row in nodes}
        self._heard: dict[str, float] = {}
        self._links: dict[str, float] = {}
        self._left: dict[str, str] = {}
        self._seen: dict[str, tuple[NodeState, float]] = {}

    def follow(
        self,
        nodes: Iterable[NodeRow],
        replicas: tuple[Replica, ...],
        next_serial: int,
        unplaced: tuple[Unplaced, ...],
        scales: Mapping[str, Scale],
    ) -> None:
        """Become what another control plane wrote down."""
        self._rows = {row.id: row for row in nodes}
        self._heard.clear()
        self.replicas, self._next_serial, self.unplaced, self.scales = replicas, next_serial, unplaced, scales

    def register(self, message: Register, now: float) -> NodeRow:
        """A node said everything about itself; its row is returned to be stored."""
        row = NodeRow(
            id=message.node,
            address=message.address,
            version=message.version,
            inventory=message.inventory,
            engines=message.engines,
            reports=self._dated(message.node, message.shards[:SHARDS], now),
            last_heard=now,
            weights=self._merged(message.node, message.weights or WeightsFound((), ())),
            installs=message.installs,
            settings=registered(self._said(message.node), message.settings),
        )
        self._weights.registered(row.id, message.weights)
        self._rows[row.id] = row
        self._links[row.id] = self._heard[row.id] = now
        self._left.pop(row.id, None)
        self._woken()
        return row

    def heard(self, node: str, now: float) -> None:
        """A message of any kind came from the node."""
        self._heard[node] = now

    def rediscovered(self, node: str, delta: InventoryDelta) -> NodeRow:
        """The node read its hardware again."""
        row = self._row(node)
        self._rows[node] = evolve(row, inventory=apply(row.inventory, delta))
        self._woken()
        return self._rows[node]

    def ask_for_weights(self, node: str, now: float) -> tuple[str, ...] | None:
        """The weights that the node is to look for, if it was not told of just these before."""
        names = named_weights(self.settings)
        return names if self._weights.ask(node, names, now) else None

    def found_weights(self, node: str, found: WeightsFound) -> NodeRow:
        """The node looked at weights."""
        self._weights.answered(node, found)
        self._rows[node] = evolve(self._row(node), weights=self._merged(node, found))
        self._woken()
        return self._rows[node]

    def _merged(self, node: str, found: WeightsFound) -> tuple[WeightFacts, ...]:
        row = self._rows.get(node)
        return merged(() if row is None else row.weights, found, named_weights(self.settings))

    def learn(self, row: NodeRow, now: float) -> tuple[Learned, ...]:
        """What the node's shards teach that was not known; it holds from now on."""
        changed = []
        for report in row.reports:
            if report.cluster == self.id and (new := lesson(report, row.inventory, now)) is not None:
                key = new.digest, new.device_class
                better = absorbed(self._learned.get(key), new)
                if better is new:
                    self._learned[key] = new
                    changed.append(new)
        return tuple(changed)

    def engines(self, node: str, message: EnginesChanged) -> NodeRow:
        """An engine was installed on the node."""
        self._rows[node] = evolve(self._row(node), engines=message.engines, installs=message.installs)
        self._woken()
        return self._rows[node]

    def report(self, node: str, report: ShardReport, now: float) -> NodeRow:
        """A shard changed. A report of an older generation does not displace a newer one.

        One more than :data:`SHARDS` is not taken in.
        """
        row = self._row(node)
        (report,) = self._dated(node, (report,), now)
        others = tuple(r for r in row.reports if (r.shard, r.generation) != (report.shard, report.generation))
        if len(others) >= SHARDS:
            return row
        self._rows[node] = evolve(row, reports=(*others, report))
        self._woken()
        return self._rows[node]

    def refused(self, command: StartShard, node: str, reason: str, now: float) -> NodeRow:
        """The node refused to start a shard: that is a failed start, with the refusal as its reason."""
        return self.report(
            node,
            ShardReport(
                shard=command.shard,
                replica=command.replica,
                generation=command.generation,
                model=command.model,
                rank=command.rank,
                cluster=command.cluster,
                profile_digest=command.profile_digest,
                devices=command.devices,
                uuids=command.uuids,
                state=ShardState.FAILED,
                reason=f"refused by the agent: {reason}",
                next="",
                since=now,
            ),
            now,
        )

    def _dated(self, node: str, reports: tuple[ShardReport, ...], now: float) -> tuple[ShardReport, ...]:
        """The reports with the time when their state was first heard of: nodes' clocks may be days off."""
        row = self._rows.get(node)
        known = {(r.shard, r.generation, r.state): r.since for r in reversed(() if row is None else row.reports)}
        return tuple(evolve(r, since=known.get((r.shard, r.generation, r.state), now)) for r in reports)

    def forgotten(self, node: str, shard: str, generation: int) -> NodeRow:
        """The node dropped its record of an ended shard."""
        row = self._row(node)
        kept = tuple(r for r in row.reports if (r.shard, r.generation) != (shard, generation))
        self._rows[node] = evolve(row, reports=kept)
        self._woken()
        return self._rows[node]

    def forget(self, node: str) -> bool:
        """The node is gone for good: what was placed there is placed elsewhere. Whether it was known."""
        self._left.pop(node, None)
        self._seen.pop(node, None)
        self.drains.pop(node, None)
        self._heard.pop(node, None)
        known = self._rows.pop(node, None) is not None
        self._woken()
        return known

    def disconnected(self, node: str, reason: str) -> None:
        """The node's session ended. It counts as connected until it was silent for long enough."""
        self._links.pop(node, None)
        self._left[node] = reason
        self._weights.gone(node)
        if self._demand.gone(node):
            self.full(self._demand.full())
        self._woken()

    def linked(self, node: str) -> bool:
        """Whether a session with this node is open."""
        return node in self._links

    def listens(self, now: float) -> None:
        """From now on nodes can connect."""
        self._listening = now

    def silent_since(self, heard: float) -> float:
        """From when on a node's silence counts: not before we listened, for until then nobody could be heard."""
        return max(heard, self._listening)

    def nodes(self) -> tuple[str, ...]:
        """Every node that ever registered."""
        return tuple(sorted(self._rows))

    @property
    def size(self) -> int:
        """How many those are."""
        return len(self._rows)

    def row(self, node: str) -> NodeRow | None:
        """The node's row as it would be stored."""
        return self._row(node) if node in self._rows else None

    def _row(self, node: str) -> NodeRow:
        """With when it was heard last: that alone is news of a thousand nodes every few seconds."""
        row = self._rows[node]
        heard = self._heard.get(node, row.last_heard)
        return row if heard == row.last_heard else evolve(row, last_heard=heard)

    def use_settings(self, settings: Settings, revision: int | None = None) -> None:
        """New settings hold from the next pass on. ``revision`` is theirs; without one that of the ones before."""
        self.settings = settings
        self._settings_book = NodeSettingsBook(settings, self._settings_book.revision if revision is None else revision)
        self._woken()

    def node_settings(self, node: str) -> NodeSettings:
        """What this node's agent is to run on."""
        return self._settings_book.of(node)

    def settings_said(self, node: str, said: SettingsApplied | None) -> NodeRow:
        """The node said how it stands to its settings; with ``None`` that it does not know what that is."""
        row = self._row(node)
        now = SettingsSaid(ignored=True) if said is None else applied(row.settings, said)
        self._rows[node] = evolve(row, settings=now)
        return self._rows[node]

    def _said(self, node: str) -> SettingsSaid:
        row = self._rows.get(node)
        return NOTHING_SAID if row is None else row.settings

    @property
    def engine_loads(self) -> Mapping[str, EngineLoad]:
        """What engines say that they have to do, by shard."""
        return self._demand.engines()

    def loaded(self, load: Load, now: float) -> None:
        """The router said what it has."""
        before = self._demand.waiting
        self.in_flight = load.outstanding
        self._demand.routed(load, now)
        if before != load.waiting or any(r.goal is Goal.DRAIN for r in self.replicas):
            self._woken()

    def worked(self, node: str, loads: tuple[EngineLoad, ...]) -> None:
        """The node's engines said what they have."""
        if self._demand.worked(node, loads):
            self.full(self._demand.full())

    def release_brake(self, silent_since: float) -> None:
        """An operator says that the nodes which were not heard after this time are gone."""
        self.brake_released = silent_since
        self._woken()

    def drain(self, node: str, drained: Drained | None) -> None:
        """An operator wants a node to be empty, or does not any more."""
        if drained is None:
            self.drains.pop(node, None)
        else:
            self.drains[node] = drained
        self._woken()

    def order(self, order: Order) -> None:
        """An operator wants something done to a replica."""
        self.orders[order.replica] = order
        self._woken()

    def state(self, now: float) -> ClusterState:
        """One frozen picture of everything."""
        placed = tuple(m for m in self.settings.models if m.profiles)
        return ClusterState(
            cluster=self.id,
            models=scaled(placed, self.scales),
            nodes=tuple(self._node(row, now) for _, row in sorted(self._rows.items())),
            replicas=self.replicas,
            next_serial=self._next_serial,
            in_flight=self._in_flight(),
            unplaced_since={item.model: item.since for item in self.unplaced},
            quotas=self.settings.quotas,
            liveness=self.settings.liveness,
            brake_released=self.brake_released,
            demands=self._demand.of(placed, self.replicas),
            scales=self.scales,
            learned=tuple(self._learned.values()),
            orders=dict(self.orders),
        )

    def _in_flight(self) -> Mapping[str, int]:
        """The open requests by shard; empty before the router's first word.

        The router counts for everything in its table, and for what left it until that has ended: what it does not name
        has none. So it is with a model that left the catalog, whose route went with it.
        """
        if (said := self.in_flight) is None:
            return {}
        return {s.shard: said.get(s.shard, 0) for row in self.replicas for s in row.shards[:1]}

    def apply(self, outcome: Outcome) -> None:
        """A pass was written down: its rows hold."""
        self.replicas = outcome.replicas
        self.unplaced = outcome.unplaced
        self.scales = outcome.scales
        for order in outcome.over:
            if self.orders.get(order.replica) == order:
                del self.orders[order.replica]
        self._next_serial = outcome.next_serial

    def changes(self, state: ClusterState) -> tuple[NodeChange, ...]:
        """The nodes whose state is another than at the last call."""
        changed = []
        for node in state.nodes:
            before = self._seen.get(node.id)
            if before is None or before[0] is not node.state:
                self._seen[node.id] = (node.state, node.since)
                changed.append(NodeChange(node, before[0] if before else None))
        return tuple(changed)

    def _node(self, row: NodeRow, now: float) -> Node:
        heard = self._heard.get(row.id, row.last_heard)
        seen = node_state(self.silent_since(heard), now, self.settings.liveness)
        reason = seen.reason
        if not self.linked(row.id) and (why := self._left.get(row.id)):
            reason = f"{reason}; the link ended: {why}"
        rules = self.settings.nodes.get(row.id, _NO_RULES)
        return Node(
            id=row.id,
            state=seen.state,
            since=self._links.get(row.id, seen.since) if seen.state is NodeState.CONNECTED else seen.since,
            reason=reason,
            next=seen.next,
            address=row.address,
            inventory=row.inventory,
            engines=row.engines,
            reports=row.reports,
            version=row.version,
            heard=heard,
            labels=rules.labels,
            taints=rules.taints,
            weights=row.weights,
            looking=self._weights.looking(row.id, now),
            installs=row.installs,
            settings=held(self._settings_book.of(row.id), row.settings),
            drained=self.drains.get(row.id),
        )


async def remembered(
    store: Store,
    settings: Settings,
    started: float,
    woken: Callable[[], None],
    settings_revision: int = 0,
    epoch: int | None = None,
) -> Cluster:
    """The cluster as the store has it, under a new epoch unless one is given.

    The epoch comes first: until it is taken an older control plane may still write.
    """
    if epoch is None:
        epoch = await store.new_epoch()
    replicas, next_serial = await store.replicas()
    return Cluster(
        cluster=await store.cluster(),
        epoch=epoch,
        settings=settings,
        nodes=await store.nodes(),
        replicas=replicas,
        next_serial=next_serial,
        unplaced=await store.unplaced(),
        started=started,
        woken=woken,
        brake_released=await store.brake_released(),
        scales=await store.scales(),
        learned=await store.learned(),
        settings_revision=settings_revision,
        drains=await store.drains(),
        orders=await store.orders(),
    )
