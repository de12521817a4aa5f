"""Agents to be killed: each runs the shards of a state folder through a script, and dies at the point it is told.

    python -m tests.agent.victim

reads one JSON object a line, forks an agent for each, and writes how that ended to the file named ``result``. The
points of a life are counted, not timed: ``step`` is the nth time that Trio lets a task go, ``mark`` the nth thing that
is done to the disk or to a process (Python's audit events, in every thread) or that a shard reports, ``shim`` the nth
step of the shim that is being started (see :mod:`tests.agent.tracer`). An agent that is not killed tells in ``result``
how many of each there were.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Any

import trio

from llmgw.agent.dispatch import Dispatch
from llmgw.agent.epoch import Epoch, EpochFile
from llmgw.agent.shards import Shards
from llmgw.link.messages import DrainShard, ForgetShard, StopShard
from llmgw.scheduler.state import ShardReport, ShardState
from tests.agent.test_shards import INVENTORY, start
from tests.agent.test_shards import config as config_of

_MARKS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "subprocess.Popen", "fcntl.flock"}


class Points(trio.abc.Instrument):
    """Counts the points, and ends this process at the one that is meant."""

    def __init__(self, folder: str, kind: str, nth: int) -> None:
        self.folder, self.kind, self.nth = folder, kind, nth
        self.steps = 0
        self.marks: list[str] = []

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps += 1
        if self.kind == "step" and self.steps == self.nth:
            os.kill(os.getpid(), signal.SIGKILL)

    def mark(self, name: str) -> None:
        """Something is about to be done, or was just reported."""
        self.marks.append(name)
        if self.kind == "mark" and len(self.marks) == self.nth:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Everything that is done to the state folder, or to a process."""
        if event in _MARKS or event.startswith("signal."):
            path = args[0] if args and isinstance(args[0], str | Path) else ""
            if event == "open" and not (str(path).startswith(self.folder) and "engine.log" not in str(path)):
                return
            self.mark(f"{event} {Path(path).name if path else ''}".rstrip())


async def _live(task: dict[str, Any], points: Points) -> None:
    """The script: ``start``, ``ready``, ``wait``, ``drain``, ``stop``, ``forget``, as a control plane would ask."""
    folder = Path(task["folder"])
    asked = Path(task["asked"])
    turned = trio.Event()

    def changed(report: ShardReport) -> None:
        points.mark(f"state {report.state.value}")
        turned.set()

    shards = Shards(config_of(folder, tuple(task["command"])), changed, time.time)
    dispatch = Dispatch(shards, Epoch(EpochFile(folder)), lambda: INVENTORY)

    async def until(*states: ShardState) -> None:
        nonlocal turned
        with trio.fail_after(20):
            while not ((known := shards.find("m-1.0", 1)) and known.shard.state in states):
                turned = trio.Event()
                await turned.wait()

    async with trio.open_nursery() as nursery:
        await nursery.start(shards.run)
        for line in task["script"]:
            with asked.open("a") as file:
                file.write(f"{line}\n")
            match line:
                case "start":
                    result = await dispatch.run(start(**task["engine"]))
                    assert result.accepted, result
                case "ready":
                    await until(ShardState.READY, ShardState.DRAINING)
                case "wait":
                    await trio.sleep(0.3)
                case "drain":
                    await dispatch.run(DrainShard("drain", 1, "m-1.0", 1, "enough"))
                    await trio.sleep(0.1)
                case "stop":
                    await dispatch.run(StopShard("stop", 1, "m-1.0", 1, "enough", 2.0))
                    await until(ShardState.STOPPED, ShardState.FAILED)
                case "forget":
                    result = await dispatch.run(ForgetShard("forget", 1, "m-1.0", 1))
                    assert result.accepted, result
        nursery.cancel_scope.cancel(reason="the script is over")


def _agent(task: dict[str, Any]) -> None:
    """One agent, to its end."""
    null = os.open("/dev/null", os.O_RDWR)
    out = os.open(f"{task['result']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number, target in ((0, null), (1, out), (2, out)):
        os.dup2(target, number)
    go = Path(task["go"])
    interpreter = Path(f"{task['result']}.sh")
    tracer = Path(__file__).with_name("tracer.py")
    step = task["nth"] if task["kind"] == "shim" else 0
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {tracer} {step} {os.getpid()} {go} -- "$@"\n')
    interpreter.chmod(interpreter.stat().st_mode | stat.S_IXUSR)
    sys.executable = str(interpreter)
    points = Points(task["folder"], task["kind"], task["nth"])
    sys.addaudithook(points.audit)
    trio.run(_live, task, points, instruments=[points])
    Path(f"{task['result']}.points").write_text(json.dumps({"steps": points.steps, "marks": points.marks}))


def _watched(task: dict[str, Any]) -> None:
    """Fork the agent, and tell how it ended."""
    agent = os.fork()
    if agent == 0:
        try:
            _agent(task)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(agent, 0)
    fresh = Path(f"{task['result']}.new")
    fresh.write_text(json.dumps({"pid": agent, "code": os.waitstatus_to_exitcode(status)}))
    fresh.rename(task["result"])
    os._exit(0)


def main() -> None:
    """Serve until standard input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who watch
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            _watched(json.loads(line))


if __name__ == "__main__":
    main()
