"""One model on one real engine: its settings, its processes, and what is waited for.

The node's GPUs are the demo's fake machine's; the engine is a CPU build and takes no notice of them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from attrs import define, field

from llmgw.cli.demo_files import DemoEngine, Engine, prepare
from llmgw.cli.demo_run import DemoRun, survivors
from llmgw.engines.activity import Activity, activity
from llmgw.settings.catalog import EngineKind
from tests.e2e.conftest import Stream, System

MODEL = "tiny"
READY_S = 150.0
"""A bound for one start on two busy cores, not a promise."""


def program(variable: str) -> str:
    """The engine that this variable names. Skips where it is not set; a wrong name is a failure."""
    named = os.environ.get(variable)
    if not named:
        pytest.skip(f"{variable} names no program")
    found = shutil.which(named)
    assert found is not None, f"{variable}={named}: there is no such program"
    return found


LAYERS = 64
"""So deep is the model that an answer of some hundred tokens takes seconds."""


def members(session: int) -> dict[int, str]:
    """The living processes of a session, by pid, as they call themselves."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] not in "ZX":
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue
    return found


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Where these processes accept TCP connections: addresses as the kernel writes them, and ports."""
    sockets = set()
    for pid in pids:
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(handle))
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                address, _, port = fields[1].partition(":")
                found.add((address, int(port, 16)))
    return found


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """The named shared memory that these processes have mapped."""
    found = set()
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/dev/shm/" in line and not line.endswith("(deleted)"):
                found.add(Path(line.split(maxsplit=5)[5]))
    return found


@define
class Real:
    """A system that offers one model. ``profile`` is its one profile's keys as YAML, without name and limits."""

    system: System
    kind: EngineKind
    profile: str
    sessions: set[int] = field(factory=set)

    @property
    def run(self) -> DemoRun:
        return self.system.run

    def configure(self, replicas: int = 1, more: str = "", drain_s: float = 2, stop_s: float = 5) -> None:
        """Write the settings; a server that runs takes them in."""
        limits = f"limits: {{drain_s: {drain_s}, stop_s: {stop_s}}}"
        (self.system.demo.folder / "settings.yaml").write_text(
            f"models:\n  {MODEL}:\n    replicas: {replicas}\n    profiles:\n"
            f"      - {{name: cpu, device_class: h100-80g, {limits}, {self.profile}{more}}}\n"
            "liveness: {heartbeat_s: 1, unreachable_s: 3, lost_s: 8}\n"
        )
        if self.run.server is not None:
            self.run.server.send_signal(signal.SIGHUP)

    def start(self) -> list[dict[str, Any]]:
        """Start both daemons and the model; what the API showed of the replica until it was ready."""
        self.run.start_server()
        self.run.start_agent()
        seen: list[dict[str, Any]] = []

        def ready() -> bool:
            row = self.replica
            if row and (not seen or (row["state"], row["reason"]) != (seen[-1]["state"], seen[-1]["reason"])):
                seen.append(row)
            return row.get("state") == "ready"

        self.until("the replica to be ready", ready, READY_S)
        return seen

    @property
    def replica(self) -> dict[str, Any]:
        """The first replica's row; empty while there is none."""
        rows = self.run.replicas()
        if rows and rows[0]["pid"]:
            self.sessions.add(rows[0]["pid"])
        return rows[0] if rows else {}

    def ready_again(self, generation: int) -> dict[str, Any]:
        """Wait until this start of the replica is ready."""
        self.until(
            f"generation {generation} to be ready",
            lambda: self.replica.get("generation") == generation and self.replica["state"] == "ready",
            READY_S,
        )
        return self.replica

    def until(self, what: str, done: Callable[[], Any], seconds: float = 20.0) -> float:
        """Wait; how long it took."""
        began = time.monotonic()
        try:
            self.system.until(what, done, seconds)
        except AssertionError as late:
            raise AssertionError(f"{late}\n---\n{self.engine_log()[-3000:]}") from None
        return time.monotonic() - began

    def engine_log(self) -> str:
        """What the engine said, of every start that is not forgotten."""
        folders = sorted(self.system.demo.agent_state.glob("shards/*/engine.log"))
        return "\n".join(f"{path}\n{path.read_text(errors='replace')}" for path in folders)

    def decisions(self, kind: str) -> list[str]:
        """The reasons of every decision of this kind, newest first."""
        answer = self.run.api("decisions")
        return [d["reason"] for d in answer["decisions"] if d["kind"] == kind] if answer else []

    def stream(self, tokens: int) -> Stream:
        return self.system.stream(tokens, MODEL)

    def chat(self, tokens: int) -> Any:
        return self.system.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Say something."}], max_tokens=tokens, timeout=30
        )

    def ask_engine(self, path: str, *, with_key: bool) -> tuple[int, str]:
        """Status and body of the engine's own answer, past the router."""
        (record,) = self.system.demo.agent_state.glob("shards/*/record.json")
        key = {"Authorization": f"Bearer {json.loads(record.read_text())['api_key']}"} if with_key else {}
        asked = urllib.request.Request(f"{self.replica['endpoint']}{path}", headers=key)
        try:
            with urllib.request.urlopen(asked, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.read().decode()

    def work(self) -> Activity:
        """What the engine's own metrics say of it, read as the agent reads them."""
        found = activity(self.kind, self.ask_engine("/metrics", with_key=True)[1])
        assert found is not None
        return found

    def is_sound(self) -> None:
        """What holds for any engine that is ready: key, addresses, answers, and metrics that move with a stream."""
        assert self.ask_engine("/v1/models", with_key=False)[0] == 401
        assert self.ask_engine("/v1/models", with_key=True)[0] == 200
        port = int(self.replica["endpoint"].rpartition(":")[2])
        where = listening(members(self.replica["pid"]))
        assert ("0100007F", port) in where
        assert {address for address, _ in where} == {"0100007F"}, "on loopback, as agent.yaml says"

        answer = self.chat(12)
        assert answer.model == MODEL
        assert answer.usage.completion_tokens == 12
        assert answer.choices[0].finish_reason == "length"
        idle = self.work()
        assert idle.running == 0
        stream = self.stream(150)
        self.until("the metrics to show it", lambda: self.work().running == 1)
        before = self.work().work
        self.until("the metrics to move", lambda: self.work().work > before)
        assert before >= idle.work > 0
        assert len(stream.result().split()) > 50

    def left(self) -> dict[int, str]:
        """Processes of any engine that was ever seen here."""
        return {pid: line for session in self.sessions for pid, line in members(session).items()}

    def stopped_within(self, seconds: float) -> float:
        """Ask for no replica; how long until no process and no row of it is left."""
        self.configure(0)
        took = self.until("every process of the engine to be gone", lambda: not self.left(), seconds)
        self.until("the replica to be forgotten", lambda: not self.run.replicas(), 5)
        return took


def cut(stream: Stream) -> BaseException:
    """A stream that ended in its middle: the client was told so, and nothing looks complete."""
    assert stream.thread is not None
    stream.thread.join(40)
    assert not stream.thread.is_alive(), "the stream never ended"
    assert stream.finish is None, f"looks complete: {stream.finish}"
    assert isinstance(stream.failure, openai.APIError), repr(stream.failure)
    return stream.failure


@contextmanager
def real(folder: Path, engine: Engine, profile: str) -> Iterator[Real]:
    """A system in ``folder``, nothing started; whatever the test starts is stopped, and nothing may be left."""
    lines: list[str] = []
    demo = prepare(folder, engine, None)
    system = System(demo, DemoRun(demo, lambda subject, text: lines.append(f"{subject} {text}")), lines)
    kind = EngineKind.VLLM if engine.kind is DemoEngine.VLLM else EngineKind.LLAMACPP
    made = Real(system, kind, f"engine: {kind.value}, {profile}")
    made.configure()
    try:
        yield made
    finally:
        made.run.stop()
        left = made.left()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left
        assert not list(survivors(demo.folder))
