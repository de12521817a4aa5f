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
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
from tests.e2e.second import Second

MODEL = "tiny"
READY_S = 240.0
"""A bound for one start on two busy cores, not a promise."""


def program(variable: str) -> str:
    """The engine that this variable names. Skips where it is not set; a wrong name is a failure."""
    named = os.environ.get(variable)
    if not named:
        pytest.skip(f"{variable} names no program")
    found = shutil.which(named)
    assert found is not None, f"{variable}={named}: there is no such program"
    return found


VLLM_ON_CPU = (
    "context_length: 4096, args: [--enforce-eager, --dtype, bfloat16, --max-num-seqs, '8'], "
    "env: {VLLM_CPU_KVCACHE_SPACE: '1', OMP_NUM_THREADS: '1', VLLM_CPU_OMP_THREADS_BIND: nobind, "
    "TORCH_COMPILE_DISABLE: '1'}"
)
"""Keys of a profile for vLLM's CPU build.

Without the last one the first request waits for a C++ compiler, in spite of ``--enforce-eager``; and left to itself
every engine binds itself to the same core.
"""


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
    second: Second | None = None
    sessions: set[int] = field(factory=set)
    offered: tuple[Any, ...] = ()

    @property
    def run(self) -> DemoRun:
        return self.system.run

    @property
    def second_node(self) -> Second:
        assert self.second is not None
        return self.second

    @property
    def states(self) -> list[Path]:
        """The state folders of the agents."""
        return [self.system.demo.agent_state, *([] if self.second is None else [self.second.state])]

    def configure(self, replicas: int = 1, drain_s: float = 2, profile: str | None = None) -> None:
        """Write the settings; a server that runs takes them in."""
        limits = f"limits: {{drain_s: {drain_s}, stop_s: 5}}"
        self.offered = (replicas, drain_s, profile)
        (self.system.demo.folder / "settings.yaml").write_text(
            f"models:\n  {MODEL}:\n    replicas: {replicas}\n    profiles:\n"
            f"      - {{name: cpu, device_class: h100-80g, {limits}, {profile or self.profile}}}\n"
            "liveness: {heartbeat_s: 1, unreachable_s: 3, lost_s: 8}\n"
        )
        if self.run.server is not None:
            self.run.server.send_signal(signal.SIGHUP)

    def begin(self, drain_s: float = 2, profile: str | None = None) -> None:
        """Ask for one replica where there is none; the daemons are started if they do not run."""
        if self.run.server is not None and self.run.replicas():
            self.stopped_within(30)
        self.configure(1, drain_s, profile)
        if self.run.server is None:
            self.run.start_server()
        if self.run.agent is None:
            self.run.start_agent()
        if self.second is not None and self.second.process is None:
            self.second.start()

    def start(self, drain_s: float = 2) -> list[dict[str, Any]]:
        """Start the model; what the API showed of the replica until it was ready."""
        self.begin(drain_s)
        seen: list[dict[str, Any]] = []

        def ready() -> bool:
            row = self.replica
            if row and (not seen or (row["state"], row["reason"]) != (seen[-1]["state"], seen[-1]["reason"])):
                seen.append(row)
                assert row["generation"] == 1, row["reason"]
            return row.get("state") == "ready"

        self.until("the replica to be ready", ready, READY_S)
        return seen

    def serving(self, drain_s: float = 2) -> dict[str, Any]:
        """The row of a ready replica: the one that is there, if it is as wanted, else a new one."""
        if self.offered != (1, drain_s, None) or self.replica.get("state") != "ready":
            self.start(drain_s)
        return self.replica

    @property
    def replica(self) -> dict[str, Any]:
        """The first replica's row; empty while there is none."""
        rows = self.run.replicas()
        self.sessions |= {shard["pid"] for row in rows for shard in row["shards"] if shard["pid"]}
        return rows[0] if rows else {}

    def ready_again(self, generation: int) -> dict[str, Any]:
        """Wait until this start of the replica is ready."""
        self.until(
            f"generation {generation} to be ready",
            lambda: self.replica.get("generation") == generation and self.replica["state"] == "ready",
            READY_S,
        )
        return self.replica

    def until(self, what: str, done: Callable[[], Any], seconds: float = 60.0) -> float:
        """Wait; how long it took."""
        began = time.monotonic()
        try:
            self.system.until(what, done, seconds)
        except AssertionError as late:
            raise AssertionError(f"{late}\n---\n{self.engine_logs()}") from None
        return time.monotonic() - began

    def engine_logs(self) -> str:
        """The end of what each engine said that is not forgotten."""
        logs = [path for state in self.states for path in sorted(state.glob("shards/*/engine.log"))]
        return "\n".join(f"{path}\n{path.read_text(errors='replace')[-3000:]}" for path in logs)

    def decisions(self, kind: str, replica: str) -> list[str]:
        """The reasons of every decision of this kind about a replica, newest first."""
        answer = self.run.api("decisions")
        found = answer["decisions"] if answer else []
        return [d["reason"] for d in found if d["kind"] == kind and d["replica"] == replica]

    def stream(self, tokens: int) -> Stream:
        return self.system.stream(tokens, MODEL)

    def chat(self, tokens: int) -> Any:
        with self.system.client() as client:
            return client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Say something."}], max_tokens=tokens, timeout=30
            )

    def ask_engine(self, path: str, *, with_key: bool) -> tuple[int, str]:
        """Status and body of rank 0's own answer, past the router."""
        (record,) = (r for state in self.states for r in state.glob("shards/*.0-*/record.json"))
        asked_of = json.loads(record.read_text())
        key = {"Authorization": f"Bearer {asked_of['api_key']}"} if with_key else {}
        asked = urllib.request.Request(f"http://{asked_of['host']}:{asked_of['port']}{path}", headers=key)
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
        # So long that no machine is through with it before it was looked at.
        stream = self.stream(4000)
        self.until("the metrics to show it", lambda: self.work().running == 1)
        before = self.work().work
        self.until("the metrics to move", lambda: self.work().work > before)
        assert before >= idle.work > 0
        stream.hang_up()
        self.until("the engine to stop generating for nobody", lambda: self.work().running == 0, 5)
        assert len(self.stream(150).result().split()) > 50

    def left(self) -> dict[int, str]:
        """Processes of any engine that was ever seen here."""
        return {pid: line for session in self.sessions for pid, line in members(session).items()}

    def stopped_within(self, seconds: float) -> float:
        """Ask for no replica; how long until no process and no row of it is left."""
        self.configure(0)
        took = self.until("every process of the engine to be gone", lambda: not self.left(), seconds)
        self.until("the replica to be forgotten", lambda: not self.run.replicas(), 10)
        self.sessions.clear()
        return took


