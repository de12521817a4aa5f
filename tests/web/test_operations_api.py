"""Drains and orders over the admin API on a real store: what is answered, written down, remembered, and refused."""

from __future__ import annotations

import http.client
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define

from llmgw.link.messages import Register
from llmgw.scheduler.decide import decide
from llmgw.scheduler.orders import Drained, OrderKind
from llmgw.scheduler.state import Goal, Replica, ShardState
from llmgw.server.cluster import Cluster, remembered
from llmgw.server.operations import Operations
from llmgw.settings.catalog import EngineKind
from llmgw.settings.daemon import Address
from llmgw.settings.document import Settings
from llmgw.store.api import PassRecord
from llmgw.store.identity import Event
from llmgw.store.opening import sqlite_store
from llmgw.store.sql import SqlStore
from llmgw.web.api import app
from llmgw.web.serve import listen, serve
from tests.scheduler.clusters import NOW, device, model, node, report
from tests.web.admin import TOKEN, Picture


class Live(Picture):
    """The cluster of a real store."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.live = cluster

    def state(self) -> Any:
        return self.live.state(NOW)


@define
class Bench:
    port: int
    cluster: Cluster
    store: SqlStore

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        def work() -> tuple[int, Any]:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
            try:
                data = None if body is None else json.dumps(body)
                fields = {"authorization": f"Bearer {TOKEN}"}
                connection.request("GET" if body is None else "POST", f"/api/v1/{path}", data, fields)
                answer = connection.getresponse()
                return answer.status, json.loads(answer.read())
            finally:
                connection.close()

        return await trio.to_thread.run_sync(work)

    async def register(self, name: str, *rows: Replica) -> None:
        here = node(name, (device(0), device(1)))
        shards = tuple(report(r, ShardState.READY) for r in rows if r.shards[0].node == name)
        said = Register(1, name, "0", "b", "10.0.0.1", here.inventory, (EngineKind.VLLM,), shards, 0)
        await self.store.save_node(self.cluster.register(said, NOW))

    async def run(self) -> None:
        """A pass, written down."""
        state = self.cluster.state(NOW)
        made = decide(state, NOW)
        await self.store.save_pass(
            PassRecord(self.cluster.epoch, NOW, made.replicas, made.next_serial, made.decisions, made.unplaced,
                       made.scales, made.over)
        )  # fmt: skip
        self.cluster.apply(made)


@asynccontextmanager
async def bench(folder: Path, nodes: int = 2, replicas: int = 1) -> AsyncIterator[Bench]:
    async with sqlite_store(folder / "db") as store:
        settings = Settings(models=(model(replicas=replicas),))
        cluster = await remembered(store, settings, NOW, lambda: None)
        listener = listen(Address("127.0.0.1", 0))
        made = Bench(listener.getsockname()[1], cluster, store)
        for number in range(1, nodes + 1):
            await made.register(f"n{number}")
        await made.run()
        for number in range(1, nodes + 1):
            await made.register(f"n{number}", *cluster.replicas)
        operations = Operations(cluster, store, lambda: NOW)
        async with trio.open_nursery() as nursery:
            await nursery.start(serve, app(Live(cluster), TOKEN, operations=operations), listener)
            yield made
            nursery.cancel_scope.cancel()


async def test_a_drain_is_answered_written_down_and_remembered(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        (row,) = it.cluster.replicas
        assert row.shards[0].node == "n1"
        status, answer = await it.ask("nodes/n1/drain", {"reason": "new fans"})
        assert status == 200
        (fate,) = answer["replicas"]
        assert (fate["replica"], fate["word"], fate["to"]) == ("m-1", "moves", ["n2"])
        assert (answer["drained"]["reason"], answer["drained"]["empty"]) == ("new fans", False)
        await it.run()
        (shown, _) = (await it.ask("nodes"))[1]["nodes"]
        assert (shown["drained"]["leaving"], shown["drained"]["staying"]) == (["m-1"], [])
        (said, *_) = await it.store.decisions(10, "n1")
        assert await it.store.drains() == {"n1": it.cluster.drains["n1"]}
        assert [(e.action, e.object, e.by) for e in await it.store.audit(9)] == [
            ("node.drain", "n1", "token admin.token")
        ]
        told = [d.decision.reason for d in await it.store.decisions(10, "n1")]
        assert "drained by token admin.token: new fans" in told, said
    async with sqlite_store(tmp_path / "db") as store:
        again = await remembered(store, Settings(models=(model(),)), NOW, lambda: None)
        found = again.state(NOW).node("n1")
        assert found is not None
        assert isinstance(found.drained, Drained)
        assert await store.identities.forget_node("n1", Event(NOW, "evicted", "n1", "b", ""))
        assert await store.drains() == {}


async def test_what_stays_is_answered_with_every_candidate_and_forced_it_goes(tmp_path: Path) -> None:
    async with bench(tmp_path, nodes=1) as it:
        _, answer = await it.ask("nodes/n1/drain", {})
        assert [f["word"] for f in answer["replicas"]] == ["stays"]
        (item,) = answer["unplaced"]
        assert [c["refusals"][0]["filter"] for c in item["candidates"]] == ["drained"]
        await it.run()
        (replica,) = (await it.ask("replicas"))[1]["replicas"]
        assert replica["next"].startswith("leaves n1, which is drained by")
        _, answer = await it.ask("nodes/n1/drain", {"force": True})
        assert [f["word"] for f in answer["replicas"]] == ["stops"]
        await it.run()
        assert [r.goal for r in it.cluster.replicas] == [Goal.DRAIN]
        assert (await it.ask("nodes/n1/undrain", {"reason": "done"}))[1] == {"node": "n1", "undrained": True}
        assert (await it.ask("nodes/n1/undrain", {}))[1] == {"node": "n1", "undrained": False}
        assert (await it.ask("nodes/n1/undrain", {"reason": "a\nb"}))[0] == 400
        assert await it.store.drains() == {}
        kinds = [row.action for row in await it.store.audit(9)]
        assert kinds == ["node.undrain", "node.drain", "node.drain"]


async def test_an_order_is_remembered_until_it_is_done(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        status, answer = await it.ask("replicas/m-1/restart", {"reason": "it stutters"})
        assert (status, answer["replicas"][0]["word"], answer["replicas"][0]["by"]) == (200, "moves", "m-2")
        (order,) = (await it.store.orders()).values()
        assert (order.kind, order.generation, order.reason) == (OrderKind.RESTART, 1, "it stutters")
        await it.run()
        assert (await it.store.orders()) == {"m-1": order}, "until the old one is on its way out"
        status, answer = await it.ask("replicas/m-1/restart", {})
        assert (status, "is replaced by m-2 already" in answer["error"]["reason"]) == (409, True)
        status, answer = await it.ask("replicas/m-1/stop", {})
        assert (status, answer["replicas"][0]["word"]) == (200, "stops")
        await it.run()
        assert (it.cluster.orders, await it.store.orders()) == ({}, {})
        assert {r.id: r.goal for r in it.cluster.replicas}["m-1"] is Goal.DRAIN
        kinds = [row.action for row in await it.store.audit(9)]
        assert kinds == ["replica.stop", "replica.restart"]


async def test_an_order_that_was_given_during_a_pass_outlives_it(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        await it.ask("replicas/m-1/stop", {})
        made = decide(it.cluster.state(NOW), NOW)
        (old,) = made.over
        newer = type(old)(old.replica, OrderKind.RESTART, 1, "b", NOW + 1)
        it.cluster.order(newer)
        it.cluster.apply(made)
        assert it.cluster.orders == {"m-1": newer}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("nodes/n11/drain", {}, "did you mean n1"),
        ("nodes/n1/drain", {"reason": "a\nb"}, "one line"),
        ("nodes/n1/drain", {"reason": "x" * 501}, "one line"),
        ("nodes/n1/drain", {"forced": True}, "forced"),
        ("nodes/n1/drain", {"force": "yes"}, "force"),
        ("nodes/zz/undrain", {}, "is not known"),
        ("replicas/m-9/restart", {}, "is not known"),
        ("replicas/m-9/stop", {}, "is not known"),
    ],
)
async def test_what_makes_no_sense_is_refused(tmp_path: Path, path: str, body: dict[str, Any], said: str) -> None:
    async with bench(tmp_path) as it:
        status, answer = await it.ask(path, body)
        assert status == (404 if path.split("/")[1] in ("n11", "zz", "m-9") else 400)
        assert said in f"{answer['error']['reason']} {answer['error']['remedy']}"
        assert await it.store.audit(9) == ()


async def test_a_plan_says_what_a_drain_would_do(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        _, plan = await it.ask("plan", {"drain": "n1"})
        assert plan["fits"]
        assert [m["kind"] for s in plan["steps"] for m in s["moves"]] == ["place", "drain"]
        assert (await it.ask("plan", {"drain": "n7"}))[0] == 404
        assert (await it.ask("plan", {"force": True}))[0] == 400
        assert (await it.ask("plan", {"force": False}))[0] == 200
        assert it.cluster.drains == {}
