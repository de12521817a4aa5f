"""What an operator does: ask, edit the settings, send SIGHUP, run a router alone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmgw.cli.demo_files import fakes_dir, free_ports
from tests.e2e.conftest import System

pytestmark = pytest.mark.e2e


def llmgw(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "llmgw", *args], capture_output=True, text=True, timeout=30, check=False
    )


def test_ctl_and_reload(system: System) -> None:
    ctl = ("ctl", "--config", str(system.demo.server_yaml))
    for what in ("nodes", "models", "replicas", "status"):
        people, program = llmgw(*ctl, what), llmgw(*ctl, what, "--json")
        assert people.returncode == program.returncode == 0, people.stderr + program.stderr
        assert people.stdout
        json.loads(program.stdout)
    nodes = json.loads(llmgw(*ctl, "nodes", "--json").stdout)["nodes"]
    assert nodes[0]["inventory"]["simulated"]
    secrets = {json.loads(f.read_text())["api_key"] for f in system.demo.agent_state.glob("shards/*/record.json")}
    assert all(secrets)
    everything = "".join(llmgw(*ctl, w, "--json").stdout for w in ("nodes", "models", "replicas", "status"))
    logs = (system.demo.folder / "server.log").read_text() + (system.demo.folder / "agent.log").read_text()
    assert not [s for s in secrets if s in everything or s in logs]

    settings = system.demo.folder / "settings.yaml"
    text = settings.read_text()
    assert system.run.server is not None
    settings.write_text(text.replace("replicas: 1", "replicas: one", 1))
    system.run.server.send_signal(signal.SIGHUP)
    system.until("the refusal", lambda: "settings refused" in system.run.log_tail("server", 50))
    assert system.run.all_ready()
    settings.write_text(text.replace("replicas: 1", "replicas: 0", 1))
    system.run.server.send_signal(signal.SIGHUP)
    system.until("the replica to be gone", lambda: len(system.run.replicas()) == 1)
    status = json.loads(llmgw(*ctl, "status", "--json", "--exit-code").stdout)
    assert status["settings_revision"] == 2
    assert status["healthy"]


def test_ctl_without_a_control_plane(prepared: System) -> None:
    done = llmgw("ctl", "--config", str(prepared.demo.server_yaml), "status")
    assert done.returncode == 2
    assert "admin token" in done.stderr
    (prepared.demo.server_state).mkdir(mode=0o700)
    token = prepared.demo.server_state / "admin.token"
    token.touch(mode=0o600)
    token.write_text("x\n")
    done = llmgw("ctl", "--config", str(prepared.demo.server_yaml), "status")
    assert done.returncode == 3
    assert "does not answer" in done.stderr


def test_router_alone(prepared: System, tmp_path: Path) -> None:
    (engine_port,) = free_ports(1)
    settings = prepared.demo.folder / "settings.yaml"
    settings.write_text(f"models:\n  elsewhere:\n    endpoints: [http://127.0.0.1:{engine_port}]\n")
    engine = subprocess.Popen(
        [sys.executable, str(fakes_dir() / "engine.py"), "serve", "m", "--served-model-name", "elsewhere",
         "--host", "127.0.0.1", "--port", str(engine_port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        text = prepared.demo.server_yaml.read_text()
        start, end = text.index("link:"), text.index("log:")
        prepared.demo.server_yaml.write_text(text[:start] + text[end:])
        prepared.run.start_server()

        def answers() -> bool:
            try:
                return bool(prepared.stream(5, "elsewhere").result())
            except AssertionError:
                return False

        prepared.until("an answer", answers)
        status = prepared.run.api("status")
        assert status["control_plane"] is False
        assert status["models"][0]["state"] == "static"
    finally:
        engine.kill()
        engine.wait()


def test_second_server_on_the_same_state_refuses(system: System) -> None:
    done = llmgw("server", "--config", str(system.demo.server_yaml))
    assert done.returncode == 2
    assert str(system.demo.server_state) in done.stderr
    assert system.run.all_ready()


def test_config_check_names_every_fault(prepared: System) -> None:
    for file in ("server.yaml", "agent.yaml", "settings.yaml"):
        assert llmgw("config", "check", str(prepared.demo.folder / file)).returncode == 0
    wrong = prepared.demo.folder / "wrong.yaml"
    wrong.write_text("models:\n  a:\n    replicas: two\n    profilez: []\n")
    done = llmgw("config", "check", str(wrong))
    assert done.returncode == 2
    assert f"{wrong}:3:" in done.stderr
    assert "profiles" in done.stderr
