"""Processes that are not our children: starting them, knowing them again, and signalling none but them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import trio
from attrs import frozen

from llmgw.agent import shim
from llmgw.agent.proctree import PROC, fingerprint, must_be_seen, stat
from llmgw.errors import OperatorError

LOG_BYTES = 16 * 1024 * 1024
"""An engine's log is rotated beyond this; one older part is kept."""

_START_S = 15.0
_SHIM = Path(shim.__file__).with_name("main.py")

_INHERITED = frozenset(
    {
        "PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "SHELL",
        "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_CACHE_PATH", "TRITON_CACHE_DIR", "XDG_CACHE_HOME",
        "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT",
        "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
        "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "OMP_NUM_THREADS",
    }
)  # fmt: skip
"""What an engine gets of the agent's own environment. Not ``NOTIFY_SOCKET``, not ``LISTEN_FDS``, no engine's flags, and
no token: what needs one fetches before the engine starts, and whoever can make an engine run code reads what it has."""


@frozen
class Known:
    """A process by number and start time: together they are never used twice within one boot.

    ``fingerprint`` is that of its command line, for those that keep it; empty where nobody knows it.
    """

    pid: int
    start: int
    fingerprint: str = ""


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of this process; ``None`` when there is none, or only its corpse."""
    found = stat(pid)
    return None if found is None else found.start


class Handle:
    """A living process that was verified after its pidfd was opened: signals cannot reach anybody else.

    Close it when done; closing signals nobody.
    """

    def __init__(self, known: Known, fd: int) -> None:
        self.known = known
        self._fd = fd

    @staticmethod
    def open(known: Known) -> Handle | None:
        """A handle on this very process, or ``None`` when it is not there any more."""
        try:
            fd = os.pidfd_open(known.pid)
        except OSError as failed:
            must_be_seen(failed)
            return None
        try:
            same = start_time(known.pid) == known.start
            same = same and known.fingerprint in ("", fingerprint(known.pid))
        except OSError:
            os.close(fd)
            raise
        if not same:
            os.close(fd)
            return None
        return Handle(known, fd)

    def send(self, number: int) -> None:
        """Signal it; a process that has ended meanwhile is no error."""
        try:
            signal.pidfd_send_signal(self._fd, number)
        except ProcessLookupError:
            return

    async def wait(self) -> None:
        """Wait for its end, however it is reaped."""
        await trio.lowlevel.wait_readable(self._fd)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._fd)


def astray(shards: Path) -> tuple[Known, ...]:
    """Shims of this state folder whose launch has no record any more: somebody removed it under a running engine.

    Blocking, for milliseconds.
    """
    found = []
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError as failed:
            must_be_seen(failed)
            continue
        if len(words) < 5 or not words[3].endswith(b"/agent/shim/main.py"):  # of whichever version
            continue
        folder = Path(os.fsdecode(words[4]))
        start = start_time(int(entry.name))
        if folder.parent == shards and not (folder / "record.json").exists() and start is not None:
            found.append(Known(int(entry.name), start))
    return tuple(found)


class Grip:
    """A hold on an engine: through its shim, or on the engine itself when the shim is gone.

    An engine leads its own process group, so as long as it is verified to be alive its group is the right one.
    """

    def __init__(self, handle: Handle, engine: int | None, *, through_shim: bool) -> None:
        self.through_shim = through_shim
        self._handle = handle
        self._engine = engine

    @staticmethod
    def take(shim: Known | None, engine: Known | None) -> Grip | None:
        """A hold on whichever of the two lives, the shim first; ``None`` when neither does."""
        number = None if engine is None else engine.pid
        for known, through_shim in ((shim, True), (engine, False)):
            if known is not None and (handle := Handle.open(known)) is not None:
                return Grip(handle, number, through_shim=through_shim)
        return None

    @property
    def over(self) -> bool:
        """Whether what is held has ended."""
        return start_time(self._handle.known.pid) != self._handle.known.start

    def terminate(self) -> None:
        """Ask the engine's group to end."""
        self._signal(signal.SIGTERM, signal.SIGTERM)

    def kill(self) -> None:
        """Kill everything that the engine started, as far as it can be known."""
        self._signal(signal.SIGUSR1, signal.SIGKILL)

    def _signal(self, to_shim: int, to_group: int) -> None:
        if self.through_shim:
            self._handle.send(to_shim)
            self._handle.send(signal.SIGCONT)  # one that somebody has stopped would pass nothing on
        elif self._engine is not None and not self.over:
            os.killpg(self._engine, to_group)

    async def wait(self) -> None:
        """Wait for the end of what is held."""
        await self._handle.wait()

    def close(self) -> None:
        """Let go."""
        self._handle.close()


def environment(own: Mapping[str, str], *more: Mapping[str, str]) -> dict[str, str]:
    """What an engine's process gets: an allow-list of our own environment, then what was set for it."""
    made = {name: value for name, value in own.items() if name in _INHERITED or name.startswith("LC_")}
    for some in more:
        made.update(some)
    return made


async def spawn(
    folder: Path, argv: tuple[str, ...], env: Mapping[str, str], cgroup: str = "", *, orderly: bool = False
) -> bool:
    """Start an engine under a shim in ``folder``, whose record must be written. Returns when the shim has spoken.

    ``cgroup`` is made for it, if one is named (:mod:`llmgw.agent.cgroup`), and whether it runs in that is returned.
    With ``orderly`` SIGTERM goes to its first process only.

    What became of it is in ``shim.json`` and ``exit.json``. The shim is nobody's child: it lives on whatever becomes
    of this process. Raises :class:`OperatorError` when no shim came to life.
    """
    command = [sys.executable, "-I", "-S", str(_SHIM), str(folder), str(LOG_BYTES), cgroup]
    command += ["first" if orderly else "group", *argv]
    # A cancelled start still ends with an engine or without one, never in between: the launch takes milliseconds.
    with trio.CancelScope(shield=True, deadline=trio.current_time() + _START_S):
        try:
            done = await trio.run_process(
                command,
                stdin=subprocess.DEVNULL,
                capture_stdout=True,
                capture_stderr=True,
                check=False,
                env=dict(env),
                start_new_session=True,
            )
        except OSError as failed:
            raise OperatorError(str(folder), f"the shim cannot be started: {failed.strerror}") from failed
        if done.returncode == 0:
            return bool(json.loads(done.stdout)["cgroup"])
        said = done.stderr.decode(errors="replace").strip()
        if said.startswith("! "):
            raise OperatorError(str(folder), said[2:].removeprefix(f"{folder} "), "check the disk")
        said = said[-300:]
        raise OperatorError(str(folder), f"the shim failed ({said or f'exit code {done.returncode}'})")
    raise OperatorError(
        str(folder), f"the shim did not come up within {_START_S:g} s", "look at the node's load and disk"
    )
