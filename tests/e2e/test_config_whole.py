"""The settings of running daemons: changed without a restart, refused, taken back, and a router that becomes more."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import System
from tests.e2e.test_operators import llmgw
from tests.server.test_settings_book import ATTACKS

pytestmark = pytest.mark.e2e


@pytest.mark.long
def test_changed_live_and_taken_back(system: System, tmp_path: Path) -> None:
    ctl = ("ctl", "--config", str(system.demo.server_yaml))
    config = (*ctl, "config")
    assert system.run.server is not None
    pid = system.run.server.pid
    first = llmgw(*config, "export").stdout
    assert first == (system.demo.folder / "settings.yaml").read_text()
    _, small = sorted(m["name"] for m in json.loads(llmgw(*ctl, "models", "--json").stdout)["models"])

    done = llmgw(*config, "set", f"models.{small}.replicas=0", "--yes", "--reason", "a test")
    assert done.returncode == 0, done.stderr
    system.until("the replica to be gone", lambda: len(system.run.replicas()) == 1)
    # Every comment of the file is still there.
    after = llmgw(*config, "export").stdout
    assert [line for line in after.splitlines() if line not in first.splitlines()] == ["    replicas: 0"]

    for text, said in ATTACKS.values():
        (tmp_path / "bad.yaml").write_text(text)
        done = llmgw(*config, "import", str(tmp_path / "bad.yaml"), "--yes")
        assert done.returncode == 2
        assert said.split(": ")[-1] in done.stderr or "larger than" in done.stderr, done.stderr
    assert llmgw(*config, "export").stdout == after

    # The file is only compared now, and says so.
    (system.demo.folder / "settings.yaml").write_text(first + "# more\n")
    system.run.server.send_signal(signal.SIGHUP)
    system.until("the refusal", lambda: "is not what holds" in system.run.log_tail("server", 50))
    assert llmgw(*config, "export").stdout == after

    assert llmgw(*config, "set", "router.auth=keys", "--yes").returncode == 0
    system.until("a closed router", lambda: system.run.api("status")["router"]["keys"])
    assert llmgw(*config, "rollback", "1", "--yes", "--reason", "enough").returncode == 0
    system.until("both again", lambda: system.run.all_ready())
    assert not system.run.api("status")["router"]["keys"]
    revisions = json.loads(llmgw(*config, "history", "--json").stdout)["revisions"]
    assert [r["reason"] for r in revisions] == ["back to revision 1: enough", "", "a test", "read at the start"]
    acts = [row["action"] for row in json.loads(llmgw(*ctl, "audit", "--json").stdout)["rows"]]
    assert [a for a in acts if a.startswith("settings")] == [
        "settings.rollback", "settings.change", "settings.change", "settings.change",
    ]  # fmt: skip
    assert system.run.server.pid == pid
    assert system.run.server.poll() is None


def test_a_router_becomes_a_control_plane_by_its_settings(prepared: System) -> None:
    settings = prepared.demo.folder / "settings.yaml"
    whole = settings.read_text()
    settings.write_text("models: {elsewhere: {endpoints: ['http://127.0.0.1:9']}}\n")
    prepared.run.start_server()
    prepared.until("a router", lambda: prepared.run.api("status")["router"]["state"] == "serving")
    assert prepared.run.api("status")["control_plane"] is False
    workers = {w["pid"] for w in prepared.run.api("status")["router"]["workers"]}
    assert prepared.run.server is not None
    pid = prepared.run.server.pid
    settings.write_text(whole)
    config = ("ctl", "--config", str(prepared.demo.server_yaml), "config")
    done = llmgw(*config, "import", str(settings), "--yes")
    assert done.returncode == 0, done.stderr
    assert "llmgw server starts itself anew" in done.stdout

    def anew() -> bool:
        done = llmgw("ctl", "--config", str(prepared.demo.server_yaml), "status", "--json")
        return done.returncode == 0 and bool(json.loads(done.stdout)["control_plane"])

    prepared.until("a control plane", anew)
    assert prepared.run.server.pid == pid
    assert {w["pid"] for w in prepared.run.api("status")["router"]["workers"]} == workers
    assert prepared.run.api("status")["settings_revision"] == 2
