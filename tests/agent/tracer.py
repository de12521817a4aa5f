"""Runs a shim step by step: kills the agent that started it at a chosen step, then waits there until it is let go.

    python -I -S tracer.py STEP AGENT GO -- -I -S shim/main.py …

STEP counts the shim's audit events (opening, forking, replacing, spawning …), 0 traces only. AGENT is a pid, GO a file
to wait for. What was done is in ``GO.steps``. Standard library only: it stands where the interpreter stands.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import time

_WAIT_S = 10.0
_STEPS = ("open", "fcntl.flock", "os.fork", "os.rename", "os.posix_spawn", "os.chdir", "ctypes.dlopen", "os.kill")


def main() -> None:
    """Trace the shim that the rest of the command line names."""
    step, agent, go = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    rest = sys.argv[5:]
    folder = rest[3]
    seen = 0
    steps = os.open(f"{go}.steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal seen
        if event not in _STEPS or (event == "open" and not _ours(args[0], folder)):
            return
        seen += 1
        os.write(steps, f"{event} {args[0] if args else ''}\n".encode())
        if seen == step:
            with contextlib.suppress(ProcessLookupError):  # in this run the step came later, and the agent is gone
                os.kill(agent, signal.SIGKILL)
            deadline = time.monotonic() + _WAIT_S
            while not os.path.exists(go) and time.monotonic() < deadline:
                time.sleep(0.005)

    sys.argv = rest[2:]
    sys.addaudithook(hook)
    runpy.run_path(rest[2], run_name="__main__")


def _ours(path: object, folder: str) -> bool:
    """Its own files; what the interpreter opens for itself, and what it reads of the engine later, are no steps."""
    return isinstance(path, str) and (path.startswith(folder) or path == "engine.log")


main()
