"""What is wrong with a file that an operator wrote: every fault with its place, all of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any

from attrs import asdict, frozen

from llmgw.errors import OperatorError

Path = tuple[str | int, ...]
"""The keys and list indices that lead to a value, from the top of the document."""

Rule = tuple[Path, str, str]
"""One fault as a rule says it: the path within what the rule is on, what is wrong, and what to do."""


@frozen
class Place:
    """Line and column of a value, both counted from 1."""

    line: int
    column: int


def at(path: Path, rules: Iterator[Rule]) -> Iterator[Rule]:
    """What rules say on a part, as said on the whole that has the part at ``path``."""
    for inner, problem, hint in rules:
        yield (*path, *inner), problem, hint


def dotted(path: Path) -> str:
    """A path as people write it: ``models.llama.profiles[0].tp``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


@frozen
class ConfigFault:
    """One fault. ``path`` is empty when it concerns the document as a whole."""

    file: str
    line: int
    column: int
    path: str
    problem: str
    hint: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}"
        subject = f"{self.path}: " if self.path else ""
        return f"{where}: {subject}{self.problem}" + (f" ({self.hint})" if self.hint else "")

    def as_dict(self) -> dict[str, Any]:
        """The fault for ``--json``."""
        return asdict(self)


class ConfigError(OperatorError):
    """A file that cannot be used, with every fault in it."""

    def __init__(self, file: str, faults: Iterable[ConfigFault]) -> None:
        self.faults = tuple(sorted(faults, key=lambda f: (f.line, f.column, f.path)))
        count = len(self.faults)
        lines = "\n  ".join(str(f) for f in self.faults)
        super().__init__(file, f"{count} fault{'s' if count != 1 else ''}\n  {lines}")


def nearest(word: str, known: Iterable[str]) -> str:
    """``did you mean …?`` for a mistyped key, or the keys that there are."""
    names = sorted(known)
    close = get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known here: {', '.join(names)}"
