"""Weights and engines as an operator has them fetched and installed: ctl, server, agent, and a hub to fetch from."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")

from fakes.hub import Hub
from llmgw.cli.demo_files import NODE
from tests.agent.jobs.test_installs import wheel
from tests.e2e.conftest import System
from tests.e2e.test_operators import llmgw

pytestmark = [pytest.mark.e2e, pytest.mark.long]

FILES = {"config.json": b"{}", "a.safetensors": bytes(200_000)}
PROFILE = "{name: one, engine: vllm, weights: 'hf:org/tiny@main', device_class: h100-80g}"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub({"org/tiny": FILES}) as made:
        yield made


class Operator:
    """Somebody with ``llmgw ctl``."""

    def __init__(self, system: System) -> None:
        self._ctl = ("ctl", "--config", str(system.demo.server_yaml))

    def says(self, *args: str) -> str:
        """What people read."""
        done = llmgw(*self._ctl, *args)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, *args: str) -> str:
        done = llmgw(*self._ctl, *args)
        assert done.returncode == 2, done
        return done.stderr

    def jobs(self, *args: str) -> list[dict[str, Any]]:
        """What programs read: the jobs that a command answers with."""
        found: list[dict[str, Any]] = json.loads(self.says(*args, "--json"))["jobs"]
        return found

    def job(self, job: str) -> dict[str, Any]:
        (found,) = self.jobs("jobs", job)
        return found


@pytest.fixture
def system(prepared: System, hub: Hub) -> System:
    """A server and an agent that may fetch from the hub, a model of it that is not wanted yet, and no engine."""
    settings, agent = prepared.demo.folder / "settings.yaml", prepared.demo.agent_yaml
    text = settings.read_text().replace("replicas: 1", "replicas: 0")
    text = text.replace("models:\n", f"models:\n  tiny: {{replicas: 0, profiles: [{PROFILE}]}}\n", 1)
    settings.write_text(f"{text}\nweights: {{sources: ['hf:org/*'], mirror: '{hub.url}'}}\n")
    agent.write_text(f"{agent.read_text()}\nweights: {{reserve_gib: 0}}\n")
    prepared.run.start_server()
    prepared.run.start_agent()
    prepared.until("the node", lambda: prepared.run.node_state() == "connected")
    return prepared


def test_weights_and_an_engine_as_an_operator_has_them(system: System, hub: Hub, tmp_path: Path) -> None:
    ctl = Operator(system)
    weights_are_fetched_cancelled_fetched_again_and_served(system, hub, ctl)
    an_engine_is_installed_and_listed(system, ctl, tmp_path / "wheels")


def weights_are_fetched_cancelled_fetched_again_and_served(system: System, hub: Hub, ctl: Operator) -> None:
    assert "no job was ever begun" in ctl.says("jobs")
    assert "is not in weights.sources" in ctl.refused("fetch", "hf:other/one", "--node", NODE)
    assert "has never registered" in ctl.refused("fetch", "tiny", "--node", "elsewhere")

    hub.faults.hold_after = 64 * 1024
    (begun,) = ctl.jobs("fetch", "tiny", "--node", NODE)
    assert (begun["subject"], begun["node"]) == ("hf:org/tiny@main", NODE)
    system.until("some bytes", lambda: ctl.job(begun["id"])["done_bytes"])
    assert "of 200002 bytes" in ctl.says("jobs")
    ctl.says("jobs", begun["id"], "--cancel")
    system.until("its end", lambda: ctl.job(begun["id"])["state"] == "cancelled")

    hub.go.set()
    (again,) = ctl.jobs("fetch", "hf:org/tiny@main", "--node", NODE)
    system.until("the weights", lambda: ctl.job(again["id"])["state"] == "done")
    path = Path(ctl.job(again["id"])["result"]["path"])
    assert {f.name: f.read_bytes() for f in path.iterdir()} == FILES
    assert "download" in ctl.says("jobs", again["id"])

    before = len(hub.asked)
    system.run.kill_agent()
    system.run.start_agent()
    settings = system.demo.folder / "settings.yaml"
    settings.write_text(settings.read_text().replace("tiny: {replicas: 0", "tiny: {replicas: 1", 1))
    assert system.run.server is not None
    system.run.server.send_signal(signal.SIGHUP)
    system.until("a replica of it", lambda: [r["state"] for r in system.run.replicas()] == ["ready"])
    assert len(hub.asked) == before, "what is here is not asked for again"
    assert len(system.stream(8, "tiny").result().split()) == 8
    states = {j["id"]: j["state"] for j in ctl.jobs("jobs")}
    assert states == {begun["id"]: "cancelled", again["id"]: "done"}, "results survive the agent"


def an_engine_is_installed_and_listed(system: System, ctl: Operator, wheels: Path) -> None:
    wheel(wheels, "1.0")
    assert "--lock or --wheels" in ctl.refused("install", "vllm", "--node", NODE, "--version", "1.0")
    (begun,) = ctl.jobs("install", "vllm", "--node", NODE, "--version", "1.0", "--wheels", str(wheels))
    system.until("the install", lambda: ctl.job(begun["id"])["state"] in ("done", "failed"), 60)
    assert ctl.job(begun["id"])["result"]["version"] == "1.0", ctl.job(begun["id"])
    system.until("the list", lambda: '"says": "1.0"' in ctl.says("nodes", "--json"))
    (node,) = json.loads(ctl.says("nodes", "--json"))["nodes"]
    assert [(i["version"], i["current"]) for i in node["installs"] if i["name"] == "vllm"] == [("1.0", True)]
