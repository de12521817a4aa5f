"""Whether what is there is what is wanted, judged by the machines themselves and not by what was reported of them."""

from __future__ import annotations

import math

from attrs import evolve

from llmgw.hardware.delta import without_load
from llmgw.hardware.inventory import Device
from llmgw.scheduler.decide import decide
from llmgw.scheduler.scale import SLACK
from llmgw.scheduler.state import Goal, NodeState
from llmgw.settings.catalog import Model, Profile, Scaling
from llmgw.settings.document import NodeRules

from .engines import Phase
from .node import Node
from .plane import Plane
from .world import World

_NO_RULES = NodeRules()


def unmet(world: World) -> str:
    """What is not as it should be once no fault is left and enough time has passed; empty when all is."""
    planes = [p for p in world.planes if not p.over]
    if len(planes) != 1 or planes[0].cluster is None:
        return f"{len(planes)} control planes"
    plane = planes[0]
    for judge in (_heard, _quiet, _served, _nothing_extra, _placed):
        if why := judge(world, plane):
            return why
    return ""


def _heard(world: World, plane: Plane) -> str:
    """Every node is connected, and known as it is."""
    assert plane.cluster is not None
    for node in world.nodes.values():
        row = plane.cluster.row(node.id)
        if row is None or not plane.cluster.linked(node.id) or node.link is None or not node.link.state.connected:
            return f"{node.id} is not linked"
        if without_load(row.inventory) != without_load(node.truth()):
            return f"{node.id} has other hardware than is known"
    return ""


def _quiet(world: World, plane: Plane) -> str:
    """One more pass would change nothing."""
    assert plane.cluster is not None
    state = plane.cluster.state(world.clock())
    if away := [n.id for n in state.nodes if n.state is not NodeState.CONNECTED]:
        return f"not connected: {', '.join(away)}"
    outcome = decide(state, world.clock())
    if outcome.decisions:
        return f"undecided: {outcome.decisions[0]}"
    if outcome.commands:
        return f"not carried out: {outcome.commands[0]}"
    if outcome.replicas != state.replicas:
        return "rows change without a decision"
    for name, found in outcome.scales.items():
        if found.want != found.number:
            return f"{name} shall soon have {found.want} replicas: {found.reason}"
    return ""


def _served(world: World, plane: Plane) -> str:
    """Every row runs, each shard of it where it was placed, and the router knows the head of each."""
    assert plane.cluster is not None
    routed = {(e.id, e.port) for t in plane.tables for r in t.routes for e in r.endpoints if not e.draining}
    for row in plane.cluster.replicas:
        if row.goal is not Goal.RUN or row.superseded_by is not None:
            return f"{row.id} is on its way out: {row.reason}"
        for shard in row.shards:
            node = world.nodes[shard.node]
            engine = next((e for e in node.engines if e.key[1:] == (shard.shard, row.generation)), None)
            if engine is None:
                return f"no engine for {shard.shard} #{row.generation} on {node.id}: {row.reason}"
            if engine.hung or engine.phase is not (Phase.LOADED if shard.rank else Phase.SERVING):
                return f"{shard.shard} is {engine.phase.name}{' and hangs' if engine.hung else ''}"
            if engine.uuids != shard.uuids:
                return f"{shard.shard} has {engine.uuids} and its row {shard.uuids}"
            if shard.rank == 0 and (shard.shard, engine.port) not in routed:
                return f"{shard.shard} is not routed to"
    return ""


def _nothing_extra(world: World, plane: Plane) -> str:
    """Nothing runs, is remembered or is routed to that no row is about."""
    assert plane.cluster is not None
    wanted = {(s.node, s.shard, r.generation) for r in plane.cluster.replicas for s in r.shards}
    for engine in world.alive():
        if (engine.node, *engine.key[1:]) not in wanted:
            return f"nobody wants {engine.key} on {engine.node}"
    for node in world.nodes.values():
        for shard, generation in node.records:
            if (node.id, shard, generation) not in wanted:
                return f"{node.id} still remembers {shard} #{generation}"
        row = plane.cluster.row(node.id)
        for report in row.reports if row is not None else ():
            if (node.id, report.shard, report.generation) not in wanted:
                return f"the control plane still has a report of {report.shard} #{report.generation}"
    heads = {s.shard for r in plane.cluster.replicas for s in r.shards if s.rank == 0}
    for table in plane.tables:
        for route in table.routes:
            if extra := [e.id for e in route.endpoints if e.id not in heads]:
                return f"{route.model} is routed to {extra[0]}"
    return ""


