"""Reading the files that operators write, with errors that name them."""

from __future__ import annotations

import os
from pathlib import Path

from llmgw.agent.kept import KeptFile
from llmgw.errors import OperatorError
from llmgw.settings.agent_part import beside
from llmgw.settings.daemon import AgentConfig, ServerConfig
from llmgw.settings.load import load_server
from llmgw.settings.load_agent import load_agent
from llmgw.settings.yaml import read
from llmgw.store.files import read_text


def server_config(path: Path) -> ServerConfig:
    """Read ``server.yaml``."""
    return load_server(read_text(path), str(path), str(path.resolve().parent))


def agent_in_force(path: Path) -> AgentConfig:
    """What an agent with this ``agent.yaml`` runs on: the file, and the settings that it took over."""
    config = agent_config(path)
    state_dir = Path(config.state_dir)
    if not os.access(state_dir, os.R_OK | os.X_OK):
        return config
    kept = KeptFile(state_dir).read()
    try:
        return beside(read(read_text(path), str(path)), str(path.resolve().parent), kept.used)
    except OperatorError:
        return config  # the agent would not use them either


def agent_config(path: Path) -> AgentConfig:
    """Read ``agent.yaml`` alone."""
    return load_agent(read_text(path), str(path), str(path.resolve().parent))
