"""The admin API's routes for jobs: what they are, and how one is begun and cancelled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Protocol

import attrs
from attrs import frozen
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmgw.errors import OperatorError
from llmgw.scheduler.jobs import Install, way
from llmgw.store.api import JobRow
from llmgw.web.bodies import actor, structured
from llmgw.web.source import Source

Answer = Callable[[Request], Awaitable[Any]]
Guard = Callable[[Answer], Callable[[Request], Awaitable[Response]]]


class Jobs(Protocol):
    """Who knows the jobs; see :class:`llmgw.server.jobs.Jobs`. Refusals are :class:`OperatorError`."""

    def rows(self) -> tuple[JobRow, ...]: ...

    def row(self, job: str) -> JobRow: ...

    async def fetch(self, node: str, what: str, by: str, *, update: bool = False) -> tuple[JobRow, ...]: ...

    async def install(self, node: str, install: Install, by: str) -> JobRow: ...

    async def cancel(self, job: str, by: str, reason: str) -> JobRow: ...


@frozen
class FetchRequest:
    """``weights`` is a name on a hub, or a model's name for all of its weights."""

    weights: str
    update: bool = False


@frozen
class JobRequest:
    """The body of ``POST /api/v1/jobs``: where, and one of the two."""

    SCHEMA_RULES: ClassVar = {
        "anyOf": [
            {"properties": {"fetch": {"type": "object"}, "install": {"type": "null"}}, "required": ["fetch"]},
            {"properties": {"install": {"type": "object"}, "fetch": {"type": "null"}}, "required": ["install"]},
        ]
    }
    node: str
    fetch: FetchRequest | None = None
    install: Install | None = None


def job_view(row: JobRow, now: float) -> dict[str, Any]:
    """One job as JSON; the text of a lock file is not in it."""
    job = row.report
    return {
        "id": job.id,
        "node": row.node,
        "kind": job.kind.value,
        "subject": job.subject,
        "state": job.state.value,
        "reason": job.reason,
        "says": way(job, now),
        "remedy": job.remedy,
        "started": job.started,
        "since": job.since,
        "steps": [attrs.asdict(step) for step in job.steps],
        "done_bytes": job.done_bytes,
        "total_bytes": job.total_bytes,
        "ends_at": job.ends_at,
        "attempt": job.attempt,
        "result": dict(job.result),
        "cancel": row.cancel,
    }


def job_routes(jobs: Jobs, source: Source, guarded: Guard) -> list[Route]:
    """``GET`` and ``POST /api/v1/jobs``, ``GET /api/v1/jobs/ID``, ``POST /api/v1/jobs/ID/cancel``."""

    def view(*rows: JobRow) -> dict[str, Any]:
        now = source.now()
        return {"now": now, "jobs": [job_view(row, now) for row in rows]}

    async def every(_request: Request) -> Any:
        return view(*jobs.rows())

    async def one(request: Request) -> Any:
        return view(jobs.row(request.path_params["job"]))

    async def begin(request: Request) -> Any:
        asked: JobRequest = await structured(request, JobRequest)
        if asked.fetch is not None and asked.install is None:
            return view(*await jobs.fetch(asked.node, asked.fetch.weights, actor(request), update=asked.fetch.update))
        if asked.install is not None and asked.fetch is None:
            return view(await jobs.install(asked.node, asked.install, actor(request)))
        raise OperatorError("the body", "should have either fetch or install", "see docs/ctl.md")

    async def cancel(request: Request) -> Any:
        return view(await jobs.cancel(request.path_params["job"], actor(request), "cancelled by an operator"))

    return [
        Route("/api/v1/jobs", guarded(every), methods=["GET"]),
        Route("/api/v1/jobs", guarded(begin), methods=["POST"]),
        Route("/api/v1/jobs/{job}", guarded(one), methods=["GET"]),
        Route("/api/v1/jobs/{job}/cancel", guarded(cancel), methods=["POST"]),
    ]
