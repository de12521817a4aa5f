"""The agent's side of the link against a control plane that we play, over real TLS."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from attrs import evolve

from fakes.machines import MACHINES, render, write_state
from llmgw.agent.dispatch import Dispatch
from llmgw.agent.epoch import Epoch, EpochFile
from llmgw.agent.hardware import Hardware
from llmgw.agent.outbox import Outbox
from llmgw.agent.session import Link
from llmgw.agent.shards import Shards
from llmgw.hardware.delta import apply
from llmgw.hardware.inventory import Inventory
from llmgw.link.client import Backoff, connect
from llmgw.link.messages import (
    CommandResult,
    HardwareChanged,
    Heartbeat,
    NotUnderstood,
    Register,
    ShardStatus,
    StopShard,
    Welcome,
)
from llmgw.link.server import serve
from llmgw.link.session import Session
from llmgw.settings.daemon import Address, Discovery, GpuSource, LinkListener
from tests.agent.test_shards import config
from tests.link.samples import TRUST_DOMAIN, WELCOME, Pki, make_pki, report

Play = Callable[[Session, Register], Awaitable[None]]


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return make_pki(tmp_path_factory.mktemp("pki"))


class Agent:
    def __init__(self, folder: Path, pki: Pki, port: int, node: str = "n1") -> None:
        settings = evolve(
            config(folder), tls=pki.node(), trust_domain=TRUST_DOMAIN, id=node,
            control_planes=(Address("localhost", port),),
        )  # fmt: skip
        self.outbox = Outbox()
        self.shards = Shards(settings, self.outbox.report, time.time)
        self.machine = folder / "machine"
        render(MACHINES["l40s-2"], self.machine)
        discovery = Discovery(GpuSource.NVIDIA_SMI, str(self.machine), interval_s=1000)
        self.hardware = Hardware(discovery, (), folder, self.outbox.hardware)
        epoch = Epoch(EpochFile(folder))
        dispatch = Dispatch(self.shards, epoch, self.inventory)
        dial = partial(connect, tls=settings.tls, trust_domain=settings.trust_domain)
        backoff = Backoff(random.Random(1), 0.01, 0.05)
        self.link = Link(
            settings, dial, self.shards.reports, dispatch, self.inventory, epoch, self.outbox, backoff, time.time
        )

    def inventory(self) -> Inventory:
        return self.hardware.inventory


@asynccontextmanager
async def linked(folder: Path, pki: Pki, play: Play, node: str = "n1") -> AsyncIterator[Agent]:
    async with trio.open_nursery() as nursery:
        listener = LinkListener(pki.server, Address("127.0.0.1", 0), trust_domain=TRUST_DOMAIN)
        (address,) = await nursery.start(partial(serve, listener, play))
        agent = Agent(folder, pki, address.port, node)
        await agent.hardware.read()
        nursery.start_soon(agent.link.run)
        yield agent
        nursery.cancel_scope.cancel()


async def soon(event: trio.Event) -> None:
    with trio.fail_after(30):
        await event.wait()


async def test_welcomed_it_beats_reports_and_obeys(tmp_path: Path, pki: Pki) -> None:
    done = trio.Event()

    async def play(session: Session, first: Register) -> None:
        assert (first.node, first.inventory, first.shards) == ("n1", agent.hardware.inventory, ())
        assert [d.device_class for d in first.inventory.devices] == ["l40s-45g"] * 2
        await session.send(evolve(WELCOME, heartbeat_s=0.05))
        assert isinstance(await session.receive(), Heartbeat)
        agent.outbox.report(report())
        agent.outbox.report(evolve(report(), reason="newer"))
        seen = []
        while not seen or not isinstance(seen[-1], ShardStatus):
            seen.append(await session.receive())
        assert seen[-1].report.reason == "newer", "the newest about a shard is enough"
        await session.send(StopShard("c1", 1, "nobody", 1, "x", 1))
        while not isinstance(seen[-1], CommandResult):
            seen.append(await session.receive())
        assert seen[-1] == CommandResult("c1", True)
        await session.send(Welcome(1, "?", "c", 1, 5))  # nothing that an agent expects now
        told = first.inventory
        for sequence, ecc in ((1, 3), (2, 0)):
            write_state(agent.machine, {1: {"ecc": ecc}})
            await agent.hardware.read()
            agent.outbox.hardware()
            while not isinstance(seen[-1], HardwareChanged) or seen[-1].sequence < sequence:
                seen.append(await session.receive())
            assert seen[-1].delta.changed == ("devices",)
            assert [d.number for d in seen[-1].delta.values.devices] == [1]
            told = apply(told, seen[-1].delta)
            assert told == agent.hardware.inventory
        write_state(agent.machine, {1: {"ecc": 3}})
        await agent.hardware.read()
        agent.outbox.report(evolve(report(), reason="its device broke"))
        agent.outbox.hardware()
        said: list[object] = []
        while not said or not isinstance(said[-1], ShardStatus):
            said.append(await session.receive())
        kinds = [type(message) for message in said if not isinstance(message, Heartbeat)]
        assert kinds == [HardwareChanged, ShardStatus], "hardware first: whose end is told holds its devices no more"
        agent.outbox.hardware()  # nothing is different: nothing is said
        assert agent.link.state.connected
        done.set()

    async with linked(tmp_path, pki, play) as agent:
        await soon(done)


async def test_it_comes_back_again_and_again(tmp_path: Path, pki: Pki) -> None:
    visits = []
    done = trio.Event()

    async def play(session: Session, first: Register) -> None:
        visits.append(first)
        if len(visits) < 4:
            await session.send(WELCOME)
            return
        done.set()
        await session.send(WELCOME)
        await session.receive()

    async with linked(tmp_path, pki, play):
        await soon(done)


async def test_a_control_plane_of_an_older_term_is_left(
    tmp_path: Path, pki: Pki, capsys: pytest.CaptureFixture[str]
) -> None:
    epochs = iter((7, 3, 7))
    done = trio.Event()

    async def play(session: Session, first: Register) -> None:
        epoch = next(epochs, None)
        if epoch is None:
            return
        assert first.epoch == (0 if epoch == 7 and not (tmp_path / "epoch").exists() else 7)
        await session.send(evolve(WELCOME, epoch=epoch))
        if epoch == 3:
            try:
                await session.receive()
            finally:
                done.set()

    async with linked(tmp_path, pki, play):
        await soon(done)
    assert (tmp_path / "epoch").read_text() == "7\n"


async def test_a_refusal_is_said_once_however_often_it_comes(
    tmp_path: Path, pki: Pki, capsys: pytest.CaptureFixture[str]
) -> None:
    async def play(session: Session, first: Register) -> None:
        raise AssertionError("it must not get this far")

    async with linked(tmp_path, pki, play, node="n2") as agent:
        with trio.fail_after(5):
            while "node id" not in agent.link.state.reason:
                await trio.sleep(0.01)
        await trio.sleep(0.3)
        assert not agent.link.state.connected
    said = [line for line in capsys.readouterr().out.splitlines() if "refused by the control plane" in line]
    assert len(said) == 1
    assert "set id: n1 in agent.yaml" in said[0]


async def test_what_it_does_not_understand_it_says(tmp_path: Path, pki: Pki) -> None:
    done = trio.Event()

    async def play(session: Session, first: Register) -> None:
        await session.send(WELCOME)
        session._protocol.send(NotUnderstood("x"), trio.current_time())
        agent.outbox.result(NotUnderstood("future-message"))
        while not isinstance(message := await session.receive(), NotUnderstood):
            pass
        assert message.tag == "future-message"
        done.set()

    async with linked(tmp_path, pki, play) as agent:
        await soon(done)
