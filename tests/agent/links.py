"""An agent's link on memory streams: control planes that a test plays, each at its own address, on a virtual clock."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import trio
import trio.testing

from fakes.swarm import KeptEpoch, NoShards
from llmgw.agent.dispatch import Dispatch
from llmgw.agent.epoch import Epoch
from llmgw.agent.outbox import Outbox
from llmgw.agent.session import Link
from llmgw.errors import PeerError
from llmgw.hardware.inventory import Host, Inventory
from llmgw.link.attend import attend
from llmgw.link.client import Backoff
from llmgw.link.messages import Register
from llmgw.link.patience import DEFAULT_LIMITS, LinkLimits
from llmgw.link.protocol import Role
from llmgw.link.session import Session, Unreached, open_session
from llmgw.settings.daemon import Address, AgentConfig, TlsFiles

Play = Callable[[Session, Register], Awaitable[None]]

HERE = Inventory(Host("host", "boot"), "test")


class Rig:
    """A link, and who answers where. ``dialled`` has when and where the agent tried."""

    def __init__(
        self, nursery: trio.Nursery, *configured: Address, seed: int = 1, limits: LinkLimits = DEFAULT_LIMITS
    ) -> None:
        self.planes: dict[Address, Play] = {}
        self.dialled: list[tuple[float, Address]] = []
        self.limits = limits
        self._nursery = nursery
        self.outbox = Outbox()
        self.backoff = Backoff(random.Random(seed))
        config = AgentConfig(id="n1", control_planes=configured, tls=TlsFiles("", "", ""), state_dir="")
        epoch = Epoch(KeptEpoch())
        dispatch = Dispatch(NoShards(), epoch, lambda: HERE)
        self.link = Link(
            config, self._dial, tuple, dispatch, lambda: HERE, epoch, self.outbox, self.backoff, trio.current_time
        )

    @asynccontextmanager
    async def _dial(self, address: Address) -> AsyncIterator[Session]:
        self.dialled.append((trio.current_time(), address))
        await trio.lowlevel.checkpoint()
        if (play := self.planes.get(address)) is None:
            raise Unreached(f"control plane at {address}", "cannot be reached: connection refused")
        ours, theirs = trio.testing.memory_stream_pair()
        self._nursery.start_soon(partial(self._attend, theirs, play))
        async with open_session(
            ours, Role.AGENT, peer=str(address), remote=str(address), limits=self.limits
        ) as session:
            yield session

    async def _attend(self, stream: trio.abc.Stream, play: Play) -> None:
        with suppress(PeerError):
            await attend(stream, play, lambda _: None, peer="n1", remote="memory", limits=self.limits)
