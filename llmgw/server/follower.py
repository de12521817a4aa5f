"""A control plane that does not lead: it routes by what the leader wrote down, and says who leads to all who ask."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from llmgw.errors import OperatorError, PeerError
from llmgw.link.messages import NotLeader, Register
from llmgw.link.session import Session
from llmgw.router.table import Table
from llmgw.scheduler.summary import model_views
from llmgw.server.cluster import Cluster
from llmgw.server.registry import table
from llmgw.settings.daemon import Address
from llmgw.store.lease import Leader
from llmgw.store.sql import SqlStore
from llmgw.telemetry.logging import logger

_LOOK_S = 0.5
_TELL_S = 1.0

_HEARD_S = 600.0
"""The leader writes down every few minutes that it heard a node; until then a follower takes it to be there."""


class Follower:
    """Keeps ``cluster`` and the routing table as the store has them.

    ``leader`` says who leads, ``push`` gives the router a table, ``refresh`` takes over the newest settings.
    """

    def __init__(
        self,
        store: SqlStore,
        cluster: Cluster,
        leader: Callable[[], Leader | None],
        push: Callable[[Table], None],
        clock: Callable[[], float],
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self.cluster = cluster
        self._leader = leader
        self._push = push
        self._clock = clock
        self._refresh = refresh
        self._table = Table()
        self._written: dict[str, float] = {}
        self._seen = -1
        self._log = logger("follower")

    async def run(self) -> None:
        """Follow the store until cancelled. A store that does not answer leaves everything as it is."""
        while True:
            try:
                await self.look()
            except OperatorError as failed:
                self._log.warning("the store cannot be read; routing goes on as it was", error=str(failed))
            await trio.sleep(_LOOK_S)

    async def look(self) -> None:
        """Take over what changed, and count as there what the leader heard not too long ago.

        Raises :class:`OperatorError`.
        """
        self._hear()
        changes = await self._store.changes()
        if changes != self._seen:
            await self.read()
            self._seen = changes

    def _hear(self) -> None:
        """No agent talks to a follower, so that it would count nodes as silent from when it read of them."""
        now = self._clock()
        for node, written in self._written.items():
            if now - written < _HEARD_S:
                self.cluster.heard(node, now)

    async def read(self) -> None:
        """Take over what the store has. Raises :class:`OperatorError`."""
        now = self._clock()
        rows = await self._store.nodes()
        replicas, serial = await self._store.replicas()
        self.cluster.follow(rows, replicas, serial, await self._store.unplaced(), await self._store.scales())
        self._written = {row.id: row.last_heard for row in rows}
        self._hear()
        self.cluster.drains = await self._store.drains()
        await self._refresh()
        state = self.cluster.state(now)
        views = {view.name: view for view in model_views(state, self.cluster.unplaced, now)}
        new = table(self.cluster.settings, state, views, int(self.cluster.started), self._table)
        if new is not self._table:
            self._table = new
            self._push(new)

    async def turn_away(self, session: Session, register: Register) -> None:
        """The link's handler: an agent is told who leads."""
        leader = self._leader()
        self._log.info("agent sent on", node=register.node, leader=None if leader is None else leader.link)
        try:
            with trio.move_on_after(_TELL_S):
                await session.send(NotLeader(None if leader is None else address_of(leader.link)))
        except PeerError:
            pass  # it is gone, which is what it was to be told


def address_of(text: str) -> Address | None:
    """The address that this text is of."""
    host, _, port = text.rpartition(":")
    return Address(host.strip("[]"), int(port)) if host and port.isdigit() else None
