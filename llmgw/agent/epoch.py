"""The highest epoch that this node ever saw, on the disk: a control plane of an older term is not obeyed."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import trio

from llmgw.errors import OperatorError
from llmgw.store.files import write_private


class Kept(Protocol):
    """Where the highest epoch outlives the agent."""

    @property
    def highest(self) -> int:
        """What was written last; 0 before anything was."""
        ...

    async def write(self, epoch: int) -> None:
        """Write it durably. Raises :class:`OperatorError` when it cannot be."""
        ...


class EpochFile:
    """``epoch`` in the state folder. It is read once, at the start: that blocks."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "epoch"
        try:
            self.highest = int(self._path.read_text())
        except FileNotFoundError:
            self.highest = 0
        except (OSError, ValueError) as wrong:
            raise OperatorError(
                str(self._path), f"is not a number ({wrong})", "remove it if no older control plane can be running"
            ) from wrong

    async def write(self, epoch: int) -> None:
        """Write it durably. Raises :class:`OperatorError` when it cannot be."""
        try:
            await trio.to_thread.run_sync(write_private, self._path, f"{epoch}\n".encode())
        except OSError as failed:
            raise OperatorError(
                str(self._path), f"cannot be written: {failed.strerror}", "check the disk and the folder's mode"
            ) from failed
        self.highest = epoch


class Epoch:
    """The rule: only the newest control plane is obeyed, also after a restart."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self.highest = kept.highest

    async def admit(self, epoch: int) -> bool:
        """Whether commands of this epoch are obeyed; a higher one is written down first.

        Raises :class:`OperatorError` when it cannot be: what a restart would forget is not obeyed.
        """
        await trio.lowlevel.checkpoint()
        if epoch < self.highest:
            return False
        if epoch > self.highest:
            await self._kept.write(epoch)
            self.highest = epoch
        return True
