"""Where settings that come over the link go; between the link and what the agent runs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from llmgw.link.messages import SettingsApplied
from llmgw.settings.agent_part import NodeSettings

Answer = Callable[[SettingsApplied], None]


class Offers(Protocol):
    """Takes settings that a control plane sent."""

    @property
    def revision(self) -> int:
        """That of the settings in force; 0 without any."""
        ...

    def offered(self, settings: NodeSettings, answer: Answer) -> None:
        """The control plane sent these; ``answer`` is called with what became of them, unless the agent ends first."""
        ...
