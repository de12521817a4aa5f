"""What the admin side reads: the daemon's memory, as :class:`llmgw.web.source.Source`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from llmgw.router.sight import EngineSight
from llmgw.router.workers import RouterWorkers
from llmgw.scheduler.brake import brake
from llmgw.scheduler.explain import Unplaced
from llmgw.scheduler.state import ClusterState
from llmgw.server.cluster import Cluster
from llmgw.server.keys import KeyBook
from llmgw.server.leader import Leadership
from llmgw.settings.catalog import Model
from llmgw.settings.document import Auth, Settings
from llmgw.store.api import Store, StoredDecision
from llmgw.telemetry.metrics import ControlPlaneMetrics
from llmgw.web.source import Identity, Routed, RoutedReplica, RouterProcess, RouterStatus, Turned


class Status:
    """A reading of the daemon; ``revision`` gives the settings revision in use."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        router: RouterWorkers,
        metrics: ControlPlaneMetrics,
        revision: Callable[[], int],
        version: str,
        clock: Callable[[], float],
        keys: KeyBook | None = None,
        leadership: Leadership | None = None,
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._router = router
        self._metrics = metrics
        self._revision = revision
        self._version = version
        self._keys = keys
        self._leadership = leadership
        self._clock = clock

    def now(self) -> float:
        """Epoch seconds."""
        return self._clock()

    def identity(self) -> Identity:
        """Which control plane this is."""
        return Identity(
            version=self._version,
            cluster=self._cluster.id,
            epoch=self._cluster.epoch,
            started=self._cluster.started,
            control_plane=self._cluster.settings.needs_control_plane,
            settings_revision=self._revision(),
            leads=self._leadership is None or self._leadership.leads,
            leader="" if self._leadership is None or self._leadership.known is None else self._leadership.known.admin,
        )

    def settings(self) -> Settings:
        """The settings in use."""
        return self._cluster.settings

    def state(self) -> ClusterState:
        """The cluster now."""
        return self._cluster.state(self._clock())

    def unplaced(self) -> tuple[Unplaced, ...]:
        """What had no place in the last pass."""
        return self._cluster.unplaced

    def router(self) -> RouterStatus:
        """The router and its processes."""
        state = self._router.state
        workers = (RouterProcess(w.pid, w.state, w.reason, w.since, w.streams) for w in self._router.workers if w.pid)
        now = self._clock()
        rows = () if self._keys is None else self._keys.rows()
        active = sum(key.state(now) == "active" for key in rows)
        closed = self._cluster.settings.router.auth is Auth.KEYS
        return RouterStatus(
            self._router.listen,
            state.state,
            state.reason,
            state.since,
            state.pid,
            state.streams,
            closed,
            active,
            tuple(workers),
        )

    def routed(self, model: Model) -> Routed:
        """Of this control plane's own router; an engine says what it has to do to the leader."""
        table, load, sight = self._router.table, self._router.load, self._router.sight
        full, loads = self._router.full, self._cluster.engine_loads
        found: dict[str, RoutedReplica] = {}
        for route in () if table is None else table.routes:
            if route.model not in model.names:
                continue
            for endpoint in route.endpoints:
                seen, said = sight.engines.get(endpoint.id, EngineSight()), loads.get(endpoint.id)
                found[endpoint.id] = RoutedReplica(
                    endpoint.id, endpoint.draining, load.outstanding.get(endpoint.id, 0), seen.tokens,
                    None if said is None else said.running, None if said is None else said.waiting,
                    None if said is None else said.kv_usage, endpoint.id in full, seen.left_alone, seen.until, seen.why,
                )  # fmt: skip
        choices: Counter[str] = Counter()
        for name in model.names:
            choices.update(sight.choices.get(name, {}))
        refused = (
            Turned(code, r.count, r.last, r.message)
            for name in model.names
            for code, r in sight.refused.get(name, {}).items()
        )
        waiting = sum(load.waiting.get(name, 0) for name in model.names)
        return Routed(tuple(found.values()), waiting, choices, tuple(sorted(refused, key=lambda t: -t.last)))

    async def decisions(self, limit: int, about: str | None = None) -> tuple[StoredDecision, ...]:
        """The newest decisions."""
        return await self._store.decisions(limit, about)

    async def release_brake(self, by: str) -> float:
        """Written down first: a released brake stays released over a restart."""
        now = self._clock()
        state = self._cluster.state(now)
        held = brake(state.nodes, state.liveness, state.brake_released)
        if held is None:
            return now  # they are back meanwhile
        # Up to where the last of them was heard: what falls silent later counts anew.
        upto = held.since
        await self._store.release_brake(self._cluster.epoch, now, by, upto, held.nodes)
        self._cluster.release_brake(upto)
        return now

    def metrics(self) -> bytes:
        """Prometheus text."""
        return self._metrics.render()

    def ready(self) -> str:
        """Why this daemon does not do its work; empty when it does."""
        router = self._router.state
        routing = "" if router.state == "serving" else f"the router is {router.state}: {router.reason}"
        return "; ".join(reason for reason in (routing, self._cluster.stuck) if reason)
