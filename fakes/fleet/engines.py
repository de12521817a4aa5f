"""Simulated engines: processes that load, serve, and go wrong. They outlive the agent that started them."""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import Enum, auto

import trio
from attrs import define, field, frozen

from llmgw.engines.diagnosis import Diagnosis
from llmgw.link.messages import StartShard
from llmgw.scheduler.state import Exit
from llmgw.settings.daemon import Address

_CLEAN, _UNSEEN, _KILLED = Exit(0), Exit(), Exit(signal=9)
_JOIN_S = 600.0
"""Rank 0 waits this long for the other ranks."""


class Phase(Enum):
    """Where an engine is."""

    BOOTING = auto()
    LOADING = auto()
    LOADED = auto()
    SERVING = auto()
    ENDED = auto()


@frozen
class Fate:
    """How an engine will go: times in seconds. What never happens lies at infinity.

    ``stuck`` is the phase that it does not get out of. After ``serves_s`` it ends by itself with ``exit``.
    ``deaf_to_term`` engines end by SIGKILL only, ``dying_s`` after it.
    """

    boot_s: float
    load_s: float
    stuck: Phase | None = None
    dies_loading: bool = False
    serves_s: float = float("inf")
    exit: Exit = _CLEAN
    diagnosis: Diagnosis | None = None
    deaf_to_term: bool = False
    dying_s: float = 1.0


def make_fate(draw: random.Random, *, well: bool) -> Fate:
    """A fate; ``well``: nothing goes wrong any more."""
    boot, load = draw.uniform(1, 30), draw.choice((draw.uniform(5, 60), draw.uniform(60, 1500)))
    roll = 1.0 if well else draw.random()
    dying = draw.choice((0.1, 2.0, 20.0))
    deaf = not well and draw.random() < 0.15
    if roll < 0.06:
        final = (
            Diagnosis("no-fit", "it does not fit", "use more devices", True, "out of memory")
            if draw.random() < 0.3
            else None
        )
        return Fate(boot, load, dies_loading=True, exit=_exit(draw), diagnosis=final)
    if roll < 0.10:
        return Fate(boot, load, stuck=draw.choice((Phase.BOOTING, Phase.LOADING)), deaf_to_term=deaf, dying_s=dying)
    if roll < 0.2:
        return Fate(boot, load, serves_s=draw.expovariate(1 / 7200), exit=_exit(draw), deaf_to_term=deaf)
    return Fate(boot, load, deaf_to_term=deaf, dying_s=dying)


def _exit(draw: random.Random) -> Exit:
    return draw.choice((Exit(0), Exit(0), Exit(1), Exit(signal=9), Exit(signal=11)))


@define(eq=False)
class Engine:
    """One process of one start of one shard. ``changed`` is replaced at every change.

    Once it is ``well`` nothing dies of itself any more; what is stuck or hung stays so until somebody sees to it.
    """

    command: StartShard
    node: str
    port: int
    rendezvous: Address | None
    fate: Fate
    pid: int
    uuids: tuple[str, ...]
    peers: Callable[[Engine], list[Engine]]
    poke: Callable[[Engine], None]
    well: Callable[[], bool]
    phase: Phase = Phase.BOOTING
    progress: float = 0.0
    hung: bool = False
    exit: Exit | None = None
    diagnosis: Diagnosis | None = None
    changed: trio.Event = field(factory=trio.Event)
    _end: trio.Event = field(factory=trio.Event)
    _ending: bool = False
    _told: Exit = _UNSEEN

    @property
    def alive(self) -> bool:
        """Whether any process of it is left."""
        return self.phase is not Phase.ENDED

    @property
    def key(self) -> tuple[str, str, int]:
        """Cluster, shard and generation."""
        return self.command.cluster, self.command.shard, self.command.generation

    def stir(self) -> None:
        """Something about it is different: whoever watches looks."""
        self.changed.set()
        self.changed = trio.Event()

    def terminate(self) -> None:
        """SIGTERM."""
        if not self.fate.deaf_to_term:
            self.kill(Exit(signal=15))

    def kill(self, exit_: Exit = _KILLED) -> None:
        """End it, after the time that it takes to die."""
        if not self._ending:
            self._ending = True
            self._told = exit_
            self._end.set()

    def vanish(self) -> None:
        """The machine lost its power: it is gone this very moment."""
        self._ended(Exit(signal=9))
        self._end.set()

    def hang(self) -> None:
        """From now on requests run and nothing comes of them."""
        self.hung = True
        self.stir()

    async def run(self) -> None:
        """From the start to the end."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._live, nursery.cancel_scope)
            await self._end.wait()
            if self.alive:
                await trio.sleep(self.fate.dying_s)
            nursery.cancel_scope.cancel()
        if self.alive:
            self._ended(self._told)

    def _ended(self, exit_: Exit) -> None:
        self.phase, self.exit = Phase.ENDED, exit_
        self.stir()
        self.poke(self)

    def _move(self, phase: Phase) -> None:
        self.phase = phase
        self.stir()
        self.poke(self)

    async def _live(self, scope: trio.CancelScope) -> None:
        fate = self.fate
        await self._spend(fate.boot_s, Phase.BOOTING)
        self._move(Phase.LOADING)
        await self._spend(fate.load_s / 2, Phase.LOADING)
        self.progress = 0.5
        self.stir()
        await trio.sleep(fate.load_s / 2)
        if fate.dies_loading and not self.well():
            self.diagnosis = fate.diagnosis
            self.kill(fate.exit)
            return
        self._move(Phase.LOADED)
        if self.command.rank == 0 and len(self.command.addresses) > 1:
            with trio.move_on_after(_JOIN_S) as late:
                while not self._joined():
                    await self.changed.wait()
            if late.cancelled_caught:
                self.kill(Exit(1))
                return
        if self.command.rank == 0:
            self._move(Phase.SERVING)
        await trio.sleep(fate.serves_s)
        if self.well():
            await trio.sleep_forever()
        self.kill(fate.exit)

    async def _spend(self, seconds: float, phase: Phase) -> None:
        await trio.sleep(seconds)
        if self.fate.stuck is phase:
            await trio.sleep_forever()

    def _joined(self) -> bool:
        """Every other rank has loaded and meets this very engine."""
        there = {
            e.command.rank
            for e in self.peers(self)
            if e.phase is Phase.LOADED and e.command.rank > 0 and e.rendezvous == self.rendezvous
        }
        return len(there) == len(self.command.addresses) - 1
