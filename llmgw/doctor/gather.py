"""What a reading is done with: the machine, asked each question once, and the facts as they come in."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import trio
from attrs import field, frozen

from llmgw.discovery.command import Ran
from llmgw.discovery.faults import DiscoveryError
from llmgw.discovery.machine import Machine
from llmgw.discovery.sysfs import Reader
from llmgw.doctor.facts import Unread
from llmgw.doctor.peer_facts import Peer, PeerPath
from llmgw.doctor.tree import Missing
from llmgw.hardware.fabric import FabricRule
from llmgw.hardware.inventory import Host
from llmgw.settings.daemon import AgentConfig, Discovery

GAP_S = 1.0
"""Between the two readings of counters and of processes."""


@frozen
class Asker:
    """What a reading is done with.

    ``rules`` are the declared fabrics; ``environment`` are this process's variables, for where no agent runs. ``dial``
    tries an address and says why it could not be reached; ``None`` where nothing may be dialled. ``peer`` tries another
    node, where one was named. ``agent_root`` is where the agent's own files are, where that is not the machine's root:
    an agent of a fake machine runs on a real one.
    """

    machine: Machine
    config: Discovery
    agent: AgentConfig | None = None
    rules: tuple[FabricRule, ...] = ()
    environment: Mapping[str, str] = field(factory=dict)
    dial: Callable[[str, int], Awaitable[str]] | None = None
    peer: Callable[[], Awaitable[tuple[Peer, PeerPath | None]]] | None = None
    wall: Callable[[], float] = time.time
    gap_s: float = GAP_S
    agent_root: Path | None = None


class Once:
    """A machine that is asked each question once, whoever asks."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._said: dict[tuple[str, ...], Ran | DiscoveryError] = {}
        self._locks: dict[tuple[str, ...], trio.Lock] = {}

    @property
    def root(self) -> Path:
        """See :class:`Machine`."""
        return self._machine.root

    @property
    def reader(self) -> Reader:
        """See :class:`Machine`."""
        return self._machine.reader

    def host(self) -> Host:
        """See :class:`Machine`."""
        return self._machine.host()

    async def ask(self, program: str, *args: str) -> Ran:
        """See :class:`Machine`."""
        key = (program, *args)
        async with self._locks.setdefault(key, trio.Lock()):
            if key not in self._said:
                try:
                    self._said[key] = await self._machine.ask(program, *args)
                except DiscoveryError as failed:
                    self._said[key] = failed
        said = self._said[key]
        if isinstance(said, DiscoveryError):
            raise said
        return said


class Gathered:
    """The facts as they come in."""

    def __init__(self, asker: Asker) -> None:
        self.asker = asker
        self.machine = Once(asker.machine)
        self.found: dict[str, Any] = {}
        self.unread: dict[str, Unread] = {}
        self.cards_done = trio.Event()
        self.agent_root = asker.machine.root if asker.agent_root is None else asker.agent_root

    def miss(self, fact: str, why: str, *, root: bool = False) -> None:
        """Say that a fact could not be read."""
        self.unread[fact] = Unread(fact, why[:300], root)

    async def said(self, program: str, *args: str, ok: tuple[int, ...] = (0,)) -> str:
        """What a program printed. Raises :class:`Missing` when it cannot be run, fails, or does not end."""
        try:
            ran = await self.machine.ask(program, *args)
        except DiscoveryError as failed:
            raise Missing(f"{failed.thing}: {failed.reason}") from failed
        if ran.code is None:
            raise Missing(f"{program} did not end in time")
        if ran.code not in ok:
            refused = any(word in ran.said.lower() for word in ("permitted", "permission", "denied", "root"))
            raise Missing(f"{program}: {ran.said}", root=refused)
        return ran.stdout

    async def read(self, fact: str, how: Callable[[], Awaitable[Any]]) -> None:
        """Read one fact, or remember why not."""
        try:
            self.found[fact] = await how()
        except Missing as missing:
            self.miss(fact, missing.why, root=missing.root)

    async def thread(self, how: Callable[..., Any], *args: Any) -> Any:
        """Read files in a thread that is left behind when it hangs."""
        return await trio.to_thread.run_sync(how, *args, abandon_on_cancel=True)
