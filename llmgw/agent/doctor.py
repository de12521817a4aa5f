"""The doctor, run on this node for the control plane: one at a time, beside everything else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import trio

from llmgw.doctor.checks import CHECKS
from llmgw.doctor.document import as_json
from llmgw.doctor.live import read_node
from llmgw.errors import OperatorError
from llmgw.link.messages import DoctorReport, RunDoctor
from llmgw.settings.daemon import AgentConfig
from llmgw.telemetry.logging import logger

BOUND_S = 30.0
MOST_BYTES = 2 * 1024 * 1024


class Doctor:
    """``tell`` gets what comes of it."""

    def __init__(self, config: AgentConfig, tell: Callable[[DoctorReport], None]) -> None:
        self._config = config
        self._tell = tell
        self._asked: RunDoctor | None = None
        self._woken = trio.Event()
        self._log = logger("doctor")

    def start(self, command: RunDoctor) -> None:
        """Begin. Raises :class:`OperatorError` while another one runs."""
        if self._asked is not None and self._asked.command != command.command:
            raise OperatorError("the doctor", "is looking at this node already", "wait half a minute, and ask again")
        self._asked = command
        self._woken.set()

    async def run(self) -> None:
        """Do what is asked for, until cancelled."""
        while True:
            await self._woken.wait()
            self._woken = trio.Event()
            if (asked := self._asked) is not None:
                self._tell(await self._examine(asked.command))
                self._asked = None

    async def _examine(self, command: str) -> DoctorReport:
        # In a thread with a loop of its own: reading a machine is many small pieces of work that do not wait, and the
        # link's heartbeats must not wait for them.
        text = await trio.to_thread.run_sync(self._read, abandon_on_cancel=True)
        if text is None:
            return DoctorReport(command, "", f"it was not done within {BOUND_S:g} s")
        if len(text) > MOST_BYTES:
            return DoctorReport(command, "", f"what was found is {len(text)} bytes long: run llmgw doctor on the node")
        self._log.info("examined")
        return DoctorReport(command, text)

    def _read(self) -> str | None:
        async def work() -> str | None:
            with trio.move_on_after(BOUND_S):
                return json.dumps(as_json(await read_node(self._config, os.environ), CHECKS))
            return None

        return trio.run(work)
