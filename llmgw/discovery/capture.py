"""A machine in a folder: everything that discovery read of it, to be sent to somebody who reads it again elsewhere.

``commands/`` holds what each program said, with ``commands/index.json`` over it; ``llmgw-capture.json`` the host and
when it was; every file that was read lies where it lies on the machine. Nothing in the folder is ever run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cattrs
from attrs import asdict, evolve, frozen

from llmgw.discovery.command import MAX_OUTPUT_BYTES, Ran
from llmgw.discovery.confined import ConfinedReader
from llmgw.discovery.faults import DiscoveryError
from llmgw.discovery.machine import Machine
from llmgw.discovery.sysfs import SWITCH_MANAGEMENT, Reader
from llmgw.hardware.fabric import FabricRule
from llmgw.hardware.inventory import Host
from llmgw.settings.convert import strict_converter

MARK = "llmgw-capture.json"
FORMAT = 1
HIDDEN = "hidden"
_TOO_COMMON = frozenset({"localhost", "node", "host", "server", "nvidia", "cuda", "linux", "ubuntu", "debian", HIDDEN})
"""Host names that are words of what is captured: blanking them would change what it means."""

_SERIALS = re.compile(r"<((?:\w+_)?serial(?:_number)?)>[^<]*</")


class Recorder:
    """A machine that is being captured: it answers as the other one does and remembers what it said."""

    def __init__(self, machine: Machine, hostname: str) -> None:
        self._machine = machine
        self._blank = _blanker(hostname)
        self._reader = _RecordingReader(machine.root, machine.reader, self._blank)
        self._ran: dict[str, Ran | DiscoveryError] = {}

    @property
    def root(self) -> Path:
        """See :class:`llmgw.discovery.machine.Machine`."""
        return self._machine.root

    @property
    def reader(self) -> Reader:
        """See :class:`llmgw.discovery.machine.Machine`."""
        return self._reader

    def host(self) -> Host:
        """See :class:`llmgw.discovery.machine.Machine`. Name and boot are blanked."""
        return evolve(self._machine.host(), hostname=HIDDEN, boot_id="")

    async def ask(self, program: str, *args: str) -> Ran:
        """See :class:`llmgw.discovery.machine.Machine`. The answer has serials and the host's name blanked.

        What was asked already gets the same answer again: a capture is of one moment.
        """
        asked = " ".join((program, *args))
        known = self._ran.get(asked)
        if isinstance(known, Ran):
            return known
        if known is not None:
            raise known
        try:
            ran = await self._machine.ask(program, *args)
        except DiscoveryError as failed:
            self._ran[asked] = failed
            raise
        ran = Ran((program, *args), ran.code, self._blank(ran.stdout), self._blank(ran.stderr))
        self._ran[asked] = ran
        return ran

    def save(self, folder: Path, host: Host, rules: Sequence[FabricRule], about: Mapping[str, Any]) -> None:
        """Write it all down, with the fabrics that were declared. Raises ``OSError``. Blocking."""
        commands = folder / "commands"
        commands.mkdir(parents=True)
        index: dict[str, dict[str, Any]] = {}
        for number, (asked, said) in enumerate(sorted(self._ran.items())):
            if isinstance(said, DiscoveryError):
                index[asked] = {"error": [said.code, said.thing, said.reason, said.remedy]}
                continue
            name = f"{number:02d}-{re.sub(r'[^A-Za-z0-9]+', '-', asked).strip('-')[:60]}"
            index[asked] = {"code": said.code, "stdout": f"{name}.out", "stderr": f"{name}.err"}
            (commands / f"{name}.out").write_text(said.stdout)
            (commands / f"{name}.err").write_text(said.stderr)
        (commands / "index.json").write_text(json.dumps(index, indent=2) + "\n")
        self._reader.save(folder)
        mark = {
            **about,
            "format": FORMAT,
            "host": asdict(host),
            "fabrics": [asdict(rule) for rule in rules],
            "unusable": sorted(str(path.relative_to(self.root)) for path in self._reader.unusable),
        }
        (folder / MARK).write_text(json.dumps(mark, indent=2) + "\n")


def _blanker(hostname: str) -> Callable[[str], str]:
    short = hostname.partition(".")[0]
    names = [re.escape(name) for name in (hostname, short) if len(name) > 3 and name.lower() not in _TOO_COMMON]
    host = re.compile(rf"(?<![A-Za-z0-9_.-])(?:{'|'.join(names)})(?![A-Za-z0-9_-])") if names else None

    def blank(text: str) -> str:
        text = _SERIALS.sub(lambda m: f"<{m[1]}>{HIDDEN}</", text)
        return text if host is None else host.sub(HIDDEN, text)

    return blank


class _RecordingReader:
    """Answers as another reader does; what it answered can be written below another root."""

    def __init__(self, root: Path, inner: Reader, blank: Callable[[str], str]) -> None:
        self._root = root
        self._inner = inner
        self._blank = blank
        self._files: dict[Path, bytes] = {}
        self._listed: dict[Path, tuple[str, ...]] = {}
        self._links: dict[Path, str] = {}
        self.unusable: set[Path] = set()

    def text(self, path: Path) -> str | None:
        """See :class:`llmgw.discovery.sysfs.Reader`."""
        text = self._inner.text(path)
        if text is not None:
            text = self._blank(text)
            self._files[path] = f"{text}\n".encode()
        return text

    def raw(self, path: Path, limit: int) -> bytes:
        """See :class:`llmgw.discovery.sysfs.Reader`. Of a VPD only the mark of switch management is kept: no serial."""
        data = self._inner.raw(path, limit)
        if path.name == "vpd":
            data = SWITCH_MANAGEMENT if SWITCH_MANAGEMENT in data else b""
        if data:
            self._files[path] = data
        return data

    def names(self, path: Path) -> tuple[str, ...]:
        """See :class:`llmgw.discovery.sysfs.Reader`."""
        found = self._inner.names(path)
        if found:
            self._listed[path] = found
        return found

    def target(self, path: Path) -> str | None:
        """See :class:`llmgw.discovery.sysfs.Reader`."""
        self.real(path)
        return self._inner.target(path)

    def real(self, path: Path) -> str | None:
        """See :class:`llmgw.discovery.sysfs.Reader`."""
        found = self._inner.real(path)
        if found is not None:
            self._links[path] = found
        return found

    def usable(self, path: Path) -> bool:
        """See :class:`llmgw.discovery.sysfs.Reader`."""
        found = self._inner.usable(path)
        if not found:
            self.unusable.add(path)
        return found

    def save(self, folder: Path) -> None:
        """Write the tree. Links first, so that what was read through one lands where it leads."""
        root = os.path.realpath(self._root)
        for path, real in sorted(self._links.items()):
            there = self._below(folder, path)
            target = folder / os.path.relpath(real, root)
            if ".." in target.relative_to(folder).parts:
                continue
            target.mkdir(parents=True, exist_ok=True)
            if there.parent.resolve() / there.name == target.resolve():
                continue
            there.parent.mkdir(parents=True, exist_ok=True)
            if not there.exists():
                there.symlink_to(os.path.relpath(target, there.parent.resolve()))
        for path, data in sorted(self._files.items()):
            there = self._below(folder, path)
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(data)
        for path, names in sorted(self._listed.items(), key=lambda item: -len(item[0].parts)):
            there = self._below(folder, path)
            there.mkdir(parents=True, exist_ok=True)
            for name in names:
                if not os.path.lexists(there / name):
                    (there / name).touch()

    def _below(self, folder: Path, path: Path) -> Path:
        return folder / path.relative_to(self._root)


@frozen
class _Said:
    """One program's answer: how it ended and the files with what it said, or why it could not be run."""

    code: int | None = None
    stdout: str = ""
    stderr: str = ""
    error: tuple[str, ...] = ()


