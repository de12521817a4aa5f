"""Paths in configuration files, as text: this floor never touches the disk."""

from __future__ import annotations

import posixpath

from llmgw.settings.daemon import TlsFiles


def resolve(path: str, folder: str) -> str:
    """An absolute path: as written, or below the folder of the file that names it."""
    return posixpath.normpath(path if path.startswith("/") else posixpath.join(folder, path))


def below(path: str, folder: str) -> str | None:
    """``path`` resolved under ``folder``, or ``None`` when it would lead out of it."""
    base = posixpath.normpath(folder)
    full = resolve(path, base)
    inside = base == "/" or full == base or full.startswith(base + "/")
    return full if inside else None


def tls_below(files: TlsFiles, folder: str) -> TlsFiles:
    """The files of one end's identity, resolved below ``folder``."""
    return TlsFiles(resolve(files.certificate, folder), resolve(files.key, folder), resolve(files.ca, folder))
