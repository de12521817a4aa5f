"""What users ask for: so many requests at a time for each model, spread over the engines that the router knows."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import trio

from llmgw.router.table import Route
from llmgw.router.wire import Load
from llmgw.scheduler.scale import EngineLoad

from .engines import Phase

if TYPE_CHECKING:
    from .node import Node
    from .plane import Plane
    from .world import World

_COUNTED_S = 600.0
_FROM_ZERO_S = 60.0
_LATE_S = 10.0
SLOTS = 4
"""An engine takes so many times its target before requests wait in it and its KV cache is full."""


class Traffic:
    """The router's counts. ``levels`` has how many requests at a time each model that follows its load is asked for.

    ``waits`` says that some of them are held: then a new routing table is looked at as it comes.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.levels: dict[str, int] = {m.name: 1 for m in world.plan.models if m.scaling is not None}
        self._asked: dict[str, int] = defaultdict(int)
        self._open: dict[str, int] = {}
        self.waits = False
        self._held: dict[str, float] = {}

    async def run(self) -> None:
        """Count now and then, and tell every control plane."""
        while True:
            # Well within the time after which nobody seems to ask any more.
            await trio.sleep(min(self._world.draw.expovariate(1 / _COUNTED_S), _COUNTED_S))
            self.count()

    def ask(self, model: str, level: int) -> None:
        """From now on a model is asked for by so many at a time."""
        self.levels[model] = level
        self._world.trace.say(f"{level} requests at a time for {model}")
        self.count()

    def count(self) -> None:
        """Tell every control plane what there is by now."""
        self.waits = False
        for plane in (p for p in self._world.planes if not p.over):
            routes = [route for table in plane.tables for route in table.routes]
            load = self._load(routes, self._world.draw)
            self._open = load.outstanding
            self.waits |= bool(load.waiting)
            self.tell(plane, load)
            for model in load.waiting:
                if self.number(plane, model) == 0:
                    self._world.daemons.start_soon(self._starts, plane, model)

    def tell(self, plane: Plane, load: Load) -> None:
        """A control plane hears of it."""
        plane.loaded(load)

    def _load(self, routes: Iterable[Route], draw: random.Random) -> Load:
        outstanding: dict[str, int] = {}
        waiting: dict[str, int] = {}
        for route in routes:
            takes = [e.id for e in route.endpoints if not e.draining]
            outstanding |= {e.id: draw.choice((0, 0, 3)) for e in route.endpoints}
            if (level := self.levels.get(route.model)) is None:
                continue
            self._asked[route.model] += level
            for at, name in enumerate(takes):
                outstanding[name] = level // len(takes) + (at < level % len(takes))
            if level and not takes:
                waiting[route.model] = level
                self._held[route.model] = float("inf")
            elif self._held.get(route.model) == float("inf"):
                self._held[route.model] = trio.current_time()
        return Load(outstanding, waiting, {name: count for name, count in self._asked.items() if count})

    def held_lately(self, model: str) -> bool:
        """Whether requests were held for want of an engine, as a control plane may still believe."""
        return self._held.get(model, float("-inf")) >= trio.current_time() - _FROM_ZERO_S

    def of(self, node: Node) -> tuple[EngineLoad, ...]:
        """What the engines on a node say of their work."""
        made = []
        for engine in node.engines:
            model = self._world.settings.model(engine.command.model)
            if engine.phase is not Phase.SERVING or engine.hung or model is None or model.scaling is None:
                continue
            slots = SLOTS * int(model.scaling.target)
            has = self._open.get(engine.command.shard, 0)
            usage = min(1.0, has / slots)
            made.append(EngineLoad(engine.command.shard, engine.command.generation, min(has, slots),
                                   max(0, has - slots), usage))  # fmt: skip
        return tuple(made)

    @staticmethod
    def number(plane: Plane, model: str) -> int | None:
        """How many replicas a control plane says that a model shall have by its load."""
        found = None if plane.cluster is None else plane.cluster.scales.get(model)
        return None if found is None else found.number

    async def _starts(self, plane: Plane, model: str) -> None:
        """A model of which there is none, and which is waited for, is started in time by whoever decides."""
        await trio.sleep(_FROM_ZERO_S)
        for _ in range(2):
            world = self._world
            decides = not plane.over and plane.cluster is not None and plane.cluster.epoch == world.disk.epoch
            known = world.settings.model(model)
            if not decides or self.number(plane, model) != 0 or known is None or known.scaling is None:
                return
            if not self.levels[model] or world.disk.trouble:
                return
            await trio.sleep(_LATE_S)
        self._world.fail("from zero in time", f"{model} is waited for, and there shall be none of it")
