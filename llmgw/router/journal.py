"""What was used, on its way to the store: written to a file of this worker, said to the control plane, kept by it.

A batch is in the file before it is said, and stays there until the control plane has it in its store; so neither's
death loses or doubles anything. The file is not forced to the disk: it outlives processes, not the machine. Whoever
collects the file of a dead worker knows by its lock that it is dead.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import cattrs
import orjson
from attrs import define, field, frozen

from llmgw.settings.convert import strict_converter
from llmgw.settings.usage import UsageRow, merged

_NAME = "usage-{}.jsonl"
_TIDY_BYTES = 1024 * 1024
_WAITING_MOST = 64


@frozen
class Batch:
    """Rows under their number; numbers of a ledger go up."""

    seq: int
    rows: tuple[UsageRow, ...]


@cache
def _converter() -> cattrs.Converter:
    return strict_converter(forbid_unknown=False)


def _line(batch: Batch) -> bytes:
    return orjson.dumps(_converter().unstructure(batch)) + b"\n"


@define
class Journal:
    """One worker's batches. ``ledger`` names it; without a folder nothing is written down."""

    folder: Path | None
    ledger: str = field(factory=lambda: secrets.token_hex(8))
    saying: Batch | None = None
    _waiting: list[Batch] = field(factory=list)
    _seq: int = 0
    _file: int = -1
    _bytes: int = 0

    def __attrs_post_init__(self) -> None:
        if self.folder is not None:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self._file = self._open(b"")

    @property
    def unkept(self) -> int:
        """Batches that no control plane has."""
        return len(self._waiting) + (self.saying is not None)

    def add(self, rows: tuple[UsageRow, ...]) -> None:
        """A new batch. Raises ``OSError`` when it cannot be written down; it is remembered all the same."""
        self._seq += 1
        batch = Batch(self._seq, rows)
        self._waiting.append(batch)
        if len(self._waiting) > _WAITING_MOST:
            self._waiting = [_joined(self._waiting)]
        if self._bytes > _TIDY_BYTES:
            self._rewrite()
        else:
            self._write(_line(batch))

    def next(self) -> Batch | None:
        """What is to be said now: what was said before and not answered, as it was, else everything since."""
        if self.saying is None and self._waiting:
            self.saying = _joined(self._waiting)
            self._waiting.clear()
        return self.saying

    def kept(self, seq: int) -> None:
        """The control plane has everything up to this number."""
        if self.saying is None or seq < self.saying.seq:
            return
        self.saying = None
        if self._bytes and (not self._waiting or self._bytes > _TIDY_BYTES):
            # What stays because the disk is full is known by its number, and counted once all the same.
            with suppress(OSError):
                self._rewrite()

    def needed(self) -> tuple[Batch, ...]:
        """What no control plane has, as far as this worker was told."""
        return (*((self.saying,) if self.saying is not None else ()), *self._waiting)

    def _rewrite(self) -> None:
        """Only what is still needed."""
        lines = b"".join(map(_line, self.needed()))
        if self._file >= 0:
            if not lines:
                os.ftruncate(self._file, 0)
            else:
                self._replace(lines)
        self._bytes = len(lines)

    def _replace(self, lines: bytes) -> None:
        old, self._file = self._file, self._open(lines)
        os.close(old)

    def _open(self, lines: bytes) -> int:
        """A file with these lines, locked before it can be found under its name."""
        assert self.folder is not None
        path = self.folder / _NAME.format(self.ledger)
        fresh = path.with_suffix(".new")
        handle = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _whole(handle, lines)
            fresh.replace(path)
        except OSError:
            os.close(handle)
            raise
        return handle

    def _write(self, line: bytes) -> None:
        if self._file >= 0:
            _whole(self._file, line)
        self._bytes += len(line)

    def close(self) -> None:
        """Give the file up; whoever collects takes what is left."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _whole(handle: int, data: bytes) -> None:
    """Append all of it, or nothing: half a line would take the next one with it."""
    before = os.fstat(handle).st_size
    if os.write(handle, data) != len(data):
        os.ftruncate(handle, before)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _joined(batches: list[Batch]) -> Batch:
    return Batch(batches[-1].seq, merged(row for batch in batches for row in batch.rows))


def left_behind(folder: Path) -> tuple[tuple[str, Path, tuple[Batch, ...]], ...]:
    """The ledgers of dead workers: name, file, batches. Blocking. The files stay until they are removed.

    A last line that was cut short is left out.
    """
    found = []
    for path in sorted(folder.glob(_NAME.format("*"))):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        with os.fdopen(handle, "rb") as file:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A worker that puts a new file in its place lets the old one go.
                if path.stat().st_ino != os.fstat(handle).st_ino:
                    continue
            except (BlockingIOError, FileNotFoundError):
                continue
            name = path.name.removeprefix(_NAME.split("{")[0]).removesuffix(".jsonl")
            found.append((name, path, tuple(_batches(file.read()))))
    return tuple(found)


def remove(path: Path) -> None:
    """Remove a dead worker's ledger, once it is in the store. Blocking."""
    path.unlink(missing_ok=True)
    path.with_suffix(".new").unlink(missing_ok=True)


def _batches(text: bytes) -> Iterator[Batch]:
    for line in text.split(b"\n")[:-1]:
        try:
            yield _converter().structure(orjson.loads(line), Batch)
        except (ValueError, cattrs.BaseValidationError):
            continue
