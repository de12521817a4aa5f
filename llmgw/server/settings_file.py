"""The settings document on disk: read, checked, and recorded as a revision."""

from __future__ import annotations

import getpass
from pathlib import Path

import trio

from llmgw.errors import OperatorError
from llmgw.settings.document import Settings
from llmgw.settings.load import load_settings
from llmgw.store.api import Store

_MAX_BYTES = 1024 * 1024


class SettingsFile:
    """Where the operator writes the settings, and where each text that was used is remembered."""

    def __init__(self, path: Path, store: Store) -> None:
        self._path = path
        self._store = store

    async def load(self, now: float, reason: str) -> tuple[Settings, int]:
        """The settings and their revision. Raises :class:`OperatorError` with every fault; nothing is recorded then."""
        text = await trio.to_thread.run_sync(self._read)
        settings = load_settings(text, str(self._path))
        recorded = await self._store.add_settings(text, f"file of {getpass.getuser()}", reason, now)
        return settings, recorded.revision

    def _read(self) -> str:
        try:
            with self._path.open("rb") as file:
                raw = file.read(_MAX_BYTES + 1)
            if len(raw) > _MAX_BYTES:
                raise OperatorError(str(self._path), f"is larger than {_MAX_BYTES} bytes", "shorten it")
            return raw.decode()
        except OSError as failed:
            raise OperatorError(
                str(self._path), f"the settings cannot be read: {failed.strerror}", "check `settings` in server.yaml"
            ) from failed
        except UnicodeDecodeError as failed:
            raise OperatorError(
                str(self._path), f"is not UTF-8 text (byte {failed.start})", "save it as UTF-8"
            ) from failed
