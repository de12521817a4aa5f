"""The machine that this very process runs on, read for the checks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import trio
from attrs import evolve

from llmgw import __version__
from llmgw.discovery.capture import CapturedMachine, is_capture
from llmgw.discovery.machine import LiveMachine, Machine
from llmgw.doctor.collect import collect
from llmgw.doctor.document import Document
from llmgw.doctor.gather import Asker
from llmgw.settings.daemon import AgentConfig, Discovery

TIMEOUT_S = 8.0
"""The longest that one program is waited for: the whole ends within 20 s."""

_DIAL_S = 3.0


def hurried(discovery: Discovery) -> Discovery:
    """The same, with programs that hang left behind in time."""
    return evolve(discovery, timeout_s=min(TIMEOUT_S, discovery.timeout_s))


async def dial(host: str, port: int) -> str:
    """Why an address cannot be reached; empty when it can."""
    with trio.move_on_after(_DIAL_S):
        try:
            stream = await trio.open_tcp_stream(host, port)
        except OSError as failed:
            return failed.strerror or str(failed)
        await trio.aclose_forcefully(stream)
        return ""
    return f"no answer within {_DIAL_S:g} s"


async def read_node(config: AgentConfig, environment: Mapping[str, str]) -> Document:
    """Everything of the machine of an agent with this configuration, a fake one's too."""
    discovery = hurried(config.discovery)
    machine: Machine = LiveMachine(discovery)
    rules = config.fabrics
    if is_capture(machine.root):
        machine = captured = CapturedMachine(machine.root)
        rules = captured.rules
    live = discovery.root == "/"
    asker = Asker(
        machine, discovery, config, rules, environment if live else {}, dial if live else None, agent_root=Path("/")
    )
    return Document(__version__, False, await collect(asker))
