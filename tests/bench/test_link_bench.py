"""A thousand agents: what they cost at rest, and how long all of them take to be back. ``pytest -m bench -s tests/bench``.

Real TLS over real sockets; the agents are in two processes of the lowest priority, as they would be on other machines.
The control plane and the router are the real daemons. Figures depend on what else the machine does: it is printed too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fakes.machines import MACHINES, render
from fakes.swarm import TRUST_DOMAIN
from llmgw.cli.demo_files import fakes_dir, free_ports
from llmgw.cli.demo_run import survivors
from llmgw.link import ca
from tests.bench.test_router_bench import cpu_s

pytestmark = pytest.mark.bench

AGENTS = int(os.environ.get("LLMGW_BENCH_AGENTS", "1000"))
SWARMS = 2
STEADY_S = 30.0


def rss_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    raise AssertionError(pid)


class Swarm:
    """One process of many agents, and what it said last."""

    def __init__(self, folder: Path, first: int, count: int, port: int) -> None:
        self.history: list[tuple[float, int]] = [(time.monotonic(), 0)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fakes.swarm", str(folder), str(first), str(count), str(port)],
            stdout=subprocess.PIPE,
            preexec_fn=lambda: os.nice(19),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                said = json.loads(line)
                self.history.append((said["at"], said["connected"]))

    @property
    def connected(self) -> int:
        return self.history[-1][1]


class Requests:
    """One request after the other to the router, in a process of the usual priority.

    ``waits`` are the processes that a request passes through besides: while one of them has its turn to come, it waits
    for a processor, and on two of them with all of the agents that is most of what a slow request takes. Times are in
    milliseconds.
    """

    def __init__(self, port: int, waits: Iterable[int]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CLIENT, str(port), *map(str, waits)],
            stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self.seen: list[tuple[float, float, float]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                at, took, waited = line.split()
                self.seen.append((float(at), float(took), float(waited)))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def between(self, begin: float, end: float) -> str:
        rows = [(ms, waited) for at, ms, waited in self.seen if begin <= at < end]
        if len(rows) < 20:
            return "too few requests"
        took, worked = sorted(ms for ms, _ in rows), sorted(max(0.0, ms - waited) for ms, waited in rows)
        half, last = len(rows) // 2, int(len(rows) * 0.99)
        return (
            f"n={len(rows)} p50 {took[half]:.2f} ms, p99 {took[last]:.2f} ms; "
            f"without waiting for a processor {worked[half]:.2f} and {worked[last]:.2f} ms"
        )


_CLIENT = """
import os, socket, sys, time
from tests.bench.test_router_bench import post
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
files = [os.open(f"/proc/{pid}/schedstat", os.O_RDONLY) for pid in (os.getpid(), *sys.argv[2:])]
def waited():
    return sum(int(os.pread(file, 100, 0).split()[1]) for file in files)
request = post({"max_tokens": 1})
while True:
    before, began = waited(), time.monotonic()
    s.sendall(request)
    data = b""
    while b'"usage"' not in data or not data.endswith(b"}}"):
        more = s.recv(65536)
        if not more:
            sys.exit(1)
        data += more
    took = time.monotonic() - began
    print(began, took * 1000, (waited() - before) / 1e6, flush=True)
    time.sleep(0.005)
