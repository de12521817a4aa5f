"""The catalog: the models that this cluster offers, and the profiles under which each can run.

The router, the scheduler, the agent and the settings check read these same classes; the checks on their
values are in :mod:`llmgw.settings.validate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from attrs import field, frozen

_NONE: Mapping[str, str] = MappingProxyType({})


class EngineKind(StrEnum):
    """The inference engines that llmgw knows how to run."""

    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMACPP = "llamacpp"


class Task(StrEnum):
    """What a model is asked for: text, the vector of a text, or how well documents answer a query."""

    GENERATE = "generate"
    EMBED = "embed"
    RERANK = "rerank"


@frozen
class Limits:
    """How long a shard may stay in a state before it counts as failed, in seconds.

    The defaults let a 70B model load from slow storage: ``start_s`` bounds ``starting``, ``load_s`` the time in
    ``loading`` without a step forward, ``hang_s`` how long requests may run in a ready engine with nothing coming of
    them, ``drain_s`` the wait for streams before a stop, ``stop_s`` the grace between SIGTERM and SIGKILL.
    """

    start_s: float = 600.0
    load_s: float = 1800.0
    hang_s: float = 120.0
    drain_s: float = 60.0
    stop_s: float = 30.0


@frozen
class Profile:
    """One way to run a model.

    ``device_class`` lists the classes that it may run on, most wanted first; one replica never mixes them.
    ``gpus`` counts the devices on each node, so a replica has ``nodes * gpus == dp * tp * pp`` of them: ``dp`` groups
    of ``tp * pp`` devices, each with requests of its own. With ``expert_parallel`` the experts of a mixture are spread
    over all devices of all groups. ``lora`` names adapters and where they are; clients ask for ``<model>:<name>``.
    ``memory_gib`` is the least device memory that it needs: it stands in for what would be estimated. That counts the
    weights' own files, or ``parameters`` until somebody has them, and room for ``concurrency`` whole contexts; neither
    is told to the engine. ``allow_args`` names arguments in ``args`` that the operator vouches for: those that no table
    knows, and those that run other code or reach other files.
    """

    name: str
    engine: EngineKind
    weights: str
    device_class: tuple[str, ...]
    gpus: int = 1
    nodes: int = 1
    tp: int = 1
    pp: int = 1
    dp: int = 1
    expert_parallel: bool = False
    task: Task = Task.GENERATE
    lora: Mapping[str, str] = field(default=_NONE, hash=False)
    memory_gib: float | None = None
    context_length: int | None = None
    quantization: str | None = None
    gpu_memory_utilization: float | None = None
    parameters: float | None = None
    concurrency: int | None = None
    args: tuple[str, ...] = ()
    allow_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default=_NONE, hash=False)
    limits: Limits = Limits()

    @property
    def devices(self) -> int:
        """How many devices one replica holds in all."""
        return self.nodes * self.gpus

    def served(self, model: str) -> tuple[str, ...]:
        """Every name that a replica answers to: the model's, and one for each adapter."""
        return (model, *(f"{model}:{name}" for name in self.lora))


class Packing(StrEnum):
    """Which of several places is taken: ``pack`` keeps whole NVLink domains and nodes free for large models, ``spread``
    keeps the replicas of a model and the load of the nodes apart."""

    PACK = "pack"
    SPREAD = "spread"


class Update(StrEnum):
    """How an edited profile takes over: ``surge`` places the new replica beside the old one where there is room for
    both, ``replace`` always takes the old one away first."""

    SURGE = "surge"
    REPLACE = "replace"


@frozen
class PlacementRules:
    """Where a model's replicas may go.

    ``nodes`` are labels that a node must have, ``tolerate`` the taints that it may have, and ``per_node`` is how many
    replicas of the model may be on one node.
    """

    policy: Packing = Packing.PACK
    nodes: Mapping[str, str] = field(default=_NONE, hash=False)
    tolerate: tuple[str, ...] = ()
    per_node: int | None = None


@frozen
class Scaling:
    """How many replicas a model has by its load: ``min`` to ``max``, so that each has about ``target`` requests.

    More when the load asked for it for ``up_s``, fewer when it did for ``down_s``, and never two changes within
    ``cooldown_s``. With ``min: 0`` the last one goes after ``idle_s`` without a request; a request brings it back,
    and waits for it up to ``hold_s``.
    """

    min: int = 1
    max: int = 1
    target: float = 16.0
    up_s: float = 15.0
    down_s: float = 300.0
    idle_s: float = 900.0
    cooldown_s: float = 60.0
    hold_s: float = 600.0


class Balance(StrEnum):
    """Which replica a request goes to: ``prefix`` keeps a conversation with the engine that has its beginning in its
    cache, as long as that has room; ``least`` takes the one with the fewest tokens outstanding of two."""

    PREFIX = "prefix"
    LEAST = "least"


@frozen
class Routing:
    """How the router treats a model's requests.

    At most ``concurrency`` are at one engine at a time (unset: as many as come, the engine has a queue of its own); up
    to ``queue`` wait for one, their users in turn, each for ``queue_s``. The times, in seconds, stand in for those of
    the ``router`` section: to reach it, until the first byte, between two pieces, and in all.
    """

    balance: Balance = Balance.PREFIX
    concurrency: int | None = None
    queue: int = 256
    queue_s: float = 30.0
    connect_timeout_s: float | None = None
    first_byte_timeout_s: float | None = None
    idle_timeout_s: float | None = None
    total_timeout_s: float | None = None


@frozen
class Model:
    """A name that clients ask for, and how it is served.

    A model has either ``profiles`` (the control plane places ``replicas`` of it, trying the profiles in
    order) or ``endpoints`` (base URLs of engines that somebody else runs; the router only forwards). With ``scaling``
    its number follows the load, and ``replicas`` is not used. A model of a higher ``priority`` takes the devices of one
    of a lower, once that had them for ``min_run_s``; ``group`` is whose quota its devices count against. ``aliases``
    are other names that clients may ask for it by.
    """

    name: str
    profiles: tuple[Profile, ...] = ()
    replicas: int = 1
    endpoints: tuple[str, ...] = ()
    placement: PlacementRules = PlacementRules()
    priority: int = 0
    min_run_s: float = 300.0
    group: str = ""
    update: Update = Update.SURGE
    scaling: Scaling | None = None
    routing: Routing = Routing()
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that clients may ask for: its own, and those of its profiles' adapters."""
        return tuple(dict.fromkeys((self.name, *(name for p in self.profiles for name in p.served(self.name)))))

    def profile(self, name: str) -> Profile | None:
        """The profile of this name, if the model has one."""
        return next((p for p in self.profiles if p.name == name), None)
