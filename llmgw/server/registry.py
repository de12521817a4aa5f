"""From what agents report to what the router needs: the routing table. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from llmgw.router.table import Endpoint, Route, Table
from llmgw.scheduler.state import ClusterState, Goal, NodeState, Replica, ShardReport, ShardState
from llmgw.settings.document import Settings


def _endpoint(report: ShardReport, *, draining: bool) -> Endpoint | None:
    if report.endpoint is None:
        return None
    url = urlsplit(report.endpoint)
    if url.hostname is None or url.port is None:
        return None
    return Endpoint(id=report.shard, host=url.hostname, port=url.port, api_key=report.api_key, draining=draining)


def _served(replica: Replica, state: ClusterState) -> Endpoint | None:
    """The endpoint of a replica's rank 0, when its engine is known to serve.

    A node's silence does not take its engines out: they may well answer, and the router notices when they
    do not. So an evicted replica keeps its traffic until its node is back to say otherwise.
    """
    head = replica.shards[0]
    node = state.node(head.node)
    if node is None:
        return None
    # Rank 0 goes on answering, and hangs with the first request, when another rank is gone.
    others = (state.report(shard, replica.generation) for shard in replica.shards[1:])
    if any(r is not None and (r.state is ShardState.STOPPING or r.state.ended) for r in others):
        return None
    for report in node.reports:
        if report.shard == head.shard and report.generation == replica.generation:
            if report.state not in (ShardState.READY, ShardState.DRAINING):
                return None
            going = replica.goal is not Goal.RUN and node.state is NodeState.CONNECTED
            return _endpoint(report, draining=going or report.state is ShardState.DRAINING)
    return None


def routes(settings: Settings, state: ClusterState, reasons: Mapping[str, str], created: int) -> tuple[Route, ...]:
    """A route a model, in the catalog's order; ``reasons`` says of each model why nothing of it may be ready.

    A model's adapters follow it, each with the replicas that were started with it.
    """
    made: list[Route] = []
    serving: list[tuple[Endpoint, tuple[str, ...]]]
    for model in settings.models:
        if model.endpoints:
            serving = [(_static(url), (model.name,)) for url in model.endpoints]
        else:
            replicas = [r for r in state.replicas if r.model == model.name and r.shards]
            serving = [(e, r.profile.served(model.name)) for r in replicas if (e := _served(r, state)) is not None]
        scaling = model.scaling
        hold_s = scaling.hold_s if scaling is not None and scaling.min == 0 else 0.0
        for name in model.names:
            endpoints = tuple(endpoint for endpoint, served in serving if name in served)
            made.append(Route(name, endpoints, reasons.get(model.name, ""), created, hold_s))
    return tuple(made)


def _static(url: str) -> Endpoint:
    parts = urlsplit(url)
    return Endpoint(id=url, host=parts.hostname or "", port=parts.port or 80)


def table(settings: Settings, state: ClusterState, reasons: Mapping[str, str], created: int, before: Table) -> Table:
    """The table to push: ``before`` itself when nothing in it changed, else one with the next version."""
    new = Table(before.version, routes(settings, state, reasons, created), settings.router)
    return before if new == before else Table(before.version + 1, new.routes, new.settings)
