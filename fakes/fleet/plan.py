"""What a seed stands for: a fleet, its models, and what will go wrong when."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from attrs import frozen

from llmgw.settings.catalog import EngineKind, Limits, Model, Packing, PlacementRules, Profile, Scaling, Update
from llmgw.settings.document import NodeRules

from .machines import KINDS, Kind

HOUR = 3600.0

HEARTBEATS_S = (60.0, 220.0)
"""Heartbeats and quiet passes are most of what happens, and find nothing: they are rarer than usual, the more so the
more of them there would be, and so is all that is measured in them."""

LEVELS = (0, 0, 3, 12, 25, 60)
"""How many requests at a time a model is asked for."""

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
    """A seed's fleet. ``length_s`` is when the last fault ends; ``heartbeat_s`` sets the pace of the link.

    ``rules`` and ``quotas`` are in the settings from the beginning. ``levels`` says how many requests at a time each
    model that follows its load is asked for in the end.
    """

    seed: int
    length_s: float
    heartbeat_s: float
    nodes: tuple[NodePlan, ...]
    models: tuple[Model, ...]
    faults: tuple[FaultPlan, ...]
    rules: Mapping[str, NodeRules]
    quotas: Mapping[str, Mapping[str, int]]
    levels: tuple[tuple[str, int], ...]


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
    ("requests", 12),
    ("node-rules", 4),
    ("quotas", 3),
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
    rules = make_rules(draw, [n.id for n in nodes]) if draw.random() < 0.3 else {}
    models = tuple(make_model(draw, f"m{n}", nodes, zoned=bool(rules)) for n in range(draw.randint(1, 3)))
    levels = tuple((m.name, draw.choice(LEVELS)) for m in models if m.scaling is not None)
    least, most = HEARTBEATS_S
    heartbeat = min(most, max(least, count * length / _BEATS))
    faults = _faults(draw, length)
    quotas = make_quotas(draw, nodes) if draw.random() < 0.5 else {}
    return Plan(seed, length, heartbeat, tuple(nodes), models, faults, rules, quotas, levels)


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


def make_model(draw: random.Random, name: str, nodes: Sequence[NodePlan], *, zoned: bool = False) -> Model:
    """A model that some node of the fleet could run, most of the time."""
    profiles = tuple(make_profile(draw, f"p{n}", nodes) for n in range(draw.choice((1, 1, 1, 2))))
    rules = PlacementRules(
        policy=draw.choice((Packing.PACK, Packing.SPREAD)),
        nodes=draw.choice(({}, {"zone": "east"})) if zoned else {},
        tolerate=draw.choice(((), ("lab",))),
        per_node=draw.choice((None, None, 1)),
    )
    return Model(
        name,
        profiles,
        draw.choice((0, 1, 1, 1, 2, 2, 3)),
        placement=rules,
        priority=draw.choice((0, 0, 0, 5, 10)),
        group=draw.choice(("", "g")),
        update=draw.choice((Update.SURGE, Update.SURGE, Update.REPLACE)),
        scaling=Scaling(draw.choice((0, 0, 1)), draw.randint(1, 3), 10) if draw.random() < 0.4 else None,
    )


def make_rules(draw: random.Random, nodes: Sequence[str]) -> dict[str, NodeRules]:
    """Labels and taints: most nodes are where models may go."""
    return {
        node: NodeRules({"zone": draw.choice(("east", "east", "west"))}, ("lab",) if draw.random() < 0.2 else ())
        for node in nodes
    }


def make_quotas(draw: random.Random, nodes: Sequence[NodePlan]) -> dict[str, dict[str, int]]:
    """How many devices of some classes the one group may have."""
    kinds = {n.kind.name: n.kind for n in nodes}
    made = {kind.device_class: draw.choice((1, 2, 4, 8)) for kind in kinds.values() if not kind.mig}
    return {"g": made} if made else {}


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
