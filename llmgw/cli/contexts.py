"""Several clusters by name: ``contexts.yaml`` in ``$XDG_CONFIG_HOME/llmgw``, 0600, else in ``~/.config/llmgw``."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

import attrs
from attrs import field, frozen
from ruamel.yaml import YAML

from llmgw.account import account
from llmgw.errors import OperatorError
from llmgw.link.identity import is_id
from llmgw.link.keyfile import replace


@frozen
class Context:
    """One cluster: where its admin API is, and who one is there. Paths are absolute.

    ``ca`` is the bundle that an ``https`` address is checked against, else the system's.
    """

    address: str
    token_file: str = ""
    token: str = field(default="", repr=False)
    ca: str = ""
    certificate: str = ""
    key: str = ""


@frozen
class Contexts:
    """All of them, and which one is used when none is named."""

    current: str = ""
    contexts: dict[str, Context] = field(factory=dict)

    def named(self, name: str) -> Context:
        """The context of this name. Raises :class:`OperatorError`."""
        if (found := self.contexts.get(name)) is None:
            have = ", ".join(sorted(self.contexts)) or "none"
            raise OperatorError(f"context {name[:64]}", f"is not in {path()}", f"there are: {have}")
        return found


def path() -> Path:
    """Where they are kept. Raises :class:`OperatorError` for an account without a home."""
    if home := os.environ.get("XDG_CONFIG_HOME"):
        return Path(home) / "llmgw" / "contexts.yaml"
    try:
        return Path.home() / ".config" / "llmgw" / "contexts.yaml"
    except RuntimeError:
        raise OperatorError(
            "contexts.yaml", f"has no place: {account()} has no home folder", "set HOME, or XDG_CONFIG_HOME"
        ) from None


def load() -> Contexts:
    """Read them. Raises :class:`OperatorError`, also when others may read the file: there may be tokens in it."""
    try:
        file = path()
    except OperatorError:
        return Contexts()  # nowhere to keep any: a container's account, which has server.yaml
    try:
        mode, text = stat.S_IMODE(file.stat().st_mode), file.read_text()
    except FileNotFoundError:
        return Contexts()
    except (OSError, UnicodeDecodeError) as failed:
        raise OperatorError(str(file), f"cannot be read: {failed}") from failed
    if mode & 0o077:
        raise OperatorError(str(file), f"others may read it (mode {mode:04o})", f"run: chmod 600 {file}")
    try:
        value = YAML(typ="safe", pure=True).load(text) or {}
        made = {str(name): Context(**fields) for name, fields in (value.get("contexts") or {}).items()}
        return Contexts(str(value.get("current") or ""), made)
    except Exception as wrong:  # whatever ruamel.yaml and a class make of a file that somebody wrote
        said = str(wrong).splitlines()[0][:200]
        raise OperatorError(str(file), f"is no list of contexts: {said}", "see llmgw ctl context add") from wrong


def save(contexts: Contexts) -> None:
    """Write them. Raises :class:`OperatorError`."""
    file, text = path(), io.StringIO()
    rows = {
        name: {key: value for key, value in attrs.asdict(context).items() if value}
        for name, context in sorted(contexts.contexts.items())
    }
    YAML(typ="safe", pure=True).dump({"current": contexts.current, "contexts": rows}, text)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as failed:
        raise OperatorError(str(file.parent), f"cannot be made: {failed.strerror}") from failed
    replace(file, text.getvalue().encode(), 0o600)


def check_name(name: str) -> None:
    """Raise :class:`OperatorError` when a context cannot be called this."""
    if not is_id(name):
        raise OperatorError(f"context {name[:64]!r}", "may have letters, digits, dots, dashes and underscores")
