"""A clock that jumps only when nothing goes on in a thread either."""

from __future__ import annotations

import math

import trio
import trio.testing


def patient_clock(autojump_threshold: float = math.inf) -> trio.testing.MockClock:
    """To Trio a program looks idle that waits for a thread; whoever jumps then lets the deadlines of what the thread
    does run out, and on a busy machine a thread takes its time."""
    clock = trio.testing.MockClock(autojump_threshold=autojump_threshold)
    jump = clock._autojump  # the class is final, and has nothing public for this

    def jump_unless_a_thread_runs() -> None:
        if not _in_a_thread():
            jump()

    clock._autojump = jump_unless_a_thread_runs  # type: ignore[method-assign]
    return clock


def _in_a_thread() -> bool:
    """Whether any task waits for a thread."""
    tasks = [trio.lowlevel.current_root_task()]
    while tasks:
        task = tasks.pop()
        if task is None:
            continue
        if any(frame.f_code is _RUN_SYNC for frame, _ in task.iter_await_frames()):
            return True
        tasks += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return False


_RUN_SYNC = trio.to_thread.run_sync.__code__
