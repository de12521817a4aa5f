"""What goes wrong: each fault begins, lasts, and is put right again."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping

import trio
from attrs import evolve

from llmgw.scheduler.state import Exit
from llmgw.settings.catalog import EngineKind, Model

from .engines import Engine, Phase
from .node import Node
from .plan import LEVELS, FaultPlan, make_model, make_profile, make_quotas, make_rules
from .world import World

_EXITS = (Exit(0), Exit(1), Exit(signal=9))


async def befall(world: World, plan: FaultPlan) -> None:
    """Let one fault happen, from its time to its end."""
    await trio.sleep_until(plan.at)
    world.trace.say(f"FAULT {plan.kind}")
    await FAULTS[plan.kind](world, random.Random(plan.draw))
    world.trace.say(f"over: {plan.kind}")


def _some(world: World, draw: random.Random) -> list[Node]:
    """One node mostly, now and then several or all."""
    nodes = list(world.nodes.values())
    many = 1 if draw.random() < 0.75 else draw.randint(1, len(nodes))
    return draw.sample(nodes, many)


async def _last(draw: random.Random) -> None:
    await trio.sleep(draw.choice((draw.uniform(0, 5), draw.uniform(5, 300), draw.uniform(300, 5000))))


# The network


async def _cut(world: World, draw: random.Random) -> None:
    for node in _some(world, draw):
        world.wires.cut(node.id)


async def _half_open(world: World, draw: random.Random) -> None:
    up, down = draw.choice(((True, True), (True, False), (False, True)))
    for node in _some(world, draw):
        world.wires.silence(node.id, up=up, down=down)


async def _partition(world: World, draw: random.Random) -> None:
    nodes = _some(world, draw)
    for node in nodes:
        world.wires.block(node.id)
    await _last(draw)
    for node in nodes:
        world.wires.unblock(node.id)


async def _slow(world: World, draw: random.Random) -> None:
    nodes = _some(world, draw)
    for node in nodes:
        world.wires.slow(node.id, draw.choice((0.05, 0.5, 2.0)))
    await _last(draw)
    for node in nodes:
        world.wires.slow(node.id, 0.0)


# Nodes


async def _agent_killed(world: World, draw: random.Random) -> None:
    for node in _some(world, draw):
        for _ in range(draw.choice((1, 1, 1, 3))):
            node.kill_agent()
            await trio.sleep(draw.choice((0.0, 0.3, 2.0, 15.0)))


async def _agent_stopped(world: World, draw: random.Random) -> None:
    nodes = _some(world, draw)
    for node in nodes:
        node.hold("stopped")
        node.stop_agent()
    await _last(draw)
    for node in nodes:
        node.release("stopped")


async def _power_off(world: World, draw: random.Random) -> None:
    nodes = _some(world, draw)
    for node in nodes:
        node.power_off()
    await _last(draw)
    for node in nodes:
        node.power_on()


async def _clock_jump(world: World, draw: random.Random) -> None:
    for node in _some(world, draw):
        node.set_clock(draw.choice((-7200.0, -60.0, 0.0, 5.0, 60.0, 3600.0, 90000.0)))
    await trio.lowlevel.checkpoint()


async def _reinstalled(world: World, draw: random.Random) -> None:
    (node,) = draw.sample(list(world.nodes.values()), 1)
    before, node.installed = node.installed, draw.choice(((), (EngineKind.LLAMACPP,)))
    node.stop_agent()
    await _last(draw)
    node.installed = before
    node.stop_agent()


async def _shim_stuck(world: World, draw: random.Random) -> None:
    records = [r for n in world.nodes.values() for _, r in sorted(n.records.items())]
    some = draw.sample(records, min(len(records), 2))
    for record in some:
        record.stuck = True
    await _last(draw)
    for record in some:
        record.stuck = False


# Hardware


async def _carve(world: World, draw: random.Random) -> None:
    nodes = [n for n in world.nodes.values() if n.plan.kind.mig]
    if not nodes:
        await _device_breaks(world, draw)
        return
    node = draw.choice(nodes)
    old = node.hardware.carve_again(draw.randrange(node.plan.kind.cards))
    for engine in list(node.engines):
        if set(engine.uuids) & set(old):
            engine.kill(Exit(1))
    await node.notice()


async def _device_breaks(world: World, draw: random.Random) -> None:
    node = draw.choice(list(world.nodes.values()))
    broken = draw.sample(node.hardware.devices, min(len(node.hardware.devices), draw.choice((1, 1, 2))))
    for device in broken:
        node.hardware.faults[device.uuid] = "fell off the bus"
        for engine in list(node.engines):
            if device.uuid in engine.uuids and draw.random() < 0.7:
                engine.kill(draw.choice(_EXITS))
    await node.notice()
    await _last(draw)
    if draw.random() < 0.7:
        for device in broken:
            node.hardware.faults.pop(device.uuid, None)
        await node.notice()


async def _memory_held(world: World, draw: random.Random) -> None:
    node = draw.choice(list(world.nodes.values()))
    used = {uuid for engine in node.engines for uuid in engine.uuids}
    free = [d.uuid for d in node.hardware.devices if d.uuid not in used]
    some = draw.sample(free, min(len(free), 2))
    node.hardware.held.update(some)
    await node.notice()
    await _last(draw)
    node.hardware.held.difference_update(some)
    await node.notice()


async def _fabric_down(world: World, draw: random.Random) -> None:
    nodes = _some(world, draw)
    for node in nodes:
        node.hardware.fabric_down = True
        node.look_again()
    await _last(draw)
    for node in nodes:
        node.hardware.fabric_down = False
        node.look_again()


# Settings


def _edit(world: World, draw: random.Random, change: Callable[[Model], Model]) -> None:
    models = world.settings.models
    if models:
        chosen = draw.choice(models)
        world.edit(tuple(change(m) if m is chosen else m for m in models))


async def _replicas(world: World, draw: random.Random) -> None:
    await trio.lowlevel.checkpoint()
    _edit(world, draw, lambda m: evolve(m, replicas=draw.choice((0, 1, 1, 2, 3, 5))))


async def _profile(world: World, draw: random.Random) -> None:
    def change(model: Model) -> Model:
        if draw.random() < 0.3:
            new = make_profile(draw, f"q{draw.randrange(100)}", world.plan.nodes)
            return evolve(model, profiles=(*model.profiles[:-1], new))
        first, *others = model.profiles
        return evolve(model, profiles=(evolve(first, args=(f"--seed={draw.randrange(1000)}",)), *others))

    _edit(world, draw, change)
    if draw.random() < 0.3:
        await _last(draw)
        _edit(world, draw, change)


async def _limits(world: World, draw: random.Random) -> None:
    def change(model: Model) -> Model:
        first, *others = model.profiles
        limits = evolve(first.limits, drain_s=draw.choice((5.0, 120.0)), load_s=draw.choice((600.0, 1800.0)))
        return evolve(model, profiles=(evolve(first, limits=limits), *others))

    await trio.lowlevel.checkpoint()
    _edit(world, draw, change)


async def _model_removed(world: World, draw: random.Random) -> None:
    before = world.settings.models
    if not before:
        return
    chosen = draw.choice(before)
    world.edit(tuple(m for m in before if m is not chosen))
    await _last(draw)
    back = chosen if draw.random() < 0.5 else make_model(draw, f"{chosen.name}x", world.plan.nodes)
    if all(m.name != back.name for m in world.settings.models):
        world.edit((*world.settings.models, back))


async def _requests(world: World, draw: random.Random) -> None:
    """A model is asked for more or less, now and then to and fro."""
    names = sorted(world.traffic.levels)
    for _ in range(draw.choice((1, 1, 4))):
        if names:
            world.traffic.ask(draw.choice(names), draw.choice(LEVELS))
        await _last(draw)


async def _node_rules(world: World, draw: random.Random) -> None:
    before = world.settings.nodes
    world.edit(nodes=make_rules(draw, list(world.nodes)))
    await _last(draw)
    if draw.random() < 0.5:
        world.edit(nodes=before)


async def _quotas(world: World, draw: random.Random) -> None:
    world.edit(quotas=make_quotas(draw, world.plan.nodes) if draw.random() < 0.7 else {})
    await trio.lowlevel.checkpoint()


# Control planes and their store


async def _plane_killed(world: World, draw: random.Random) -> None:
    async with world.change_planes:
        for _ in range(draw.choice((1, 1, 1, 3))):
            for plane in world.planes:
                plane.kill()
            await _last(draw)
            world.start_plane(draw.choice(world.addresses))
            await trio.sleep(draw.choice((0.1, 5.0, 100.0)))


async def _plane_stopped(world: World, draw: random.Random) -> None:
    async with world.change_planes:
        for plane in world.planes:
            plane.stop()
        await _last(draw)
        world.start_plane(draw.choice(world.addresses))


async def _takeover(world: World, draw: random.Random) -> None:
    """A second control plane takes the next epoch while the first one does not know it yet."""
    async with world.change_planes:
        old = [p for p in world.planes if not p.over]
        free = [a for a in world.addresses if a not in [p.address for p in old]]
        if not free or any(p.cluster is None for p in old):
            return  # one that has no epoch yet would take the higher one, and be the wrong one to end
        world.start_plane(free[0])
        for _ in range(draw.choice((0, 0, 1, 2, 6))):
            # An agent that has to connect anew finds the other one of the two.
            await trio.sleep(draw.uniform(0, 120))
            for node in _some(world, draw):
                world.wires.cut(node.id)
        await _last(draw)
        for plane in old:
            draw.choice((plane.stop, plane.kill))()


async def _store(world: World, draw: random.Random) -> None:
    world.disk.trouble = "the disk is full"
    await _last(draw)
    world.disk.trouble = ""


# Engines


def _victim(world: World, draw: random.Random, *, serving: bool) -> Engine | None:
    some = [e for e in world.alive() if not serving or e.phase is Phase.SERVING]
    return draw.choice(some) if some else None


async def _engine_dies(world: World, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 1, 2, 9))):
        if (engine := _victim(world, draw, serving=draw.random() < 0.5)) is not None:
            engine.kill(draw.choice(_EXITS))
        await trio.sleep(draw.uniform(0, 120))


async def _engine_hangs(world: World, draw: random.Random) -> None:
    await trio.lowlevel.checkpoint()
    if (engine := _victim(world, draw, serving=True)) is not None:
        engine.hang()


FAULTS: Mapping[str, Callable[[World, random.Random], Awaitable[None]]] = {
    "cut": _cut,
    "half-open": _half_open,
    "partition": _partition,
    "slow": _slow,
    "agent-killed": _agent_killed,
    "agent-stopped": _agent_stopped,
    "power-off": _power_off,
    "carve": _carve,
    "device-breaks": _device_breaks,
    "memory-held": _memory_held,
    "fabric-down": _fabric_down,
    "clock-jump": _clock_jump,
    "replicas": _replicas,
    "profile": _profile,
    "limits": _limits,
    "model-removed": _model_removed,
    "plane-killed": _plane_killed,
    "plane-stopped": _plane_stopped,
    "takeover": _takeover,
    "store": _store,
    "engine-dies": _engine_dies,
    "engine-hangs": _engine_hangs,
    "shim-stuck": _shim_stuck,
    "reinstalled": _reinstalled,
    "requests": _requests,
    "node-rules": _node_rules,
    "quotas": _quotas,
}
