"""What signals ask of the daemon, sent to this very process."""

from __future__ import annotations

import os
import signal

import pytest
import trio

from llmgw.server.signals import After, Signals


@pytest.mark.parametrize(
    ("number", "after"),
    [(signal.SIGTERM, After.END), (signal.SIGINT, After.END), (signal.SIGUSR2, After.PROGRAM)],
)
async def test_a_run_is_ended_once_and_said_what_comes_then(number: signal.Signals, after: After) -> None:
    async with trio.open_nursery() as nursery:
        signals = Signals()
        await nursery.start(signals.listen)
        # One that ends nothing leaves the daemon as it is, between two runs as well.
        os.kill(os.getpid(), signal.SIGHUP)
        await signals.reload.wait()
        assert not signals.stopping.is_set()
        os.kill(os.getpid(), number)
        await signals.stopping.wait()
        assert (signals.name, signals.after) == (number.name, after)
        nursery.cancel_scope.cancel()
