"""Coroutines that are stepped outside their task."""

from __future__ import annotations

import select
import socket

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.router.sockets import READ_BYTES, Peer
from llmgw.router.steps import Steps, arrival, own_task


async def test_it_goes_on_where_it_is_stepped_and_in_its_task_for_all_else() -> None:
    seen: list[tuple[str, bool]] = []
    mine: list[trio.lowlevel.Task] = []

    def here(what: str) -> None:
        seen.append((what, trio.lowlevel.current_task() is mine[0]))

    async def work() -> None:
        mine.append(trio.lowlevel.current_task())
        here("begun")
        await arrival()
        here("stepped")
        await arrival()
        here("stepped again")
        await own_task()
        here("back")
        with trio.move_on_after(1):
            await trio.lowlevel.checkpoint()
        await arrival()
        here("stepped after it")

    steps = Steps(work())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(steps.run)
        for _ in range(4):
            await trio.testing.wait_all_tasks_blocked()
            steps.step()
    assert seen == [
        ("begun", True), ("stepped", False), ("stepped again", False), ("back", True), ("stepped after it", False),
    ]  # fmt: skip
    steps.step()  # it has ended: nothing happens


async def test_what_it_raises_is_its_task_s() -> None:
    async def fails() -> None:
        await arrival()
        raise ZeroDivisionError

    async def awaits_a_task_s_thing() -> None:
        await arrival()
        await trio.lowlevel.checkpoint()

    for work, expected in ((fails, ZeroDivisionError), (awaits_a_task_s_thing, RuntimeError)):
        steps = Steps(work())
        with pytest.RaisesGroup(expected):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(steps.run)
                await trio.testing.wait_all_tasks_blocked()
                steps.step()


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("stepping", [False, True])
async def test_it_is_cancelled_as_its_task_is(stepping: bool, ends: bool) -> None:
    scope = trio.CancelScope()
    raised = []

    async def work() -> None:
        try:
            await arrival()
            if stepping:
                scope.cancel()
            if not ends:
                await arrival()
        except trio.Cancelled:
            raised.append(1)
            raise

    steps = Steps(work())

    async def run() -> None:
        with scope:
            await steps.run()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()
        if stepping:
            steps.step()
        else:
            scope.cancel()
            steps.step()  # bytes that come in the same moment change nothing
    assert raised == ([] if stepping and ends else [1])


async def test_whoever_sends_faster_than_it_is_read_keeps_nobody_waiting() -> None:
    theirs, ours = socket.socketpair()
    with theirs, ours:
        peer = Peer(ours)
        read: list[int] = []

        async def work() -> None:
            while sum(read) < 2 * READ_BYTES + 1:
                read.append(len(await peer.receive()))

        peer.steps = Steps(work())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.steps.run)
            await trio.testing.wait_all_tasks_blocked()
            theirs.sendall(bytes(2 * READ_BYTES + 1))
            peer.told(select.EPOLLIN)
            assert read == [READ_BYTES], "the rest of it only when others had their turn"
        assert read == [READ_BYTES, READ_BYTES, 1]


class OPS:
    """What a coroutine does, a letter each."""

    ARRIVAL, OWN, TRIO, CANCEL, RAISE, STEP = "arwcxs"


@settings(max_examples=60, deadline=None)
@given(program=st.text("aaarwcxs", max_size=8), moves=st.lists(st.sampled_from("ssstc"), max_size=12))
async def test_whatever_it_does_and_whoever_steps_and_cancels_it(program: str, moves: list[str]) -> None:
    """Step, turn and cancel in any order, between and within steps: nothing is raised where it is stepped, everything of
    Trio's is in its own task, and the task ends with what the coroutine ended with, or at once when it is cancelled."""
    scope, mine = trio.CancelScope(), []
    done: list[str] = []
    cancelled: list[int] = []

    async def work() -> None:
        try:
            for does in program:
                match does:
                    case OPS.ARRIVAL:
                        await arrival()
                    case OPS.OWN:
                        await own_task()
                        assert trio.lowlevel.current_task() is mine[0]
                    case OPS.TRIO:
                        await own_task()
                        with trio.move_on_after(60):
                            await trio.lowlevel.checkpoint()
                    case OPS.CANCEL:
                        scope.cancel()
                    case OPS.STEP:
                        steps.step()  # from within: it goes on already
                    case _:
                        raise ZeroDivisionError
                done.append(does)
        except trio.Cancelled:
            cancelled.append(len(done))
            raise

    steps = Steps(work())
    ended: list[str] = []

    async def run() -> None:
        mine.append(trio.lowlevel.current_task())
        with scope:
            try:
                await steps.run()
            except ZeroDivisionError:
                ended.append("raised")
            else:
                ended.append("returned")
        ended.append("over")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await trio.lowlevel.checkpoint()
        for move in moves:
            match move:
                case "s":
                    steps.step()
                case "t":
                    await trio.lowlevel.checkpoint()
                case _:
                    scope.cancel()
        if not scope.cancel_called:
            for _ in program:
                await trio.testing.wait_all_tasks_blocked()
                steps.step()
        await trio.testing.wait_all_tasks_blocked()
        assert ended[-1:] == ["over"], "cancelled it ends without a step"
    assert "".join(done) == program[: len(done)]
    assert len(cancelled) <= scope.cancel_called
    raises = program.find(OPS.RAISE)
    if not scope.cancel_called:
        assert ended[0] == ("returned" if raises < 0 else "raised")
        assert len(done) == (len(program) if raises < 0 else raises)
    elif cancelled:
        assert len(ended) == 1
        assert program[cancelled[0]] in "arw", "where it awaits something, and nowhere else"
    steps.step()
