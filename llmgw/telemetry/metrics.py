"""The control plane's own metrics, for Prometheus. The router's are the router's."""

from __future__ import annotations

from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from llmgw.scheduler.explain import Outcome
from llmgw.scheduler.state import ClusterState, Goal, NodeState, ShardState


class ControlPlaneMetrics:
    """Gauges are set from each pass's picture, so that they never drift from what the pass saw."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._nodes = Gauge("llmgw_nodes", "Nodes by state", ["state"], registry=self.registry)
        self._drained = Gauge(
            "llmgw_node_drained", "Replicas that a drained node still has", ["node"], registry=self.registry
        )
        self._devices = Gauge("llmgw_devices", "Devices by class", ["device_class"], registry=self.registry)
        self._faulty = Gauge("llmgw_devices_faulty", "Devices with a fault", registry=self.registry)
        self._replicas = Gauge(
            "llmgw_replicas", "Replicas by model and goal", ["model", "goal"], registry=self.registry
        )
        self._shards = Gauge("llmgw_shards", "Shards by reported state", ["state"], registry=self.registry)
        self._unplaced = Gauge("llmgw_unplaced", "Replicas without a place", ["model"], registry=self.registry)
        self._brake = Gauge("llmgw_brake", "1 while nothing is replaced, see llmgw ctl brake", registry=self.registry)
        self._decisions = Counter("llmgw_decisions", "Decisions by kind", ["kind"], registry=self.registry)
        self._pass = Histogram(
            "llmgw_reconcile_pass_seconds",
            "Duration of a reconcile pass, the store's write included",
            buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2.0),
            registry=self.registry,
        )

    def observe_pass(self, seconds: float, state: ClusterState, outcome: Outcome) -> None:
        """Take in one pass."""
        self._pass.observe(seconds)
        nodes = Tally(n.state for n in state.nodes)
        for node_state in NodeState:
            self._nodes.labels(node_state.value).set(nodes[node_state])
        self._drained.clear()
        for node in state.nodes:
            if node.drained is not None:
                here = (r for r in outcome.replicas if any(s.node == node.id for s in r.shards))
                self._drained.labels(node.id).set(sum(1 for _ in here))
        shards = Tally(r.state for n in state.nodes for r in n.reports)
        for shard_state in ShardState:
            self._shards.labels(shard_state.value).set(shards[shard_state])
        devices = [d for n in state.nodes for d in n.inventory.devices]
        self._devices.clear()
        for device_class, count in Tally(d.device_class for d in devices).items():
            self._devices.labels(device_class).set(count)
        self._faulty.set(sum(1 for d in devices if d.faults))
        self._replicas.clear()
        for (model, goal), count in Tally((r.model, r.goal) for r in outcome.replicas).items():
            self._replicas.labels(model, Goal(goal).value).set(count)
        self._unplaced.clear()
        for unplaced in outcome.unplaced:
            self._unplaced.labels(unplaced.model).set(unplaced.wanted - unplaced.running)
        self._brake.set(outcome.brake is not None)
        for decision in outcome.decisions:
            self._decisions.labels(decision.kind.value).inc()

    def render(self) -> bytes:
        """The text exposition of everything."""
        return generate_latest(self.registry)
