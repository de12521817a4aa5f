"""The admin API's route for engines' logs: newline-delimited JSON, as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from llmgw.errors import OperatorError
from llmgw.link.messages import LogChunk
from llmgw.web.jobs import Guard

_QUIET_S = 5.0
"""After so long without news an empty object is sent, so that an end of either side is seen."""


class Reader(Protocol):
    """See :class:`llmgw.server.logs.LogReader`."""

    async def next(self, seconds: float) -> LogChunk | None: ...

    def close(self) -> None: ...


class Logs(Protocol):
    """Who can read logs; refusals are :class:`OperatorError`."""

    def read_log(self, replica: str, rank: int, lines: int, *, follow: bool, previous: bool) -> Reader: ...


def _number(request: Request, name: str, usual: int, most: int) -> int:
    text = request.query_params.get(name, str(usual))
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and int(text) <= most):
        raise OperatorError(name, f"must be a whole number from 0 to {most}, found {text[:20]!r}")
    return int(text)


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "0")
    if text not in ("0", "1"):
        raise OperatorError(name, f"must be 0 or 1, found {text[:20]!r}")
    return text == "1"


async def _stream(reader: Reader) -> AsyncIterator[bytes]:
    try:
        while True:
            chunk = await reader.next(_QUIET_S)
            if chunk is None:
                yield b"{}\n"
                continue
            said: dict[str, Any] = {}
            if chunk.skipped:
                said["skipped"] = chunk.skipped
            if chunk.lines:
                said["lines"] = list(chunk.lines)
            if chunk.ended:
                said["end"] = chunk.reason
            yield orjson.dumps(said) + b"\n"
            if chunk.ended:
                return
    finally:
        reader.close()


def log_routes(logs: Logs, guarded: Guard) -> list[Route]:
    """``GET replicas/ID/logs?rank=0&lines=200&follow=1&previous=1`` under ``/api/v1/``."""

    async def read(request: Request) -> Any:
        reader = logs.read_log(
            request.path_params["replica"],
            _number(request, "rank", 0, 999),
            _number(request, "lines", 200, 10_000),
            follow=_flag(request, "follow"),
            previous=_flag(request, "previous"),
        )
        headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        return StreamingResponse(_stream(reader), 200, headers, "application/x-ndjson")

    return [Route("/api/v1/replicas/{replica}/logs", guarded(read))]
