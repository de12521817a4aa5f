"""``agent.yaml`` on the disk, and whether it is still the one that was read."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from llmgw.settings import yaml
from llmgw.settings.yaml import Document
from llmgw.store.files import read_text

Stamp = tuple[int, int, int, int]
"""Device, inode, time of change and size: another file, or another content."""


@frozen
class Written:
    """What the file said, and the folder that its relative paths are below."""

    document: Document
    folder: str


class OwnFile:
    """One node's ``agent.yaml``. Every method blocks."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Written:
        """What it says now. Raises :class:`OperatorError`: it cannot be read, or is not YAML."""
        return Written(yaml.read(read_text(self._path), str(self._path)), str(self._path.resolve().parent))

    def stamp(self) -> Stamp | None:
        """What tells it from itself at another time; ``None`` while it is not there."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
