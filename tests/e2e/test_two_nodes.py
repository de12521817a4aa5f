"""One replica over two nodes: two agents, one fake engine on each, and what happens when a part of it goes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from llmgw.cli.demo_files import NODE
from tests.e2e.conftest import System
from tests.e2e.second import FABRIC, SECOND, Second

pytestmark = pytest.mark.e2e


def settings(load_s: float = 0.3) -> str:
    told = json.dumps({"load_s": load_s, "token_s": 0.02})
    return f"""\
models:
  demo-small:
    replicas: 1
    profiles:
      - name: two-nodes
        engine: vllm
        weights: /demo/no-weights
        device_class: h100-80g
        gpus: 2
        nodes: 2
        tp: 4
        env: {{FAKE_ENGINE: '{told}'}}
        limits: {{stop_s: 2, hang_s: 2}}
liveness: {{heartbeat_s: 1, unreachable_s: 3, lost_s: 8}}
"""


class Pair:
    """The system with a second agent."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.second = Second(system.demo)
        self.second.prepare()
        (system.demo.folder / "settings.yaml").write_text(settings())

    def reports(self) -> dict[str, dict[str, Any]]:
        """What each agent said of its rank."""
        return {s["shard"]: s for r in self.system.run.replicas() for s in r["shards"]}

    def pids(self) -> dict[str, int]:
        return {name: r["pid"] for name, r in self.reports().items() if r["pid"] is not None}

    def replica(self) -> dict[str, Any]:
        (found,) = self.system.run.replicas()
        return found

    def ready(self, generation: int = 1) -> bool:
        return any(r["state"] == "ready" and r["generation"] == generation for r in self.system.run.replicas())


@pytest.fixture
def pair(prepared: System) -> Iterator[Pair]:
    both = Pair(prepared)
    try:
        prepared.run.start_server()
        prepared.run.start_agent()
        both.second.start()
        prepared.until("the replica to be ready", both.ready, 40)
        yield both
    finally:
        both.second.stop()


@pytest.mark.long
def test_a_replica_over_two_nodes_serves_and_a_dead_rank_ends_all_of_it(pair: Pair) -> None:
    system = pair.system
    replica = pair.replica()
    assert sorted(replica["nodes"]) == [NODE, SECOND]
    assert len(replica["devices"]) == 4
    assert system.whole(5)
    before = pair.pids()
    assert set(before) == {"demo-small-1.0", "demo-small-1.1"}
    for victim in ("demo-small-1.1", "demo-small-1.0"):
        generation = pair.replica()["generation"]
        pids = pair.pids()
        stream = system.stream(10_000)
        os.killpg(pids[victim], signal.SIGKILL)
        with pytest.raises(AssertionError, match=r"Error|cut"):
            stream.result()
        system.until("a new start", lambda g=generation: pair.ready(g + 1), 40)
        decision = next(d for d in system.run.api("decisions")["decisions"] if d["kind"] == "restart")
        rank = victim[-1]
        assert decision["reason"].startswith(f"rank {rank} on ")
        assert not set(pids.values()) & set(pair.pids().values())
        assert system.whole(5)


@pytest.mark.long
def test_agents_may_go_and_come_back_while_the_ranks_serve(pair: Pair) -> None:
    system = pair.system
    before = pair.pids()
    expected = system.whole(100)
    stream = system.stream(100)
    system.run.kill_agent()
    pair.second.kill()
    assert stream.result() == expected
    system.run.start_agent()
    pair.second.start()
    system.until("both to be back", lambda: system.run.all_ready() and pair.pids() == before, 30)
    assert pair.replica()["generation"] == 1


def test_a_node_without_its_fabric_is_named(prepared: System) -> None:
    both = Pair(prepared)
    both.second.config.write_text(both.second.config.read_text().replace(FABRIC, ""))
    try:
        prepared.run.start_server()
        prepared.run.start_agent()
        both.second.start()

        def reason() -> str:
            answer = prepared.run.api("models")
            return json.dumps(answer["models"][0]["unplaced"]) if answer and answer["models"] else ""

        wanted = "needs one fabric over 2 nodes of h100-80g: rack-1 has 1 (demo-node"
        prepared.until("the reason", lambda: wanted in reason() and "second-node is on no fabric" in reason())
        with prepared.client() as client, pytest.raises(openai.APIStatusError):
            client.chat.completions.create(model="demo-small", messages=[{"role": "user", "content": "x"}])
    finally:
        both.second.stop()
