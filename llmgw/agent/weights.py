"""Looking at the weights that the control plane asks for: how large they are, again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import trio

from llmgw.discovery.weights import Look, look
from llmgw.link.messages import WeightsFound
from llmgw.telemetry.logging import logger

MOST_NAMES = 1000
"""More than this are not looked at: the answer must fit into one message."""


class Weights:
    """``told`` is called when :attr:`found` has become another. Names that were asked for stay, over sessions."""

    def __init__(self, weights_dir: str, hub: Path, interval_s: float, told: Callable[[], None]) -> None:
        self._weights_dir = weights_dir
        self._hub = hub
        self._interval_s = interval_s
        self._told = told
        self._names: tuple[str, ...] = ()
        self._looks: dict[str, Look] = {}
        self._asked = trio.Event()
        # A disk that hangs holds this one thread, and nobody else.
        self._turn = trio.CapacityLimiter(1)
        self._log = logger("weights")

    @property
    def found(self) -> WeightsFound:
        """What was looked at so far, and what was there."""
        looks = [(name, self._looks[name]) for name in self._names if name in self._looks]
        return WeightsFound(
            tuple(name for name, _ in looks), tuple(seen.facts for _, seen in looks if seen.facts is not None)
        )

    def ask(self, names: Iterable[str]) -> None:
        """From now on these are looked at."""
        self._names = tuple(dict.fromkeys(names))[:MOST_NAMES]
        self._asked.set()
        # Also where nothing is new: whoever asks again has forgotten.
        self._told()

    async def run(self) -> None:
        """Look now and then until cancelled, and at once when asked."""
        while True:
            self._asked = trio.Event()
            self._looks = {name: seen for name, seen in self._looks.items() if name in self._names}
            for name in self._names:
                before = self._looks.get(name)
                now = await trio.to_thread.run_sync(
                    look, name, self._weights_dir, self._hub, before, abandon_on_cancel=True, limiter=self._turn
                )
                self._looks[name] = now
                if before is None or now.facts != before.facts:
                    self._told()
                if now.trouble and (before is None or now.trouble != before.trouble):
                    self._log.warning("weights cannot be read as what they should be", name=name, reason=now.trouble)
            with trio.move_on_after(self._interval_s):
                await self._asked.wait()
