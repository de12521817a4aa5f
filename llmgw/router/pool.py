"""The engines of the routing table as the router knows them: connections kept, requests outstanding, failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from llmgw.router.choose import EJECT_AFTER, EJECT_S
from llmgw.router.sockets import Peer, dial
from llmgw.router.table import Endpoint, Route, Table

_IDLE_MOST = 64
_IDLE_S = 30.0
"""Engines close idle connections after 5 s (uvicorn) and up; one that was closed meanwhile is noticed at its use."""

HELD_MOST = 256
"""So many requests of a model wait for its first engine; what comes beyond is told to come again."""


class Engine:
    """One endpoint and what the router learnt of it. Lives on over new tables for as long as it is in them."""

    __slots__ = ("_idle", "draining", "ejected_until", "endpoint", "failures", "head_lines", "outstanding")

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.draining = endpoint.draining
        self.outstanding = 0
        self.failures = 0
        self.ejected_until = 0.0
        self._idle: list[tuple[Peer, float]] = []
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        lines = f"host: {host}:{endpoint.port}\r\n"
        if endpoint.api_key is not None:
            lines += f"authorization: Bearer {endpoint.api_key}\r\n"
        self.head_lines = lines.encode()

    def take_idle(self, now: float) -> Peer | None:
        """A kept connection, the one that was used last; older ones are likelier to be closed."""
        while self._idle:
            peer, since = self._idle.pop()
            if now - since < _IDLE_S:
                return peer
            peer.close()
        return None

    async def connect(self, timeout_s: float) -> Peer:
        """A new connection. Raises ``OSError``."""
        return await dial(self.endpoint.host, self.endpoint.port, timeout_s)

    def give_back(self, peer: Peer, now: float) -> None:
        """Keep a connection whose answer ended exactly where it said."""
        if len(self._idle) < _IDLE_MOST:
            self._idle.append((peer, now))
        else:
            peer.close()

    def failed(self, now: float) -> None:
        """A connection could not be had, or ended before an answer."""
        self.failures += 1
        if self.failures >= EJECT_AFTER:
            self.ejected_until = now + EJECT_S

    def worked(self) -> None:
        """It answered."""
        self.failures = 0
        self.ejected_until = 0.0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count one request as outstanding, however it ends."""
        self.outstanding += 1
        try:
            yield
        finally:
            self.outstanding -= 1

    def sweep(self, now: float) -> None:
        """Close connections that nobody needed for a while."""
        keep = [(peer, since) for peer, since in self._idle if now - since < _IDLE_S]
        for peer, since in self._idle:
            if now - since >= _IDLE_S:
                peer.close()
        self._idle = keep

    def close(self) -> None:
        """Close what is idle; requests under way are not touched."""
        for peer, _ in self._idle:
            peer.close()
        self._idle.clear()


class Directory:
    """Models and their engines, as the newest table has them."""

    def __init__(self) -> None:
        self.table = Table()
        self._routes: dict[str, tuple[Route, tuple[Engine, ...]]] = {}
        self._engines: dict[tuple[str, str, int, str | None], Engine] = {}
        self._leaving: list[Engine] = []
        self._changed = trio.Event()
        self.waiting: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()

    def use(self, table: Table) -> None:
        """Take over a table; engines that are in both keep their connections and counts."""
        engines: dict[tuple[str, str, int, str | None], Engine] = {}
        routes: dict[str, tuple[Route, tuple[Engine, ...]]] = {}
        for route in table.routes:
            mine = []
            for endpoint in route.endpoints:
                key = (endpoint.id, endpoint.host, endpoint.port, endpoint.api_key)
                engine = engines.get(key) or self._engines.get(key) or Engine(endpoint)
                engine.draining = endpoint.draining
                engines[key] = engine
                mine.append(engine)
            routes[route.model] = (route, tuple(mine))
        gone = [engine for key, engine in self._engines.items() if key not in engines]
        for engine in gone:
            engine.close()
        self._leaving = [e for e in (*self._leaving, *gone) if e.outstanding]
        self._engines, self._routes, self.table = engines, routes, table
        self._changed.set()
        self._changed = trio.Event()

    def find(self, model: str) -> tuple[Route, tuple[Engine, ...]] | None:
        """A model's route and its engines."""
        return self._routes.get(model)

    async def engine_of(self, model: str, hold_s: float) -> bool:
        """Wait for the model to have an engine that takes requests, for so many seconds; whether it has."""
        if self.waiting[model] >= HELD_MOST:
            return False
        self.waiting[model] += 1
        try:
            with trio.move_on_after(hold_s):
                while (found := self.find(model)) is not None:
                    if any(not engine.draining for engine in found[1]):
                        return True
                    await self._changed.wait()
            return False
        finally:
            self.waiting[model] -= 1
            if not self.waiting[model]:
                del self.waiting[model]

    def routes(self) -> tuple[Route, ...]:
        """Every route, in the catalog's order."""
        return self.table.routes

    def outstanding(self) -> dict[str, int]:
        """Open requests by endpoint id; engines that left the table count until theirs have ended."""
        counts = {engine.endpoint.id: 0 for engine in self._engines.values()}
        for engine in (*self._engines.values(), *self._leaving):
            counts[engine.endpoint.id] = counts.get(engine.endpoint.id, 0) + engine.outstanding
        return counts

    def in_flight(self) -> dict[tuple[str, str], int]:
        """Open requests by model and endpoint id; those for a model's adapters count as the model's."""
        models = {id(engine): route.model for route, engines in reversed(self._routes.values()) for engine in engines}
        return {(models[id(e)], e.endpoint.id): e.outstanding for e in self._engines.values()}

    def sweep(self, now: float) -> None:
        """Look after idle connections and engines that have left."""
        for engine in self._engines.values():
            engine.sweep(now)
        self._leaving = [e for e in self._leaving if e.outstanding]

    def close(self) -> None:
        """Close every idle connection."""
        for engine in self._engines.values():
            engine.close()
