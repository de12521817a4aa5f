"""Reading the files that operators write, with errors that name them."""

from __future__ import annotations

from pathlib import Path

from llmgw.errors import OperatorError
from llmgw.settings.daemon import AgentConfig, ServerConfig
from llmgw.settings.document import Settings
from llmgw.settings.load import load_agent, load_server, load_settings

MAX_BYTES = 1024 * 1024
"""The largest configuration file that is read at all."""


def read_text(path: Path) -> str:
    """The text of a configuration file. Raises :class:`OperatorError` naming it when it cannot be had."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as failed:
        raise OperatorError(str(path), f"cannot be read: {failed.strerror}", "check the path and its mode") from failed
    if len(raw) > MAX_BYTES:
        raise OperatorError(str(path), f"is larger than {MAX_BYTES} bytes", "split or shorten it")
    try:
        return raw.decode()
    except UnicodeDecodeError as failed:
        raise OperatorError(str(path), f"is not UTF-8 text (byte {failed.start})", "save it as UTF-8") from failed


def server_config(path: Path) -> ServerConfig:
    """Read ``server.yaml``."""
    return load_server(read_text(path), str(path), str(path.resolve().parent))


def agent_config(path: Path) -> AgentConfig:
    """Read ``agent.yaml``."""
    return load_agent(read_text(path), str(path), str(path.resolve().parent))


def settings(path: Path) -> Settings:
    """Read a settings document."""
    return load_settings(read_text(path), str(path))
