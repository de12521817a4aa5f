"""Joining, keeping out and rotating with the commands that people type, around a system that serves."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import System
from tests.e2e.test_operators import llmgw

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@contextmanager
def agent(config: Path) -> Iterator[None]:
    with config.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "llmgw", "agent", "--config", str(config)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(5) == 0


def joined(system: System, node: str) -> Path:
    """A node that has joined, ready for its agent."""
    ctl = ("ctl", "--config", str(system.demo.server_yaml))
    made = llmgw(*ctl, "token", "create", "--node", node, "--ttl", "2m")
    assert made.returncode == 0, made.stderr
    token = made.stdout.strip()
    config = system.demo.folder / node / "agent.yaml"
    config.parent.mkdir()
    about = ("agent", "--config", str(config))
    server = f"localhost:{system.demo.link_port}"
    state = str(system.demo.folder / node / "state")
    wrong = llmgw(*about, "join", token[:-1] + ("0" if token[-1] != "0" else "1"), "--server", server)
    assert wrong.returncode == 3
    assert "is not the one that the token is from" in wrong.stderr
    done = subprocess.run(
        [sys.executable, "-m", "llmgw", *about, "join", "-", "--server", server, "--state-dir", state],
        input=f"{token}\n", capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"joined as {node}" in done.stdout
    assert (config.parent / "identity").stat().st_mode & 0o777 == 0o700
    assert (config.parent / "identity/key.pem").stat().st_mode & 0o777 == 0o600
    again = llmgw(*about, "join", token, "--server", server, "--out", str(config.parent / "other"))
    assert again.returncode == 3
    assert "was used at" in again.stderr
    assert llmgw("config", "check", str(config)).returncode == 0
    config.write_text(config.read_text() + "discovery: none\n")
    return config


def test_a_node_joins_is_kept_out_and_forgotten(system: System) -> None:
    ctl = ("ctl", "--config", str(system.demo.server_yaml))
    config = joined(system, "gpu-9")
    status = ("agent", "--config", str(config), "status")
    assert llmgw(*status).returncode == 1
    assert "no agent has ever run here" in llmgw(*status).stdout
    with agent(config):
        system.until("gpu-9 to be connected", lambda: llmgw(*status).returncode == 0)
        assert "gpu-9" in llmgw(*ctl, "identities").stdout
        assert "is connected" in llmgw(*ctl, "node", "forget", "--yes", "gpu-9").stderr
        assert llmgw(*ctl, "deny", "node", "gpu-9", "--reason", "left at the airport").returncode == 0
        began = time.monotonic()
        system.until("gpu-9 to be refused", lambda: json.loads(llmgw(*status, "--json").stdout)["link"]["refused"])
        assert time.monotonic() - began < 3  # the command alone takes most of it
    said = llmgw(*status).stdout
    assert "its agent does not run" in said
    assert "REFUSED" in said
    assert "denied: left at the airport" in said
    assert "remedy:      if that is over: llmgw ctl deny lift node gpu-9" in said
    assert "gpu-9  " in llmgw(*ctl, "deny", "list").stdout
    assert llmgw(*ctl, "node", "forget", "--yes", "gpu-9").returncode == 0
    assert "gpu-9" not in llmgw(*ctl, "nodes").stdout
    told = llmgw(*ctl, "identities", "--events", "100").stdout
    for kind in ("token.create", "token.use", "node.join", "join-refused", "node.deny", "refused", "node.forget"):
        assert kind in told


def test_one_ca_follows_another_while_a_stream_goes_on(system: System) -> None:
    rotate = ("ca", "rotate", "--config", str(system.demo.server_yaml))
    status = ("agent", "--config", str(system.demo.agent_yaml), "status", "--json")
    whole = system.whole(400)
    stream = system.stream(400)
    since = json.loads(llmgw(*status).stdout)["link"]["since"]
    assert "begins a rotation" in llmgw(*rotate).stdout
    for too_early in ("switch", "retire"):
        assert llmgw(*rotate, too_early).returncode == 2
    added = llmgw(*rotate, "add")
    assert added.returncode == 0, added.stderr
    assert "llmgw ca rotate switch, when every node has the new root" in llmgw(*rotate, "retire").stderr
    system.until("the switch", lambda: llmgw(*rotate, "switch").returncode == 0)
    system.until("the end of the old one", lambda: llmgw(*rotate, "retire").returncode == 0)
    system.until("the agent to trust one CA", lambda: len(json.loads(llmgw(*status).stdout)["cas"]) == 1)
    told = json.loads(llmgw(*status).stdout)
    (ca,) = told["cas"]
    assert ca["subject"].endswith("demo.llmgw 2")
    assert told["certificate"]["issuer"].endswith("demo.llmgw 2")
    assert told["link"]["since"] == since, "the session is the same"
    assert stream.result() == whole
    # Once more, with a node that is away: it is named, and waited for.
    system.run.kill_agent()
    assert llmgw(*rotate, "add").returncode == 0
    refused = llmgw(*rotate, "switch")
    assert refused.returncode == 2
    assert "demo-node does not have the new root yet" in refused.stderr
    assert "demo-node: does not have the new root yet" in llmgw(*rotate).stdout
    system.run.start_agent()
    system.until("the agent", lambda: json.loads(llmgw(*status).stdout)["connected"])
    system.until(
        "its word",
        lambda: "lacking" not in llmgw(*rotate).stdout and len(json.loads(llmgw(*status).stdout)["cas"]) == 2,
    )
    system.run.kill_agent()
    assert llmgw(*rotate, "switch").returncode == 0
    # First the server reads its own new certificate; then it is the node's that stands in the way.
    still = "is still in use: demo-node its certificate is from it"
    system.until("the refusal", lambda: still in llmgw(*rotate, "retire").stderr)
    system.run.start_agent()
    system.until("the end of the old one", lambda: llmgw(*rotate, "retire").returncode == 0)
