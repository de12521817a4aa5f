"""Where everything that discovery knows comes from: files below a root, and a few programs.

A :class:`Machine` is a real one, a folder that stands in for one, a capture, or one that is being captured
(:mod:`llmgw.discovery.capture`).
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Protocol

import trio

from llmgw.discovery.command import Ran, run
from llmgw.discovery.confined import ConfinedReader
from llmgw.discovery.faults import DiscoveryError
from llmgw.discovery.host import read_host, read_host_of_tree
from llmgw.discovery.sysfs import DiskReader, Reader
from llmgw.hardware.inventory import Host
from llmgw.settings.daemon import Discovery

_BELOW_ROOT = {"nvidia-smi": "usr/bin/nvidia-smi", "nvml": "usr/libexec/llmgw-nvml", "ip": "usr/sbin/ip"}
_MORE_PLACES = (
    "/usr/bin", "/usr/sbin", "/sbin", "/usr/lib/wsl/lib", "/opt/bin", "/usr/local/nvidia/bin",
    "/run/nvidia/driver/usr/bin",
)  # fmt: skip
"""Where programs lie that a daemon's ``PATH`` may not have: WSL2, and hosts with the driver in a folder of its own."""


class Machine(Protocol):
    """What discovery asks. ``root`` is the folder that every path is below."""

    @property
    def root(self) -> Path:
        """The folder that every path is below."""
        ...

    @property
    def reader(self) -> Reader:
        """How its files are read."""
        ...

    def host(self) -> Host:
        """The host itself. Blocking."""
        ...

    async def ask(self, program: str, *args: str) -> Ran:
        """Run a program such as ``nvidia-smi``, ``nvml`` or ``ip``.

        Raises :class:`DiscoveryError` when it cannot be started.
        """
        ...


def programs_of(root: Path) -> tuple[Path, ...]:
    """The programs that a folder brings along, and that reading it as a machine's root would run."""
    return tuple(path for name in _BELOW_ROOT.values() if os.access(path := root / name, os.X_OK))


class LiveMachine:
    """The machine that this process runs on, or a folder with programs of its own that stands in for one.

    Keep one: it remembers what hangs.
    """

    def __init__(self, config: Discovery) -> None:
        self._config = config
        self._root = Path(config.root)
        self._reader: Reader = DiskReader()
        self._left: dict[str, trio.Process] = {}

    @property
    def root(self) -> Path:
        """See :class:`Machine`."""
        return self._root

    @property
    def reader(self) -> Reader:
        """See :class:`Machine`."""
        return self._reader

    def host(self) -> Host:
        """See :class:`Machine`."""
        return read_host(self._root, self._reader)

    async def ask(self, program: str, *args: str) -> Ran:
        """See :class:`Machine`. Each run is bounded by ``discovery.timeout_s``.

        While an earlier run hangs in the kernel no other one is started: each would hang there as well, for ever.
        """
        self.refuse_while_stuck(program)
        argv = (*self._argv(program), *args)
        try:
            ran = await run(argv, self._config.timeout_s)
        except OSError as failed:
            remedy = "check discovery.nvidia_smi" if program == "nvidia-smi" else ""
            raise DiscoveryError("not-runnable", argv[0], f"cannot be run: {failed.strerror}", remedy) from failed
        if ran.left is not None:
            self.left(program, ran.left)
        return ran

    def left(self, program: str, process: trio.Process) -> None:
        """Remember a process of this program that could not be ended."""
        self._left[program] = process

    def refuse_while_stuck(self, program: str) -> None:
        """Raise :class:`DiscoveryError` while a process of this program that could not be ended is still there."""
        process = self._left.get(program)
        if process is None:
            return
        if process.poll() is None:
            raise DiscoveryError(
                "stuck",
                program,
                f"an earlier run (pid {process.pid}) hangs in the driver and cannot be ended",
                "look for Xid lines in the kernel log, then reboot",
            )
        del self._left[program]

    def _argv(self, program: str) -> tuple[str, ...]:
        if program == "nvidia-smi" and self._config.nvidia_smi is not None:
            return (self._config.nvidia_smi,)
        if self._root != Path("/"):
            below = self._root / _BELOW_ROOT.get(program, f"usr/bin/{program}")
            found = str(below) if os.access(below, os.X_OK) else None
        elif program == "nvml":
            # A process of its own: a call that hangs in the driver cannot be cancelled, and a library that was
            # loaded before a driver upgrade never works again.
            return (sys.executable, "-I", "-m", "llmgw.discovery.nvml_child")
        else:
            path = os.pathsep.join((os.environ.get("PATH", ""), *_MORE_PLACES))
            found = shutil.which(program, path=path)
        if found is None:
            raise DiscoveryError("not-found", program, "was not found", "")
        return (found,)


class FilesOnly(LiveMachine):
    """A folder that stands in for a machine's root and of which nothing is run."""

    def __init__(self, config: Discovery) -> None:
        super().__init__(config)
        self._reader = ConfinedReader(self._root)

    def host(self) -> Host:
        """See :class:`Machine`: the one whose files these are."""
        return read_host_of_tree(self._root, self._reader)

    async def ask(self, program: str, *args: str) -> Ran:
        """See :class:`Machine`: there is nobody to ask."""
        raise DiscoveryError("not-found", program, "is not run", "")
