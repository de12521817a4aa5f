"""Engines' logs for those who ask for them over the link: bounded, redacted, through rotation.

A follower has credit: so many chunks may be under way to it. Without credit nothing is read, and what the log has
moved on by meanwhile beyond a bound is left out, with a word on how much.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Self

import trio

from llmgw.agent import records
from llmgw.durable import regular
from llmgw.errors import OperatorError, PeerError
from llmgw.link.messages import LogChunk, StopTail, TailLog
from llmgw.link.plain import plain
from llmgw.telemetry.logging import logger

LOOK_S = 0.25
MOST = 16
"""So many followers a node has at most."""

LONGEST_LINE = 4000
_CHUNK_LINES, _CHUNK_BYTES = 100, 16 * 1024
_BEHIND_BYTES = 256 * 1024
_MARK_BYTES = 200
_GENERATION = re.compile(r"-g([0-9]{1,9})(?:\.[0-9]+)?$")


def folder_of(state_dir: Path, shard: str, generation: int, *, previous: bool) -> Path:
    """Where the log of this start of a shard is, or of the newest one before it. Blocking.

    Raises :class:`OperatorError`.
    """
    records.folder_of(state_dir / "shards", shard, generation)  # its name is one
    found: list[tuple[int, float, Path]] = []
    for place in (state_dir / "shards", state_dir / "logs"):
        for folder in place.glob(f"{shard}-g*"):
            match = _GENERATION.search(folder.name)
            number = -1 if match is None else int(match[1])
            wanted = number < generation if previous else number == generation
            if number >= 0 and wanted and (folder / "engine.log").exists() and not folder.is_symlink():
                found.append((number, folder.stat().st_mtime, folder))
    if not found:
        which = f"a start before number {generation}" if previous else f"start {generation}"
        raise OperatorError(f"the log of {shard}", f"of {which} is not on this node any more")
    return max(found)[2]


class FollowedLog:
    """A log, look by look, which goes on over the cuts that keep it short, and over its folder's move. Blocking.

    Use it as a context manager. Raises :class:`OSError` where there is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        # An engine's folder is moved away when it has ended, its last words with it: the folder is held, not its name.
        self._folder = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        held = Path(f"/proc/self/fd/{self._folder}")
        self._path = held / "engine.log"
        self._older = held / "engine.log.1"
        self._at = 0
        self._mark = b""
        self._rest = b""
        self._cut_is = _which(self._older)
        self.skipped = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._folder)

    def last(self, lines: int) -> list[bytes]:
        """The last lines; from here on :meth:`more` goes on."""
        data = self._read(max(0, self._size() - _BEHIND_BYTES))
        if data.count(b"\n") < lines:
            with contextlib.suppress(OSError):
                data = _tail(self._older, _BEHIND_BYTES) + data
        *whole, self._rest = _cut(data)
        return whole[-lines:] if lines else []

    def more(self) -> list[bytes]:
        """What was completed since the last look."""
        data = b""
        # By its size alone a log that was cut and has grown again would look like one that was not.
        if (last_cut := _which(self._older)) != self._cut_is or self._size() < self._at:
            self._cut_is = last_cut
            data = self._missed()
            self._at, self._mark = 0, b""
        if (beyond := self._size() - self._at - _BEHIND_BYTES) > 0:
            self.skipped += beyond
            self._at += beyond
            self._rest = b""
        data += self._read(self._at)
        *whole, self._rest = _cut(self._rest + data)
        if len(self._rest) > 2 * LONGEST_LINE:
            self._rest = self._rest[-LONGEST_LINE:]
        return whole

    def end(self) -> list[bytes]:
        """What came since the last look, and a last line that nobody completed."""
        lines = self.more()
        rest, self._rest = self._rest, b""
        return [*lines, rest] if rest.strip() else lines

    def _missed(self) -> bytes:
        """What was written between the last look and the cut: it is in the older part, behind what was read last.

        What of it is not to be had any more, or is beyond the bound, is counted.
        """
        older = _tail(self._older, 2 * _BEHIND_BYTES)
        at = older.rfind(self._mark) if self._mark else -1
        if at < 0:
            # Where it ended is not in sight: everything from there on, as far as that can be told.
            self._rest = b""
            missed, found = max(1, _size_of(self._older) - self._at), b""
        else:
            found = older[at + len(self._mark) :]
            missed = max(0, len(found) - _BEHIND_BYTES)
            if missed:
                found, self._rest = found[-_BEHIND_BYTES:], b""
        self.skipped += missed
        return found

    def _size(self) -> int:
        return _size_of(self._path)

    def _read(self, at: int) -> bytes:
        try:
            with regular(self._path) as file:
                file.seek(at)
                data = file.read(2 * _BEHIND_BYTES)
        except OSError:
            return b""
        self._at = at + len(data)
        self._mark = (self._mark + data)[-_MARK_BYTES:]
        return data


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _which(path: Path) -> tuple[int, int] | None:
    """What tells this file from another one under the same name."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _tail(path: Path, most: int) -> bytes:
    """The end of a file that may be large; nothing of one that is not there."""
    try:
        with regular(path) as file:
            file.seek(max(0, _size_of(path) - most))
            return file.read(most)
    except OSError:
        return b""


def _cut(data: bytes) -> list[bytes]:
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")


def chunks(lines: list[bytes], secrets: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Lines as they may be sent, in portions."""
    some: list[str] = []
    size = 0
    for line in lines:
        text = plain(line[:LONGEST_LINE].decode(errors="replace"), secrets)
        if not text.strip():
            continue
        if some and (len(some) == _CHUNK_LINES or size + len(text) > _CHUNK_BYTES):
            yield tuple(some)
            some, size = [], 0
        some.append(text)
        size += len(text)
    if some:
        yield tuple(some)


