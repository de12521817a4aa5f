"""Reading what operators wrote, and replacing files of ours so that no crash leaves half of one."""

from __future__ import annotations

from pathlib import Path

from llmgw import durable
from llmgw.errors import OperatorError


def read_text(path: Path, max_bytes: int = 1024 * 1024) -> str:
    """The text of a configuration file. Raises :class:`OperatorError` naming it when it cannot be had. Blocking."""
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as failed:
        raise OperatorError(str(path), f"cannot be read: {failed.strerror}", "check the path and its mode") from failed
    if len(raw) > max_bytes:
        raise OperatorError(str(path), f"is larger than {max_bytes} bytes", "split or shorten it")
    try:
        return raw.decode()
    except UnicodeDecodeError as failed:
        raise OperatorError(str(path), f"is not UTF-8 text (byte {failed.start})", "save it as UTF-8") from failed


def write_private(path: Path, data: bytes) -> None:
    """Replace a file atomically and durably, readable by its owner only. Blocking."""
    durable.replace(path, data, 0o600)
