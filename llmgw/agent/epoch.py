"""The highest epoch that this node ever saw, on the disk: a control plane of an older term is not obeyed."""

from __future__ import annotations

from pathlib import Path

from llmgw.errors import OperatorError
from llmgw.store.files import write_private


class Epoch:
    """Reads ``epoch`` in the state folder once and writes it when it goes up. Blocking."""

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

    def admit(self, epoch: int) -> bool:
        """Whether commands of this epoch are obeyed; a higher one is written down first.

        Raises :class:`OperatorError` when it cannot be: what a restart would forget is not obeyed.
        """
        if epoch < self.highest:
            return False
        if epoch > self.highest:
            try:
                write_private(self._path, f"{epoch}\n".encode())
            except OSError as failed:
                raise OperatorError(
                    str(self._path), f"cannot be written: {failed.strerror}", "check the disk and the folder's mode"
                ) from failed
            self.highest = epoch
        return True
