"""What the admin side shows, and where it gets it: the daemon implements this, the web floor only reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from attrs import field, frozen

from llmgw.scheduler.explain import Unplaced
from llmgw.scheduler.state import ClusterState
from llmgw.settings.catalog import Model
from llmgw.settings.document import Settings
from llmgw.store.api import StoredDecision


@frozen
class RouterProcess:
    """One worker process of the router, and the requests that it has in flight. ``since`` in epoch seconds."""

    pid: int
    state: str
    reason: str
    since: float
    streams: int


@frozen
class RouterStatus:
    """The router: where it listens, and whether it is there. ``since`` in epoch seconds, ``pid`` its oldest worker's.

    ``keys`` says whether it wants an API key of its clients, ``active_keys`` how many would do.
    """

    listen: str
    state: str
    reason: str
    since: float
    pid: int | None
    streams: int
    keys: bool = False
    active_keys: int = 0
    workers: tuple[RouterProcess, ...] = ()


@frozen
class RoutedReplica:
    """One engine of a model as the router sees it, and as it says itself (``None``: it does not).

    ``requests`` and ``tokens`` are outstanding at it. ``full``: by its own word it has no room. So many workers of the
    router have ``left_alone`` what failed, ``until`` when (epoch seconds), because of ``failures`` in a row, because it
    was ``silent``, or because of ``errors``.
    """

    endpoint: str
    draining: bool
    requests: int
    tokens: int
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    full: bool = False
    left_alone: int = 0
    until: float = 0.0
    why: str = ""


@frozen
class Turned:
    """Requests of the last minutes that ended with one code: how many, when the last was, and what it was told."""

    code: str
    count: int
    last: float
    message: str


@frozen
class Routed:
    """What the router has to do for a model. ``choices`` counts why replicas were taken, since its workers began."""

    replicas: tuple[RoutedReplica, ...] = ()
    waiting: int = 0
    choices: Mapping[str, int] = field(factory=dict)
    refused: tuple[Turned, ...] = ()


@frozen
class Identity:
    """Which control plane answers. ``leader`` is the admin API of the one that leads, where that is another."""

    version: str
    cluster: str
    epoch: int
    started: float
    control_plane: bool
    settings_revision: int
    leads: bool = True
    leader: str = ""


class Source(Protocol):
    """A consistent reading of the daemon's memory. Nothing here waits for a node."""

    def now(self) -> float:
        """Epoch seconds."""
        ...

    def identity(self) -> Identity: ...

    def settings(self) -> Settings: ...

    def state(self) -> ClusterState: ...

    def unplaced(self) -> tuple[Unplaced, ...]: ...

    def router(self) -> RouterStatus: ...

    def routed(self, model: Model) -> Routed:
        """How the router treats this model's requests now, those for its adapters among them."""
        ...

    async def decisions(self, limit: int, about: str | None = None) -> tuple[StoredDecision, ...]:
        """The newest ones, newest first; of those only what names ``about`` as its replica, model or node."""
        ...

    async def release_brake(self, by: str) -> float:
        """The nodes that are silent by now are gone: an operator says so. When that was, in epoch seconds.

        Raises :class:`OperatorError` when it cannot be written down; nothing is released then.
        """
        ...

    def metrics(self) -> bytes: ...

    def ready(self) -> str:
        """Empty when this daemon does its work, else the reason why not."""
        ...
