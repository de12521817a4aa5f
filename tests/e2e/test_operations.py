"""What operators do to nodes and replicas, around a system that serves: no request notices."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest

from tests.e2e.conftest import System
from tests.e2e.test_operators import llmgw

pytestmark = pytest.mark.e2e


@contextmanager
def load(system: System) -> Iterator[list[str]]:
    """Requests one after the other for as long as the block lasts; yields what failed."""
    failed: list[str] = []
    api = system.client()
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            try:
                answer = api.chat.completions.create(
                    model="demo-small", messages=[{"role": "user", "content": "Hello"}], max_tokens=3, timeout=20
                )
                if not answer.choices[0].message.content:
                    failed.append("an empty answer")
            except openai.APIError as wrong:
                failed.append(str(wrong))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield failed
    finally:
        over.set()
        for thread in threads:
            thread.join(30)
        api.close()


def small(system: System) -> dict[str, int]:
    return {r["id"]: r["pid"] for r in system.run.replicas() if r["model"] == "demo-small" and r["state"] == "ready"}


@pytest.mark.long
def test_a_replica_is_started_anew_and_no_request_fails(system: System) -> None:
    ctl = ("ctl", "--config", str(system.demo.server_yaml))
    (name,) = before = small(system)
    with load(system) as failed:
        done = llmgw(*ctl, "replica", "restart", name, "--reason", "new driver")
        assert done.returncode == 0, done.stderr
        system.until("another one to serve", lambda: (now := small(system)) and not set(now) & set(before), 40)
        system.until("the old one to be gone", lambda: len(system.run.replicas()) == 2, 40)
    assert failed == []
    assert "new driver" in llmgw(*ctl, "why", name).stdout
    rows = json.loads(llmgw(*ctl, "audit", "--json").stdout)["rows"]
    (row,) = (r for r in rows if r["action"] == "replica.restart")
    assert (row["object"], row["reason"]) == (name, "new driver")
    assert llmgw(*ctl, "replica", "restart", "nobody-1").returncode == 2
    (other,) = small(system)
    with load(system) as failed:
        assert llmgw(*ctl, "replica", "stop", other).returncode == 0
        system.until("its successor", lambda: (now := small(system)) and other not in now, 40)
    assert "no-such" not in "".join(failed)


@pytest.mark.long
def test_a_node_that_cannot_be_emptied_serves_on_and_says_why(system: System) -> None:
    ctl = ("ctl", "--config", str(system.demo.server_yaml))
    pids = system.pids()
    with load(system) as failed:
        assert llmgw(*ctl, "plan", "--drain", "demo-node").returncode == 1
        done = llmgw(*ctl, "node", "drain", "demo-node", "--reason", "new disk")
        assert done.returncode == 0, done.stderr
        assert "demo-small" in done.stdout
        told = llmgw(*ctl, "nodes").stdout
        assert "drained" in told
        assert "new disk" in told
        # It holds over a restart of the control plane.
        assert system.run.server is not None
        system.run.server.kill()
        system.run.server.wait()
        system.run.start_server()
        system.until("the drain", lambda: "drained" in llmgw(*ctl, "nodes").stdout)
        assert llmgw(*ctl, "node", "undrain", "demo-node").returncode == 0
        system.until("its end", lambda: "drained" not in llmgw(*ctl, "nodes").stdout)
    assert failed == []
    assert system.pids() == pids


@pytest.mark.long
def test_a_log_is_read_and_followed(system: System) -> None:
    ctl = ("ctl", "--config", str(system.demo.server_yaml))
    (name,) = small(system)
    last = llmgw(*ctl, "replica", "logs", name, "-n", "3")
    assert last.returncode == 0, last.stderr
    assert 1 <= len(last.stdout.splitlines()) <= 3
    assert llmgw(*ctl, "replica", "logs", "nobody-1").returncode == 2
    assert llmgw(*ctl, "replica", "logs", name, "--rank", "7").returncode == 2
    follower = subprocess.Popen(
        [sys.executable, "-m", "llmgw", *ctl, "replica", "logs", name, "-f", "-n", "1", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert follower.stdout is not None
    assert follower.stderr is not None
    try:
        # It reads from here on, as its first line says: what the engine writes now comes, and its end is said.
        assert json.loads(follower.stdout.readline())["lines"]
        assert llmgw(*ctl, "replica", "stop", name).returncode == 0
        said = [json.loads(line) for line in follower.stdout.read().splitlines()]
    finally:
        follower.kill()
        follower.wait(10)
        follower.stderr.close()
        follower.stdout.close()
    assert any("end" in line for line in said), said
    assert [text for line in said for text in line.get("lines", ())], said
