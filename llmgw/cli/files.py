"""Reading the files that operators write, with errors that name them."""

from __future__ import annotations

from pathlib import Path

from llmgw.settings.daemon import AgentConfig, ServerConfig
from llmgw.settings.load import load_server
from llmgw.settings.load_agent import load_agent
from llmgw.store.files import read_text


def server_config(path: Path) -> ServerConfig:
    """Read ``server.yaml``."""
    return load_server(read_text(path), str(path), str(path.resolve().parent))


def agent_config(path: Path) -> AgentConfig:
    """Read ``agent.yaml``."""
    return load_agent(read_text(path), str(path), str(path.resolve().parent))
