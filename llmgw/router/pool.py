"""The engines of the routing table as the router knows them: connections kept, requests outstanding, failures."""

from __future__ import annotations

import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import trio
from attrs import define, frozen

from llmgw.router.choose import seed_of
from llmgw.router.errors import ApiError
from llmgw.router.health import Health, RetryBudget
from llmgw.router.queue import FairQueue
from llmgw.router.sight import EngineSight, RefusalBook
from llmgw.router.sockets import Peer, dial
from llmgw.router.table import Endpoint, Route, Table
from llmgw.settings.catalog import Routing
from llmgw.settings.document import RouterSettings

_PROBE_S = 2.0
_IDLE_MOST = 64
_IDLE_S = 30.0
"""Engines close idle connections after 5 s (uvicorn) and up; one that was closed meanwhile is noticed at its use."""


class Engine:
    """One endpoint and what the router learnt of it. Lives on over new tables for as long as it is in them."""

    __slots__ = (
        "_idle",
        "draining",
        "endpoint",
        "full",
        "head_lines",
        "health",
        "outstanding",
        "probed",
        "seed",
        "tokens",
    )

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.draining = endpoint.draining
        self.health = Health()
        self.full = False
        self.probed = False
        self.outstanding = 0
        self.tokens = 0
        self.seed = seed_of(endpoint.id)
        self._idle: list[tuple[Peer, float]] = []
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        lines = f"host: {host}:{endpoint.port}\r\n"
        if endpoint.api_key is not None:
            lines += f"authorization: Bearer {endpoint.api_key}\r\n"
        self.head_lines = lines.encode()

    def take_idle(self, now: float) -> Peer | None:
        """A kept connection, the one that was used last; older ones are likelier to be closed. What an engine said
        unasked on one would be taken for its next answer."""
        while self._idle:
            peer, since = self._idle.pop()
            if now - since < _IDLE_S and peer.silent():
                return peer
            peer.close()
        return None

    async def connect(self, timeout_s: float) -> Peer:
        """A new connection. Raises ``OSError``."""
        return await dial(self.endpoint.host, self.endpoint.port, timeout_s)

    def to_probe(self, now: float) -> bool:
        """Whether somebody should ask it if it is there: it was silent, and has been left alone for its time."""
        return self.health.silent and self.health.troubled and now >= self.health.until and not self.probed

    async def probe(self, clock: Callable[[], float]) -> None:
        """Ask it for anything, in place of a client that would wait in vain; how it is is known then."""
        self.probed = True
        try:
            with trio.move_on_after(_PROBE_S):
                peer = await self.connect(_PROBE_S)
                try:
                    await peer.send(b"GET /health HTTP/1.1\r\n" + self.head_lines + b"connection: close\r\n\r\n")
                    if await peer.receive():
                        self.health.heard()
                        return
                finally:
                    peer.close()
        except OSError:
            pass
        finally:
            self.probed = False
        self.health.failed(clock(), silent=True)

    def give_back(self, peer: Peer, now: float) -> None:
        """Keep a connection whose answer ended exactly where it said."""
        if len(self._idle) < _IDLE_MOST:
            self._idle.append((peer, now))
        else:
            peer.close()

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


@frozen
class Timeouts:
    """How long a model's engines may take, in seconds: to be reached, to the first byte, between two pieces, in all."""

    connect_s: float
    first_byte_s: float
    idle_s: float
    total_s: float

    @classmethod
    def of(cls, routing: Routing, router: RouterSettings) -> Timeouts:
        """The model's own where it has any, and the router's."""
        return cls(
            routing.connect_timeout_s or router.connect_timeout_s,
            routing.first_byte_timeout_s or router.first_byte_timeout_s,
            routing.idle_timeout_s or router.idle_timeout_s,
            routing.total_timeout_s or router.total_timeout_s,
        )


class Line:
    """The requests of a model that wait, and how many of them were just let go and are not at an engine yet."""

    __slots__ = ("queue", "released")

    def __init__(self) -> None:
        self.queue: FairQueue[trio.Event] = FairQueue()
        self.released = 0


@define(eq=False)
class Served:
    """A model as this router serves it. ``line`` and ``budget`` live on over new tables.

    ``started`` when it has an engine that takes requests; ``salted`` when one of them knows ``cache_salt``, of which
    the others take no notice.
    """

    route: Route
    engines: tuple[Engine, ...]
    timeouts: Timeouts
    line: Line
    budget: RetryBudget
    started: bool
    salted: bool

    def free(self) -> bool:
        """Whether one more request may go to an engine now."""
        most = self.route.routing.concurrency
        if most is None:
            return self.started
        return sum(most - e.outstanding for e in self.engines if not e.draining) > self.line.released

    def busy_ones(self) -> Sequence[int]:
        """The engines that have all they may have."""
        most = self.route.routing.concurrency
        return () if most is None else [n for n, engine in enumerate(self.engines) if engine.outstanding >= most]


