"""Ending every engine of a node whose agent does not run: for taking a node out, and for a node that is cut off."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from llmgw.agent import proctree, records
from llmgw.agent.process import Grip, Handle, astray, start_time
from llmgw.agent.records import Record
from llmgw.agent.tracking import kill_left
from llmgw.errors import OperatorError
from llmgw.store.folder import held

_KILL_S = 3.0
_LOOK_S = 0.02


def stop_engines(state_dir: Path, grace_s: float) -> tuple[str, ...]:
    """Stop every engine that was started from this state folder, and say which. Blocking.

    SIGTERM to all, SIGKILL after ``grace_s``. A full or read-only disk does not keep it from that. Raises
    :class:`llmgw.errors.OperatorError` while an agent holds the folder, as then the control plane is the one to ask,
    and where it cannot see what runs: nothing is then said to be stopped.
    """
    if not os.path.lexists(state_dir):
        raise OperatorError(str(state_dir), "is not there: no agent ran on it", "look at state_dir in agent.yaml")
    try:
        return _stop(state_dir, grace_s)
    except OSError as failed:
        where = str(failed.filename or state_dir)
        raise OperatorError(where, f"cannot be looked at: {failed.strerror}", "mend that, and try again") from failed


def _stop(state_dir: Path, grace_s: float) -> tuple[str, ...]:
    stopped: dict[str, None] = {}
    with held(state_dir, "agent", to_end=True):
        # Twice: a shim that is killed meanwhile leaves its engine behind, which is then held itself.
        for _ in range(2):
            stopped.update(dict.fromkeys(_round(state_dir / "shards", grace_s)))
        stopped.update(dict.fromkeys(_sweep(state_dir / "shards")))
        stopped.update(dict.fromkeys(_astray(state_dir / "shards")))
    return tuple(stopped)


def _round(shards: Path, grace_s: float) -> tuple[str, ...]:
    running = [(folder.name, grip) for folder in records.folders(shards) if (grip := _grip(folder)) is not None]
    try:
        for _, grip in running:
            grip.terminate()
        if not _wait(lambda: all(grip.over for _, grip in running), grace_s):
            for _, grip in running:
                if not grip.over:
                    grip.kill()
            _wait(lambda: all(grip.over for _, grip in running), _KILL_S)
    finally:
        for _, grip in running:
            grip.close()
    return tuple(name for name, _ in running)


def _sweep(shards: Path) -> tuple[str, ...]:
    """Kill what outlived its engine and its shim."""
    swept = []
    for folder in records.folders(shards):
        try:
            record = records.read(folder)
        except OperatorError:
            continue
        if not _nothing_left(record):
            swept.append(folder.name)
            _wait(partial(_nothing_left, record), _KILL_S)
    return tuple(swept)


def _nothing_left(record: Record) -> bool:
    """Whether nothing of a launch lives. What does is killed, again at each look: it may have forked meanwhile."""
    left = proctree.members(record.launch, cgroup=record.cgroup_path)
    kill_left(record, left)
    return not left


def _astray(shards: Path) -> tuple[str, ...]:
    """Kill what runs in folders that somebody removed."""
    held = [handle for known in astray(shards) if (handle := Handle.open(known)) is not None]
    for handle in held:
        handle.send(signal.SIGUSR1)
    _wait(lambda: all(start_time(handle.known.pid) != handle.known.start for handle in held), 2 * _KILL_S)
    for handle in held:
        handle.close()
    return tuple(f"pid {handle.known.pid}" for handle in held)


def _grip(folder: Path) -> Grip | None:
    pids = records.pids(folder)
    return None if pids is None else pids.grip()


def _wait(done: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True