class _Tail:
    def __init__(self, asked: TailLog) -> None:
        self.asked = asked
        self.credit = asked.credit
        self.changed = trio.Event()
        self.scope = trio.CancelScope()

    async def spend(self) -> None:
        while self.credit <= 0:
            self.changed = trio.Event()
            await self.changed.wait()
        self.credit -= 1


class Tails:
    """The followers of one session. ``live`` says whether an engine still writes."""

    def __init__(
        self,
        state_dir: Path,
        secret: Callable[[str, int], str | None],
        live: Callable[[str, int], bool],
        send: Callable[[LogChunk], Awaitable[None]],
    ) -> None:
        self._state_dir = state_dir
        self._secret = secret
        self._live = live
        self._send = send
        self._tails: dict[str, _Tail] = {}
        self._log = logger("tails")

    def heard(self, message: TailLog | StopTail, nursery: trio.Nursery) -> None:
        """Begin, give more credit to, or end a follower."""
        known = self._tails.get(message.tail)
        if isinstance(message, StopTail):
            if known is not None:
                known.scope.cancel(reason="nobody reads it any more")
        elif known is not None:
            known.credit = min(known.credit + message.credit, 1000)
            known.changed.set()
        else:
            tail = self._tails[message.tail] = _Tail(message)
            nursery.start_soon(self._run, tail, len(self._tails) > MOST)

    async def _run(self, tail: _Tail, too_many: bool) -> None:
        name = tail.asked.tail
        reason = ""
        try:
            with tail.scope:
                if too_many:
                    reason = f"{MOST} logs of this node are read already"
                else:
                    reason = await self._follow(tail)
            if not tail.scope.cancelled_caught:
                await self._send(LogChunk(name, ended=True, reason=reason))
        except PeerError:
            return  # the listener sees the same end
        finally:
            self._tails.pop(name, None)

    async def _follow(self, tail: _Tail) -> str:
        asked = tail.asked
        try:
            folder = await trio.to_thread.run_sync(
                lambda: folder_of(self._state_dir, asked.shard, asked.generation, previous=asked.previous)
            )
        except OperatorError as missing:
            return f"{missing.thing} {missing.reason}"
        try:
            log = FollowedLog(folder)
        except OSError as error:
            return f"log of {asked.shard}: {error.strerror}"
        with log:
            return await self._read(tail, log)

    async def _read(self, tail: _Tail, log: FollowedLog) -> str:
        asked = tail.asked
        key = self._secret(asked.shard, asked.generation)
        secrets = () if key is None else (key,)
        lines = await trio.to_thread.run_sync(log.last, asked.lines)
        while True:
            live = asked.follow and not asked.previous and self._live(asked.shard, asked.generation)
            if not live:
                lines += await trio.to_thread.run_sync(log.end)
                lines = lines if asked.follow else lines[-asked.lines or len(lines) :]
            for some in chunks(lines, secrets):
                await tail.spend()
                skipped, log.skipped = log.skipped, 0
                await self._send(LogChunk(asked.tail, some, skipped))
            if not live:
                return "its engine has ended" if asked.follow else ""
            await trio.sleep(LOOK_S)
            lines = await trio.to_thread.run_sync(log.more)
