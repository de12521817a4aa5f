"""One router worker, as the control plane sees it: what it says, and what it is fed with."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Protocol

import trio
from attrs import define, evolve, field, frozen

from llmgw import __version__
from llmgw.errors import OperatorError, PeerError
from llmgw.router.control_socket import Channel
from llmgw.router.sight import Sight
from llmgw.router.table import Table
from llmgw.router.wire import (
    Accept,
    Drain,
    Failed,
    Full,
    Hello,
    Keys,
    KeysHeld,
    Load,
    Serving,
    Spent,
    Usage,
    UsageKept,
    UseTable,
)
from llmgw.settings.keys import ApiKey
from llmgw.settings.keys import Spent as SpentRow
from llmgw.settings.usage import UsageRow
from llmgw.telemetry.logging import logger

_KILL_S = 1.0
_LISTEN_S = 1.0

SILENT_S = 10.0
"""A worker that says nothing for so long is stuck, whatever its process does: it speaks every second."""

_PAGE_KEYS = 100
"""So many keys a message: taking one over must not hold the worker's requests up."""

_log = logger("router")


class KeySource(Protocol):
    """Who knows the keys: see :class:`llmgw.server.keys.KeyBook`."""

    version: int

    def since(self, version: int) -> tuple[ApiKey, ...]:
        """The keys that changed after this version, in the order of their changes."""
        ...

    def spent(self, mark: int) -> tuple[int, tuple[SpentRow, ...]]:
        """The newest mark, and what of the budgets changed after the one that is given."""
        ...

    async def used(self, ledger: str, seq: int, rows: tuple[UsageRow, ...]) -> bool:
        """Keep what a worker used; whether it is kept."""
        ...


@frozen
class WorkerState:
    """How a worker stands, or all of them: ``serving``, ``starting``, ``draining`` or ``down``, why, and since when
    (epoch seconds)."""

    state: str
    reason: str
    since: float
    pid: int | None
    streams: int = 0


@define(eq=False)
class Feed:
    """What every worker is to have; ``changed`` wakes whoever hands it on. ``share`` is how many it is shared by."""

    share: int = 1
    table: Table | None = None
    full: tuple[str, ...] = ()
    keys: KeySource | None = None
    _news: trio.Event = field(factory=trio.Event)

    def changed(self) -> None:
        """Something is new."""
        news, self._news = self._news, trio.Event()
        news.set()

    @property
    def news(self) -> trio.Event:
        """Set when something is new after this moment."""
        return self._news


