"""Cancelling a scenario at every point where Trio switches tasks, one run for each point.

    survived = sweep(scenario)

``scenario`` is an async function without arguments. Two kinds of points are tried: ``blocked`` cancels right after
a task parked, ``ready`` right before it runs again with a result in hand. After each run no file descriptor and no
thread may be left, nothing but the cancellation may have been raised, and the time from the cancel to the end (on
the scenario's clock) is bounded.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable

import trio
from attrs import frozen

from tests.patient_clock import patient_clock


class CancelAt(trio.abc.Instrument):
    """Cancels ``scope`` at the ``nth`` step of the tasks below the one that armed it."""

    def __init__(self, nth: int, when: str) -> None:
        self.nth = nth
        self.when = when
        self.seen = 0
        self.site: str | None = None
        self.cancelled_at = 0.0
        self._scope: trio.CancelScope | None = None
        self._root: trio.lowlevel.Task | None = None

    def arm(self, scope: trio.CancelScope) -> None:
        """Call it from the task that runs the scenario."""
        self._scope, self._root = scope, trio.lowlevel.current_task()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.when == "blocked":
            self._step(task)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.when == "ready":
            self._step(task)

    def _step(self, task: trio.lowlevel.Task) -> None:
        if self._scope is None or self.site is not None or not self._inside(task):
            return
        self.seen += 1
        if self.seen == self.nth:
            frames = [f"{frame.f_code.co_name}:{line}" for frame, line in task.iter_await_frames()]
            self.site = f"{task.name} {' > '.join(frames[-4:])}"
            self.cancelled_at = trio.current_time()
            self._scope.cancel(reason="sweep")

    def _inside(self, task: trio.lowlevel.Task | None) -> bool:
        while task is not None:
            if task is self._root:
                return True
            task = task.parent_nursery.parent_task if task.parent_nursery else None
        return False


@frozen
class Injection:
    """One run: where it was cancelled, and how long its end took on the scenario's clock."""

    when: str
    nth: int
    site: str
    took_s: float


def open_files() -> set[str]:
    """What this process holds open, by number and target."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:
            continue  # the folder itself
    return found


def busy_threads() -> int:
    """Threads that do something: Trio keeps its own for a while after their work."""
    return sum(not thread.name.startswith("Trio thread") for thread in threading.enumerate())


def sweep(
    scenario: Callable[[], Awaitable[object]],
    *,
    after: Callable[[], Awaitable[object]] | None = None,
    instrument_of: Callable[[int, str], CancelAt] = CancelAt,
    within_s: float = 1.0,
    stride: int = 1,
    most: int = 5000,
    real_clock: bool = False,
) -> tuple[Injection, ...]:
    """Run the scenario once for each point, and to its end; returns the points that were tried.

    ``after`` is run after each of them, to look at what was left; ``instrument_of`` makes another kind of cancel.
    """
    done: list[Injection] = []
    before, threads = open_files(), busy_threads()
    for when in ("blocked", "ready"):
        for nth in range(1, most, stride):
            instrument = instrument_of(nth, when)
            began = time.monotonic()
            took_s = trio.run(
                _one_run,
                scenario,
                instrument,
                instruments=[instrument],
                clock=None if real_clock else patient_clock(0),
            )
            where = f"{when} {nth} at {instrument.site}"
            assert open_files() <= before, f"left open after {where}: {open_files() - before}"
            assert busy_threads() <= threads, f"threads left after {where}"
            if after is not None:
                try:
                    trio.run(after)
                except BaseException as failed:
                    failed.add_note(f"after {where}")
                    raise
            if instrument.site is None:
                break
            assert took_s <= within_s, f"{took_s:.2f} s to end after {where}"
            assert time.monotonic() - began < 10, f"took too long in real time after {where}"
            done.append(Injection(when, nth, instrument.site, took_s))
        else:
            raise AssertionError(f"more than {most} points: does the scenario end?")
    return tuple(done)


async def _one_run(scenario: Callable[[], Awaitable[object]], instrument: CancelAt) -> float:
    with trio.CancelScope() as scope:
        instrument.arm(scope)
        await scenario()
    # Trio drops an instrument that raised, with a log line only; then this raises KeyError.
    trio.lowlevel.remove_instrument(instrument)
    return trio.current_time() - instrument.cancelled_at
