"""What the connections of one worker have in common."""

from __future__ import annotations

from collections.abc import Callable

import trio
from attrs import frozen

from llmgw.router.front import Front
from llmgw.router.gate import Gate
from llmgw.router.metrics import RouterMetrics
from llmgw.router.pool import Directory
from llmgw.router.sockets import Ticker, Watch


@frozen
class Shared:
    """What every connection of a worker shares. ``clock`` is for durations, ``ticker`` for deadlines;
    ``ids`` makes the id of a request that has none; ``readers`` are the threads that read large bodies."""

    directory: Directory
    metrics: RouterMetrics
    gate: Gate
    clock: Callable[[], float]
    ticker: Ticker
    ids: Callable[[], bytes]
    ready: Callable[[], str]
    draining: Callable[[], bool]
    front: Front
    watch: Watch
    readers: trio.CapacityLimiter
