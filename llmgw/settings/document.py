"""The settings document: everything that the cluster as a whole is told."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from attrs import field, frozen

from llmgw.settings.bounds import EXACT, declared
from llmgw.settings.catalog import Model, Scaling
from llmgw.settings.daemon import DoctorRules
from llmgw.settings.keys import Period

_NONE: Mapping[str, str] = MappingProxyType({})


@frozen
class Liveness:
    """When a silent node stops counting as there, in seconds since its last heartbeat.

    ``heartbeat_s`` is how often agents send one; at ``unreachable_s`` nothing new is placed on the node; at
    ``lost_s`` its replicas are placed elsewhere. When more than ``brake_share`` of the nodes, and at least
    ``brake_nodes``, fall silent within ``brake_window_s`` of each other, the control plane suspects itself, and nothing
    is replaced until they are back or an operator says so.
    """

    heartbeat_s: float = 5.0
    unreachable_s: float = 15.0
    lost_s: float = 60.0
    brake_share: float = 1 / 3
    brake_nodes: int = 3
    brake_window_s: float = 60.0


@frozen
class NodeRules:
    """What operators say of a node: ``labels`` that models can ask for, and ``taints`` that keep out every model that
    does not tolerate them."""

    labels: Mapping[str, str] = field(default=_NONE, hash=False)
    taints: tuple[str, ...] = ()


@frozen
class WeightsRules:
    """What nodes may fetch: ``sources`` are ``hf:org/name``, or ``hf:org/*`` for all of an organisation.

    ``mirror`` is the address that is asked instead of the hub's own; with ``offline`` nothing is asked, and what is in
    a node's cache must do. Paths need no rule: they are used where they are.
    """

    sources: tuple[str, ...] = ()
    mirror: str = ""
    offline: bool = False


NOTHING_FETCHED = WeightsRules()
"""The rules where nothing may be fetched."""

_NO_NODES: Mapping[str, NodeRules] = MappingProxyType({})
_NO_QUOTAS: Mapping[str, Mapping[str, int]] = MappingProxyType({})


class Auth(StrEnum):
    """Who may use the router: ``open`` is everyone who reaches it, ``keys`` whoever has an API key."""

    OPEN = "open"
    KEYS = "keys"


@frozen
class Price:
    """What a million tokens cost, in whatever unit the operator counts in."""

    prompt: float = 0.0
    completion: float = 0.0

    def of(self, prompt: int, completion: int) -> int:
        """The price of so many tokens, in millionths of that unit."""
        return round(prompt * self.prompt + completion * self.completion)


_NO_PRICES: Mapping[str, Price] = MappingProxyType({})


@frozen
class RouterSettings:
    """How the router treats requests. Times in seconds, sizes in bytes; ``prices`` by model.

    ``max_media_bytes`` is for routes that take recordings and images. ``media_hosts`` are the hosts that addresses in
    requests may name; one that begins with a dot stands for all names below it, none for every public host.
    """

    max_body_bytes: int = 8 * 1024 * 1024
    max_media_bytes: int = 64 * 1024 * 1024
    media_hosts: tuple[str, ...] = ()
    connect_timeout_s: float = 2.0
    first_byte_timeout_s: float = 600.0
    idle_timeout_s: float = 120.0
    total_timeout_s: float = 3600.0
    auth: Auth = Auth.OPEN
    prices: Mapping[str, Price] = field(default=_NO_PRICES, hash=False)


_NO_PART: Mapping[str, Any] = MappingProxyType({})
_NO_PARTS: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


@frozen
class AgentSettings:
    """What agents are told beside their ``agent.yaml``, as it is written there: all of them, and single ones by id.

    :mod:`llmgw.settings.agent_part` says what that comes to on a node.
    """

    default: Mapping[str, Any] = field(default=_NO_PART, hash=False)
    nodes: Mapping[str, Mapping[str, Any]] = field(default=_NO_PARTS, hash=False)


@frozen
class KeyDefaults:
    """The limits of a key that is made without a word on them; ``budget_cost`` is in the unit of ``router.prices``."""

    requests_per_minute: int | None = declared(None, minimum=0, maximum=EXACT)
    tokens_per_minute: int | None = declared(None, minimum=0, maximum=EXACT)
    concurrent: int | None = declared(None, minimum=0, maximum=EXACT)
    budget_tokens: int | None = declared(None, minimum=0, maximum=EXACT)
    budget_cost: float | None = declared(None, minimum=0, maximum=EXACT // 1_000_000)
    budget_period: Period = Period.MONTH


@frozen
class KeyPolicy:
    """What holds for API keys from now on: ``limits`` for keys that are made, and ``longest_days``, the latest end that
    a key can be given, counted from then. Keys that there are stay as they are."""

    limits: KeyDefaults = KeyDefaults()
    longest_days: float | None = None


@frozen
class Tracing:
    """Where spans of requests go: ``endpoint`` takes OTLP over HTTP. ``share`` of the requests that no caller traces
    already become spans."""

    endpoint: str
    share: float = 1.0


@frozen
class Settings:
    """The whole document. ``models`` keeps the order in which the operator wrote them.

    ``nodes`` has rules for nodes by id; ``quotas`` says how many devices of a class the models of a group may have.
    ``scaling`` is what the ``scaling`` of a model leaves out; a model without one does not follow its load. ``doctor``
    holds on every node whose ``agents`` say nothing else.
    """

    models: tuple[Model, ...] = ()
    router: RouterSettings = RouterSettings()
    liveness: Liveness = Liveness()
    nodes: Mapping[str, NodeRules] = field(default=_NO_NODES, hash=False)
    quotas: Mapping[str, Mapping[str, int]] = field(default=_NO_QUOTAS, hash=False)
    weights: WeightsRules = WeightsRules()
    scaling: Scaling = Scaling()
    keys: KeyPolicy = KeyPolicy()
    tracing: Tracing | None = None
    agents: AgentSettings = AgentSettings()
    doctor: DoctorRules = DoctorRules()

    def model(self, name: str) -> Model | None:
        """The model of this name, if the catalog has it."""
        return next((m for m in self.models if m.name == name), None)

    @property
    def needs_control_plane(self) -> bool:
        """Whether any model declares a profile; without one ``llmgw server`` is only a router."""
        return any(m.profiles for m in self.models)
