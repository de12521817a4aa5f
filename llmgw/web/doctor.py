"""The admin API's route for the doctor on nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import attrs
import trio
from starlette.requests import Request
from starlette.routing import Route

from llmgw.errors import OperatorError
from llmgw.web.bodies import json_of
from llmgw.web.jobs import Guard


@attrs.frozen
class DoctorRequest:
    """The body: the nodes to check, all of them where none is named."""

    nodes: tuple[str, ...] = ()


class Doctors(Protocol):
    """Who asks nodes; see :class:`llmgw.server.doctors.Doctors`. Refusals are :class:`OperatorError`."""

    async def examine(
        self, nodes: tuple[str, ...]
    ) -> tuple[Mapping[str, dict[str, Any]], Mapping[str, str], tuple[Any, ...]]: ...


def doctor_routes(doctors: Doctors, guarded: Guard) -> list[Route]:
    """``POST /api/v1/doctor`` with ``{"nodes": […]}``; without ``nodes`` it is all of them."""
    one = trio.CapacityLimiter(1)

    async def examine(request: Request) -> Any:
        said = await json_of(request)
        nodes = said.get("nodes", []) if isinstance(said, dict) and not set(said) - {"nodes"} else None
        if not isinstance(nodes, list) or not all(isinstance(node, str) for node in nodes):
            raise OperatorError("the body", "should be an object with nodes, a list of ids", "see docs/ctl.md")
        async with one:
            documents, failed, unequal = await doctors.examine(tuple(dict.fromkeys(nodes)))
        return {
            "nodes": dict(documents),
            "failed": dict(failed),
            "unequal": [attrs.asdict(found) | {"text": str(found)} for found in unequal],
        }

    return [Route("/api/v1/doctor", guarded(examine), methods=["POST"])]
