"""A simulated machine with its disk and engines, and the real agent's link and dispatch, one life after another."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio
from attrs import define

from llmgw.agent.dispatch import Dispatch, Runs
from llmgw.agent.epoch import Epoch
from llmgw.agent.outbox import Outbox
from llmgw.agent.session import Link
from llmgw.hardware.inventory import Inventory
from llmgw.link.client import Backoff
from llmgw.link.messages import Command, CommandResult, StartShard
from llmgw.link.protocol import Role
from llmgw.link.session import Session, open_session
from llmgw.scheduler.state import ShardReport
from llmgw.settings.daemon import Address, AgentConfig, EngineInstall, TlsFiles

from .engines import Engine
from .machines import Hardware
from .plan import NodePlan
from .shards import Record

if TYPE_CHECKING:
    from .world import World

_READ_AFTER_S = 1.0
_NOTICED_S = 60.0
_DISTURBED = 0.1


@define(eq=False)
class KeptEpoch:
    """The highest epoch on the node's disk; every write of it is watched."""

    node: Node
    highest: int = 0

    async def write(self, epoch: int) -> None:
        """Write it down."""
        await self.node.moment()
        if epoch < self.highest:
            self.node.world.fail("epoch", f"{self.node.id} had {self.highest} and wrote {epoch}")
        self.highest = epoch


class WatchedDispatch(Dispatch):
    """The agent's own, which says whose command is being carried out."""

    def __init__(self, node: Node, runs: Runs, epoch: Epoch) -> None:
        super().__init__(runs, epoch, lambda: node.reading)
        self._node = node

    async def run(self, command: Command) -> CommandResult:
        """Do one command."""
        self._node.carrying = command.epoch
        self._node.disturb()
        result = await super().run(command)
        said = "done" if result.accepted else f"refused: {result.reason}"
        self._node.say(f"{command.command} of epoch {command.epoch}: {said}")
        return result


