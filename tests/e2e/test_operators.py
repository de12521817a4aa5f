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


@pytest.mark.long
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


@pytest.mark.long
def test_a_model_that_cannot_fit_is_refused_by_its_own_files(system: System) -> None:
    weights = system.demo.folder / "large"
    weights.mkdir()
    config = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192}
    (weights / "config.json").write_text(json.dumps(config))
    index = weights / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 141_107_412_992}, "weight_map": {}}))
    settings = system.demo.folder / "settings.yaml"
    profile = f"{{name: one, engine: vllm, weights: {weights}, device_class: h100-80g, context_length: 8192}}"
    settings.write_text(settings.read_text().replace("models:\n", f"models:\n  large:\n    profiles: [{profile}]\n", 1))
    assert system.run.server is not None
    system.run.server.send_signal(signal.SIGHUP)
    ctl = ("ctl", "--config", str(system.demo.server_yaml))
    wanted = (
        "needs 136.4 GiB on each device: weights 131.4 (131.4 GiB by model.safetensors.index.json)"
        " + KV cache 2.5 (8192 tokens x 320 KiB in 16 bits) + overhead 2.5"
    )
    system.until("the refusal", lambda: wanted in llmgw(*ctl, "models").stdout)
    assert "[memory] -> raise tp, use quantized weights" in llmgw(*ctl, "models").stdout
    assert not [r for r in system.run.replicas() if r["model"] == "large"], "it was not tried before it was looked at"
    (node,) = json.loads(llmgw(*ctl, "nodes", "--json").stdout)["nodes"]
    assert {w["name"]: w["weights_bytes"] for w in node["weights"]} == {str(weights): 141_107_412_992}
    # A smaller one is put in its place; the agent looks again by itself.
    index.write_text(json.dumps({"metadata": {"total_size": 14_110_741_299}, "weight_map": {}}))
    system.until("a place", lambda: any(r["model"] == "large" for r in system.run.replicas()))


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
