"""Files of ours that appear whole and on disk, or not at all. Blocking."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
