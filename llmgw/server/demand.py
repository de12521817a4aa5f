"""What each model has to do, put together from what the router and the engines say. In memory only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from llmgw.router.wire import Load
from llmgw.scheduler.scale import Demand, EngineLoad
from llmgw.scheduler.state import Replica
from llmgw.settings.catalog import Model

_KV_GONE = 0.95
"""From this share of used KV cache on an engine puts requests off, or takes the cache of running ones."""


class DemandBook:
    """The newest word of the router and of each node's engines. ``started`` is when nobody had asked for anything yet.

    That is the beginning of this control plane: an idle time goes on from there, because nobody knows what was before.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self._routed: Load | None = None
        self._asked: dict[str, float] = {}
        self._engines: dict[str, tuple[EngineLoad, ...]] = {}
        self._full: dict[str, tuple[str, ...]] = {}

    @property
    def waiting(self) -> Mapping[str, int]:
        """The requests that are held for want of an engine, by model."""
        return {} if self._routed is None else self._routed.waiting

    def routed(self, load: Load, now: float) -> None:
        """The router said what it has."""
        before = {} if self._routed is None else self._routed.asked
        for model, count in load.asked.items():
            if count != before.get(model, 0):
                self._asked[model] = now
        for model in load.waiting:
            self._asked[model] = now
        self._routed = load

    def worked(self, node: str, loads: tuple[EngineLoad, ...]) -> bool:
        """A node's engines said what they have. Whether others of them are full than before."""
        before = self._full.pop(node, ())
        if loads:
            self._engines[node] = loads
        else:
            self._engines.pop(node, None)
        # A thousand nodes say so every few seconds: each is looked at alone.
        if full := tuple(e.shard for e in loads if e.waiting or (e.kv_usage or 0.0) >= _KV_GONE):
            self._full[node] = full
        return full != before

    def engines(self) -> dict[str, EngineLoad]:
        """What engines say of themselves, by shard."""
        return {load.shard: load for loads in self._engines.values() for load in loads}

    def full(self) -> tuple[str, ...]:
        """The shards whose engines say that they have no room for another request."""
        return tuple(sorted(shard for shards in self._full.values() for shard in shards))

    def gone(self, node: str) -> bool:
        """What a node's engines said does not hold any more. Whether some of them were full."""
        return self.worked(node, ())

    def of(self, models: Iterable[Model], replicas: Iterable[Replica]) -> dict[str, Demand]:
        """What each model that follows its load has to do; nothing before the router's first word."""
        scaling = {model.name: model.names for model in models if model.scaling is not None}
        if not scaling or self._routed is None:
            return {}
        said = {(e.shard, e.generation): e for loads in self._engines.values() for e in loads}
        made = {}
        rows: dict[str, list[Replica]] = {name: [] for name in scaling}
        for row in replicas:
            if row.model in scaling and row.shards:
                rows[row.model].append(row)
        for name, names in scaling.items():
            engines = [e for r in rows[name] if (e := said.get((r.shards[0].shard, r.generation))) is not None]
            routed = sum(self._routed.outstanding.get(r.shards[0].shard, 0) for r in rows[name])
            waiting = sum(e.waiting for e in engines)
            # Whoever asks an engine past the router is seen by the engine only.
            running = max(routed, sum(e.running for e in engines) + waiting) - waiting
            usage = [e.kv_usage for e in engines if e.kv_usage is not None]
            made[name] = Demand(
                running=running,
                waiting=waiting + sum(self._routed.waiting.get(n, 0) for n in names),
                kv_usage=sum(usage) / len(usage) if usage else None,
                asked=max(self._started, *(self._asked.get(n, 0.0) for n in names)),
            )
        return made