def shared_out(table: Table, workers: int) -> Table:
    """What one of so many workers gets of a table: its part of what all of them together may have at an engine and
    hold back, rounded up, so that none of them is left without."""
    if workers == 1:
        return table
    routes = []
    for route in table.routes:
        most = route.routing.concurrency
        if most is not None or route.hold_s:
            part = None if most is None else -(-most // workers)
            queue = -(-route.routing.queue // workers)
            route = evolve(route, routing=evolve(route.routing, concurrency=part, queue=queue))
        routes.append(route)
    return evolve(table, routes=tuple(routes))


@define(eq=False)
class RouterWorker:
    """One process. ``ended`` is set when it is gone; ``changed`` is called whenever it says how it is.

    ``fits`` is whether it was started with what is set up now, ``heard`` how often it said something.
    """

    pid: int
    feed: Feed
    changed: Callable[[], None]
    fits: bool = False
    draining: bool = False
    serving: bool = False
    version: str = __version__
    since: float = field(factory=time.time)
    keys: int = 0
    heard: int = 0
    load: Load | None = None
    sight: Sight = field(factory=Sight)
    failure: OperatorError | None = None
    ended: trio.Event = field(factory=trio.Event)
    _channel: Channel | None = None
    _hearing: bool = False

    @property
    def state(self) -> WorkerState:
        """For people."""
        streams = 0 if self.load is None else sum(self.load.outstanding.values())
        state = "draining" if self.draining else "serving" if self.serving else "starting"
        reason = "" if self.fits or self.draining else "to be replaced"
        return WorkerState(state, reason, self.since, self.pid, streams)

    async def talk(self, channel: Channel, hello: Hello) -> None:
        """Hear what it says and tell it what is new, until the connection ends. Raises :class:`PeerError`."""
        self._channel = channel
        self.heard += 1
        self.version, self.keys = hello.version, hello.keys
        self.draining = self.draining or hello.draining
        kept: list[UsageKept] = []
        try:
            async with trio.open_nursery() as nursery:
                # Of another version nothing is sure but that it can be told to end.
                if hello.version == __version__:
                    nursery.start_soon(self._hand_on, channel, kept, nursery.cancel_scope)
                while (message := await channel.receive()) is not None:
                    self.heard += 1
                    match message:
                        case Serving():
                            self.serving = True
                        case Load():
                            self.load = message
                        case Sight():
                            self.sight = message
                            continue
                        case KeysHeld(version=version):
                            self.keys = version
                        case Usage(ledger=ledger, seq=seq, rows=rows):
                            self._hearing = True
                            keys = self.feed.keys
                            if keys is not None and await keys.used(ledger, seq, rows):
                                kept.append(UsageKept(ledger, seq))
                                self.feed.changed()
                            self._hearing = False
                            continue
                        case Failed(thing=thing, reason=reason, remedy=remedy):
                            self.failure = OperatorError(thing, reason, remedy)
                        case _:
                            raise PeerError("router control", f"{type(message).__name__} is not for the control plane")
                    self.changed()
                nursery.cancel_scope.cancel(reason="the worker is gone")
        finally:
            self._hearing = False
            if self._channel is channel:
                self._channel = None

    async def drain(self, seconds: float, *, replaced: bool) -> None:
        """Have it finish what is under way and end; returns when it has, or is killed after that time."""
        self.draining = True
        self.since = time.time()
        self.changed()
        channel = self._channel
        try:
            if channel is not None:
                await channel.send(Drain(seconds, replaced))
            else:
                os.kill(self.pid, signal.SIGTERM)
        except (trio.BrokenResourceError, trio.ClosedResourceError, ProcessLookupError):
            pass  # if it is not gone, it is killed below
        with trio.move_on_after(seconds + _KILL_S):
            await self.ended.wait()
            return
        _log.warning("a router worker did not end; killing it", pid=self.pid)
        self.kill()

    def kill(self) -> None:
        """End it at once."""
        if not self.ended.is_set():
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    async def watch(self, silent_s: float = SILENT_S) -> None:
        """Wait until its process is gone; one that is there and says nothing for so long is killed."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            handle = -1
        try:
            if handle >= 0:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._end_if_silent, silent_s)
                    await trio.lowlevel.wait_readable(handle)
                    nursery.cancel_scope.cancel(reason="the worker is gone")
            self.ended.set()
        finally:
            if handle >= 0:
                os.close(handle)

    async def _end_if_silent(self, silent_s: float) -> None:
        silent = 0
        while silent * _LISTEN_S < silent_s:
            heard = self.heard
            # Step by step: when this process itself was stopped for a while, that is one step and no silence.
            await trio.sleep(_LISTEN_S)
            silent = 0 if self._hearing or self.heard != heard else silent + 1
        _log.error("a router worker is stuck; killing it", pid=self.pid, silent_s=silent_s)
        self.kill()

    async def _hand_on(self, channel: Channel, kept: list[UsageKept], scope: trio.CancelScope) -> None:
        """Send the newest table and what is new of the keys, and each one after it."""
        table: Table | None = None
        full: tuple[str, ...] = ()
        mark, known, whole, accepts = 0, self.keys, False, False
        try:
            while True:
                news = self.feed.news
                if self.feed.table is not None and self.feed.table is not table:
                    table = self.feed.table
                    await channel.send(UseTable(shared_out(table, self.feed.share)))
                if full != self.feed.full:
                    full = self.feed.full
                    await channel.send(Full(full))
                while kept:
                    await channel.send(kept.pop(0))
                source = self.feed.keys
                if source is not None:
                    mark, rows = source.spent(mark)
                    if rows:
                        await channel.send(Spent(rows))
                    if not whole or source.version != known:
                        known, whole = await _send_keys(channel, source, known), True
                if not accepts:
                    accepts = True
                    await channel.send(Accept())
                await news.wait()
        except trio.BrokenResourceError:
            scope.cancel(reason="the worker is gone")


async def _send_keys(channel: Channel, source: KeySource, known: int) -> int:
    """Send what the worker lacks. Returns the version that it has then."""
    version = source.version
    if known > version:
        # The store is older than what this worker knows, as after a backup was put back. What it knows stays: a
        # stale table must not undo a revocation.
        _log.error("the router has newer keys than the store; restart it to use the store's", store=version,
                   router=known)  # fmt: skip
        known = 0
    news = source.since(known)
    pages = [news[at : at + _PAGE_KEYS] for at in range(0, len(news), _PAGE_KEYS)] or [()]
    for number, page in enumerate(pages):
        last = number == len(pages) - 1
        upto = version if last else page[-1].version
        await channel.send(Keys(known, upto, page, last))
        known = upto
    return version