def cut(stream: Stream) -> str:
    """How a client was told of a stream that ended in its middle: nothing looks complete.

    vLLM that is stopped may have the time to say itself that it breaks it off.
    """
    assert stream.thread is not None
    stream.thread.join(90)
    assert not stream.thread.is_alive(), "the stream never ended"
    if stream.finish == "abort":
        return stream.finish
    assert stream.finish is None, f"looks complete: {stream.finish}"
    assert isinstance(stream.failure, openai.APIError), repr(stream.failure)
    return repr(stream.failure)


@contextmanager
def real(folder: Path, engine: Engine, profile: str, *, second_at: str = "") -> Iterator[Real]:
    """A system in ``folder``, nothing started; whatever the test starts is stopped, and nothing may be left.

    With ``second_at`` it has a second node of this address.
    """
    lines: list[str] = []
    demo = prepare(folder, engine, None)
    second = Second(demo) if second_at else None
    if second is not None:
        second.prepare(second_at)
    system = System(demo, DemoRun(demo, lambda subject, text: lines.append(f"{subject} {text}")), lines)
    kind = EngineKind.VLLM if engine.kind is DemoEngine.VLLM else EngineKind.LLAMACPP
    made = Real(system, kind, f"engine: {kind.value}, {profile}", second)
    try:
        yield made
    finally:
        if second is not None:
            second.stop()
        made.run.stop()
        left = made.left()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left
        assert not list(survivors(demo.folder))


class Keeper:
    """Lends one system to test after test: most of what they take is an engine's start. Never one that saw a failure.

    A test asks for what it needs (:meth:`Real.serving`, :meth:`Real.start`), so that each also runs alone.
    """

    def __init__(self, make: Callable[[Path], AbstractContextManager[Real]], folders: pytest.TempPathFactory) -> None:
        self._make = make
        self._folders = folders
        self._stack = ExitStack()
        self._made: Real | None = None

    @contextmanager
    def lend(self, session: pytest.Session) -> Iterator[Real]:
        """For one test."""
        if self._made is None:
            self._made = self._stack.enter_context(self._make(self._folders.mktemp("system") / "d"))
        failed = session.testsfailed
        yield self._made
        if session.testsfailed != failed:
            self.close()

    def close(self) -> None:
        """Stop what was lent."""
        self._made = None
        self._stack.close()
