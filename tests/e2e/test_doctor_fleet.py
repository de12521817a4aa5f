"""`llmgw ctl doctor` over a real link."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import System
from tests.e2e.test_operators import llmgw

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_a_node_is_examined_over_the_link(prepared: System) -> None:
    prepared.run.start_server()
    prepared.run.start_agent()
    prepared.until("the node", lambda: prepared.run.node_state() == "connected")
    ctl = ("ctl", "--config", str(prepared.demo.server_yaml), "doctor")
    told = llmgw(*ctl)
    assert "demo-node" in told.stdout, told.stderr
    assert "SIMULATED MACHINE" in told.stdout
    assert told.returncode == 0, told.stdout
    said = json.loads(llmgw(*ctl, "--json", "demo-node").stdout)
    assert said["nodes"]["demo-node"]["redacted"]
    assert said["nodes"]["demo-node"]["facts"]["cards"]
    assert (said["failed"], said["unequal"]) == ({}, [])
    assert llmgw(*ctl, "nobody").returncode == 2
    prepared.run.kill_agent()
    prepared.until("its end", lambda: llmgw(*ctl, "demo-node").returncode == 1)
    assert "demo-node is not connected" in llmgw(*ctl, "demo-node").stdout
