"""Weights that a node fetches from a hub, as they are written: ``hf:org/name``, ``hf:org/name@revision``, and with
``:file`` behind it one file of the repository (``hf:org/name@main:model-q4.gguf``). Pure.

A revision is a branch, a tag or a commit; without one it is ``main``. A branch is resolved to a commit once on each
node, so that restarts load what the first start loaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from attrs import frozen

PREFIX = "hf:"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_SOURCE = re.compile(
    rf"hf:(?P<repository>{_NAME}/{_NAME})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._-]{{0,127}}))?"
    r"(?::(?P<file>[A-Za-z0-9_][A-Za-z0-9._/-]{0,255}))?"
)
_ALLOWED = re.compile(rf"hf:{_NAME}/(?:{_NAME}|\*)")


@frozen
class HubSource:
    """A repository on a hub at a revision; ``file`` is the one file of it that is meant, if only one is."""

    repository: str
    revision: str = "main"
    file: str = ""

    def __str__(self) -> str:
        return f"{PREFIX}{self.repository}@{self.revision}{f':{self.file}' if self.file else ''}"


def hub_source(text: str) -> HubSource | None:
    """What this names on a hub; ``None`` when it is no such name (a path, or nothing that can be read)."""
    match = _SOURCE.fullmatch(text)
    if match is None or ".." in text or "//" in text:
        return None
    return HubSource(match["repository"], match["revision"] or "main", match["file"] or "")


def is_rule(text: str) -> bool:
    """Whether this is a rule of the allow-list: ``hf:org/name``, or ``hf:org/*`` for all of an organisation."""
    return _ALLOWED.fullmatch(text) is not None and ".." not in text


def allowed(source: HubSource, rules: Sequence[str]) -> bool:
    """Whether a rule allows this source. Names on a hub are compared as they are written."""
    organisation = source.repository.partition("/")[0]
    return f"{PREFIX}{source.repository}" in rules or f"{PREFIX}{organisation}/*" in rules
