"""What the operator's signals ask of the daemon, for as long as the process lives."""

from __future__ import annotations

import os
import signal
from enum import Enum

import trio

from llmgw.telemetry.logging import logger


class After(Enum):
    """What comes when a run of the daemon is over."""

    END = "end"
    PROGRAM = "program"
    """The program anew, in the same process."""
    PART = "part"
    """The same program in another part: it leads where it followed, or places models where it only routed, or back."""


class Signals:
    """``stopping`` is set by the signals that end a run, ``reload`` by SIGHUP; who acts on that replaces it."""

    def __init__(self) -> None:
        self.stopping = trio.Event()
        self.reload = trio.Event()
        self.name = ""
        self.after = After.END
        self._log = logger("server")

    async def listen(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take signals until cancelled. The second one that is to end it ends it at once."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2) as received:
            task_status.started()
            async for number in received:
                if number == signal.SIGHUP:
                    self.reload.set()
                elif self.stopping.is_set():
                    self._log.warning("second signal: ending at once")
                    os._exit(1)
                else:
                    self.name = signal.Signals(number).name
                    self.after = After.PROGRAM if number == signal.SIGUSR2 else After.END
                    said = "stopping" if self.after is After.END else "starting anew"
                    self._log.info(said, signal=self.name)
                    self.stopping.set()
