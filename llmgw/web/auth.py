"""Who may use the admin API: whoever holds the token in the state folder's 0600 file."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from llmgw.errors import OperatorError

TOKEN_FILE = "admin.token"  # noqa: S105 - a file's name, not a secret


def token_of(state_dir: Path) -> str:
    """The admin token of this state folder, made on first use. Blocking; the file is 0600 from its first byte.

    Raises :class:`OperatorError` when others may read the file.
    """
    path = state_dir / TOKEN_FILE
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_token(path)
    token = f"llmgw_admin_{secrets.token_urlsafe(32)}"
    with os.fdopen(handle, "w") as file:
        file.write(token + "\n")
        file.flush()
        os.fsync(file.fileno())
    return token


def read_token(path: Path) -> str:
    """Read a token file. Raises :class:`OperatorError` when it is missing, empty, or open to others."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text().strip()
    except OSError as failed:
        raise OperatorError(
            str(path),
            f"the admin token cannot be read: {failed.strerror}",
            "start the server once to have it made, or name the file with --token-file",
        ) from failed
    if mode & 0o077:
        raise OperatorError(str(path), f"others may read it (mode {mode:04o})", f"run: chmod 600 {path}")
    if not text:
        raise OperatorError(str(path), "the admin token file is empty", "remove it and restart the server")
    return text
