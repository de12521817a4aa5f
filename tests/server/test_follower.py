"""A control plane that does not lead: it shows what the leader wrote down, and for as long as that can be true."""

from __future__ import annotations

from pathlib import Path

from llmgw.router.table import Table
from llmgw.scheduler.state import NodeState, ShardState
from llmgw.server.cluster import Cluster
from llmgw.server.follower import Follower
from llmgw.settings.document import Settings
from llmgw.store.api import NodeRow
from llmgw.store.opening import sqlite_store
from tests.scheduler.clusters import NOW, model, node, report, row


async def test_nobody_talks_to_it_and_what_the_leader_hears_is_there_nevertheless(tmp_path: Path) -> None:
    now = NOW
    here = node(reports=(report(row(), ShardState.READY),))
    cluster = Cluster(
        cluster="c1", epoch=1, settings=Settings(models=(model(),)), nodes=(), replicas=(), next_serial=1,
        unplaced=(), started=NOW, woken=lambda: None,
    )  # fmt: skip
    pushed: list[Table] = []

    async def refresh() -> None:
        pass

    def state() -> NodeState:
        found = cluster.state(now).node("n1")
        assert found is not None
        return found.state

    async with sqlite_store(tmp_path / "db") as store:
        await store.save_node(NodeRow(here.id, here.address, "1", here.inventory, here.engines, here.reports, NOW))
        it = Follower(store, cluster, lambda: None, pushed.append, lambda: now, refresh)
        await it.look()
        assert state() is NodeState.CONNECTED
        # Nothing is written meanwhile: the leader notes that it heard a node every few minutes.
        for later in (70, 590):
            now = NOW + later
            await it.look()
            assert state() is NodeState.CONNECTED
        now = NOW + 700
        await it.look()
        assert state() is NodeState.LOST
