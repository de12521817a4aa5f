"""The settings that came over the link, on the disk: those in force, those on trial, and those that were refused.

``settings.json`` in the state folder is replaced as a whole, so an agent that dies leaves either what was or what is.
"""

from __future__ import annotations

from pathlib import Path

import cattrs
import orjson
from attrs import evolve, frozen

from llmgw.settings.agent_part import NodeSettings
from llmgw.settings.convert import strict_converter
from llmgw.store.files import write_private
from llmgw.telemetry.logging import logger

_NAME = "settings.json"


@frozen
class Refusal:
    """Settings that are not used, and why. Those that were ``tried`` load, and the agent did not come up on them."""

    settings: NodeSettings
    reason: str
    tried: bool = False


@frozen
class Kept:
    """``used`` worked. ``trial`` came after them and has yet to be seen to work; ``tries`` counts the starts on it.

    ``file`` is why agent.yaml as it is now is not used, empty while it is.
    """

    used: NodeSettings | None = None
    trial: NodeSettings | None = None
    tries: int = 0
    refused: Refusal | None = None
    file: str = ""

    def refusing(self, settings: NodeSettings, reason: str, *, tried: bool) -> Kept:
        """As it is once these were refused."""
        made = evolve(self, refused=Refusal(settings, reason, tried))
        return evolve(made, trial=None, tries=0) if self.trial is not None and self.trial == settings else made


class KeptFile:
    """``settings.json`` of a state folder. Every method blocks."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / _NAME

    def read(self) -> Kept:
        """What was written last; nothing where that cannot be read, which is said in the log."""
        try:
            return strict_converter(forbid_unknown=False).structure(orjson.loads(self._path.read_bytes()), Kept)
        except FileNotFoundError:
            return Kept()
        except (OSError, ValueError, cattrs.BaseValidationError) as wrong:
            said = "what the control plane said of settings cannot be read; it says it again"
            logger("settings").error(said, file=str(self._path), error=str(wrong))
            return Kept()

    def write(self, kept: Kept) -> None:
        """Replace it durably. Raises ``OSError``; then what was there is there."""
        write_private(self._path, orjson.dumps(strict_converter().unstructure(kept)))
