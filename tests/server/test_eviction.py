"""Forgetting a node: what ran there is placed elsewhere at once, and the router lets go of it."""

from __future__ import annotations

import trio

from llmgw.link.messages import CommandResult, ShardStatus, StartShard
from llmgw.scheduler.state import ShardState
from tests.server.test_control import Plane, plane, report, until

__all__ = ["plane"]


async def test_what_ran_there_is_placed_elsewhere_at_once(plane: Plane, autojump_clock: trio.testing.MockClock) -> None:
    async with plane.agent("n1") as session:
        start = await started(session)
        await session.send(ShardStatus(report(start, ShardState.READY)))
        await until(lambda: any(e.id == start.shard for e in endpoints(plane)))
    began = plane.clock()
    await until(lambda: not plane.agents.connected("n1"))
    assert any(e.id == start.shard for e in endpoints(plane)), "a node that is silent keeps its traffic"
    async with plane.agent("n2") as session:
        assert plane.cluster.forget("n1")
        again = await started(session)
        assert plane.clock() - began < plane.cluster.settings.liveness.unreachable_s
        assert again.model == start.model
        assert not endpoints(plane)
    assert not plane.cluster.forget("n1")


def endpoints(plane: Plane) -> list[object]:
    return [e for route in plane.tables[-1].routes for e in route.endpoints] if plane.tables else []


async def started(session: object) -> StartShard:
    from llmgw.link.messages import LookForWeights, WeightsFound
    from llmgw.link.session import Session

    assert isinstance(session, Session)
    with trio.fail_after(60):
        while True:
            match await session.receive():
                case LookForWeights(names=names):
                    await session.send(WeightsFound(names, ()))
                case StartShard() as start:
                    await session.send(CommandResult(start.command, True))
                    return start
                case _:
                    pass
