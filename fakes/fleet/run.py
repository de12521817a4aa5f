"""One run: a fleet lives through its plan, heals, comes to rest, and ends with nothing left over."""

from __future__ import annotations

import traceback
from functools import partial

import trio

from .check import unmet
from .faults import befall
from .kit import Kit
from .outcome import Outcome
from .plan import Plan, make_plan
from .trace import Trace, logs_into, repeatable
from .world import World

SETTLE_S = 5 * 3600.0
"""Once nothing goes wrong any more, all must be as it is wanted within this time.

It is what the limits add up to: an engine that stands still for 1800 s, one more try after as long a pause, 600 s for
the ranks to meet, the longest load and the longest drain; twice, for what is replaced must end before what replaces it.
"""

_LOOK_S = 60.0
_REST_S = 1800.0
_STOP_S = 5.0


def run(seed: int, *, hours: float | None = None, kit: Kit | None = None, echo: bool = False) -> Outcome:
    """Run a seed to its end. ``hours`` of faults instead of the seed's own number."""
    plan = make_plan(seed, hours=hours)
    trace = Trace(echo=echo)
    settled: list[float] = []
    failure = ""
    worlds: list[World] = []

    def broken(what: str) -> None:
        for world in worlds:
            world.fail("no unexpected error", what)

    with repeatable(seed) as clock, logs_into(trace, broken):
        try:
            trio.run(
                partial(_main, plan, kit or Kit(), trace, settled, worlds), clock=clock, strict_exception_groups=True
            )
        except Exception as error:  # noqa: BLE001 - whatever it was, it has a seed
            failure = f"no unexpected error: {''.join(traceback.format_exception(error))}"
    (world,) = worlds
    if not failure and world.failure is not None:
        failure = ": ".join(world.failure)
    return Outcome(
        seed=seed,
        failure=failure,
        digest=trace.digest,
        events=trace.events,
        launches=world.launches,
        passes=world.disk.passes,
        length_s=plan.length_s,
        settled_s=settled[0] if settled else None,
        last=tuple(trace.last),
    )


async def _main(plan: Plan, kit: Kit, trace: Trace, settled: list[float], worlds: list[World]) -> None:
    before = trio.lowlevel.current_statistics().tasks_living
    async with trio.open_nursery() as engines:
        world = World(plan, kit, trace, engines.cancel_scope)
        worlds.append(world)
        world.engines = engines
        async with trio.open_nursery() as world.daemons:
            for node in world.nodes.values():
                world.daemons.start_soon(node.run)
            world.start_plane(world.addresses[0])
            world.daemons.start_soon(world.traffic.run)
            await _faults(world)
            settled.append(await _settle(world))
            await _rest(world)
            await _end(world, before)
            world.daemons.cancel_scope.cancel()
        engines.cancel_scope.cancel()


async def _faults(world: World) -> None:
    async with trio.open_nursery() as faults:
        for fault in world.plan.faults:
            faults.start_soon(befall, world, fault)
        await trio.sleep_until(world.plan.length_s)
    world.well = True
    for model, level in world.plan.levels:
        world.traffic.ask(model, level)
    world.trace.say("no more faults")


async def _settle(world: World) -> float:
    """Wait until all is as it is wanted; returns how long that took."""
    since = trio.current_time()
    for _ in range(int(SETTLE_S / _LOOK_S)):
        why = unmet(world)
        if not why:
            await trio.sleep(2 * world.tick_s)  # what engines say of their load is of the last heartbeat
            why = unmet(world)
        if not why:
            break
        await trio.sleep(_LOOK_S)
    if why:
        world.fail("observed converges to desired", why)
    world.trace.say("settled")
    await trio.lowlevel.checkpoint()
    return trio.current_time() - since


async def _rest(world: World) -> None:
    """What has settled stays as it is."""
    decisions, launches = world.disk.decisions, world.launches
    await trio.sleep(_REST_S)
    if why := unmet(world):
        world.fail("what has settled stays", why)
    if (world.disk.decisions, world.launches) != (decisions, launches):
        world.fail("what has settled stays", "something was decided though nothing happened")
    await trio.lowlevel.checkpoint()


async def _end(world: World, before: int) -> None:
    """Stop every daemon: engines go on, and nothing else is left."""
    engines = world.alive()
    linked = len(world.wires.open)
    if linked != len(world.nodes):
        world.fail("nothing leaks", f"{linked} connections of {len(world.nodes)} nodes are open")
    for plane in world.planes:
        plane.stop()
    for node in world.nodes.values():
        node.hold("the end")
        node.stop_agent()
    await trio.sleep(_STOP_S)
    if world.wires.open:
        world.fail("nothing leaks", f"{len(world.wires.open)} connections are open and nobody is there")
    if world.alive() != engines:
        world.fail("nothing leaks", "an engine did not outlive its agent")
    # An engine has two tasks; each node waits to be let up again, and the router counts.
    expected = before + 2 * len(engines) + len(world.nodes) + 1
    living = trio.lowlevel.current_statistics().tasks_living
    if living != expected:
        world.fail("nothing leaks", f"{living - expected:+d} tasks")
    await trio.lowlevel.checkpoint()
