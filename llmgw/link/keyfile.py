"""Private keys and certificates as files: written once and whole, read only when nobody else can."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from llmgw import durable
from llmgw.errors import OperatorError


def check_private(path: Path) -> None:
    """Raise :class:`OperatorError` if others than the owner can reach this file or folder."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as cause:
        raise OperatorError(str(path), f"cannot be read: {cause.strerror}") from cause
    allowed = 0o700 if path.is_dir() else 0o600
    if mode & ~allowed:
        remedy = f"run: chmod {allowed:o} {path}"
        raise OperatorError(str(path), f"has mode {mode:04o}, and {allowed:04o} is the widest that is safe", remedy)


def read_private(path: Path) -> bytes:
    """The content of a key file. Raises :class:`OperatorError` if others can read it too."""
    check_private(path)
    return read(path)


def read(path: Path) -> bytes:
    """The content of a file. Raises :class:`OperatorError` naming it."""
    try:
        return path.read_bytes()
    except OSError as cause:
        raise OperatorError(str(path), f"cannot be read: {cause.strerror}") from cause


def write_new(path: Path, data: bytes, mode: int) -> None:
    """Write a file that must not exist yet: it appears whole, on disk, or not at all.

    Raises :class:`OperatorError`.
    """
    try:
        with durable.staged(path, data, mode, replaces=False) as fresh:
            os.link(fresh, path)  # unlike a rename, never replaces
        durable.sync_folder(path.parent)
    except FileExistsError as cause:
        raise OperatorError(
            str(path), "exists already, and keys are never overwritten", "name another folder"
        ) from cause
    except OSError as cause:
        raise OperatorError(str(path), f"cannot be written: {cause.strerror}") from cause


def replace(path: Path, data: bytes, mode: int) -> None:
    """Write a file in place of what is there: whoever reads it sees the old one whole or the new one, on disk.

    Raises :class:`OperatorError`.
    """
    try:
        durable.replace(path, data, mode)
    except OSError as cause:
        raise OperatorError(str(path), f"cannot be written: {cause.strerror}") from cause
