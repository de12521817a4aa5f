"""The settings document on disk: read, checked, and recorded as a revision."""

from __future__ import annotations

import getpass
from pathlib import Path

import trio

from llmgw.settings.document import Settings
from llmgw.settings.load import load_settings
from llmgw.store.api import History
from llmgw.store.files import read_text


class SettingsFile:
    """Where the operator writes the settings, and where each text that was used is remembered."""

    def __init__(self, path: Path, store: History) -> None:
        self._path = path
        self._store = store

    async def load(self, now: float, reason: str) -> tuple[Settings, int]:
        """The settings and their revision. Raises :class:`OperatorError` with every fault; nothing is recorded then."""
        text = await trio.to_thread.run_sync(read_text, self._path)
        settings = load_settings(text, str(self._path))
        recorded = await self._store.add_settings(text, f"file of {getpass.getuser()}", reason, now)
        return settings, recorded.revision
