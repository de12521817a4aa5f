"""What operators do to nodes and replicas: written down with who and why, and then looked at by every pass."""

from __future__ import annotations

from collections.abc import Callable

from llmgw.errors import ConflictError, UnknownError
from llmgw.scheduler.drains import Effect, drain_effect, order_effect
from llmgw.scheduler.orders import Drained, Order, OrderKind
from llmgw.scheduler.state import Goal, Replica
from llmgw.server.agents import Agents
from llmgw.server.cluster import Cluster
from llmgw.server.logs import LogReader
from llmgw.settings.bounds import reason_of
from llmgw.settings.faults import nearest
from llmgw.store.api import Store
from llmgw.store.audit import Act


class Operations:
    """The cluster, and the store that remembers what is wanted of it. Refusals are :class:`OperatorError`."""

    def __init__(
        self, cluster: Cluster, store: Store, clock: Callable[[], float], agents: Agents | None = None
    ) -> None:
        self._cluster = cluster
        self._agents = agents
        self._store = store
        self._clock = clock

    async def drain(self, node: str, reason: str, by: str, *, force: bool) -> Effect:
        """Nothing new goes to a node, and what is there goes elsewhere. What that leads to."""
        self._known(node)
        now = self._clock()
        drained = Drained(by, now, reason_of(reason), force)
        effect = drain_effect(self._cluster.state(now), node, drained, now)
        act = Act(now, by, "node.drain", node, drained.reason, "force" if force else "")
        await self._store.save_drain(self._cluster.epoch, node, drained, act)
        self._cluster.drain(node, drained)
        return effect

    async def undrain(self, node: str, reason: str, by: str) -> bool:
        """A node gets work again; whether it was drained."""
        self._known(node)
        act = Act(self._clock(), by, "node.undrain", node, reason_of(reason))
        if node not in self._cluster.drains:
            return False
        await self._store.save_drain(self._cluster.epoch, node, None, act)
        self._cluster.drain(node, None)
        return True

    async def order(self, replica: str, kind: OrderKind, reason: str, by: str) -> Effect:
        """Have a replica started anew, or stopped. What that leads to."""
        row = self._row(replica)
        now = self._clock()
        if row.goal is not Goal.RUN:
            raise ConflictError(f"replica {replica}", f"is on its way out: {row.reason}", f"llmgw ctl why {replica}")
        if row.superseded_by is not None and kind is OrderKind.RESTART:
            said = f"is replaced by {row.superseded_by} already, and goes once that is ready"
            raise ConflictError(f"replica {replica}", said, f"llmgw ctl why {row.superseded_by}")
        if not row.shards:
            raise ConflictError(f"replica {replica}", "has no place and no engine", f"llmgw ctl why {row.model}")
        order = Order(replica, kind, row.generation, by, now, reason_of(reason))
        effect = order_effect(self._cluster.state(now), order, now)
        act = Act(now, by, f"replica.{kind.value}", replica, order.reason, f"start {row.generation}")
        await self._store.save_order(self._cluster.epoch, row.model, order, act)
        self._cluster.order(order)
        return effect

    def read_log(self, replica: str, rank: int, lines: int, *, follow: bool, previous: bool) -> LogReader:
        """Read the log of one rank, from its node."""
        row = self._row(replica)
        shard = next((s for s in row.shards if s.rank == rank), None)
        if shard is None:
            has = ", ".join(str(s.rank) for s in row.shards) or "none: it has no place"
            raise UnknownError(f"replica {replica}", f"has no rank {rank}", f"its ranks are {has}")
        made = None
        if self._agents is not None:
            made = self._agents.read_log(
                shard.node, shard.shard, row.generation, lines, follow=follow, previous=previous
            )
        if made is None:
            said = f"is on {shard.node}, which is not connected"
            raise ConflictError(f"log of {shard.shard}", said, f"its agent has it: see llmgw ctl why {shard.node}")
        return made

    def _known(self, node: str) -> None:
        if self._cluster.row(node) is None:
            known = self._cluster.nodes()
            raise UnknownError(f"node {node[:200]}", "is not known", nearest(node, known) or "see: llmgw ctl nodes")

    def _row(self, replica: str) -> Replica:
        found = next((r for r in self._cluster.replicas if r.id == replica), None)
        if found is None:
            names = [r.id for r in self._cluster.replicas]
            remedy = nearest(replica, names) or "see: llmgw ctl replicas"
            raise UnknownError(f"replica {replica[:200]}", "is not known", remedy)
        return found