class Directory:
    """Models and their engines, as the newest table has them. ``chance`` is what draws are made with."""

    def __init__(self, chance: random.Random | None = None) -> None:
        self.table = Table()
        self.draw = (chance or random.Random()).random  # noqa: S311
        self._served: dict[str, Served] = {}
        self._engines: dict[tuple[str, str, int, str | None], Engine] = {}
        self._leaving: list[Engine] = []
        self._full: frozenset[str] = frozenset()
        self._waiting_now: set[str] = set()
        self.asked: Counter[str] = Counter()
        self.refused = RefusalBook(time.time)

    def use(self, table: Table) -> None:
        """Take over a table; engines that are in both keep their connections and counts."""
        engines: dict[tuple[str, str, int, str | None], Engine] = {}
        served: dict[str, Served] = {}
        for route in table.routes:
            mine = []
            for endpoint in route.endpoints:
                key = (endpoint.id, endpoint.host, endpoint.port, endpoint.api_key)
                engine = engines.get(key) or self._engines.get(key) or Engine(endpoint)
                engine.endpoint, engine.draining = endpoint, endpoint.draining
                engine.full = endpoint.id in self._full
                engines[key] = engine
                mine.append(engine)
            before = self._served.get(route.model)
            served[route.model] = Served(
                route,
                tuple(mine),
                Timeouts.of(route.routing, table.settings),
                Line() if before is None else before.line,
                RetryBudget() if before is None else before.budget,
                started=any(not endpoint.draining for endpoint in route.endpoints),
                salted=any(endpoint.salted for endpoint in route.endpoints),
            )
        gone = [engine for key, engine in self._engines.items() if key not in engines]
        for engine in gone:
            engine.close()
        self._leaving = [e for e in (*self._leaving, *gone) if e.outstanding]
        left = [s for name, s in self._served.items() if name not in served]
        self._engines, self._served, self.table = engines, served, table
        for model in left:
            while (waiter := model.line.queue.take()) is not None:
                waiter.set()
        self._let_go()

    def fill(self, full: Iterable[str]) -> None:
        """Which engines, by endpoint id, say that they have no room."""
        self._full = frozenset(full)
        for engine in self._engines.values():
            engine.full = engine.endpoint.id in self._full

    def find(self, model: str) -> Served | None:
        """A model by any of its names, if it is in the table."""
        found = self._served.get(model)
        return self._served.get(found.route.alias_of) if found is not None and found.route.alias_of else found

    @staticmethod
    def open(served: Served) -> bool:
        """Whether a request may go to an engine at once, and need not wait for its :meth:`turn`."""
        return not served.line.queue and served.free()

    async def turn(self, served: Served, tenant: str) -> Served:
        """Wait until a request may go to an engine; returns the model as it is then.

        Where there is no engine and none is being started for it that is at once. Raises :class:`ApiError` with 503
        when too many wait, or its time is over while all engines have what they may have.
        """
        line = served.line
        if self.open(served):
            return served
        route = served.route
        wait_s = route.routing.queue_s if served.started else route.hold_s
        if not wait_s:
            return served
        if not line.queue.room(tenant, route.routing.queue):
            raise _too_many(route.model, "too many requests wait for it")
        waiter, goes = trio.Event(), False
        line.queue.put(tenant, waiter)
        self._waiting_now.add(route.model)
        try:
            with trio.move_on_after(wait_s):
                await waiter.wait()
            goes = True
        finally:
            if not line.queue.drop(tenant, waiter):
                line.released = max(0, line.released - 1)
                if not goes:
                    self._let_go()  # its client is gone, and the place that it was given is another's
            if not line.queue:
                self._waiting_now.discard(route.model)
        found = self._served.get(route.model, served)
        if not waiter.is_set() and found.started:
            raise _too_many(route.model, f"no engine was free for it within {wait_s:g} s")
        return found

    def _let_go(self) -> None:
        """Let requests that wait go on, as many as there is room for."""
        for model in list(self._waiting_now):
            served = self._served.get(model)
            while served is not None and served.line.queue and served.free():
                waiter = served.line.queue.take()
                assert waiter is not None
                served.line.released += 1
                waiter.set()
            if served is None or not served.line.queue:
                self._waiting_now.discard(model)

    def began(self, engine: Engine, tokens: int) -> None:
        """A request of about so many tokens goes to an engine; :meth:`ended` follows, however it ends."""
        engine.outstanding += 1
        engine.tokens += tokens
        engine.health.asked()

    def ended(self, engine: Engine, tokens: int) -> None:
        """It has ended."""
        engine.outstanding -= 1
        engine.tokens -= tokens
        engine.health.left()
        if self._waiting_now:
            self._let_go()

    @property
    def waiting(self) -> dict[str, int]:
        """How many requests wait, by model."""
        return {model: len(self._served[model].line.queue) for model in self._waiting_now if model in self._served}

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
        models = {id(e): served.route.model for served in reversed(self._served.values()) for e in served.engines}
        return {(models[id(e)], e.endpoint.id): e.outstanding for e in self._engines.values()}

    def sights(self, now: float, wall: float) -> dict[str, EngineSight]:
        """What is known of engines that have something to do or are left alone, by endpoint id."""
        found = {}
        for engine in self._engines.values():
            health = engine.health
            if health.troubled:
                until = float(round(wall + health.until - now))
                found[engine.endpoint.id] = EngineSight(engine.tokens, 1, until, health.why)
            elif engine.tokens:
                found[engine.endpoint.id] = EngineSight(engine.tokens)
        return found

    def sweep(self, now: float) -> list[Engine]:
        """Look after idle connections and engines that have left. Returns the engines to be probed."""
        for engine in self._engines.values():
            engine.sweep(now)
        self._leaving = [e for e in self._leaving if e.outstanding]
        return [engine for engine in self._engines.values() if engine.to_probe(now)]

    def close(self) -> None:
        """Close every idle connection."""
        for engine in self._engines.values():
            engine.close()


def _too_many(model: str, why: str) -> ApiError:
    # Clients that were turned away together should not all come back together.
    after_s = 1 + secrets.randbelow(5)
    return ApiError(503, f"The model {model} is overloaded: {why}.", "overloaded", retry_after_s=after_s)
