"""Daemons die and stop in the middle of streams; no stream notices, and no engine is restarted."""

from __future__ import annotations

import os
import signal
import time

import openai
import pytest

from tests.e2e.conftest import System

pytestmark = pytest.mark.e2e


def router_pid(system: System) -> int:
    pid: int = system.run.api("status")["router"]["pid"]
    return pid


@pytest.mark.long
def test_agent_killed_mid_stream(system: System) -> None:
    expected = system.whole(120)
    before = system.pids()
    stream = system.stream(120)
    system.run.kill_agent()
    assert stream.result() == expected
    system.until("the node to be lost", lambda: system.run.node_state() == "lost")
    # The state of a node is read off the clock, the reasons are the next pass's.
    system.until("the reasons", lambda: any(m["unplaced"] for m in system.run.api("models")["models"]))
    assert system.whole(5), "without an agent the engine still serves"
    system.run.start_agent()
    system.until("the replicas to be back", system.run.all_ready)
    assert system.pids() == before
    assert all(r["generation"] == 1 for r in system.run.replicas())


def test_agent_stops_within_a_second_and_leaves_its_engines(system: System) -> None:
    before = system.pids()
    stream = system.stream(80)
    assert system.run.agent is not None
    began = time.monotonic()
    system.run.agent.send_signal(signal.SIGTERM)
    assert system.run.agent.wait(3) == 0
    assert time.monotonic() - began < 1.0
    assert stream.result()
    system.run.start_agent()
    system.until("the node to be back", lambda: system.run.node_state() == "connected" and system.run.all_ready())
    assert system.pids() == before


@pytest.mark.long
def test_control_plane_killed_mid_stream_and_restarted(system: System) -> None:
    expected = system.whole(200)
    engines, router = system.pids(), router_pid(system)
    epoch = system.run.api("status")["epoch"]
    stream = system.stream(200)
    assert system.run.server is not None
    system.run.server.kill()
    system.run.server.wait()
    assert system.whole(5), "without a control plane the router still serves"
    system.run.start_server()
    assert stream.result() == expected
    system.until("the router to be adopted", lambda: router_pid(system) == router)
    system.until("the agent to be back", lambda: system.run.node_state() == "connected" and system.run.all_ready())
    assert system.pids() == engines
    assert system.run.api("status")["epoch"] > epoch


@pytest.mark.long
def test_the_control_plane_starts_anew_in_place(system: System) -> None:
    """SIGUSR2, with another setup of the router, so that its worker is replaced in the middle of a stream."""
    expected = system.whole(100)
    engines, router = system.pids(), router_pid(system)
    stream = system.stream(100)
    assert system.run.server is not None
    system.demo.server_yaml.write_text(system.demo.server_yaml.read_text().replace("workers: 1", "access_log: true"))
    epoch = system.run.api("status")["epoch"]
    system.run.server.send_signal(signal.SIGUSR2)

    def replaced() -> bool:
        found = system.run.api("status")
        workers = [w for w in found["router"]["workers"] if w["state"] == "serving"] if found else []
        return bool(workers) and found["epoch"] > epoch and router not in [w["pid"] for w in workers]

    system.until("the worker to be replaced", replaced)
    assert system.whole(5)
    assert stream.result() == expected
    system.until("the agent to be back", lambda: system.run.node_state() == "connected" and system.run.all_ready())
    assert system.pids() == engines
    assert system.run.server.poll() is None, "the same process all along"


def test_server_drains_on_sigterm(system: System) -> None:
    expected = system.whole(30)
    stream = system.stream(30)
    assert system.run.server is not None
    system.run.server.send_signal(signal.SIGTERM)
    assert stream.result() == expected
    assert system.run.server.wait(5) == 0
    with system.client() as client, pytest.raises(openai.APIConnectionError):
        client.models.list()


@pytest.mark.long
def test_drain_is_bounded(system: System) -> None:
    stream = system.stream(100_000)
    assert system.run.server is not None
    began = time.monotonic()
    system.run.server.send_signal(signal.SIGTERM)
    assert system.run.server.wait(8) == 0
    assert time.monotonic() - began < 1.0 + 3.0, "drain_s is 1 in the demo"
    with pytest.raises(AssertionError, match=r"cut|Error"):
        stream.result()


@pytest.mark.long
def test_engine_crash_is_restarted_with_its_reason(system: System) -> None:
    victim = system.run.replicas()[0]
    os.kill(victim["pid"], signal.SIGKILL)
    system.until(
        "the replica to be restarted",
        lambda: any(r["id"] == victim["id"] and r["generation"] == 2 for r in system.run.replicas()),
    )
    decisions = system.run.api("decisions")["decisions"]
    restart = next(d for d in decisions if d["kind"] == "restart")
    assert restart["replica"] == victim["id"]
    assert "signal 9" in restart["reason"]
    system.until("it to be ready again", system.run.all_ready, 30)
    assert system.pids()[victim["id"]] != victim["pid"]
