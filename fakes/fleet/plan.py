"""What a seed stands for: a fleet, its models, and what will go wrong when."""

from __future__ import annotations

import random
from collections.abc import Sequence

from attrs import frozen

from llmgw.settings.catalog import EngineKind, Limits, Model, Packing, PlacementRules, Profile, Update

from .machines import KINDS, Kind

HOUR = 3600.0

HEARTBEATS_S = (60.0, 180.0)
"""Heartbeats and quiet passes are most of what happens, and find nothing: they are rarer than usual, the more so the
more of them there would be, and so is all that is measured in them."""

_BEATS = 200
_MOST_NODES = 12
_BURST_EVERY = 1.0 * HOUR


@frozen
class NodePlan:
    """One node: its kind, its fabric if it is on one, and the engines that are installed."""

    id: str
    kind: Kind
    fabric: str | None
    engines: tuple[EngineKind, ...]


@frozen
class FaultPlan:
    """At ``at`` seconds something of this kind begins; ``draw`` seeds everything else about it."""

    at: float
    kind: str
    draw: int


@frozen
class Plan:
    """A seed's fleet. ``length_s`` is when the last fault ends; ``heartbeat_s`` sets the pace of the link."""

    seed: int
    length_s: float
    heartbeat_s: float
    nodes: tuple[NodePlan, ...]
    models: tuple[Model, ...]
    faults: tuple[FaultPlan, ...]


FAULTS: Sequence[tuple[str, int]] = (
    ("cut", 6),
    ("half-open", 6),
    ("partition", 6),
    ("slow", 4),
    ("agent-killed", 8),
    ("agent-stopped", 4),
    ("power-off", 7),
    ("carve", 5),
    ("device-breaks", 5),
    ("memory-held", 3),
    ("fabric-down", 3),
    ("clock-jump", 4),
    ("replicas", 8),
    ("profile", 6),
    ("limits", 2),
    ("model-removed", 4),
    ("plane-killed", 8),
    ("plane-stopped", 3),
    ("takeover", 6),
    ("store", 4),
    ("engine-dies", 9),
    ("engine-hangs", 5),
    ("shim-stuck", 4),
    ("reinstalled", 2),
)
"""What can go wrong, and how often it does."""


def make_plan(seed: int, *, hours: float | None = None) -> Plan:
    """The fleet of a seed. Small fleets are common and large ones rare: most faults need few nodes to show.

    ``hours`` is for how long things go wrong; without it the seed says that too.
    """
    draw = random.Random(f"plan {seed}")
    count = min(_MOST_NODES, 1 + int(draw.expovariate(1 / 2.2)))
    length = draw.uniform(2, 6) * HOUR
    if hours is not None:
        length = hours * HOUR
    kinds = draw.choices(list(KINDS.values()), k=draw.randint(1, 2))
    fabrics = draw.choice(((None,), ("rack-1",), ("rack-1",), ("rack-1", "rack-2")))
    nodes = []
    for number in range(count):
        kind = draw.choice(kinds)
        engines = (EngineKind.VLLM,) if draw.random() < 0.9 else (EngineKind.VLLM, EngineKind.LLAMACPP)
        nodes.append(NodePlan(f"n{number:02d}", kind, draw.choice(fabrics) if kind.ports else None, engines))
    models = tuple(make_model(draw, f"m{n}", nodes) for n in range(draw.randint(1, 3)))
    least, most = HEARTBEATS_S
    heartbeat = min(most, max(least, count * length / _BEATS))
    return Plan(seed, length, heartbeat, tuple(nodes), models, _faults(draw, length))


def _faults(draw: random.Random, length: float) -> tuple[FaultPlan, ...]:
    """Bursts: what goes wrong together is what finds faults, and the quiet between lets them show."""
    names, weights = zip(*FAULTS, strict=True)
    found = []
    for _ in range(max(2, round(draw.uniform(0.5, 1.5) * length / _BURST_EVERY))):
        at = draw.uniform(600, length * 0.9)
        for _ in range(draw.randint(1, 4)):
            found.append(FaultPlan(at, draw.choices(names, weights)[0], draw.getrandbits(32)))
            at += draw.choice((0.0, draw.uniform(0, 5), draw.uniform(0, 300), draw.uniform(0, 3000)))
    return tuple(sorted((f for f in found if f.at < length), key=lambda f: (f.at, f.draw)))


def make_model(draw: random.Random, name: str, nodes: Sequence[NodePlan]) -> Model:
    """A model that some node of the fleet could run, most of the time."""
    profiles = tuple(make_profile(draw, f"p{n}", nodes) for n in range(draw.choice((1, 1, 1, 2))))
    return Model(
        name,
        profiles,
        draw.choice((0, 1, 1, 1, 2, 2, 3)),
        placement=PlacementRules(policy=draw.choice((Packing.PACK, Packing.SPREAD))),
        priority=draw.choice((0, 0, 0, 5, 10)),
        update=draw.choice((Update.SURGE, Update.SURGE, Update.REPLACE)),
    )


def make_profile(draw: random.Random, name: str, nodes: Sequence[NodePlan]) -> Profile:
    """A profile for the classes of one node of the fleet, over several nodes where that is on a fabric."""
    node = draw.choice(nodes)
    kind = node.kind
    if kind.mig:
        some = [f"{kind.device_class}-mig-{p}" for p in ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb")]
        classes, gpus, count = tuple(draw.sample(some, k=draw.randint(1, 3))), 1, 1
    else:
        classes = (kind.device_class,)
        gpus = draw.choice([n for n in (1, 1, 2, 4, 8) if n <= kind.cards])
        count = draw.choice((1, 2, 2, 3)) if node.fabric is not None and draw.random() < 0.6 else 1
        if draw.random() < 0.2 and gpus == 1 and count == 1:
            classes = (draw.choice([k.device_class for k in KINDS.values()]), *classes)
            classes = tuple(dict.fromkeys(classes))
    limits = Limits(drain_s=draw.choice((5.0, 60.0, 600.0)), stop_s=draw.choice((5.0, 30.0)))
    return Profile(
        name=name,
        engine=EngineKind.VLLM if draw.random() < 0.97 else EngineKind.LLAMACPP,
        weights="/w",
        device_class=classes,
        gpus=gpus,
        nodes=count,
        tp=gpus * count,
        args=(f"--seed={draw.randrange(1000)}",),
        limits=limits,
    )
