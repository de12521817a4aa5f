"""How the link stands, on the disk, for ``llmgw agent status``: while the agent runs and when it does not."""

from __future__ import annotations

from pathlib import Path

import cattrs
import orjson

from llmgw.agent.session import LinkState
from llmgw.errors import OperatorError
from llmgw.settings.convert import strict_converter
from llmgw.telemetry.logging import logger

_NAME = "link.json"


class LinkFile:
    """``link.json`` in the state folder, replaced as a whole at each change. It need not outlive a power cut."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / _NAME

    def write(self, state: LinkState) -> None:
        """Write it down; what cannot be written is only said."""
        fresh = self._path.with_name(f".{_NAME}.new")
        try:
            fresh.write_bytes(orjson.dumps(strict_converter().unstructure(state)))
            fresh.chmod(0o600)
            fresh.replace(self._path)
        except OSError as failed:
            logger("link").warning("how the link stands is not written down", error=str(failed))


def read(state_dir: Path) -> LinkState | None:
    """What an agent of this state folder wrote last. Raises :class:`OperatorError` when it cannot be read."""
    path = state_dir / _NAME
    try:
        return strict_converter(forbid_unknown=False).structure(orjson.loads(path.read_bytes()), LinkState)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, cattrs.BaseValidationError) as wrong:
        raise OperatorError(str(path), f"cannot be read: {wrong}", "start the agent: it writes it anew") from wrong
