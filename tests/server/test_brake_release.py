"""The brake end to end: a control plane in memory, its admin API on a socket, and ``llmgw ctl`` before it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from llmgw.router.table import Table
from llmgw.router.workers import RouterWorkers
from llmgw.scheduler.explain import DecisionKind
from llmgw.scheduler.state import NodeState, ShardState
from llmgw.server.agents import Agents
from llmgw.server.cluster import Cluster, remembered
from llmgw.server.reconcile import Reconciler
from llmgw.server.status import Status
from llmgw.settings.daemon import Address, Log, RouterListener
from llmgw.settings.document import Settings
from llmgw.store.api import NodeRow, PassRecord
from llmgw.store.database import StoreError
from llmgw.store.opening import sqlite_store
from llmgw.store.sql import SqlStore
from llmgw.store.sqlite import SqliteDatabase
from llmgw.telemetry.metrics import ControlPlaneMetrics
from llmgw.web.api import app
from llmgw.web.auth import token_of
from llmgw.web.serve import listen, serve
from tests.scheduler.clusters import NOW, model, node, report, row

NODES = ("n1", "n2", "n3", "n4")


class Plane:
    """A control plane whose clock is turned by hand."""

    def __init__(self, cluster: Cluster, store: SqlStore, folder: Path) -> None:
        self.now = cluster.started
        self.cluster, self.store, self.folder = cluster, store, folder
        self.tables: list[Table] = []
        self.metrics = ControlPlaneMetrics()
        agents = Agents(cluster, store, self.clock)
        self.reconciler = Reconciler(cluster, store, agents, self.tables.append, self.clock, self.metrics, 7)
        router = RouterWorkers(folder, RouterListener(), Log())
        self.status = Status(cluster, store, router, self.metrics, lambda: 1, "0", self.clock)
        self.port = 0

    def clock(self) -> float:
        return self.now

    def later(self, seconds: float, *heard: str) -> None:
        """So many seconds pass, and these nodes are heard at their end."""
        self.now += seconds
        for name in heard:
            self.cluster.heard(name, self.now)
        self.reconciler.wake()

    async def ctl(self, *words: str, text: str = "") -> tuple[int, str]:
        line = [sys.executable, "-m", "llmgw", "ctl", "--admin", f"http://127.0.0.1:{self.port}",
                "--token-file", str(self.folder / "admin.token"), *words]  # fmt: skip
        done = await trio.run_process(
            line, stdin=text.encode(), capture_stdout=True, stderr=subprocess.STDOUT, check=False
        )
        return done.returncode, done.stdout.decode()


async def until(done: Callable[[], object]) -> None:
    with trio.fail_after(10):
        while not done():
            await trio.sleep(0.01)


@asynccontextmanager
async def running(store: SqlStore, folder: Path, started: float) -> AsyncIterator[Plane]:
    cluster = await remembered(store, Settings(models=(model(replicas=2),)), started, lambda: plane.reconciler.wake())
    plane = Plane(cluster, store, folder)
    listener = listen(Address("127.0.0.1", 0))
    plane.port = listener.getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(plane.reconciler.run)
        await nursery.start(serve, app(plane.status, token_of(folder)), listener)
        yield plane
        nursery.cancel_scope.cancel()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    """Four nodes, and a ready replica on each of the first two."""
    rows = (row(1, "n1"), row(2, "n2"))
    async with sqlite_store(tmp_path / "db") as opened:
        for name in NODES:
            here = node(name, reports=tuple(report(r, ShardState.READY) for r in rows if r.shards[0].node == name))
            await opened.save_node(
                NodeRow(name, here.address, "1", here.inventory, here.engines, here.reports, NOW - 5)
            )
        await opened.save_pass(PassRecord(await opened.new_epoch(), NOW, rows, 3, (), ()))
        yield opened


async def test_from_silence_to_a_released_brake(store: SqlStore, tmp_path: Path) -> None:
    async with running(store, tmp_path, NOW) as it:
        before = it.cluster.replicas

        def on() -> bool:
            return b"llmgw_brake 1.0" in it.metrics.render()

        def off() -> bool:
            return b"llmgw_brake 0.0" in it.metrics.render()

        await until(lambda: it.tables)
        assert (await it.ctl("brake"))[1] == "the brake is off\n"
        assert (await it.ctl("brake", "release", "--yes"))[1].startswith(
            "error: llmgw ctl brake release: the brake is not"
        )

        # Three of four fall silent together: nothing is moved, and everybody is told.
        it.later(61, "n4")
        await until(on)
        states = [n.state for n in it.cluster.state(it.now).nodes]
        assert states == [NodeState.LOST] * 3 + [NodeState.CONNECTED]
        assert it.cluster.replicas == before
        code, said = await it.ctl("status", "--exit-code")
        assert code == 1
        for line in ("not healthy: the brake is on: 3 of 4 nodes fell silent together (n1, n2, n3)", "m      lost"):
            assert line in said
        for command in ("nodes", "models", "plan"):
            assert "the brake is on: 3 of 4 nodes" in (await it.ctl(command))[1], command
        assert "next: the brake is on: nothing is replaced until it is back" in (await it.ctl("why", "m-1"))[1]

        # They come back, and it goes off by itself.
        it.later(1, *NODES)
        await until(off)
        assert it.cluster.replicas == before

        # Silent again, and an operator says that they are gone; only with --yes, or when asked.
        it.later(61, "n4")
        await until(on)
        code, said = await it.ctl("brake", "release", text="n\n")
        assert (code, "3 of 4 nodes are gone (n1, n2, n3)" in said) == (2, True), "nobody can be asked"
        assert it.cluster.replicas == before
        code, said = await it.ctl("brake", "release", "--yes")
        assert (code, said) == (0, "released: what ran on n1, n2, n3 is placed elsewhere\n")
        await until(off)
        await until(lambda: len(it.cluster.replicas) == 4)
        assert [r.superseded_by for r in it.cluster.replicas if r in before or r.id in ("m-1", "m-2")] == ["m-3", "m-4"]
        assert {s.node for r in it.cluster.replicas if r.superseded_by is None for s in r.shards} == {"n4"}
        kinds = [d.decision.reason for d in await store.decisions(20) if d.decision.kind is DecisionKind.BRAKE]
        assert [reason.split(":")[0].split(",")[0] for reason in kinds] == [
            "the brake is off", "released by token admin.token", "the brake is on", "the brake is off", "the brake is on",
        ]  # fmt: skip
        code, said = await it.ctl("why", "m-1")
        assert "evict" in said
        assert "node n1 is lost; m-3 replaces it" in said
        _, said = await it.ctl("why", "n2")
        for line in ("the brake is on: 3 of 4", "released by token admin.token", "the brake is off"):
            assert line in said, "it held for this node"
        assert "the brake is on" not in (await it.ctl("why", "n4"))[1]

        # One that falls silent later counts anew; alone it is no reason for the brake.
        it.later(61, "n1", "n2", "n3")
        await until(lambda: it.cluster.state(it.now).nodes[3].state is NodeState.LOST)
        assert off()


class Filling(SqlStore):
    """A store whose disk can be full."""

    full = False

    async def save_pass(self, record: PassRecord) -> int:
        if self.full:
            raise StoreError("llmgw.db", "the disk is full", "free some space; nothing was changed")
        return await super().save_pass(record)


async def test_passes_that_cannot_be_stored_are_said_until_they_can(tmp_path: Path) -> None:
    async with Filling(SqliteDatabase(tmp_path / "db")) as store, running(store, tmp_path, NOW) as it:
        await until(lambda: it.tables)
        assert "nothing is decided" not in (await it.ctl("status"))[1]
        store.full = True
        it.cluster.use_settings(Settings(models=(model("other"),)))
        await until(lambda: it.cluster.stuck)
        code, said = await it.ctl("status", "--exit-code")
        assert (code, "nothing is decided: llmgw.db: the disk is full" in said) == (1, True), said
        assert "nothing is decided" in it.status.ready()
        store.full = False
        await until(lambda: not it.cluster.stuck)
        assert "nothing is decided" not in (await it.ctl("status"))[1]


async def test_a_node_that_fell_silent_outside_of_the_window_is_not_released_with_them(
    store: SqlStore, tmp_path: Path
) -> None:
    async with running(store, tmp_path, NOW) as it:
        first = max(n.heard for n in it.cluster.state(NOW).nodes)
        it.later(10, "n1")
        it.later(15, "n1")
        it.later(36, "n1")
        it.later(20)  # 61 s after the others
        await until(lambda: b"llmgw_brake 1.0" in it.metrics.render())
        assert next(n.state for n in it.cluster.state(it.now).nodes) is NodeState.UNREACHABLE
        _, said = await it.ctl("brake", "release", "--yes")
        assert said == "released: what ran on n2, n3, n4 is placed elsewhere\n"
        assert it.cluster.brake_released == first


async def test_a_released_brake_stays_released_over_a_restart(store: SqlStore, tmp_path: Path) -> None:
    async with running(store, tmp_path, NOW) as it:
        it.later(61, "n4")
        await until(lambda: b"llmgw_brake 1.0" in it.metrics.render())
        assert (await it.ctl("brake", "release", "--yes"))[0] == 0
        await until(lambda: len(it.cluster.replicas) == 4)
        last = it.now
    async with running(store, tmp_path, last + 10) as again:
        await until(lambda: again.tables)
        assert {n.state for n in again.cluster.state(again.now).nodes} == {NodeState.CONNECTED}, "silence counts anew"
        again.later(61, "n4")
        await until(lambda: b'llmgw_nodes{state="lost"} 3.0' in again.metrics.render())
        assert b"llmgw_brake 0.0" in again.metrics.render()
