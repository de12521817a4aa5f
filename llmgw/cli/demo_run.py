"""The demo's processes: a server and an agent as they run anywhere, watched through the admin API."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import define, field

from llmgw.cli.admin_client import AdminClient
from llmgw.cli.demo_files import Demo
from llmgw.errors import LlmgwError, OperatorError, PeerError
from llmgw.web.auth import TOKEN_FILE, read_token

_POLL_S = 0.1
_STOP_S = 1.9
_ENGINE_GRACE_S = 0.4

Say = Callable[[str, str], None]


@define
class DemoRun:
    """A running demo. ``say(subject, text)`` prints one line of what happens."""

    demo: Demo
    say: Say
    server: subprocess.Popen[bytes] | None = None
    agent: subprocess.Popen[bytes] | None = None
    _shown: dict[str, str] = field(factory=dict)

    def start_server(self) -> None:
        """Start ``llmgw server`` and wait until its admin API answers."""
        self.server = self._spawn("server", self.demo.server_yaml)
        self.say("server", f"llmgw server started, pid {self.server.pid}")
        self.wait("the control plane to answer", 60.0, lambda: self.api("status") is not None)

    def start_agent(self) -> None:
        """Start ``llmgw agent``; the node appears in the API once it has registered."""
        self.agent = self._spawn("agent", self.demo.agent_yaml)
        self.say("agent", f"llmgw agent started, pid {self.agent.pid}")

    def _spawn(self, daemon: str, config: Path) -> subprocess.Popen[bytes]:
        with (self.demo.folder / f"{daemon}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "llmgw", daemon, "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def api(self, path: str) -> Any:
        """An answer of the admin API, or ``None`` while nothing answers."""
        try:
            token = read_token(self.demo.server_state / TOKEN_FILE)
            return AdminClient("127.0.0.1", self.demo.admin_port, token).get(path)
        except (PeerError, OperatorError):
            return None

    def replicas(self) -> list[dict[str, Any]]:
        """The replicas as the API shows them."""
        answer = self.api("replicas")
        return [] if answer is None else answer["replicas"]

    def node_state(self) -> str:
        """The state of the demo's one node; empty before it registered."""
        answer = self.api("nodes")
        return answer["nodes"][0]["state"] if answer and answer["nodes"] else ""

    def all_ready(self) -> bool:
        """Whether every replica of every model is ready."""
        answer = self.api("status")
        return answer is not None and all(m["ready"] == m["wanted"] for m in answer["models"])

    def follow(self) -> None:
        """Print every state that changed since the last call, with why and what happens next."""
        nodes = self.api("nodes")
        for node in nodes["nodes"] if nodes else ():
            self._change("node", node["id"], node, _devices(node) if node["state"] == "connected" else "")
        for replica in self.replicas():
            where = f"on {', '.join(replica['nodes'])} {', '.join(replica['devices'])}"
            self._change("replica", replica["id"], replica, where)
        models = self.api("models")
        for model in models["models"] if models else ():
            self._change("model", model["name"], model, "")

    def _change(self, subject: str, name: str, row: dict[str, Any], more: str) -> None:
        state = f"{row['state']}"
        if self._shown.get(f"{subject} {name}") == state:
            return
        self._shown[f"{subject} {name}"] = state
        text = f"{name} {state.upper()}: {row['reason']}"
        if more:
            text += f" ({more})"
        if row["next"]:
            text += f"; next: {row['next']}"
        self.say(subject, text)

    def wait(self, what: str, seconds: float, done: Callable[[], bool]) -> None:
        """Follow until ``done``. Raises when it takes too long or a daemon ends."""
        deadline = time.monotonic() + seconds
        while not done():
            self.follow()
            for name, process in (("server", self.server), ("agent", self.agent)):
                if process is not None and process.poll() is not None:
                    raise OperatorError(
                        f"llmgw {name}", f"ended with exit code {process.returncode}:\n{self.log_tail(name)}"
                    )
            if time.monotonic() > deadline:
                raise OperatorError(
                    "llmgw demo",
                    f"waited {seconds:.0f} s for {what}. Agent's last lines:\n{self.log_tail('agent')}",
                    f"see the logs in {self.demo.folder}",
                )
            time.sleep(_POLL_S)
        self.follow()

    def log_tail(self, daemon: str, lines: int = 12) -> str:
        """The end of a daemon's log."""
        try:
            text = (self.demo.folder / f"{daemon}.log").read_text(errors="replace")
        except OSError:
            return "(no log)"
        return "\n".join(text.splitlines()[-lines:])

    def kill_agent(self) -> None:
        """SIGKILL, as a crash or the kernel's OOM killer would."""
        assert self.agent is not None
        self.agent.kill()
        self.agent.wait()
        self.say("agent", f"killed with SIGKILL (pid {self.agent.pid})")
        self.agent = None

    def stop(self) -> float:
        """Stop daemons, router and engines; returns how long it took. Leaves no process."""
        from llmgw.agent.stop import stop_engines

        began = time.monotonic()
        for process in (self.agent, self.server):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
        if self.agent is not None:
            _end(self.agent, began + _STOP_S)
        if self.demo.agent_state.exists():
            try:
                stop_engines(self.demo.agent_state, grace_s=_ENGINE_GRACE_S)
            except LlmgwError as failed:
                self.say("engines", str(failed))
        if self.server is not None:
            _end(self.server, began + _STOP_S)
        for pid, line in survivors(self.demo.folder):
            self.say("process", f"killing what is left: {pid} {line[:80]}")
            os.kill(pid, signal.SIGKILL)
        return time.monotonic() - began


def _end(process: subprocess.Popen[bytes], deadline: float) -> None:
    try:
        process.wait(max(0.05, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _devices(node: dict[str, Any]) -> str:
    simulated = node["inventory"]["simulated"]
    kinds = ", ".join(sorted({d["device_class"] for d in node["devices"]}))
    real = f"{node['inventory']['cpus']} CPUs of {node['inventory']['hostname']}"
    fake = f"{len(node['devices'])} x {kinds}" + (f" of a FAKE machine: {simulated}" if simulated else "")
    return f"{fake}; real host: {real}"


def survivors(folder: Path) -> Iterator[tuple[int, str]]:
    """Processes whose command line names the demo's folder, but for this one and those that it descends from."""
    spared = _ancestors()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in spared:
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"{folder}/" in line and state != "Z":
            yield int(entry.name), line


def _ancestors() -> set[int]:
    found = {os.getpid()}
    pid = os.getpid()
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            break
        found.add(pid)
    return found


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM ends the demo just as Ctrl-C does."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
