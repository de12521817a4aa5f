"""One life of a control plane: the real cluster, agents and reconcile loop, over a store that outlives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from llmgw.errors import PeerError
from llmgw.link.attend import attend
from llmgw.link.messages import Refused, Register
from llmgw.router.table import Table
from llmgw.router.wire import Load
from llmgw.scheduler.explain import Outcome
from llmgw.scheduler.state import ClusterState
from llmgw.server.agents import Agents
from llmgw.server.cluster import Cluster, remembered
from llmgw.server.reconcile import Reconciler
from llmgw.settings.daemon import Address
from llmgw.settings.document import Settings
from llmgw.telemetry.metrics import ControlPlaneMetrics

if TYPE_CHECKING:
    from .world import World


class _Unmeasured(ControlPlaneMetrics):
    """Metrics that nobody reads would cost more than the passes that they are about."""

    def observe_pass(self, seconds: float, state: ClusterState, outcome: Outcome) -> None:
        """Take in nothing."""


class Plane:
    """A control plane at an address. ``cluster`` is there once it has taken its epoch."""

    def __init__(self, world: World, address: Address) -> None:
        self.world = world
        self.address = address
        self.store = world.kit.store(world.disk, world.draw)
        self.cluster: Cluster | None = None
        self.tables: list[Table] = []
        self.over = False
        self._scope = trio.CancelScope()
        self._sessions: trio.Nursery | None = None

    async def run(self) -> None:
        """As :class:`llmgw.server.main.Server` does it, without router and admin side."""
        world = self.world
        with self._scope:
            async with self.store as store:
                cluster = await remembered(
                    store, world.kit.read(world.settings), world.clock(), lambda: reconciler.wake()
                )
                agents = Agents(cluster, store, world.clock)
                started = int(world.clock())
                reconciler = Reconciler(
                    cluster, store, agents, self._push, world.clock, _Unmeasured(), started, world.tick_s
                )
                self.cluster, self._agents, self._reconciler = cluster, agents, reconciler
                self.use_settings(world.settings)  # they may have been edited while it took its epoch
                world.trace.say(f"control plane at {self.address} has epoch {cluster.epoch}")
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(reconciler.run)
                    async with trio.open_nursery() as self._sessions:
                        await trio.sleep_forever()
        self.over = True
        world.trace.say(f"control plane at {self.address} is over")

    @property
    def listens(self) -> bool:
        """Whether agents can connect."""
        return self._sessions is not None and not self._scope.cancel_called

    def accept(self, stream: trio.abc.Stream, node: str) -> None:
        """An agent connected; who it is its certificate would have said."""
        assert self._sessions is not None
        self._sessions.start_soon(self._attend, stream, node)

    async def _attend(self, stream: trio.abc.Stream, node: str) -> None:
        def check(register: Register) -> Refused | None:
            if register.node == node:
                return None
            return Refused("node", node, register.node, "", "")

        try:
            await attend(stream, self._agents.serve, check, peer=node, remote=node, limits=self.world.limits)
        except PeerError as ended:
            self.world.trace.say(f"plane: agent {node} not served: {ended.reason}")

    def use_settings(self, settings: Settings) -> None:
        """They were edited."""
        if self.cluster is not None:
            self.cluster.use_settings(self.world.kit.read(settings))

    def loaded(self, load: Load) -> None:
        """The router counted its requests."""
        if self.cluster is not None:
            self.cluster.loaded(load, self.world.clock())

    def _push(self, table: Table) -> None:
        self.tables = [table]
        if self.world.traffic.waits:
            self.world.traffic.count()

    def stop(self) -> None:
        """As SIGTERM does."""
        self._scope.cancel()

    def kill(self) -> None:
        """As SIGKILL does: nothing more is said or written."""
        self.store.dead = True
        self.world.wires.cut(plane=self.address)
        self._scope.cancel()
