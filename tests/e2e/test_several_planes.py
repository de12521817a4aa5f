"""Two and three control planes on one PostgreSQL: one leads, all route, and neither engines nor traffic notice which."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from attrs import define, field

from llmgw.cli.admin_client import AdminClient
from llmgw.cli.demo_files import free_ports
from llmgw.cli.demo_run import survivors
from llmgw.errors import OperatorError, PeerError
from llmgw.web.auth import TOKEN_FILE, read_token
from tests.e2e.conftest import Stream, System
from tests.e2e.test_operators import llmgw
from tests.store.postgresql import Postgresql, running

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@define
class Plane:
    """One of the control planes."""

    folder: Path
    router: int
    admin: int
    link: int
    process: subprocess.Popen[bytes] | None = None
    log: Path = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.log = self.folder / "log"

    @property
    def yaml(self) -> Path:
        return self.folder / "server.yaml"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "llmgw", "server", "--config", str(self.yaml)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def status(self) -> dict[str, Any] | None:
        try:
            client = AdminClient("127.0.0.1", self.admin, read_token(self.folder / "state" / TOKEN_FILE))
            answer: dict[str, Any] = client.get("status", 1.0)
            return answer
        except (OperatorError, PeerError):
            return None

    @property
    def leads(self) -> bool:
        said = self.status()
        return said is not None and said["leads"]

    @property
    def follows(self) -> bool:
        said = self.status()
        return said is not None and not said["leads"]

    def ask(self) -> str:
        url = f"http://127.0.0.1:{self.router}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=5) as client:
            answer = client.chat.completions.create(
                model="demo-small", messages=[{"role": "user", "content": "Hello"}], max_tokens=4
            )
        return answer.choices[0].message.content or ""

    @property
    def routes(self) -> bool:
        try:
            return bool(self.ask())
        except openai.APIError:
            return False

    def stream(self, tokens: int) -> Stream:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.router}/v1", api_key="none", max_retries=0)
        return Stream(client, "demo-small", tokens).start()

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def end(self) -> float:
        assert self.process is not None
        began = time.monotonic()
        self.process.terminate()
        assert self.process.wait(10) == 0
        self.process = None
        return time.monotonic() - began


@pytest.fixture(scope="module")
def server() -> Iterator[Postgresql]:
    with running() as found:
        yield found


@pytest.fixture
def planes(prepared: System, server: Postgresql) -> Iterator[tuple[System, Plane, Plane]]:
    """Two control planes and a node with two replicas; the first one was there first."""
    with several(prepared, server, "one", "two") as (one, two):
        yield prepared, one, two


@contextmanager
def several(prepared: System, server: Postgresql, *names: str) -> Iterator[list[Plane]]:
    """Control planes of these names, of which the first leads, and a node whose every replica is ready."""
    demo = prepared.demo
    address = server.database()
    text = demo.server_yaml.read_text()
    made = []
    for name in names:
        folder = demo.folder / name
        folder.mkdir()
        router, admin, link = free_ports(3)
        mine = text
        for before, after in (
            (str(demo.server_state), str(folder / "state")),
            (f":{demo.router_port}", f":{router}"), (f":{demo.admin_port}", f":{admin}"),
            (f":{demo.link_port}", f":{link}"),
        ):  # fmt: skip
            mine = mine.replace(before, after)
        (folder / "server.yaml").write_text(f"{mine}\nstore: {json.dumps(address)}\n")
        made.append(Plane(folder, router, admin, link))
    agent = demo.agent_yaml.read_text()
    links = "\n".join(f"  - 127.0.0.1:{plane.link}" for plane in reversed(made))
    demo.agent_yaml.write_text(agent.replace(f"  - 127.0.0.1:{demo.link_port}", links))
    try:
        made[0].start()
        until(made, "the first to lead", lambda: made[0].leads, 60)
        for plane in made[1:]:
            plane.start()
            until(made, "another to follow", lambda plane=plane: plane.follows, 60)
        prepared.run.start_agent()
        until(made, "every replica", lambda: ready(made[0]), 40)
        yield made
    finally:
        if prepared.run.agent is not None:
            prepared.run.agent.terminate()
            prepared.run.agent.wait(5)
            prepared.run.agent = None
        llmgw("agent", "--config", str(demo.agent_yaml), "stop-engines", "--yes")
        for plane in made:
            if plane.process is not None:
                plane.signal(signal.SIGCONT)
                plane.process.terminate()
                try:
                    plane.process.wait(10)
                except subprocess.TimeoutExpired:
                    plane.kill()
        for pid, _ in survivors(demo.folder):
            os.kill(pid, signal.SIGKILL)


def ready(plane: Plane) -> bool:
    said = plane.status()
    return said is not None and bool(said["models"]) and all(m["ready"] == m["wanted"] for m in said["models"])


def until(planes: list[Plane], what: str, done: Any, seconds: float = 20.0) -> float:
    began = time.monotonic()
    while not done():
        if time.monotonic() - began > seconds:
            logs = "\n---\n".join(p.log.read_text(errors="replace")[-3000:] if p.log.exists() else "" for p in planes)
            raise AssertionError(f"waited {seconds} s for {what}\n{logs}")
        time.sleep(0.05)
    return time.monotonic() - began


def pids(plane: Plane) -> dict[str, int]:
    client = AdminClient("127.0.0.1", plane.admin, read_token(plane.folder / "state" / TOKEN_FILE))
    return {r["id"]: r["pid"] for r in client.get("replicas")["replicas"]}


def test_both_route_one_leads_and_the_other_takes_over(planes: tuple[System, Plane, Plane]) -> None:
    _, one, two = planes
    both = [one, two]
    until(both, "both to route", lambda: ready(two) and one.routes and two.routes)
    before = pids(one)
    assert all(before.values())

    # Writes are answered with the leader; readings are not.
    said = two.status()
    assert said is not None
    assert said["leader"] == f"127.0.0.1:{one.admin}"
    refused = llmgw("ctl", "--config", str(two.yaml), "keys", "create", "--name", "k")
    assert refused.returncode == 2
    assert f"127.0.0.1:{one.admin}, which does, does not know who asks" in refused.stderr
    # A token that all of them know gets there by itself.
    made = llmgw("ctl", "--config", str(one.yaml), "admin-token", "create", "ada", "--role", "operator", "--json")
    token = two.folder / "ada.token"
    token.touch(0o600)
    token.write_text(json.loads(made.stdout)["token"])
    followed = llmgw("ctl", "--admin", f"http://127.0.0.1:{two.admin}", "--token-file", str(token),
                     "keys", "create", "--name", "k")  # fmt: skip
    assert followed.returncode == 0, followed.stderr
    assert "demo-node" in llmgw("ctl", "--config", str(two.yaml), "nodes").stdout

    # A stop hands over at once; streams through either router go on where they can.
    whole = two.stream(150).result()
    stream = two.stream(150)
    one.end()
    took = until([two], "the second to lead", lambda: two.leads)
    assert took < 10, "the lease was released"
    assert stream.result() == whole
    until([two], "the agent to be back", lambda: ready(two))
    assert pids(two) == before, "no engine noticed"

    # What is killed lets go when its lease runs out.
    one.start()
    until(both, "the first to follow, and to route", lambda: one.follows and one.routes)
    stream = one.stream(900)
    two.kill()
    until([one], "the first to lead", lambda: one.leads, 25)
    until([one], "the agent to be back", lambda: ready(one), 30)
    assert stream.result()
    assert pids(one) == before


def test_a_leader_that_was_stopped_writes_and_commands_nothing_any_more(planes: tuple[System, Plane, Plane]) -> None:
    _, one, two = planes
    both = [one, two]
    before = pids(one)
    one.signal(signal.SIGSTOP)
    until([two], "the second to lead", lambda: two.leads, 25)
    until([two], "the agent to be back", lambda: ready(two), 40)
    epoch = (two.status() or {})["epoch"]
    one.signal(signal.SIGCONT)
    until(both, "the first to follow", lambda: one.follows, 30)
    assert two.leads
    assert (two.status() or {})["epoch"] == epoch
    assert pids(two) == before
    until(both, "both to route", lambda: ready(two) and one.routes and two.routes)


def test_the_last_of_three_leads_and_what_waited_for_the_first_changes_nothing(
    prepared: System, server: Postgresql
) -> None:
    with several(prepared, server, "one", "two", "three") as made:
        one, two, three = made
        before = pids(one)
        epoch = (one.status() or {})["epoch"]
        two.kill()
        one.signal(signal.SIGSTOP)
        # They wait in its sockets; what it does with them when it goes on is of a term that is over.
        name, *_ = before
        waiting = [ask(one, path, body) for path, body in (
            ("keys", {"name": "stale"}), (f"replicas/{name}/restart", {"reason": "stale"}),
            ("nodes/demo-node/drain", {"force": True, "reason": "stale"}),
        )]  # fmt: skip
        took = until(made, "the third to lead", lambda: three.leads, 25)
        now = (three.status() or {})["epoch"]
        assert now > epoch, took
        kept = prepared.demo.agent_state / "epoch"
        until(made, "the agent to be back", lambda: kept.read_text() == f"{now}\n" and ready(three), 60)

        one.signal(signal.SIGCONT)
        for asked in waiting:
            with suppress(OSError, http.client.HTTPException):  # its part is over: it begins anew
                assert asked.getresponse().status in (421, 503)
            asked.close()
        until(made, "the first to follow", lambda: one.follows, 30)
        two.start()
        until(made, "the second to follow, and all to route", lambda: two.follows and all(p.routes for p in made), 60)
        assert three.leads
        assert (three.status() or {})["epoch"] == now
        assert pids(three) == before
        assert kept.read_text() == f"{now}\n"
        token = read_token(three.folder / "state" / TOKEN_FILE)
        client = AdminClient("127.0.0.1", three.admin, token)
        assert client.get("keys")["keys"] == []
        assert client.get("audit/verify")["intact"]
        assert not [row for row in client.get("audit")["rows"] if row["reason"] == "stale"]


def ask(plane: Plane, path: str, body: Any) -> http.client.HTTPConnection:
    """A change that was sent, and whose answer is still to be read."""
    token = read_token(plane.folder / "state" / TOKEN_FILE)
    connection = http.client.HTTPConnection("127.0.0.1", plane.admin, timeout=20)
    connection.request("POST", f"/api/v1/{path}", json.dumps(body), {"authorization": f"Bearer {token}"})
    return connection


def test_the_database_goes_away_and_comes_back(planes: tuple[System, Plane, Plane], server: Postgresql) -> None:
    _, one, two = planes
    both = [one, two]
    until(both, "both to route", lambda: one.routes and two.routes)
    before = pids(one)
    server.stop()
    for plane in both:
        assert plane.ask(), "inference goes on"
    time.sleep(1)
    server.start()
    until(both, "one to lead", lambda: one.leads != two.leads and (one.follows or two.follows), 40)
    leader = one if one.leads else two
    until(both, "the agent", lambda: ready(leader), 40)
    assert pids(leader) == before
    connection = http.client.HTTPConnection("127.0.0.1", leader.admin, timeout=5)
    connection.request("GET", "/readyz")
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.soak
def test_leaders_that_hang_follow_one_another_fifty_times(planes: tuple[System, Plane, Plane]) -> None:
    _, one, two = planes
    both = [one, two]
    before = pids(one)
    epoch = 1
    for _ in range(50):
        leader, other = (one, two) if one.leads else (two, one)
        leader.signal(signal.SIGSTOP)
        until([other], "the other to lead", lambda other=other: other.leads, 25)
        time.sleep(45 - 15)  # three leases in all
        leader.signal(signal.SIGCONT)
        until(both, "it to follow", lambda leader=leader: leader.follows, 30)
        until(both, "the agent", lambda other=other: ready(other), 30)
        now = (other.status() or {})["epoch"]
        assert now > epoch
        epoch = now
        assert pids(other) == before
        assert one.routes
        assert two.routes


@pytest.mark.soak
def test_the_database_is_away_for_longer_than_a_lease(planes: tuple[System, Plane, Plane], server: Postgresql) -> None:
    _, one, two = planes
    both = [one, two]
    until(both, "both to route", lambda: one.routes and two.routes)
    before = pids(one)
    server.stop()
    for _ in range(20):
        time.sleep(1)
        assert one.routes
        assert two.routes
    server.start()
    until(both, "one to lead", lambda: one.leads != two.leads and (one.follows or two.follows), 60)
    leader = one if one.leads else two
    until(both, "the agent", lambda: ready(leader), 60)
    assert pids(leader) == before
