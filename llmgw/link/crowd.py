"""How many connections one address may hold, and who of them waits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf

import trio

from llmgw.link.attempts import host_of

_WAITING = 3
"""So many times its places may wait for one: with ``HURRIED_S`` that is a second less than an agent's handshake has."""

HURRIED_S = 1.0
"""How long a stranger keeps its place while others of its address wait for one (seconds)."""


class Crowd:
    """The connections of each host: ``most`` of agents, and ``most`` of strangers, of whom nothing is known yet.

    They are counted apart, so that strangers behind an address that agents share take no place of theirs. Whoever has
    not registered is a stranger, with whatever certificate, and for a while who failed to. Beyond ``most`` of them the
    next wait, first come first served, and nobody keeps a place for long meanwhile: one hung up on at once would come
    again at once, and an agent among a thousand of those would hardly ever be let in. Remotes are ``host:port``.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._hosts: dict[str, _Host] = {}

    @asynccontextmanager
    async def one_more(self, remote: str) -> AsyncIterator[Place | None]:
        """Count a connection while it is open, once it has a place among its host's strangers.

        Work for it belongs inside ``with place.scope``, which ends for whoever has to make way. ``None`` for one that
        is not even worth a word: as many as may wait do.
        """
        name = host_of(remote)
        host = self._hosts.get(name)
        if host is None:
            host = self._hosts[name] = _Host(name, self._most)
        if host.waiting >= _WAITING * self._most:
            yield None
            return
        place = Place(host)
        host.connections += 1
        try:
            await host.place(place)
            yield place
        finally:
            if place in host.strangers:
                host.gone(place)
            elif place.agent:
                host.agents -= 1
            host.connections -= 1
            if not host.connections:
                del self._hosts[name]

    def __len__(self) -> int:
        """How many hosts are known: those with a connection."""
        return len(self._hosts)


class Place:
    """A connection as it is counted; ``agent`` is whether it is known to be one's."""

    def __init__(self, host: _Host) -> None:
        self.agent = False
        self.scope = trio.CancelScope()
        self._host = host

    @property
    def crowded(self) -> str:
        """Why it cannot be an agent's now; empty if it can."""
        host = self._host
        if host.agents < host.most:
            return ""
        return f"{host.name} holds more than {host.most} connections (link.connections_per_address)"

    def registers(self) -> None:
        """It is an agent's from now on. Not for one that is :attr:`crowded` out."""
        self._host.agents += 1
        self._host.gone(self)
        self.agent = True
        self.scope.deadline = inf


class _Host:
    def __init__(self, name: str, most: int) -> None:
        self.name = name
        self.most = most
        self.connections = 0
        self.agents = 0
        self.waiting = 0
        self.strangers: dict[Place, float] = {}
        self._free = trio.Semaphore(most)

    async def place(self, place: Place) -> None:
        """Wait for a place among the strangers."""
        try:
            self._free.acquire_nowait()
        except trio.WouldBlock:
            await self._wait()
        self.strangers[place] = trio.current_time()
        if self.waiting:
            _hurry(place, self.strangers[place])
        await trio.lowlevel.checkpoint()

    async def _wait(self) -> None:
        self.waiting += 1
        try:
            for stranger, since in self.strangers.items():
                _hurry(stranger, since)
            await self._free.acquire()
        finally:
            self.waiting -= 1

    def gone(self, place: Place) -> None:
        """This one is no stranger any more, or is no more."""
        del self.strangers[place]
        self._free.release()


def _hurry(place: Place, since: float) -> None:
    place.scope.deadline = min(place.scope.deadline, since + HURRIED_S)
