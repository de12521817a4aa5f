"""A second node beside the demo's own: an agent with its own certificate and state, on the same machine and fabric."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from attrs import define

from llmgw.agent.stop import stop_engines
from llmgw.cli.demo_files import NODE, Demo
from llmgw.link import ca

SECOND = "second-node"
FABRIC = "fabrics:\n  rack-1:\n    link_layer: infiniband\n"


@define
class Second:
    """The second agent; it runs once it was started."""

    demo: Demo
    process: subprocess.Popen[bytes] | None = None

    @property
    def config(self) -> Path:
        return self.demo.folder / "second.yaml"

    @property
    def state(self) -> Path:
        return self.demo.folder / "second"

    def prepare(self, address: str = "127.0.0.1") -> None:
        """Write its files, and declare one fabric on both nodes."""
        ca.issue_node(self.demo.folder / "ca", SECOND, self.demo.folder / "certs" / SECOND, 7, time.time())
        first = self.demo.agent_yaml.read_text() + FABRIC
        self.demo.agent_yaml.write_text(first)
        (line,) = [line for line in first.splitlines() if line.startswith("ports:")]
        low = int(line.split()[1].split("-")[0])
        self.config.write_text(
            first.replace(NODE, SECOND)
            .replace(json.dumps(str(self.demo.agent_state)), json.dumps(str(self.state)))
            .replace("\naddress: 127.0.0.1\n", f"\naddress: {address}\n")
            .replace(line, f"ports: {low - 300}-{low - 100}")
        )

    def start(self) -> None:
        with (self.demo.folder / "second.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "llmgw", "agent", "--config", str(self.config)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        """SIGKILL to the agent; its engines go on."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        """End it and its engines."""
        self.kill()
        if self.state.exists():
            stop_engines(self.state, 0.2)
