"""Reading the files that operators write, with errors that name them."""

from __future__ import annotations

import os
from pathlib import Path

from llmgw.agent.kept import KeptFile
from llmgw.settings.daemon import AgentConfig, ServerConfig
from llmgw.settings.load import load_server
from llmgw.settings.load_agent import load_agent
from llmgw.store.files import read_text


def server_config(path: Path) -> ServerConfig:
    """Read ``server.yaml``."""
    return load_server(read_text(path), str(path), str(path.resolve().parent))


def agent_in_force(path: Path) -> AgentConfig:
    """``agent.yaml`` beside the settings that its agent keeps: what one that is started now would run on.

    It is the file alone for whoever may not look into the agent's state folder.
    """
    from llmgw.agent.own_file import OwnFile
    from llmgw.agent.plan import first_plans

    config = agent_config(path)
    state_dir = Path(config.state_dir)
    if not os.access(state_dir, os.R_OK | os.X_OK):
        return config
    plans, _ = first_plans(OwnFile(path).read(), KeptFile(state_dir).read())
    return plans[0].config


def agent_config(path: Path) -> AgentConfig:
    """Read ``agent.yaml`` alone."""
    return load_agent(read_text(path), str(path), str(path.resolve().parent))