def _placed(world: World, plane: Plane) -> str:
    """Every model has its replicas, or the machines have no room for one more, counted anew."""
    assert plane.cluster is not None
    missing = {u.model for u in plane.cluster.unplaced}
    for model in world.settings.models:
        rows = sum(1 for r in plane.cluster.replicas if r.model == model.name and r.shards)
        if model.scaling is not None:
            if why := _scaled(world, plane, model, model.scaling):
                return why
            model = evolve(model, replicas=plane.cluster.scales[model.name].number)
        if rows > model.replicas:
            return f"{model.name} has {rows} replicas of {model.replicas}"
        if rows == model.replicas:
            continue
        if model.name not in missing:
            return f"{model.name} has {rows} replicas of {model.replicas}, and nothing is said of it"
        if where := _room(world, plane, model):
            return f"{model.name} has {rows} replicas of {model.replicas}, and there is room on {where}"
    known = {m.name for m in world.settings.models}
    if extra := [r.id for r in plane.cluster.replicas if r.model not in known]:
        return f"{extra[0]} is of no model"
    return ""


def _scaled(world: World, plane: Plane, model: Model, rules: Scaling) -> str:
    """There are as many as the load asks for, or could be fewer only if the rest were too full."""
    assert plane.cluster is not None
    found = plane.cluster.scales.get(model.name)
    if found is None:
        return f"{model.name} has no number by its load"
    level = world.traffic.levels.get(model.name, 0)
    least = min(max(rules.min, math.ceil(level / rules.target)), rules.max)
    most = max(least, min(math.ceil(level / (rules.target * SLACK)), rules.max))
    demand = plane.cluster.state(world.clock()).demands.get(model.name)
    if demand is not None and demand.waiting:
        most = rules.max  # as long as anybody waits nothing is given up
    if not least <= found.number <= most:
        return f"{model.name} shall have {found.number} for {level} requests, not {least} to {most}: {found.reason}"
    return ""


def _room(world: World, plane: Plane, model: Model) -> str:
    """Where one more replica could go, if need be in place of less important ones.

    Plain counting, which has nothing in common with the scheduler's way.
    """
    assert plane.cluster is not None
    settings = world.settings
    lower = frozenset(m.name for m in settings.models if m.priority < model.priority)
    group = {m.name for m in settings.models if m.group == model.group and m.name not in lower}
    used = world.devices_of(r for r in plane.cluster.replicas if r.model in group)
    quotas = settings.quotas.get(model.group, {}) if model.group else {}
    allowed = [n for n in world.nodes.values() if _allowed(settings.nodes.get(n.id, _NO_RULES), n, plane, model)]
    for profile in model.profiles:
        for device_class in profile.device_class:
            if used[device_class] + profile.devices > quotas.get(device_class, math.inf):
                continue
            able = [n for n in allowed if _fits(n, profile, device_class, lower)]
            if profile.nodes == 1 and able:
                return able[0].id
            for label in ("rack-1", "rack-2"):
                there = [n for n in able if n.plan.fabric == label and not n.hardware.fabric_down]
                kinds = {n.plan.kind.name for n in there}
                for kind in sorted(kinds):
                    some = [n.id for n in there if n.plan.kind.name == kind]
                    if profile.nodes > 1 and len(some) >= profile.nodes:
                        return "+".join(some)
    return ""


def _allowed(rules: NodeRules, node: Node, plane: Plane, model: Model) -> bool:
    """Whether one more of the model may be on the node, by what the settings say."""
    assert plane.cluster is not None
    wants = model.placement
    here = sum(r.model == model.name and any(s.node == node.id for s in r.shards) for r in plane.cluster.replicas)
    return (
        set(rules.taints) <= set(wants.tolerate)
        and wants.nodes.items() <= rules.labels.items()
        and (wants.per_node is None or here < wants.per_node)
    )


def _fits(node: Node, profile: Profile, device_class: str, lower: frozenset[str]) -> bool:
    if profile.engine not in node.installed:
        return False
    truth = node.truth()
    held = [u for e in node.engines if e.command.model not in lower for u in e.uuids]
    taken: list[Device] = [d for u in held if (d := truth.by_uuid(u)) is not None]
    free = [
        d
        for d in truth.devices
        if d.device_class == device_class
        and not d.faults
        and d.uuid not in node.hardware.held
        and not any(d.uuid == t.uuid or d.shares_memory(t) for t in taken)
    ]
    return len(free) >= profile.gpus
