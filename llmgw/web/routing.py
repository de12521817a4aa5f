"""How a model's requests find a replica, and why they wait or were turned away: what ``why`` says of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from llmgw.settings.catalog import Balance, Model
from llmgw.web.source import Routed, RoutedReplica
from llmgw.web.views import Json

_RULES = {
    Balance.PREFIX: "a conversation stays with the replica that has its beginning in its cache while that has room and "
    "no more than 1.25 times its share of the requests (4 at least); others go to the one of two with fewer tokens",
    Balance.LEAST: "of two replicas that are drawn the one with fewer tokens outstanding",
}
_FAILED = {
    "silent": "it took requests and answered none, and is asked by the router before a client's request tries it",
    "failures": "it could not be reached or did not answer 3 times in a row; one request tries it then",
    "errors": "it answered 5 times with 5xx within 10 s; one request tries it then",
}


def routing_view(model: Model, routed: Routed, now: float) -> Json:
    """The rule, each replica with what it has to do and what stands against it, and who was turned away lately."""
    rules = model.routing
    return {
        "balance": rules.balance.value,
        "rule": _RULES[rules.balance],
        "concurrency": rules.concurrency,
        "queue": rules.queue,
        "queue_s": rules.queue_s,
        "waiting": routed.waiting,
        "waits": _waits(model, routed),
        "choices": dict(routed.choices),
        "replicas": [_replica(replica, now) for replica in routed.replicas],
        "refused": [
            {"code": t.code, "count": t.count, "last": t.last, "message": t.message} for t in routed.refused
        ],
    }  # fmt: skip


def _replica(replica: RoutedReplica, now: float) -> Json:
    return {
        "endpoint": replica.endpoint,
        "requests": replica.requests,
        "tokens": replica.tokens,
        "running": replica.running,
        "waiting": replica.waiting,
        "kv_usage": replica.kv_usage,
        "left_alone": replica.left_alone,
        "until": replica.until or None,
        "notes": list(_notes(replica, now)),
    }


def _notes(replica: RoutedReplica, now: float) -> Iterator[str]:
    """What stands against this one."""
    if replica.draining:
        yield "drains: it gets nothing new"
    if replica.full:
        said = f"{replica.waiting} requests wait in it" if replica.waiting else "its KV cache is in use"
        yield f"says that it has no room ({said}): others are taken before it"
    if replica.left_alone:
        workers = "1 worker" if replica.left_alone == 1 else f"{replica.left_alone} workers"
        left = replica.until - now
        time = f"for {left:.0f} s more" if left > 0 else "until it has been tried"
        yield f"left alone by {workers} {time}: {_FAILED.get(replica.why, 'it failed')}"


def _waits(model: Model, routed: Routed) -> str | None:
    """Why requests wait in the router."""
    if not routed.waiting:
        return None
    if all(replica.draining for replica in routed.replicas):
        hold_s = 0.0 if model.scaling is None else model.scaling.hold_s
        return f"no replica takes requests yet; they are held for up to {hold_s:g} s"
    if model.routing.concurrency is None:
        # Nothing bounds them: a worker said so before it had heard of the replica.
        return "replicas are ready and take as many as come; the requests that waited for one go on"
    return (
        f"every replica has the {model.routing.concurrency} requests that it may have; they wait for up to "
        f"{model.routing.queue_s:g} s, {model.routing.queue} of them at most"
    )
