"""Files of ours that appear whole and on disk, or not at all; and others' files, read without waiting. Blocking."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def staged(path: Path, data: bytes, mode: int, *, replaces: bool) -> Iterator[Path]:
    """``data`` on disk in a file beside ``path``, for the caller to rename or link; gone afterwards in any case.

    With ``replaces`` the name is always the same one, for files with one writer: what a writer that was killed has
    left, a private key perhaps, goes with the next write. Raises :class:`OSError`.
    """
    if replaces:
        fresh = path.with_name(f".{path.name}.new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(fresh, flags, 0o600)
    else:
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        fresh = Path(name)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(data)
            file.flush()
            os.fsync(fd)
        yield fresh
    finally:
        fresh.unlink(missing_ok=True)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """An empty file, 0600 from the start, that becomes ``path`` at the end of the block, and is gone if that fails.

    For what somebody else writes, by its name. Raises :class:`OSError`; what was at ``path`` is still there then.
    """
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    os.close(os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    try:
        yield fresh
        fd = os.open(fresh, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        fresh.replace(path)
        sync_folder(path.parent)
    finally:
        fresh.unlink(missing_ok=True)


def regular(path: Path) -> BinaryIO:
    """A regular file, opened for reading, at a place where others may have put something else: nothing is waited for.

    A pipe, a socket or a device would hold who opens it, perhaps for ever. Raises :class:`OSError`.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def content(path: Path) -> bytes:
    """All that is in such a file. Raises :class:`OSError`."""
    with regular(path) as file:
        return file.read()


def replace(path: Path, data: bytes, mode: int) -> None:
    """Put a file in the place of what is there: readers see the old one whole or the new one. Raises ``OSError``."""
    with staged(path, data, mode, replaces=True) as fresh:
        fresh.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make new names in ``folder`` survive a power cut. Raises :class:`OSError`."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
