"""Settings for agents, through real daemons: a node takes them over while its engines serve, or refuses them."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from typing import Any

import pytest

from tests.e2e.conftest import System

pytestmark = pytest.mark.e2e


def held(system: System) -> dict[str, Any]:
    answer = system.run.api("nodes")
    return dict(answer["nodes"][0]["settings"]) if answer and answer["nodes"] else {}


def change(system: System, agents: str) -> None:
    """Put this into the settings' section for agents, in place of what was there."""
    path = system.demo.folder / "settings.yaml"
    path.write_text(path.read_text().partition("\nagents:")[0] + f"\nagents: {agents}\n")
    assert system.run.server is not None
    system.run.server.send_signal(signal.SIGHUP)


def llmgw(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "llmgw", *args], capture_output=True, text=True, timeout=30, check=False
    )


def status(system: System) -> str:
    done = llmgw("agent", "--config", str(system.demo.agent_yaml), "status")
    return done.stdout + done.stderr


def ready_lines(system: System) -> int:
    return (system.demo.folder / "agent.log").read_text().count(" ready  ")


def connected(system: System) -> bool:
    return system.run.node_state() == "connected" and system.run.all_ready()


@pytest.mark.long
def test_a_node_takes_its_settings_over_in_the_middle_of_a_stream(system: System) -> None:
    expected = system.whole(150)
    before = system.pids()
    assert system.run.agent is not None
    agent = system.run.agent.pid
    system.until("what there is to be applied", lambda: held(system).get("state") == "applied")
    assert ready_lines(system) == 1, "what changes nothing needs no start"
    stream = system.stream(150)
    change(system, "{default: {log: {level: debug}}, nodes: {demo-node: {weights: {reserve_gib: 3}}}}")
    system.until("them to be taken over", lambda: held(system) == {"state": "applied", "wanted": 2, "applied": 2, "reason": ""})  # fmt: skip
    assert stream.result() == expected
    system.until("everything to be there", lambda: connected(system))
    assert system.pids() == before
    assert system.run.agent.poll() is None
    assert ready_lines(system) == 2
    assert all(r["generation"] == 1 for r in system.run.replicas())
    log = (system.demo.folder / "agent.log").read_text()
    assert "the settings stand in for keys of agent.yaml" in log
    assert "log.level" in log
    assert "settings: revision 2, on trial" in status(system)
    kept = system.demo.agent_state / "settings.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert json.loads(json.loads(kept.read_bytes())["trial"]["text"])["weights"] == {"reserve_gib": 3}
    # Without its control plane the next agent starts on what was kept.
    assert system.run.server is not None
    system.run.server.kill()
    system.run.server.wait()
    system.run.kill_agent()
    system.run.start_agent()
    system.until("the agent to be up", lambda: ready_lines(system) == 3)
    assert "settings=2" in (system.demo.folder / "agent.log").read_text().split(" ready  ")[-1].splitlines()[0]
    system.run.start_server()
    system.until("everything to be there", lambda: connected(system))
    assert system.pids() == before
    assert system.run.agent.pid != agent


@pytest.mark.long
def test_settings_that_cannot_be_used_are_refused_and_stay_refused(system: System) -> None:
    before = system.pids()
    change(system, "{default: {discovery: {root: /no/such/machine}}}")
    system.until("them to be refused", lambda: held(system).get("state") == "refused")
    assert "discovery.root: /no/such/machine is not a folder" in held(system)["reason"]
    assert held(system)["wanted"] == 2
    assert "settings: revision 2 REFUSED: discovery.root: /no/such/machine is not a folder" in status(system)
    shown = llmgw("ctl", "--config", str(system.demo.server_yaml), "nodes").stdout
    assert "2 refused" in shown
    assert "demo-node: settings of revision 2 refused: discovery.root: /no/such/machine is not a folder" in shown
    assert "node demo-node refused its settings" in system.run.api("status")["problems"]
    assert ready_lines(system) == 1
    system.run.kill_agent()
    system.run.start_agent()
    system.until("the node to be back", lambda: connected(system) and ready_lines(system) == 2)
    system.until("them to be refused again", lambda: held(system).get("state") == "refused")
    change(system, "{default: {log: {level: warning}}}")
    system.until("better ones to be taken", lambda: held(system).get("state") == "applied")
    system.until("everything to be there", lambda: connected(system))
    assert system.pids() == before


@pytest.mark.long
def test_an_edited_file_is_taken_over_and_a_wrong_one_is_not(system: System) -> None:
    before = system.pids()
    file = system.demo.agent_yaml
    right = file.read_text()
    fresh = file.with_suffix(".new")
    fresh.write_text(right.replace("level: info", "level: debug"))
    os.replace(fresh, file)
    system.until("the file to be taken over", lambda: ready_lines(system) == 2)
    file.write_text(right.replace("level: info", "level: loud"))
    log = system.demo.folder / "agent.log"
    system.until("it to be reported", lambda: "agent.yaml as it is now is not used" in log.read_text())
    assert system.run.agent is not None
    said = status(system)
    assert "its agent runs" in said
    assert "agent.yaml as it is now is NOT USED: " in said
    assert "log.level: expected one of debug" in said
    file.write_text(right)
    system.run.agent.send_signal(signal.SIGHUP)
    system.until("the right one to be taken over", lambda: ready_lines(system) == 3)
    system.until("everything to be there", lambda: connected(system))
    assert system.pids() == before
