"""How many connections an address may hold, who of them waits for how long, and who makes way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from llmgw.link.crowd import HURRIED_S, Crowd, Place


class Rig:
    """Connections of one host, each a task that stays until it is told to go or has to make way."""

    def __init__(self, crowd: Crowd, nursery: trio.Nursery) -> None:
        self.said: list[tuple[str, float]] = []
        self.places: dict[str, Place] = {}
        self._crowd = crowd
        self._nursery = nursery
        self._go: dict[str, trio.Event] = {}

    async def comes(self, *names: str, registers: bool = False) -> None:
        for name in names:
            self._go[name] = trio.Event()
            self._nursery.start_soon(self._connection, name, registers)
            await wait_all_tasks_blocked()

    async def goes(self, name: str) -> None:
        self._go[name].set()
        await wait_all_tasks_blocked()

    async def _connection(self, name: str, registers: bool) -> None:
        async with self._crowd.one_more(f"10.0.0.1:{len(self._go)}") as place:
            if place is None:
                self._say(f"{name} is hung up on")
                return
            self.places[name] = place
            self._say(f"{name} has a place")
            with place.scope:
                if registers and place.crowded:
                    self._say(f"{name}: {place.crowded}")
                elif registers:
                    place.registers()
                await self._go[name].wait()
            if place.scope.cancelled_caught:
                self._say(f"{name} makes way")

    def _say(self, what: str) -> None:
        self.said.append((what, trio.current_time()))

    def heard(self) -> list[str]:
        said, self.said = [what for what, _ in self.said], []
        return said


@asynccontextmanager
async def rig(most: int) -> AsyncIterator[Rig]:
    crowd = Crowd(most)
    async with trio.open_nursery() as nursery:
        yield Rig(crowd, nursery)
        nursery.cancel_scope.cancel()
    assert not len(crowd), "nothing is kept of who is gone"


async def test_beyond_their_places_strangers_wait_in_the_order_in_which_they_came() -> None:
    async with rig(2) as at:
        await at.comes("a", "b", "c", "d")
        assert at.heard() == ["a has a place", "b has a place"]
        await at.goes("b")
        await at.goes("a")
        assert at.heard() == ["c has a place", "d has a place"]


async def test_as_many_wait_as_get_a_place_before_their_handshake_is_over() -> None:
    async with rig(1) as at:
        await at.comes("a", "b", "c", "d", "e")
        assert at.heard() == ["a has a place", "e is hung up on"]


async def test_those_who_come_in_one_turn_are_counted_one_by_one(autojump_clock: MockClock) -> None:
    crowd = Crowd(2)
    hung_up = 0

    async def connection(number: int) -> None:
        nonlocal hung_up
        async with crowd.one_more(f"10.0.0.1:{number}") as place:
            hung_up += place is None
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(connection, number)
    assert hung_up == 12, "two have a place, six wait"


async def test_who_is_not_known_after_a_second_makes_way_only_where_others_wait(autojump_clock: MockClock) -> None:
    async with rig(1) as at:
        await at.comes("a")
        await trio.sleep(4)
        assert at.heard() == ["a has a place"], "nobody waits"
        began = trio.current_time()
        await at.comes("b", "c")
        await trio.sleep(2.5 * HURRIED_S)
        assert at.said == [
            ("a makes way", began),
            ("b has a place", began),
            ("b makes way", began + HURRIED_S),
            ("c has a place", began + HURRIED_S),
        ], "and c, for whom nobody waits, stays"


async def test_nobody_is_hurried_where_there_are_places_though_all_come_in_one_turn(autojump_clock: MockClock) -> None:
    crowd = Crowd(50)
    stayed = 0

    async def connection(number: int) -> None:
        nonlocal stayed
        async with crowd.one_more(f"10.0.0.1:{number}") as place:
            assert place is not None
            with place.scope:
                await trio.sleep(4 * HURRIED_S)
                stayed += 1

    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(connection, number)
    assert stayed == 50


async def test_agents_are_no_strangers_and_make_way_for_nobody(autojump_clock: MockClock) -> None:
    async with rig(2) as at:
        await at.comes("a", "b", registers=True)
        await at.comes("c", "d")
        assert at.heard() == [f"{name} has a place" for name in "abcd"]
        await at.comes("e", registers=True)
        await trio.sleep(2 * HURRIED_S)
        assert sorted(at.heard()) == [
            "c makes way",
            "d makes way",
            "e has a place",
            "e: 10.0.0.1 holds more than 2 connections (link.connections_per_address)",
        ]
        await at.goes("a")
        assert not at.heard()
        await at.comes("f", registers=True)
        assert at.heard() == ["f has a place"]


async def test_who_gives_up_waiting_leaves_its_place_in_the_line() -> None:
    crowd = Crowd(1)
    async with crowd.one_more("10.0.0.1:1") as first, crowd.one_more("[::1]:1") as elsewhere:
        assert first is not None
        assert elsewhere is not None
        with trio.move_on_after(0) as gave_up:
            async with crowd.one_more("10.0.0.1:2"):
                pass
        assert gave_up.cancelled_caught
    assert not len(crowd)
    async with crowd.one_more("10.0.0.1:3") as again:
        assert again is not None
