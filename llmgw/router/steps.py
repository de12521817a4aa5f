"""Coroutines that go on where their bytes arrive, without a turn of Trio's loop for each wait.

A connection's coroutine belongs to one Trio task. While it waits for bytes (:func:`arrival`) that task sleeps, and
whoever sees the bytes steps the coroutine right there. For whatever else it awaits it goes back to its task first
(:func:`own_task`): Trio's scopes, events and threads belong to tasks.
"""

from __future__ import annotations

import types
from collections.abc import Coroutine, Generator
from typing import Any

import outcome
import trio

_ARRIVAL, _OWN_TASK = object(), object()


@types.coroutine
def arrival() -> Generator[object, object, None]:
    """Wait until :meth:`Steps.step`. Not within a scope of Trio's that was entered in the coroutine."""
    yield _ARRIVAL


@types.coroutine
def own_task() -> Generator[object, object, None]:
    """Go on in the coroutine's own task, where everything of Trio's can be awaited."""
    yield _OWN_TASK


@types.coroutine
def _passed(trap: object) -> Generator[object, object, object]:
    return (yield trap)


class Steps:
    """One coroutine: :meth:`run` it in its task."""

    __slots__ = ("_coro", "_error", "_finished", "_raise_cancel", "_stepping", "_task", "waits")

    def __init__(self, coro: Coroutine[object, Any, None]) -> None:
        self._coro = coro
        self._task: trio.lowlevel.Task | None = None
        self._error: BaseException | None = None
        self._finished = self._stepping = False
        self._raise_cancel: Any = None
        self.waits = False
        """Whether it can be stepped."""

    async def run(self) -> None:
        """Run it to its end. Raises what it raises."""
        self._task = trio.lowlevel.current_task()
        coro = self._coro
        value: object = None
        error: BaseException | None = None
        while True:
            given, thrown, value, error = value, error, None, None
            try:
                trap = coro.send(given) if thrown is None else coro.throw(thrown)
            except StopIteration:
                return
            finally:
                del given, thrown  # an exception in them has this frame
            if trap is _ARRIVAL:
                self.waits = True
                woken = await outcome.acapture(trio.lowlevel.wait_task_rescheduled, self._cancelled)
                self.waits = False
                error = woken.error if isinstance(woken, outcome.Error) else None  # the coroutine's to raise again
                del woken
                if self._finished:
                    self._end()
                    return
            elif trap is not _OWN_TASK:
                value = await _passed(trap)

    def _end(self) -> None:
        error, self._error = self._error, None
        try:
            self._coro.close()  # it has not ended where it awaited something that is not to be had in a step
            if error is not None:
                raise error
        finally:
            del error  # it has this frame

    def _cancelled(self, raise_cancel: Any) -> trio.lowlevel.Abort:
        if self._stepping:
            self._raise_cancel = raise_cancel
            return trio.lowlevel.Abort.FAILED
        self.waits = False
        return trio.lowlevel.Abort.SUCCEEDED

    def step(self) -> None:
        """What it waits for is there: let it go on, here. Raises nothing."""
        if not self.waits or self._stepping:
            return
        self._stepping = True
        try:
            trap = self._coro.send(None)
        except StopIteration:
            self._finished = True
        except Exception as raised:  # noqa: BLE001 - its task raises it
            self._finished, self._error = True, raised
        else:
            if trap is _ARRIVAL and self._raise_cancel is None:
                self._stepping = False
                return
            if trap is not _ARRIVAL and trap is not _OWN_TASK:
                self._finished, self._error = True, RuntimeError("something of Trio's is awaited outside the own task")
        self._stepping = self.waits = False
        assert self._task is not None
        if self._raise_cancel is not None:
            trio.lowlevel.reschedule(self._task, outcome.capture(self._raise_cancel))
        else:
            trio.lowlevel.reschedule(self._task)
