"""How many clients each worker has, in a memory that all of them see: so that none takes all connections of a burst.

Whoever is ahead of another one waits a moment before it accepts, and takes what is still there then. A count is one
word that one process writes, so no lock is needed; one of a dead worker stays until its place is taken again, and costs
the others no more than those moments.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from llmgw.router.limits import LANES

PAUSE_S = 0.002
_AHEAD = 2
_FILE = "clients-1"


class Balance:
    """This worker's sight of them; ``lane`` is its place, which nobody else has. Raises ``OSError``."""

    def __init__(self, folder: Path, lane: int) -> None:
        self._lane = lane
        handle = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, LANES * 8)
            self._map = mmap.mmap(handle, LANES * 8)
        finally:
            os.close(handle)
        self._cells = memoryview(self._map).cast("q")  # 0: nobody accepts there, else the number of clients and one

    def have(self, clients: int) -> None:
        """So many are this worker's now."""
        self._cells[self._lane] = clients + 1

    def ahead(self, clients: int) -> bool:
        """Whether another one has clearly fewer."""
        mine = clients + 1 - _AHEAD
        return any(0 < cell < mine for at, cell in enumerate(self._cells) if at != self._lane)

    def leave(self) -> None:
        """It accepts nothing any more."""
        self._cells[self._lane] = 0
