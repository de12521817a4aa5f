"""Ending every engine of a node whose agent does not run: for taking a node out, and for a node that is cut off."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from llmgw.agent import records
from llmgw.agent.process import Handle, Known
from llmgw.store.folder import held

_KILL_S = 3.0
_LOOK_S = 0.02


def stop_engines(state_dir: Path, grace_s: float) -> tuple[str, ...]:
    """Stop every engine that was started from this state folder, and say which. Blocking.

    SIGTERM to all, SIGKILL after ``grace_s``. Raises :class:`llmgw.errors.OperatorError` while an agent holds the
    folder: then the control plane is the one to ask.
    """
    with held(state_dir, "agent"):
        folders = records.folders(state_dir / "shards")
        running = [(folder, handle) for folder in folders if (handle := _handle(folder)) is not None]
        try:
            for _, handle in running:
                handle.send(signal.SIGTERM)
            if not _wait(lambda: all(_over(folder) for folder, _ in running), grace_s):
                for folder, handle in running:
                    if not _over(folder):
                        handle.send(signal.SIGUSR1)
                _wait(lambda: all(_over(folder) for folder, _ in running), _KILL_S)
        finally:
            for _, handle in running:
                handle.close()
        return tuple(folder.name for folder, _ in running)


def _handle(folder: Path) -> Handle | None:
    pids = records.pids(folder)
    if pids is None or pids.shim_start is None:
        return None
    return Handle.open(Known(pids.shim, pids.shim_start))


def _over(folder: Path) -> bool:
    with records.lock(folder) as free:
        return free


def _wait(done: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True