class Node:
    """One machine. What is on its disk (``records``, ``kept``) and its ``engines`` outlive its agent."""

    def __init__(self, plan: NodePlan, world: World, number: int) -> None:
        self.plan = plan
        self.id = plan.id
        self.address = f"10.0.0.{number + 1}"
        self.world = world
        self.installed = plan.engines
        self.hardware = Hardware(plan.kind, plan.id, plan.fabric, random.Random(world.draw.getrandbits(64)))
        self.records: dict[tuple[str, int], Record] = {}
        self.kept = KeptEpoch(self)
        self.engines: list[Engine] = []
        self.boot = 1
        self.offset_s = 0.0
        self.clock_changed = trio.Event()
        self.killed = False
        self.carrying = 0
        self.obeyed = 0
        self.link: Link | None = None
        self._held: Counter[str] = Counter()
        self._let = trio.Event()
        self._life: trio.CancelScope | None = None
        self._pids = 100
        self._outbox: Outbox | None = None
        self._look = trio.Event()
        self.reading = self._inventory()

    # The machine

    def clock(self) -> float:
        """The node's own idea of the time, in epoch seconds."""
        return self.world.clock() + self.offset_s

    def set_clock(self, offset_s: float) -> None:
        """The node's clock jumps."""
        self.offset_s = offset_s
        self.clock_changed.set()
        self.clock_changed = trio.Event()

    async def moment(self) -> None:
        """What the disk and the kernel take: mostly nothing, now and then long enough for something to come between."""
        if self.world.draw.random() < 0.3:
            await trio.sleep(self.world.draw.choice((0.001, 0.02, 0.3)))
        else:
            await trio.lowlevel.checkpoint()

    def _inventory(self) -> Inventory:
        return self.hardware.inventory(self.boot, {uuid: e.pid for e in self.engines for uuid in e.uuids})

    def truth(self) -> Inventory:
        """The hardware as it is this very moment."""
        return self._inventory()

    def read_hardware(self) -> None:
        """What the agent knows of the hardware is made new."""
        now = self._inventory()
        if now != self.reading:
            self.reading = now
            if self._outbox is not None:
                self._outbox.hardware()

    def ports(self) -> set[int]:
        """What somebody listens on."""
        taken = {e.port for e in self.engines}
        return taken | {e.rendezvous.port for e in self.engines if e.rendezvous is not None and e.command.rank == 0}

    def launch(self, command: StartShard, port: int, rendezvous: Address | None, uuids: tuple[str, ...]) -> Engine:
        """Start an engine's process."""
        self._pids += 1
        engine = Engine(
            command, self.id, port, rendezvous, self.world.fate(), self._pids, uuids,
            peers=self.world.peers, poke=self._poked, well=lambda: self.world.well,
        )  # fmt: skip
        self.world.launched(self, engine)
        self.engines.append(engine)
        self.world.engines.start_soon(engine.run)
        return engine

    def _poked(self, engine: Engine) -> None:
        if not engine.alive:
            self.say(f"engine {engine.pid} of {engine.key} ended: {engine.exit}")
            self.engines.remove(engine)
            self.look_again()
        else:
            self.say(f"engine {engine.pid} of {engine.key} is {engine.phase.name}")
        for peer in self.world.peers(engine):
            peer.stir()

    def look_again(self) -> None:
        """Something happened to the hardware that the agent notices."""
        self._look.set()

    # Off and on

    @property
    def up(self) -> bool:
        """Whether an agent may run."""
        return not self._held.total()

    def hold(self, why: str) -> None:
        """No agent runs here until this is released as often as it was held."""
        self._held[why] += 1

    def release(self, why: str) -> None:
        """The reason is gone."""
        self._held[why] -= 1
        if self.up:
            self._let.set()

    def stop_agent(self) -> None:
        """As SIGTERM does. Another agent follows unless it is held."""
        if self._life is not None:
            self._life.cancel()

    def kill_agent(self) -> None:
        """As SIGKILL does: its connections end, and it does nothing more."""
        self.killed = True
        self.world.wires.cut(self.id)
        self.stop_agent()

    def power_off(self) -> None:
        """Everything that runs here is gone this moment, and nobody is told."""
        self.hold("power")
        self.world.wires.silence(self.id)
        self.kill_agent()
        for engine in list(self.engines):
            engine.vanish()

    def power_on(self) -> None:
        """The machine boots."""
        self.boot += 1
        self.release("power")

    # The agent

    def say(self, what: str) -> None:
        """Into the trace."""
        self.world.trace.say(f"{self.id} {what}")

    def disturb(self) -> None:
        """Now and then the link or the agent ends just while a command is being carried out."""
        world = self.world
        if world.well or world.draw.random() > _DISTURBED:
            return

        async def strike() -> None:
            await trio.sleep(world.draw.choice((0.0, 0.001, 0.01, 0.1, 0.3)))
            world.wires.cut(self.id)
            if world.draw.random() < 0.5:
                self.kill_agent()

        world.daemons.start_soon(strike)

    def obey(self) -> None:
        """Somebody's command takes effect: it must be nobody's who was replaced."""
        if self.carrying < self.obeyed:
            self.world.fail("epoch", f"{self.id} obeyed epoch {self.obeyed} and then {self.carrying}")
        self.obeyed = self.carrying

    async def run(self) -> None:
        """One agent after another, for ever."""
        while True:
            while not self.up:
                self._let = trio.Event()
                await self._let.wait()
            self.killed = False
            with trio.CancelScope() as self._life:
                self.say("agent starts")
                await self._agent()
            self._outbox = self.link = None
            self.say("agent is over")
            await trio.sleep(self.world.draw.choice((0.1, 1.0, 10.0)))

    async def _agent(self) -> None:
        """As :func:`llmgw.agent.main._main` does it."""
        kit, world = self.world.kit, self.world
        config = AgentConfig(
            id=self.id,
            control_planes=world.addresses,
            tls=TlsFiles("", "", ""),
            state_dir="",
            address=self.address,
            engines=tuple(EngineInstall(kind, ("engine",)) for kind in self.installed),
        )
        outbox = Outbox()

        def changed(report: ShardReport) -> None:
            outbox.report(report)
            if report.state.ended:
                self.look_again()

        shards = kit.shards(self, changed)
        epoch = kit.epoch(self.kept)
        dispatch = WatchedDispatch(self, shards, epoch)
        backoff = Backoff(random.Random(world.draw.getrandbits(64)))
        async with trio.open_nursery() as root:
            await root.start(shards.run)
            self.reading = self._inventory()
            self._outbox = outbox
            self.link = Link(
                config,
                self._dial,
                shards.reports,
                dispatch,
                lambda: self.reading,
                epoch,
                outbox,
                backoff,
                self.clock,
                lambda: world.traffic.of(self),
            )
            root.start_soon(self._watch_hardware)
            root.start_soon(self.link.run)

    async def _watch_hardware(self) -> None:
        while True:
            await self._look.wait()
            self._look = trio.Event()
            await trio.sleep(_READ_AFTER_S)
            self.read_hardware()

    async def notice(self) -> None:
        """What changed without any sign is seen at the next reading that is due."""
        await trio.sleep(self.world.draw.uniform(0, _NOTICED_S))
        self.look_again()

    @asynccontextmanager
    async def _dial(self, address: Address) -> AsyncIterator[Session]:
        stream = await self.world.connect(self, address)
        limits = self.world.limits
        async with open_session(stream, Role.AGENT, peer="server", remote=str(address), limits=limits) as session:
            yield session
