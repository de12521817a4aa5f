"""A node with a valid certificate that says what no agent says: what it may cost, and that it costs nobody else."""

from __future__ import annotations

from pathlib import Path

import trio
from attrs import evolve

from llmgw.link.client import connect
from llmgw.link.messages import DrainShard, Heartbeat, Register, RenewCertificate, ShardStatus, Welcome
from llmgw.scheduler.state import ShardReport
from llmgw.server.cluster import SHARDS
from tests.link.samples import register, report
from tests.server.identity_rig import DOMAIN, plane, until
from tests.server.test_agents import Service


def known(service: Service) -> tuple[ShardReport, ...]:
    row = service.cluster.row("n1")
    assert row is not None
    return row.reports


def many(count: int) -> Register:
    return evolve(register(), shards=tuple(evolve(report(), shard=f"m-{n}.0", replica=f"m-{n}") for n in range(count)))


async def test_shards_without_end_are_not_taken_in(nursery: trio.Nursery) -> None:
    service = Service(nursery)
    async with service.agent(many(SHARDS - 1)) as session:
        for number in range(5):
            await session.send(ShardStatus(evolve(report(), shard=f"more-{number}.0")))
        await session.send(ShardStatus(evolve(report(), shard="m-7.0", reason="a known one goes on")))
        await session.send(Heartbeat(1))
        await session.receive()
        reports = known(service)
        assert len(reports) == SHARDS
        assert "a known one goes on" in {r.reason for r in reports}
    async with service.agent(many(2 * SHARDS)):
        assert len(known(service)) == SHARDS


async def test_many_shards_are_registered_in_time_that_grows_with_them_and_not_with_their_square(
    nursery: trio.Nursery,
) -> None:
    service = Service(nursery)
    for _ in range(2):
        async with service.agent(many(SHARDS)):
            compared = 0

            class Counted(str):
                __slots__ = ()

                def __eq__(self, other: object) -> bool:
                    nonlocal compared
                    compared += 1
                    return str.__eq__(self, other)

                __hash__ = str.__hash__

            first = many(SHARDS)
            shards = tuple(evolve(s, shard=Counted(s.shard)) for s in first.shards)
            service.cluster.register(evolve(first, shards=shards), 0.0)
            assert compared <= 2 * SHARDS


async def test_requests_to_renew_of_somebody_who_reads_nothing_do_not_pile_up(tmp_path: Path) -> None:
    async with plane(tmp_path) as at:
        async with connect(at.address, await at.join(), DOMAIN) as session:
            await session.send(register())
            assert isinstance(await session.receive(), Welcome)
            mine = at.agents._sessions["n1"]
            await until(lambda: not mine.queue)
            for number in range(200):
                mine.put(DrainShard(f"{number} {'x' * 20_000}", 1, "m-1.0", 1, "because"))
            for _ in range(1000):
                await session.send(RenewCertificate("none"))
            await trio.sleep(0.5)
            assert len(mine.queue) <= 200
