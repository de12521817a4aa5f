"""What the routers of all control planes have to do, put together for the one that leads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import trio

from llmgw.errors import BugError, OperatorError
from llmgw.router.wire import Load
from llmgw.server.leader import Leadership
from llmgw.store.rows import from_text, to_text
from llmgw.telemetry.logging import logger

_EVERY_S = 1.0
_AGAIN_S = 4.0
"""Less than :data:`llmgw.store.lease.LOAD_S`: what did not change is said again before it counts no more."""


def together(loads: Iterable[Load]) -> Load:
    """The sum of what several routers have."""
    outstanding: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for load in loads:
        outstanding.update(load.outstanding)
        waiting.update(load.waiting)
        asked.update(load.asked)
    return Load(dict(outstanding), dict(waiting), dict(asked))


class Loads:
    """``use`` is called with the sum whenever it changes, where this control plane leads."""

    def __init__(self, leadership: Leadership | None, use: Callable[[Load], None]) -> None:
        self._leadership = leadership
        self._use = use
        self._own: Load | None = None
        self._others: tuple[Load, ...] = ()
        self._changed = trio.Event()
        self._log = logger("loads")

    def own(self, load: Load) -> None:
        """This control plane's router said what it has."""
        self._own = load
        self._changed.set()
        if self._leadership is None or self._leadership.leads:
            self._sum()

    async def run(self) -> None:
        """Tell the leader, or hear the others, until cancelled."""
        assert self._leadership is not None
        while True:
            try:
                if self._leadership.leads:
                    await self._hear(self._leadership)
                else:
                    await self._tell(self._leadership)
            except (OperatorError, BugError) as failed:
                self._log.warning("what routers have to do is not known to all", error=str(failed))
            await trio.sleep(_EVERY_S)

    async def _tell(self, leadership: Leadership) -> None:
        with trio.move_on_after(_AGAIN_S):
            await self._changed.wait()
        self._changed = trio.Event()
        if self._own is not None:
            await leadership.leases.save_load(leadership.me.holder, to_text(self._own))

    async def _hear(self, leadership: Leadership) -> None:
        others = tuple(from_text(text, Load) for text in await leadership.leases.loads(leadership.me.holder))
        if others != self._others:
            self._others = others
            self._sum()

    def _sum(self) -> None:
        if self._own is not None:
            self._use(together((self._own, *self._others)))
