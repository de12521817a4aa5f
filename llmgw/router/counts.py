"""The cells that the workers of one machine share: a file in memory, a lock a key, a lane a worker.

The kernel's locks end with the process that holds them, and what a dead worker had under way is forgotten by whoever
comes next; what it had granted stays counted. Locks of a key are held for some microseconds, never over an await.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from pathlib import Path
from typing import Protocol

from llmgw.errors import OperatorError
from llmgw.router import limits
from llmgw.router.limits import LANES, SLOT_CELLS, Cells

COUNTS_FOLDER = "router"
"""Beside the control socket: limits that workers share, and usage that is not in the store yet."""

_HEADER_CELLS = 512
_GROW_BYTES = 1024 * 1024
_FILE = "limits-3"
"""The layout is in the name: workers of another one count in a file of their own."""

_BOOT, _IN_USE = 0, 1
"""In the header: which boot the times are of, and a bit for each lane that is in use."""

_PATIENCE_S = 0.05
_BESIDE_S = 0.1
"""Who comes beside others waits so long before its first turn: one that was alone took turns without a lock."""


def boot_id() -> int:
    """A number that another boot does not have: the clock of the cells begins anew with each (random(4))."""
    text = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return int(text, 16) >> 65


class Counts(Protocol):
    """Cells by slot. ``lane`` is this worker's."""

    lane: int

    def cells(self, slot: int) -> tuple[Cells, int]: ...

    def lock(self, slot: int) -> None: ...

    def unlock(self, slot: int) -> None: ...

    def close(self) -> None: ...


class OwnCounts:
    """Cells of one process alone."""

    lane = 0

    def __init__(self) -> None:
        self._cells: list[int] = []

    def cells(self, slot: int) -> tuple[Cells, int]:
        """The cells that have this slot's, and where those begin."""
        base = slot * SLOT_CELLS
        if base + SLOT_CELLS > len(self._cells):
            self._cells.extend([0] * (base + SLOT_CELLS - len(self._cells)))
        return self._cells, base

    def lock(self, slot: int) -> None:
        """Nobody else is there."""

    def unlock(self, slot: int) -> None:
        """Nobody else is there."""

    def close(self) -> None:
        """Nothing to give back."""


class SharedCounts:
    """Cells that every process has which opens the same folder. Blocking, for microseconds as a rule."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self.lane, self._lane_file, self._bit = -1, -1, 0
        self._locked = False
        self._map: mmap.mmap | None = None
        self._cells = memoryview(b"").cast("q")
        free: list[tuple[int, int]] = []
        self._file = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # One comes in at a time. A lane is the lock of a file of its own (flock(2)): locks of ranges of one file
            # belong to the process, and any descriptor of it that is closed, a map's own too, ends them (fcntl(2)).
            fcntl.flock(self._file, fcntl.LOCK_EX)
            for lane in range(LANES):
                handle = os.open(folder / f"lane-{lane}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(handle)
                else:
                    free.append((lane, handle))
            if not free:
                raise OperatorError(
                    str(folder), f"{LANES} router workers count there already", "end those that drain, or start fewer"
                )
            self._grow(0)
            boot = boot_id()
            if self._cells[_BOOT] != boot:
                self._cells[:] = memoryview(bytes(8 * len(self._cells))).cast("q")
                self._cells[_BOOT] = boot
            in_use = self._cells[_IN_USE]
            for lane, _ in free:
                self._forget(lane)
                in_use &= ~(1 << lane)
            self.lane, self._lane_file = free.pop(0)
            self._bit = 1 << self.lane
            self._cells[_IN_USE] = in_use | self._bit
            while free:
                os.close(free.pop()[1])  # before the next one comes in to look for a lane
            fcntl.flock(self._file, fcntl.LOCK_UN)
            if in_use:
                time.sleep(_BESIDE_S)
        except BaseException:
            os.close(self._file)
            raise
        finally:
            for _, handle in free:
                os.close(handle)

    def _forget(self, lane: int) -> None:
        for slot in range((len(self._cells) - _HEADER_CELLS) // SLOT_CELLS):
            base = _HEADER_CELLS + slot * SLOT_CELLS
            if limits.under_way(self._cells, base, lane):
                self.lock(slot)
                limits.clear_lane(self._cells, base, lane)
                self.unlock(slot)

    def _grow(self, cells: int) -> None:
        """Map the file, with room for at least so many cells."""
        size = -(-max(cells * 8, 1) // _GROW_BYTES) * _GROW_BYTES
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, 0)
        there = os.fstat(self._file).st_size
        if size > there:
            try:
                # Really there: a page that the disk has no room for ends the process that writes to it (mmap(2)).
                os.posix_fallocate(self._file, there, size - there)
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 0)
        else:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 0)
        size = max(there, size)
        old, self._map = self._map, mmap.mmap(self._file, size)
        self._cells.release()
        self._cells = memoryview(self._map).cast("q")
        if old is not None:
            old.close()

    def cells(self, slot: int) -> tuple[Cells, int]:
        """The cells that have this slot's, and where those begin. Before the lock is taken."""
        base = _HEADER_CELLS + slot * SLOT_CELLS
        if base + SLOT_CELLS > len(self._cells):
            self._grow(base + SLOT_CELLS)
        return self._cells, base

    def lock(self, slot: int) -> None:
        """No other process uses the slot's cells until :meth:`unlock`.

        A worker that is alone needs no lock. One that was stopped in the middle of its turn is not waited for longer
        than 50 ms.
        """
        if self._cells[_IN_USE] == self._bit:
            return
        at = (_HEADER_CELLS + slot * SLOT_CELLS) * 8
        by = 0.0
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
                self._locked = True
                return
            except BlockingIOError:
                now = time.monotonic()
                by = by or now + _PATIENCE_S
                if now > by:
                    return
                os.sched_yield()

    def unlock(self, slot: int) -> None:
        """Let the others go on."""
        if self._locked:
            self._locked = False
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, (_HEADER_CELLS + slot * SLOT_CELLS) * 8)

    def close(self) -> None:
        """Leave; what this worker had under way is forgotten."""
        if self.lane >= 0:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._forget(self.lane)
            self._cells[_IN_USE] &= ~self._bit
            self.lane = -1
            self._cells.release()
            if self._map is not None:
                self._map.close()
            os.close(self._file)
            os.close(self._lane_file)
