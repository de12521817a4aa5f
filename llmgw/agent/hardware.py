"""The node's hardware as it was last read, and reading it again."""

from __future__ import annotations

from collections.abc import Callable

import trio

from llmgw.discovery.probe import discover
from llmgw.hardware.inventory import Inventory
from llmgw.settings.daemon import Discovery
from llmgw.telemetry.logging import logger


class Hardware:
    """Holds the newest inventory. ``changed`` is called when a new reading differs."""

    def __init__(self, config: Discovery, first: Inventory, changed: Callable[[Inventory], None]) -> None:
        self._config = config
        self._changed = changed
        self._again = trio.Event()
        self._log = logger("hardware")
        self.inventory = first

    def look_again(self) -> None:
        """Something happened that may have been the hardware: read it soon."""
        self._again.set()

    async def run(self) -> None:
        """Read again and again until cancelled: on a timer, and when asked to."""
        while True:
            with trio.move_on_after(self._config.interval_s):
                await self._again.wait()
            self._again = trio.Event()
            found = await discover(self._config)
            if found != self.inventory:
                self._log.info("hardware changed", devices=len(found.devices), warnings=len(found.warnings))
                self.inventory = found
                self._changed(found)
