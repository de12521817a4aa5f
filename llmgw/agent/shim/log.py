"""The engine's log, which is kept short while the engine writes it."""

import contextlib
import ctypes
import os
import time

from llmgw.agent.shim.files import put

_LOOK_S, _LOOK_AT_LEAST_S = 0.1, 0.02
_PART, _LAST_BYTES = 1024 * 1024, 64 * 1024
_BLOCK = 4096
_COLLAPSE_RANGE = 0x08  # linux/falloc.h


class Log:
    """The engine's log, kept short: what it holds becomes ``engine.log.1``, and it starts anew.

    The engine writes in append mode, so that after the cut it goes on at the beginning.
    """

    def __init__(self, limit: int) -> None:
        self.file = os.open("engine.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.limit = limit
        self.size, self.seen_at = 0, time.monotonic()

    def look(self) -> float:
        """Cut it if it is too long, or long and the disk full; says in how many seconds to look again.

        The faster it grows the sooner.
        """
        with contextlib.suppress(OSError):
            size, now = os.fstat(self.file).st_size, time.monotonic()
            rate = max(0, size - self.size) / max(now - self.seen_at, 0.001)
            room = os.fstatvfs(self.file)
            full = room.f_bavail * room.f_frsize < _LAST_BYTES and size > 2 * _LAST_BYTES
            if size > self.limit or full:
                self.cut()
                size, now = 0, time.monotonic()
            self.size, self.seen_at = size, now
            return min(_LOOK_S, max(_LOOK_AT_LEAST_S, (self.limit - size) / (rate or 1)))
        return _LOOK_S

    def cut(self) -> None:
        """Keep the end of it; on a full disk only its last lines, which must not cost the room that is gained."""
        # The file that was opened, whatever the engine has put in its place: opening a pipe would be the end of us.
        with open(f"/proc/self/fd/{self.file}", "rb") as old:
            size = os.fstat(old.fileno()).st_size
            try:
                with open("engine.log.1.new", "w+b", opener=_private) as new:
                    old.seek(max(0, size - self.limit))
                    # To its very end, as more is written meanwhile.
                    while new.tell() < 2 * self.limit and (part := old.read(_PART)):
                        new.write(part)
                        new.flush()
                    copied = old.tell()
                    # Whole blocks, and never all there are: a file system that can, cannot do that.
                    whole = (copied - 1) // _BLOCK * _BLOCK
                    if self.drop(whole):
                        new.truncate(new.tell() - (copied - whole))
                    else:
                        os.ftruncate(self.file, 0)  # what came between the last look and this is lost
                    new.flush()
                    self.shorten(new.fileno())
                os.replace("engine.log.1.new", "engine.log.1")
            except OSError:
                old.seek(max(0, size - _LAST_BYTES))
                last = old.read(2 * _LAST_BYTES)
                os.ftruncate(self.file, 0)
                with contextlib.suppress(OSError):
                    os.unlink("engine.log.1.new")
                with contextlib.suppress(OSError):
                    put("engine.log.1", last)

    def drop(self, count: int) -> bool:
        """Take so much off its beginning and leave what was written since; whether the file system can (ext4, XFS)."""
        size = ctypes.c_int64
        return bool(ctypes.CDLL(None).fallocate64(self.file, _COLLAPSE_RANGE, size(0), size(count)) == 0)

    def shorten(self, older: int) -> None:
        """Leave no more than the limit of what was copied, its end: more had come while it was."""
        excess = os.fstat(older).st_size - self.limit
        if excess <= 0:
            return
        at = 0
        while part := os.pread(older, _PART, excess + at):
            at += os.pwrite(older, part, at)
        os.ftruncate(older, at)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
