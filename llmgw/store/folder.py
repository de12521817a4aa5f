"""A daemon's state folder: private, writable, and held by one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmgw.durable import whole
from llmgw.errors import OperatorError

_LOCK = "lock"
_INSTANCE = "instance"


@contextmanager
def held(folder: Path, daemon: str, *, to_end: bool = False) -> Iterator[None]:
    """Make the folder if need be, check it, and hold it until the block ends. Blocking, but never for long.

    Raises :class:`OperatorError` naming the folder when it is a link, open to others, not writable, or held by
    another process (whose pid is named). The lock is the kernel's: it ends with the process, however that ends.

    With ``to_end`` it is held only to end what runs from it, which no disk that is full or read-only may prevent.
    """
    _prepare(folder)
    try:
        handle = _open(folder / _LOCK, reading=to_end)
    except OSError as failed:
        raise OperatorError(
            str(folder), f"is not writable: {failed.strerror}", f"give the user of llmgw {daemon} write access to it"
        ) from failed
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
            raise OperatorError(
                str(folder),
                f"another llmgw {daemon} holds it (pid {pid})",
                "stop that one first, or give this one a state_dir of its own",
            ) from None
        try:
            # Over what is there: that needs no room on a disk that is full.
            os.ftruncate(handle, os.pwrite(handle, f"{os.getpid()}\n".encode(), 0))
        except OSError as failed:
            if not to_end:
                raise OperatorError(str(folder), f"cannot be written: {failed.strerror}", "free some space") from failed
        yield
    finally:
        os.close(handle)


def _open(lock: Path, *, reading: bool) -> int:
    try:
        return os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as failed:
        if not reading or failed.errno != errno.EROFS:
            raise
        return os.open(lock, os.O_RDONLY | os.O_CLOEXEC)


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as failed:
        raise OperatorError(
            str(folder), f"cannot be made: {failed.strerror}", "make it, or set state_dir to another folder"
        ) from failed
    if stat.S_ISLNK(found.st_mode):
        raise OperatorError(str(folder), "is a symbolic link", f"set state_dir to {folder.resolve()} itself")
    if not stat.S_ISDIR(found.st_mode):
        raise OperatorError(str(folder), "is not a folder", "set state_dir to a folder")
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise OperatorError(str(folder), f"is open to others (mode {mode:04o})", f"run: chmod 700 {folder}")
    if found.st_uid != os.geteuid():
        raise OperatorError(
            str(folder),
            f"belongs to uid {found.st_uid}, this process runs as {os.geteuid()}",
            "chown it, or run as its owner",
        )


def instance_of(folder: Path) -> str:
    """The name of the daemon that has this state folder: its host, and what was drawn once for the folder. Blocking."""
    path = folder / _INSTANCE
    try:
        drawn = path.read_text().strip()
    except FileNotFoundError:
        drawn = ""
    if not drawn:
        drawn = secrets.token_hex(4)
        with whole(path) as new:
            new.write_text(drawn + "\n")
    return f"{socket.gethostname()}/{drawn}"