class _CapturedReader(ConfinedReader):
    """Reads a capture's files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self.unusable: frozenset[str] = frozenset()

    def usable(self, path: Path) -> bool:
        """See :class:`llmgw.discovery.sysfs.Reader`: as it was then."""
        return str(path.relative_to(self._folder)) not in self.unusable


class CapturedMachine:
    """A capture; ``rules`` are the fabrics that were declared when it was made.

    Raises :class:`DiscoveryError` when the folder is none, or is of a format that is not known.
    """

    def __init__(self, folder: Path) -> None:
        self._root = folder
        self._reader = _CapturedReader(folder)
        convert = strict_converter(forbid_unknown=False)
        try:
            about = json.loads((folder / MARK).read_bytes())
            self._index = convert.structure(json.loads((folder / "commands/index.json").read_bytes()), dict[str, _Said])
            self._host = convert.structure(about["host"], Host)
            self.rules = convert.structure(about["fabrics"], tuple[FabricRule, ...])
            self._reader.unusable = frozenset(convert.structure(about.get("unusable", []), tuple[str, ...]))
            known = about["format"] == FORMAT
        except (OSError, ValueError, KeyError, TypeError, cattrs.BaseValidationError) as wrong:
            raise DiscoveryError(
                "not-a-capture", str(folder), f"is not a whole capture ({type(wrong).__name__})", "make it with --save"
            ) from wrong
        if not known:
            raise DiscoveryError("not-a-capture", str(folder), f"has format {about['format']}, {FORMAT} is known", "")

    @property
    def root(self) -> Path:
        """See :class:`llmgw.discovery.machine.Machine`."""
        return self._root

    @property
    def reader(self) -> Reader:
        """See :class:`llmgw.discovery.machine.Machine`."""
        return self._reader

    def host(self) -> Host:
        """See :class:`llmgw.discovery.machine.Machine`."""
        return self._host

    async def ask(self, program: str, *args: str) -> Ran:
        """See :class:`llmgw.discovery.machine.Machine`: what the program said then. Nothing is run."""
        asked = " ".join((program, *args))
        said = self._index.get(asked)
        if said is None:
            raise DiscoveryError("not-found", program, "was not asked when this was captured", "")
        if said.error:
            raise DiscoveryError(*(*said.error, "", "", "", "")[:4])
        out, err = (
            self._reader.raw(self._root / "commands" / name, MAX_OUTPUT_BYTES) for name in (said.stdout, said.stderr)
        )
        return Ran((program, *args), said.code, out.decode(errors="replace"), err.decode(errors="replace"))


def is_capture(folder: Path) -> bool:
    """Whether a folder is a capture rather than a root with programs in it."""
    return (folder / MARK).exists()
