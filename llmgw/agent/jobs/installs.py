"""The engines of this node: those that jobs installed, ``installs/<engine>/<name>-<version>/`` in the state folder, and
those that ``agent.yaml`` names.

``installs/<engine>/current`` is a link to the one that shards start with; it is replaced atomically. Launches name the
folder itself, so what runs keeps the install that it was started from.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import cattrs
import orjson
from attrs import frozen

from llmgw.agent import records
from llmgw.agent.jobs.install_child import DONE, InstallTask
from llmgw.errors import OperatorError
from llmgw.scheduler.jobs import Install, Installed, check_install
from llmgw.settings.catalog import EngineKind
from llmgw.settings.convert import strict_converter
from llmgw.settings.daemon import AgentConfig, EngineInstall
from llmgw.store.files import write_private

_CURRENT = "current"
_COMMANDS: Mapping[EngineKind, tuple[str, ...]] = {
    EngineKind.VLLM: ("bin/vllm", "serve"),
    EngineKind.SGLANG: ("bin/python", "-m", "sglang.launch_server"),
    EngineKind.LLAMACPP: ("bin/llama-server",),
}
_SGLANG = "import sglang; print(sglang.__version__)"


@frozen
class Made:
    """``install.json``: what an environment is. ``before`` is the folder's name of the one that was current then."""

    name: str
    version: str
    command: tuple[str, ...]
    says: str
    before: str = ""


class Installs:
    """Which engine is started how. ``refresh`` after a switch; everything else is from memory."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._folder = Path(config.state_dir) / "installs"
        self._shards = Path(config.state_dir) / "shards"
        self._converter = strict_converter(forbid_unknown=False)
        self._listed: tuple[Installed, ...] = ()
        self._engines: dict[EngineKind, EngineInstall] = {}
        self.refresh()

    def engine(self, kind: EngineKind) -> EngineInstall | None:
        """The install that shards start with now: what a job made last, else what ``agent.yaml`` names."""
        return self._engines.get(kind) or self._config.engine(kind)

    def listed(self) -> tuple[Installed, ...]:
        """Every engine of this node."""
        return self._listed

    def refresh(self) -> None:
        """Read what there is. Blocking."""
        listed: list[Installed] = []
        engines: dict[EngineKind, EngineInstall] = {}
        for kind in EngineKind:
            current = self._current(kind)
            for folder in self._folders(kind):
                if (made := self._made(folder)) is None:
                    continue
                now = folder.name == current
                listed.append(Installed(kind, made.name, made.version, str(folder), made.says, now))
                if now:
                    command = (f"{folder}/{made.command[0]}", *made.command[1:])
                    engines[kind] = EngineInstall(kind, command, made.version)
        for named in self._config.engines:
            used = named.kind not in engines
            listed.append(Installed(named.kind, "", named.version or "", named.command[0], "", used))
        self._listed, self._engines = tuple(listed), engines

    def task(self, install: Install) -> InstallTask:
        """What the installing process is told. Raises :class:`OperatorError`."""
        check_install(install)
        command = install.command or _COMMANDS[install.engine]
        verify: tuple[str, ...] = (command[0], "--version")
        if install.engine is EngineKind.SGLANG and not install.command:
            verify = (command[0], "-c", _SGLANG)  # its server knows no --version
        target = str(self._folder / install.engine.value / install.label)
        return InstallTask(target, verify, install.lock, install.wheels, install.packages, install.python)

    def switch(self, install: Install, says: str) -> None:
        """It is verified: shards start with it from now on. Raises ``OSError``. Blocking."""
        folder = self._folder / install.engine.value
        target, before = folder / install.label, self._current(install.engine)
        if before == install.label and (known := self._made(target)) is not None:
            before = known.before
        made = Made(install.name, install.version, install.command or _COMMANDS[install.engine], says, before)
        write_private(target / DONE, orjson.dumps(self._converter.unstructure(made)))
        fresh = folder / f".{_CURRENT}.new"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(install.label)
        fresh.replace(folder / _CURRENT)
        self._prune(install.engine, {install.label, before})
        self.refresh()

    def _prune(self, kind: EngineKind, kept: set[str]) -> None:
        """Drop what neither runs nor is current nor was so just before: a start may be under way with that."""
        argv: list[str] = []
        for folder in records.folders(self._shards):
            try:
                argv += records.read(folder).argv
            except OperatorError:
                return  # one that cannot be read may run from any of them
        for install in self._folders(kind):
            used = any(word.startswith(f"{install}/") for word in argv)
            if install.name not in kept and not used and self._made(install) is not None:
                shutil.rmtree(install, ignore_errors=True)

    def _folders(self, kind: EngineKind) -> list[Path]:
        folder = self._folder / kind.value
        if not folder.is_dir():
            return []
        return sorted(p for p in folder.iterdir() if p.is_dir() and not p.is_symlink())

    def _current(self, kind: EngineKind) -> str:
        try:
            return os.readlink(self._folder / kind.value / _CURRENT)
        except OSError:
            return ""

    def _made(self, folder: Path) -> Made | None:
        try:
            return self._converter.structure(orjson.loads((folder / DONE).read_bytes()), Made)
        except (OSError, ValueError, cattrs.BaseValidationError):
            return None
