"""The process that installs an engine: ``python -m llmgw.agent.jobs.install_child TASK.json``.

It makes a virtual environment, fills it from a lock file with hashes or from a folder of wheels and nothing else, and
asks what came of it for its version. An environment cannot be moved, so it is made where it stays; it counts once its
``install.json`` is there, which the agent writes, and one that nobody verified is made anew. What pip says goes to
standard error, the job's log.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import frozen

from llmgw.agent.jobs import lifeline

DONE = "install.json"
_VERIFIED = ".verified"
_VERSION_S = 300.0
_LONGEST = 200
_LAST_LINES = 40


@frozen
class InstallTask:
    """``target`` is the environment's folder; ``lock``, or ``wheels`` and ``packages``, is what is put into it.

    ``verify`` is asked for the version, its first word relative to the environment.
    """

    target: str
    verify: tuple[str, ...]
    lock: str = ""
    wheels: str = ""
    packages: tuple[str, ...] = ()
    python: str = ""


class InstallError(Exception):
    """It cannot be installed: why, and what to do."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


def commands(task: InstallTask, uv: str | None) -> tuple[list[str], list[str]]:
    """What makes the environment, and what fills it; with uv where there is one, else with venv and pip. Pure."""
    python = task.python or sys.executable
    inside = f"{task.target}/bin/python"
    if uv is not None:
        make, fill = [uv, "venv", "--python", python, task.target], [uv, "pip", "install", "--python", inside]
    else:
        make = [python, "-m", "venv", task.target]
        fill = [inside, "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    if task.lock:
        return make, [*fill, "--require-hashes", "-r", f"{task.target}/requirements.lock"]
    return make, [*fill, "--no-index", "--find-links", task.wheels, *task.packages]


def _environment() -> dict[str, str]:
    """Without what lets this very process find llmgw: the new environment has its own packages only."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}


def _run(argv: list[str], what: str) -> None:
    last: deque[str] = deque(maxlen=_LAST_LINES)
    try:
        with subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=_environment()
        ) as done:
            for line in done.stdout or ():
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
                last.append(line.decode(errors="replace").strip())
    except OSError as failed:
        raise InstallError(f"{argv[0]} cannot be run: {failed.strerror}", "check the path") from failed
    if done.returncode:
        said = why(list(last))
        raise InstallError(
            f"{what} ended with exit code {done.returncode}{': ' if said else ''}{said}",
            "see the job's log.txt on the node",
        )


def why(lines: Sequence[str]) -> str:
    """What pip or uv said last of an error, or else said last. Pure."""
    found = [line for line in lines if line]
    errors = [line for line in found if line.lower().startswith("error")]
    return (errors or found or [""])[-1][:_LONGEST]


def _version(task: InstallTask) -> str:
    """What the engine says its version is: the last line, for engines log before they answer."""
    argv = [f"{task.target}/{task.verify[0]}", *task.verify[1:]]
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_VERSION_S,
            check=False,
            cwd=task.target,
            env=_environment(),
        )
    except subprocess.TimeoutExpired as slow:
        raise InstallError(f"it did not say its version within {_VERSION_S:g} s", "see the job's log.txt") from slow
    except OSError as failed:
        remedy = "are these the packages of this engine?"
        raise InstallError(f"there is no {task.verify[0]} in it ({failed.strerror})", remedy) from failed
    sys.stderr.buffer.write(done.stdout + done.stderr)
    said = (done.stdout or done.stderr).decode(errors="replace").strip().splitlines()
    if done.returncode or not said:
        raise InstallError(f"asked for its version it ended with exit code {done.returncode}", "see the job's log.txt")
    return said[-1][:_LONGEST]


def install(task: InstallTask, say: Any, uv: str | None) -> dict[str, str]:
    """Do it, and return ``path`` and ``version``. Raises :class:`InstallError`, ``OSError``."""
    target = Path(task.target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / ".lock").open("w") as lock:
        say({"type": "step", "name": "wait for other installs of this engine"})
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel's: it ends with its process
        # Verified is enough: the agent may be about to switch to it, for another job that is asked for the same.
        if not ((target / DONE).exists() or (target / _VERIFIED).exists()):
            with suppress(FileNotFoundError):
                shutil.rmtree(target)
            make, fill = commands(task, uv)
            say({"type": "step", "name": "make the environment"})
            _run(make, "making the environment")
            if task.lock:
                (target / "requirements.lock").write_text(task.lock)
            say({"type": "step", "name": "install the packages"})
            _run(fill, "installing the packages")
        say({"type": "step", "name": "verify"})
        version = _version(task)
        (target / _VERIFIED).touch()
        return {"path": task.target, "version": version}


def main() -> None:
    """Run the task that the first argument names."""
    lifeline.hold()

    def say(what: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()

    code = 1
    try:
        said = json.loads(Path(sys.argv[1]).read_bytes())
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in said.items()}
        task = InstallTask(**fields)
        say({"type": "done", **install(task, say, shutil.which("uv"))})
        code = 0
    except InstallError as wrong:
        say({"type": "failed", "reason": wrong.reason, "remedy": wrong.remedy})
    except OSError as failed:
        say({"type": "failed", "reason": f"{failed.strerror}: {failed.filename}", "remedy": "check the disk"})
    os._exit(code)


if __name__ == "__main__":
    main()
