"""The node's hardware as it was last read, reading it again, and what it was known to be."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import attrs
import cattrs
import trio

from llmgw.discovery.kmsg import watch
from llmgw.discovery.kmsg_text import KernelEvent
from llmgw.discovery.machine import LiveMachine
from llmgw.discovery.probe import discover
from llmgw.errors import OperatorError
from llmgw.hardware.delta import without_load
from llmgw.hardware.fabric import FabricRule
from llmgw.hardware.inventory import Fault, Inventory
from llmgw.hardware.known import KnownCard, differences, known_cards, merged
from llmgw.settings.convert import strict_converter
from llmgw.settings.daemon import Discovery
from llmgw.store.files import write_private
from llmgw.telemetry.logging import logger

KMSG = Path("/dev/kmsg")
SETTLE_S = 1.0
"""After an event the hardware is read this much later: what happens to one card often happens to several."""

QUIET_S = 5.0
"""Least time between two readings: a card that hangs makes the reading itself write Xids, which ask for another."""


class Known:
    """The cards that this node is known to have, in its state folder. Every method blocks."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "hardware.json"

    def read(self) -> tuple[KnownCard, ...]:
        """The cards; none before the first reading. Raises :class:`OperatorError` for a file that is not ours."""
        try:
            said = json.loads(self._path.read_bytes())
            return strict_converter(forbid_unknown=False).structure(said, tuple[KnownCard, ...])
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, cattrs.BaseValidationError) as wrong:
            raise OperatorError(
                str(self._path), f"is not a list of cards ({type(wrong).__name__})", "remove it"
            ) from wrong

    def write(self, cards: Sequence[KnownCard]) -> None:
        """Replace the list. Raises ``OSError``."""
        write_private(self._path, json.dumps([attrs.asdict(card) for card in cards], indent=2).encode())

    def compare(self, inventory: Inventory, *, remember: bool) -> Inventory:
        """The inventory with what is different from before among its warnings.

        With ``remember`` cards that are new are known from now on.
        """
        try:
            known = self.read()
            warnings = differences(known, inventory)
            now = merged(known, known_cards(inventory))
            if remember and now != known and inventory.source != "none":
                self.write(now)
        except (OperatorError, OSError) as failed:
            warnings = (Fault("known-hardware", f"what this node had before is not known: {failed}", ""),)
        return attrs.evolve(inventory, warnings=(*inventory.warnings, *warnings))


class Hardware:
    """Holds the newest inventory. ``changed`` is called when a new reading differs."""

    def __init__(
        self,
        config: Discovery,
        rules: Sequence[FabricRule],
        state_dir: Path,
        changed: Callable[[], None],
        kmsg: Path = KMSG,
        quiet_s: float = QUIET_S,
    ) -> None:
        self._config = config
        self._machine = LiveMachine(config)
        self._rules = rules
        self._known = Known(state_dir)
        self._changed = changed
        self._kmsg = kmsg
        self._quiet_s = min(quiet_s, config.interval_s)
        self._again = trio.Event()
        self._log = logger("hardware")
        self._inventory: Inventory | None = None
        self._reading = trio.Lock()
        self._begun = self._newest = 0
        self._done = trio.Event()
        self._read_at = -math.inf

    @property
    def inventory(self) -> Inventory:
        """The newest reading; :meth:`read` comes first."""
        assert self._inventory is not None
        return self._inventory

    async def read(self) -> Inventory:
        """Read everything, say what is new in the log, and remember it."""
        async with self._reading:
            return await self._read()

    async def _read(self) -> Inventory:
        self._begun += 1
        number = self._begun
        found = await discover(self._config, self._rules, self._machine)
        found = await trio.to_thread.run_sync(partial(self._known.compare, found, remember=True))
        self._say(self._inventory, found)
        self._inventory, self._newest, self._read_at = found, number, trio.current_time()
        done, self._done = self._done, trio.Event()
        done.set()
        return found

    async def anew(self) -> Inventory:
        """A reading that began after this call; all who ask meanwhile share it. A cancelled one changes nothing."""
        asked = self._begun
        async with self._reading:
            if self._newest > asked:
                return self.inventory
            before = self._inventory
            found = await self._read()
        if found != before:
            self._changed()
        return found

    async def next(self) -> Inventory:
        """The inventory of the next reading, whoever wanted it."""
        await self._done.wait()
        return self.inventory

    def no_older_than(self, seconds: float) -> None:
        """Have it read soon if the newest reading is older than this."""
        if trio.current_time() - self._read_at >= seconds:
            self.look_again()

    def look_again(self) -> None:
        """Something happened that may have been the hardware: read it soon."""
        self._again.set()

    async def run(self) -> None:
        """Read again and again until cancelled: on a timer, when asked to, and when the kernel log speaks of it."""
        async with trio.open_nursery() as nursery:
            if self._config.root == "/":
                nursery.start_soon(watch, self._kmsg, self._heard)
            while True:
                await trio.sleep(self._quiet_s)
                with trio.move_on_after(self._config.interval_s - self._quiet_s):
                    await self._again.wait()
                    await trio.sleep(min(SETTLE_S, self._quiet_s))
                self._again = trio.Event()
                await self.anew()

    def _heard(self, event: KernelEvent) -> None:
        self._log.warning(
            "kernel log", kind=event.kind.value, code=event.code, pci=event.pci_address, text=event.text,
            meaning=event.meaning or None,
        )  # fmt: skip
        self.look_again()

    def _say(self, before: Inventory | None, now: Inventory) -> None:
        """What is new: a fault or a warning once when it comes, and once when it goes."""
        if before is None and now.simulated is not None:
            self._log.warning("SIMULATED machine", machine=now.simulated)
        old, new = _troubles(before), _troubles(now)
        for (device, fault), remedy in new.items():
            if (device, fault) not in old:
                what = "device is out" if device else "hardware"
                write = self._log.error if fault[0] == "nvml-failed" else self._log.warning
                write(what, device=device or None, code=fault[0], reason=fault[1], remedy=remedy)
        for device, fault in old:
            if (device, fault) not in new:
                self._log.info("no longer so", device=device or None, code=fault[0], reason=fault[1])
        if before is not None and without_load(before) != without_load(now):
            self._log.info("hardware changed", devices=len(now.devices), source=now.source)


def _troubles(inventory: Inventory | None) -> dict[tuple[str, tuple[str, str]], str]:
    if inventory is None:
        return {}
    found = {("", (w.code, w.reason)): w.remedy for w in inventory.warnings}
    for device in inventory.devices:
        found.update({(device.label, (f.code, f.reason)): f.remedy for f in device.faults})
    for fabric in inventory.fabrics:
        found.update({(f"fabric {fabric.label}", (f.code, f.reason)): f.remedy for f in fabric.faults})
    return found
