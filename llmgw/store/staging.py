"""A file that is written under another name, and takes its place once it is whole and on the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """An empty file, 0600 from the start, that becomes ``path`` at the end of the block, and is removed if it fails.

    Raises :class:`OSError`; what was at ``path`` is still there then.
    """
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    try:
        yield new
        sync(new)
        new.replace(path)
        sync(path.parent)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Have a file, or what a folder lists, on the disk. Blocking. Raises :class:`OSError`."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
