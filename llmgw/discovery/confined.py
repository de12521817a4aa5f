"""Reading a folder that somebody sent: nothing outside of it, wherever its links lead. Blocking."""

from __future__ import annotations

import os
from pathlib import Path

from llmgw.discovery.sysfs import DiskReader


class ConfinedReader(DiskReader):
    """Reads plain files and folders below one folder; of whatever else, there is nothing."""

    def __init__(self, folder: Path) -> None:
        self._top = os.path.realpath(folder).rstrip("/")

    def raw(self, path: Path, limit: int) -> bytes:
        """See :class:`llmgw.discovery.sysfs.Reader`."""
        return super().raw(path, limit) if self._within(path) and path.is_file() else b""

    def names(self, path: Path) -> tuple[str, ...]:
        """See :class:`llmgw.discovery.sysfs.Reader`."""
        return super().names(path) if self._within(path) else ()

    def _within(self, path: Path) -> bool:
        return f"{os.path.realpath(path)}/".startswith(f"{self._top}/")
