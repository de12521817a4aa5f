"""How results look: tables for people, JSON for programs, plain columns when the output is piped."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from llmgw.errors import OperatorError

_COLOURS = {
    "ready": "green", "connected": "green", "static": "green", "ok": "green", "idle": "green",
    "failed": "red", "lost": "red", "unplaced": "red",
}  # fmt: skip


def ago(since: float | None, now: float) -> str:
    """How long a state holds, short: ``12 s``, ``5 min``, ``3 h``, ``4 d``."""
    if since is None:
        return ""
    seconds = max(0, round(now - since))
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds // size} {unit}"
    return f"{seconds // 86400} d"


def few(names: Sequence[str]) -> str:
    """The first three, and how many more."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def drained_line(name: str, drained: dict[str, Any], now: float) -> str:
    """Who drained a node, when and why, and what comes next."""
    why = f": {drained['reason']}" if drained["reason"] else ""
    force = " (force)" if drained["force"] else ""
    return f"{name} was drained{force} by {drained['by']} {ago(drained['at'], now)} ago{why}; {drained['next']}"


def plain(text: str) -> str:
    """Text that came from elsewhere, with every control character as an escape: it must not steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def echo(text: str = "", *, err: bool = False, nl: bool = True, fg: str | None = None, bold: bool = False) -> None:
    """Lines for people. Whatever a node, a peer or a file said in them is made :func:`plain`; ends of lines stay."""
    shown = "\n".join(plain(line) for line in text.split("\n"))
    if (fg is None and not bold) or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        click.echo(shown, err=err, nl=nl)  # noqa: TID251
    else:
        click.secho(shown, err=err, nl=nl, fg=fg, bold=bold or None)  # noqa: TID251


def agreed(command: str, question: str) -> bool:
    """What somebody at a terminal says to a question. Raises :class:`OperatorError` where nobody is at one.

    The question goes to standard error: standard output is the answer's.
    """
    if not sys.stdin.isatty():
        raise OperatorError(command, f"nobody can be asked here: {plain(question)}", "if so, add --yes")
    return click.confirm(plain(question), err=True)


def echo_json(value: Any) -> None:
    """One JSON document, in the order it was built."""
    echo(json.dumps(value, indent=2))


def table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str, state_column: int | None = None
) -> None:
    """A table; columns are never cut when the output is piped. ``empty`` is said when there are no rows."""
    _draw(headers, rows, state_column)
    if not rows and empty:
        echo(empty)


def _draw(headers: Sequence[str], rows: Sequence[Sequence[str]], state_column: int | None) -> None:
    rows = [[plain(text) for text in row] for row in rows]
    if not sys.stdout.isatty():
        widths = [max(len(r[i]) for r in (headers, *rows)) for i in range(len(headers))]
        for row in (headers, *rows):
            echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for at, header in enumerate(headers):
        # Names and states stay whole on a narrow terminal; what explains them folds.
        drawn.add_column(header, overflow="fold", no_wrap=at in (0, state_column))
    for row in rows:
        cells = [Text(text) for text in row]
        if state_column is not None:
            cells[state_column].stylize(_COLOURS.get(row[state_column].split(" ")[0], "yellow"))
        drawn.add_row(*cells)
    Console().print(drawn)


def say(answer: Any, sentence: str, *, as_json: bool) -> None:
    """What was done: the answer as it is, or a sentence."""
    if as_json:
        echo_json(answer)
    else:
        echo(sentence)
