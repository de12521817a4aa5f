"""The routing table: all that the router knows about models and where they are served.

The control plane pushes a whole new table whenever anything in it changed; a router without a control plane
keeps the last one.
"""

from __future__ import annotations

from attrs import field, frozen

from llmgw.settings.catalog import Routing
from llmgw.settings.document import RouterSettings, Tracing


@frozen
class Endpoint:
    """One engine. ``id`` is its shard, or the URL for an engine that somebody else runs.

    ``api_key`` is what the engine wants as a bearer token. ``draining`` endpoints finish what they have and
    get nothing new. ``salted`` ones know ``cache_salt``.
    """

    id: str
    host: str
    port: int
    api_key: str | None = field(default=None, repr=False)
    draining: bool = False
    salted: bool = False


@frozen
class Route:
    """A model, its engines, and how it is: ``ready`` (``None``: nobody counts them) of ``wanted`` replicas.

    ``public`` is a phrase for the model's users, to be put behind its name: no node, replica or other model is in it.
    With ``alias_of`` it is another name for that model, and nothing else in it is used.
    ``hold_s`` is how long a request waits for an engine when there is none, because one is started for it.
    """

    model: str
    endpoints: tuple[Endpoint, ...]
    public: str = ""
    created: int = 0
    hold_s: float = 0.0
    state: str = ""
    ready: int | None = None
    wanted: int = 0
    routing: Routing = Routing()
    alias_of: str = ""


@frozen
class Table:
    """Every route, in the catalog's order. ``version`` goes up with each push."""

    version: int = 0
    routes: tuple[Route, ...] = ()
    settings: RouterSettings = RouterSettings()
    tracing: Tracing | None = None
