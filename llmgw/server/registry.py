"""From what agents report to what the router needs: the routing table. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from attrs import evolve

from llmgw.router.table import Endpoint, Route, Table
from llmgw.scheduler.state import ClusterState, Goal, NodeState, Replica, ShardReport, ShardState
from llmgw.scheduler.summary import ModelView, of_adapter
from llmgw.settings.catalog import EngineKind, Model
from llmgw.settings.document import Settings

_MAY_ANSWER = "may not be reachable at present"
_SALTED = frozenset({EngineKind.VLLM, EngineKind.SGLANG})
"""Engines that know ``cache_salt``: vLLM 0.9 and SGLang 0.5.3 on; others take no notice of it."""


def _endpoint(report: ShardReport, *, draining: bool, salted: bool) -> Endpoint | None:
    if report.endpoint is None:
        return None
    url = urlsplit(report.endpoint)
    if url.hostname is None or url.port is None:
        return None
    return Endpoint(report.shard, url.hostname, url.port, report.api_key, draining=draining, salted=salted)


def _served(replica: Replica, state: ClusterState) -> Endpoint | None:
    """The endpoint of a replica's rank 0, when its engine is known to serve.

    A node's silence does not take its engines out: they may well answer, and the router notices when they
    do not. So an evicted replica keeps its traffic until its node is back to say otherwise.
    """
    head = replica.shards[0]
    node = state.node(head.node)
    report = state.report(head, replica.generation)
    if node is None or report is None or report.state not in (ShardState.READY, ShardState.DRAINING):
        return None
    # Rank 0 goes on answering, and hangs with the first request, when another rank is gone.
    others = (state.report(shard, replica.generation) for shard in replica.shards[1:])
    if any(r is not None and (r.state is ShardState.STOPPING or r.state.ended) for r in others):
        return None
    going = replica.goal is not Goal.RUN and node.state is NodeState.CONNECTED
    return _endpoint(
        report, draining=going or report.state is ShardState.DRAINING, salted=replica.profile.engine in _SALTED
    )


def routes(settings: Settings, state: ClusterState, views: Mapping[str, ModelView], created: int) -> tuple[Route, ...]:
    """A route a model, in the catalog's order; ``views`` says how each is. Of that only what any user may see.

    A model's adapters follow it, each with the replicas that were started with it, and then its aliases.
    """
    rows: dict[str, list[Replica]] = {}
    for row in state.replicas:
        if row.shards:
            rows.setdefault(row.model, []).append(row)
    made: list[Route] = []
    for model in settings.models:
        view = views.get(model.name)
        if model.endpoints:
            count = len(model.endpoints)
            there = tuple(_static(url) for url in model.endpoints)
            made.append(
                Route(
                    model.name, there, "is served elsewhere", created, state="static", wanted=count,
                    routing=model.routing,
                )
            )  # fmt: skip
            made.extend(_aliases(model, made[-1]))
            continue
        replicas = rows.get(model.name, ())
        serving = [(e, r.profile.served(model.name)) for r in replicas if (e := _served(r, state)) is not None]
        scaling = model.scaling
        hold_s = scaling.hold_s if scaling is not None and scaling.min == 0 else 0.0
        for name in model.names:
            endpoints = tuple(endpoint for endpoint, served in serving if name in served)
            route = Route(name, endpoints, "", created, hold_s, routing=model.routing)
            if view is not None:
                # The model is ready, and an adapter of it may not be yet.
                how = view if name == model.name else of_adapter(view, sum(not e.draining for e in endpoints))
                # Nobody hears of its nodes, and its engines may well answer.
                said = _MAY_ANSWER if endpoints and how.state == "lost" else how.public
                route = evolve(route, public=said, state=how.state, ready=how.ready, wanted=how.wanted)
            made.append(route)
        made.extend(_aliases(model, next(r for r in made if r.model == model.name)))
    return tuple(made)


def _aliases(model: Model, route: Route) -> Iterable[Route]:
    """The model's other names; with each how the model is."""
    for alias in model.aliases:
        yield evolve(route, model=alias, alias_of=model.name, endpoints=())


def _static(url: str) -> Endpoint:
    parts = urlsplit(url)
    return Endpoint(id=url, host=parts.hostname or "", port=parts.port or 80)


def table(
    settings: Settings, state: ClusterState, views: Mapping[str, ModelView], created: int, before: Table
) -> Table:
    """The table to push: ``before`` itself when nothing in it changed, else one with the next version."""
    new = Table(before.version, routes(settings, state, views, created), settings.router, settings.tracing)
    return before if new == before else evolve(new, version=before.version + 1)