"""


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[Path, int, int, int]]:
    """Certificates for all, a machine that they all have, and the control plane's files; ports of link and router, and
    the engine's pid."""
    now = time.time()
    ca.init(folder / "ca", TRUST_DOMAIN, now)
    ca.issue_server(folder / "ca", ("127.0.0.1",), folder / "server-certs", 1, now)
    for number in range(AGENTS):
        ca.issue_node(folder / "ca", f"node-{number}", folder / f"node-{number}", 1, now)
    render(MACHINES["hgx-h100"], folder / "machine")
    argv = ["agent", "--config", "/none", "inventory", "--root", str(folder / "machine"), "--run-programs", "--json"]
    said = subprocess.run([sys.executable, "-m", "llmgw", *argv], capture_output=True, check=True)
    (folder / "inventory.json").write_bytes(said.stdout)
    link, router, admin, engine = free_ports(4)
    certs = folder / "server-certs"
    (folder / "settings.yaml").write_text(
        f"models:\n  m:\n    endpoints: ['http://127.0.0.1:{engine}']\n"
        "  big:\n    replicas: 0\n    profiles:\n"
        "      - {name: p, engine: vllm, weights: /w, device_class: h100-80g}\n"
    )
    (folder / "server.yaml").write_text(
        f"state_dir: {folder / 'state'}\nsettings: {folder / 'settings.yaml'}\n"
        f"router: {{listen: '127.0.0.1:{router}'}}\nadmin: {{listen: '127.0.0.1:{admin}'}}\n"
        f"link:\n  listen: 127.0.0.1:{link}\n  trust_domain: {TRUST_DOMAIN}\n  connections_per_address: 5000\n"
        f"  tls: {{certificate: {certs / 'cert.pem'}, key: {certs / 'key.pem'}, ca: {certs / 'ca.pem'}}}\n"
        "log: {level: warning}\n"
    )
    engine_process = subprocess.Popen(
        [
            sys.executable,
            str(fakes_dir() / "engine.py"),
            "serve",
            "x",
            "--served-model-name",
            "m",
            "--port",
            str(engine),
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield folder / "server.yaml", link, router, engine_process.pid
    finally:
        engine_process.kill()
        engine_process.wait()
        for pid, _ in survivors(folder):
            os.kill(pid, signal.SIGKILL)


def server(config: Path) -> subprocess.Popen[bytes]:
    with config.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "llmgw", "server", "--config", str(config)], stdout=log, stderr=log
        )


def listening(port: int) -> float:
    import socket

    for _ in range(3000):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.01)
        else:
            return time.monotonic()
    raise AssertionError("the control plane does not start")


def until(swarms: list[Swarm], count: int, within_s: float) -> float:
    deadline = time.monotonic() + within_s
    while sum(s.connected for s in swarms) != count:
        assert time.monotonic() < deadline, [s.connected for s in swarms]
        time.sleep(0.02)
    return max(s.history[-1][0] for s in swarms)


def test_a_thousand_agents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{AGENTS} agents; load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"]
    with cluster(tmp_path) as (config, link, router, engine):
        process = server(config)
        began = listening(link)
        time.sleep(1)
        empty = rss_kib(process.pid)
        each = AGENTS // SWARMS
        swarms = [Swarm(tmp_path, n * each, each, link) for n in range(SWARMS)]
        workers = map(int, (tmp_path / "state" / "router.pid").read_text().split())
        requests = Requests(router, (*workers, engine))
        try:
            until(swarms, AGENTS, 120)
            time.sleep(10)
            cpu, memory, quiet_from = cpu_s(process.pid), rss_kib(process.pid), time.monotonic()
            time.sleep(STEADY_S)
            used = (cpu_s(process.pid) - cpu) / STEADY_S
            quiet_to = time.monotonic()
            rows.append(
                f"at rest: {used:.1%} of a core, {(memory - empty) / AGENTS:.0f} KiB an agent (empty {empty} KiB)"
            )
            rows.append(f"router, quiet: {requests.between(quiet_from, quiet_to)}")
            process.kill()
            process.wait()
            killed = time.monotonic()
            until(swarms, 0, 20)
            time.sleep(3)
            process = server(config)
            began = listening(link)
            done = until(swarms, AGENTS, 120)
            rows.append(f"all {AGENTS} welcomed {done - began:.2f} s after the control plane listens again")
            rows.append(f"router, without a control plane: {requests.between(killed, began)}")
            rows.append(f"router, while they come back: {requests.between(began, done)}")
            rows.append(f"load of the machine after: {os.getloadavg()[0]:.1f}")
        finally:
            for each_swarm in swarms:
                each_swarm.stop()
            requests.stop()
            process.kill()
            process.wait()
    with capsys.disabled():
        print("\n" + "\n".join(rows))
