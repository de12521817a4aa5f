"""The tests' own clock: deadlines are not for threads that take their time."""

from __future__ import annotations

import threading
import time

import trio
import trio.testing


async def test_a_thread_is_waited_for(autojump_clock: trio.testing.MockClock, nursery: trio.Nursery) -> None:
    release = threading.Event()

    async def let_go() -> None:
        await trio.to_thread.run_sync(time.sleep, 0.05)
        release.set()

    began = trio.current_time()
    nursery.start_soon(let_go)
    with trio.fail_after(1):
        await trio.to_thread.run_sync(release.wait)
    assert trio.current_time() == began
    await trio.sleep(1000)
    assert trio.current_time() == began + 1000
