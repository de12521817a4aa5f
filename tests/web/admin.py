"""An admin listener on a real socket over a cluster that stands still."""

from __future__ import annotations

import http.client
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from attrs import evolve

from llmgw.errors import OperatorError
from llmgw.scheduler.decide import decide
from llmgw.scheduler.explain import Decision, DecisionKind, Unplaced
from llmgw.scheduler.state import ClusterState, ShardState
from llmgw.settings.catalog import Model
from llmgw.settings.daemon import Address
from llmgw.settings.document import Settings
from llmgw.store.api import StoredDecision
from llmgw.web.access import Access
from llmgw.web.api import app
from llmgw.web.serve import listen, serve
from llmgw.web.source import Identity, Routed, RouterStatus
from llmgw.web.watch import Watch
from tests.scheduler.clusters import NOW, cluster, model, node, report, row

TOKEN = "llmgw_admin_test"


class Picture:
    """A cluster that stands still: one of three replicas of ``m`` is ready, one placed, and one has no place."""

    def __init__(self) -> None:
        replica = row()
        told = report(replica, ShardState.READY)
        state = cluster((node(reports=(evolve(told, api_key="sk-secret"),)),), (model(replicas=3),), (replica,))
        outcome = decide(state, NOW)
        self.cluster = evolve(state, replicas=outcome.replicas, next_serial=outcome.next_serial)
        self.catalog = Settings(models=(model(replicas=3), Model("e", endpoints=("http://h:1",))))
        self._unplaced = outcome.unplaced
        self.reason = ""
        self.traffic = Routed()
        self.full = False

    def decide(self) -> None:
        """A pass over the cluster as it is by now."""
        outcome = decide(self.cluster, NOW)
        self.cluster = evolve(self.cluster, replicas=outcome.replicas, next_serial=outcome.next_serial)
        self._unplaced = outcome.unplaced

    def now(self) -> float:
        return NOW

    def identity(self) -> Identity:
        return Identity("0", "c1", 3, NOW - 5, True, 2)

    def settings(self) -> Settings:
        return self.catalog

    def state(self) -> ClusterState:
        return self.cluster

    def unplaced(self) -> tuple[Unplaced, ...]:
        return self._unplaced

    def router(self) -> RouterStatus:
        return RouterStatus("127.0.0.1:8000", "serving", "", NOW, 7, 0)

    def routed(self, model: Model) -> Routed:
        return self.traffic

    async def decisions(self, limit: int, about: str | None = None) -> tuple[StoredDecision, ...]:
        if about not in (None, "m", "m-1", "m-0", "n1"):
            return ()
        name = about if about in ("m-1", "m-0") else "m-1"
        return tuple(
            StoredDecision(n, NOW, Decision(DecisionKind.PLACE, "m", name, "n1", "why")) for n in range(min(limit, 60))
        )

    async def release_brake(self, by: str) -> float:
        if self.full:
            raise OperatorError("db", "the disk is full", "free some space")
        self.cluster = evolve(self.cluster, brake_released=NOW)
        return NOW

    def metrics(self) -> bytes:
        return b"x 1\n"

    def ready(self) -> str:
        return self.reason


class Admin:
    """A client of it."""

    def __init__(self, port: int, picture: Picture) -> None:
        self.port, self.picture = port, picture

    async def ask(
        self, path: str, method: str = "GET", token: str | None = TOKEN, body: bytes | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        def work() -> tuple[int, dict[str, str], bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
            try:
                fields = {} if token is None else {"authorization": f"Bearer {token}"}
                connection.request(method, path, body, fields)
                answer = connection.getresponse()
                return answer.status, dict(answer.headers), answer.read()
            finally:
                connection.close()

        return await trio.to_thread.run_sync(work)


@asynccontextmanager
async def admin() -> AsyncIterator[Admin]:
    picture = Picture()
    listener = listen(Address("127.0.0.1", 0))
    port = listener.getsockname()[1]
    async with trio.open_nursery() as nursery:
        access = Access(TOKEN)
        watch = Watch(picture, None, access)
        nursery.start_soon(watch.run)
        await nursery.start(serve, app(picture, access, watch=watch), listener)
        yield Admin(port, picture)
        nursery.cancel_scope.cancel()
