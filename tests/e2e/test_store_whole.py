"""The store as an operator looks after it: backup, restore, check, the audit, and a disk that is full."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from llmgw.cli.demo_files import fakes_dir, free_ports
from tests.e2e.conftest import System
from tests.e2e.test_operators import llmgw

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@contextmanager
def router_alone(system: System) -> Iterator[None]:
    """Have the demo's server route to one engine that nobody manages, and be no control plane."""
    (port,) = free_ports(1)
    settings = system.demo.folder / "settings.yaml"
    settings.write_text(f"models:\n  elsewhere:\n    endpoints: [http://127.0.0.1:{port}]\n")
    text = system.demo.server_yaml.read_text()
    system.demo.server_yaml.write_text(text[: text.index("link:")] + text[text.index("log:") :])
    engine = subprocess.Popen(
        [sys.executable, str(fakes_dir() / "engine.py"), "serve", "m", "--served-model-name", "elsewhere",
         "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        engine.kill()
        engine.wait()


def stop(system: System) -> None:
    assert system.run.server is not None
    system.run.server.terminate()
    system.run.server.wait(20)


def test_backup_check_and_restore(prepared: System) -> None:
    server = ("--config", str(prepared.demo.server_yaml))
    ctl, backup = ("ctl", *server), prepared.demo.folder / "b.db"

    def does(*words: str, code: int = 0) -> str:
        done = llmgw(*words)
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def keys() -> int:
        return len(json.loads(does(*ctl, "keys", "list", "--json"))["keys"])

    with router_alone(prepared):
        prepared.run.start_server()
        does(*ctl, "keys", "create", "--owner", "ada")
        shown = does(*ctl, "audit")
        for word in ("settings.change", "revision 1", "key.create"):
            assert word in shown
        assert "intact: 2 rows\nto be noted: 2:" in does(*ctl, "audit", "verify")

        # A server that runs goes on, and gives its own backup.
        assert "by the server that runs" in does("server", *server, "backup", str(backup))
        assert backup.stat().st_mode & 0o777 == 0o600
        assert not list(prepared.demo.server_state.glob(".backup-*"))
        assert "is there already" in does("server", *server, "backup", str(backup), code=2)
        assert "a server runs on it" in does("server", *server, "check", code=2)
        assert "nothing is wrong" in does("server", *server, "check", "--file", str(backup))
        assert "holds it" in does("server", *server, "restore", str(backup), "--yes", code=2)
        does(*ctl, "keys", "create", "--owner", "eve")
        assert keys() == 2

        stop(prepared)
        assert "nothing is wrong" in does("server", *server, "check")
        assert "restored from" in does("server", *server, "restore", str(backup), "--yes")
        (kept,) = prepared.demo.server_state.glob("llmgw.db.replaced-*")
        with closing(sqlite3.connect(kept)) as old:
            assert old.execute("SELECT count(*) FROM api_key").fetchone() == (2,)
        prepared.run.start_server()
        assert keys() == 1

        # Somebody who can write the file makes as if somebody else had done it.
        stop(prepared)
        with closing(sqlite3.connect(prepared.demo.server_state / "llmgw.db")) as file, file:
            file.execute("UPDATE audit SET by = 'mallory' WHERE action = 'key.create'")
        assert "row 2 was changed" in does("server", *server, "check", code=1)
        prepared.run.start_server()
        assert "not intact: row 2 was changed" in does(*ctl, "audit", "verify", code=1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a small disk")
def test_a_full_disk_refuses_changes_and_nothing_else(prepared: System) -> None:
    state: Path = prepared.demo.server_state
    state.mkdir(mode=0o700)
    small = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "llmgw-test", str(state)],
        capture_output=True,
        text=True,
        check=False,
    )
    if small.returncode:
        pytest.skip(f"no small disk can be made: {small.stderr.strip()}")
    try:
        with router_alone(prepared):
            full_and_not_full(prepared, state)
            prepared.run.stop()
    finally:
        prepared.run.stop()
        subprocess.run(["umount", str(state)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def full_and_not_full(system: System, state: Path) -> None:
    ctl = ("ctl", "--config", str(system.demo.server_yaml))
    settings = system.demo.folder / "settings.yaml"
    system.run.start_server()
    assert system.run.server is not None

    def answers() -> bool:
        try:
            return bool(system.stream(5, "elsewhere").result())
        except AssertionError:
            return False

    system.until("an answer", answers)
    with pytest.raises(OSError, match="No space left"):
        fill(state / "filler")

    text = settings.read_text()
    settings.write_text(text + "".join(f"# {n} {'x' * 100}\n" for n in range(5000)))
    system.run.server.send_signal(signal.SIGHUP)
    system.until("the refusal", lambda: "the disk is full" in system.run.log_tail("server", 50))
    refused = llmgw(*ctl, "keys", "create", "--owner", "x" * 100)
    for _ in range(40):  # until what the log of the database has left is used up
        if refused.returncode:
            break
        refused = llmgw(*ctl, "keys", "create", "--owner", "x" * 100)
    assert refused.returncode != 0
    assert "the disk is full" in refused.stderr
    assert "free some space" in refused.stderr
    made = len(json.loads(llmgw(*ctl, "keys", "list", "--json").stdout)["keys"])
    assert answers()

    (state / "filler").unlink()
    done = llmgw(*ctl, "keys", "create", "--owner", "ada")
    assert done.returncode == 0, done.stderr
    system.run.server.send_signal(signal.SIGHUP)
    system.until("the settings to be taken", lambda: system.run.api("status")["settings_revision"] == 2)
    assert len(json.loads(llmgw(*ctl, "keys", "list", "--json").stdout)["keys"]) == made + 1
    assert "intact" in llmgw(*ctl, "audit", "verify").stdout
    assert answers()
