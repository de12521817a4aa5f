"""What a change of the settings would do, or why it was refused, in words."""

from __future__ import annotations

import sys
from typing import Any

from llmgw.cli.admin_client import Refused
from llmgw.cli.ctl_plan import show_moves
from llmgw.cli.terminal import echo, few


def say_check(found: dict[str, Any]) -> None:
    """What a text would change, and what that means for models and nodes."""
    if not found["text"]:
        echo("nothing would change")
        return
    say_diff(found["text"])
    echo()
    for line in found["differences"] or ["what it says is the same"]:
        echo(line)
    for kind in ("models", "nodes"):
        if found[kind]:
            echo(f"{kind}: {few(found[kind])}")
    plan = found["plan"]
    if plan is None:
        echo("\nwhat would be placed or moved takes too long to tell here; see llmgw ctl plan --settings FILE")
    elif plan["steps"] or found["models"]:
        echo()
        show_moves(plan["steps"])
        if plan["lacking"]:
            echo(f"no place for all of {', '.join(plan['lacking'])}; see llmgw ctl plan --settings FILE")
    for note in plan["notes"] if plan else ():
        echo(note)
    echo()


def say_stale(refused: Refused) -> None:
    """Why a change of an old revision was refused, and what both made of it."""
    answer = refused.answer
    newest = answer["newest"]
    echo(f"refused: {refused.reason}", err=True)
    merge = answer["merge"]
    if merge is None:
        return
    echo("\nwhat they changed:", err=True)
    for line in merge["theirs"]:
        echo(f"  {line}", err=True)
    echo("what you changed:", err=True)
    for line in merge["mine"]:
        echo(f"  {line}", err=True)
    if merge["conflicts"]:
        echo("where that is in each other's way:", err=True)
        for conflict in merge["conflicts"]:
            for who in ("theirs", "mine"):
                for line in conflict[who]:
                    echo(f"  {who:6}  {line}", err=True)
    else:
        echo(f"\nnone of it is in the other's way: it can be done again on revision {newest['revision']}", err=True)


def say_faults(faults: list[dict[str, Any]], name: str) -> None:
    """Every fault with its place."""
    for fault in faults:
        subject = f"{fault['path']}: " if fault["path"] else ""
        hint = f" ({fault['hint']})" if fault["hint"] else ""
        echo(f"{name}:{fault['line']}:{fault['column']}: {subject}{fault['problem']}{hint}", err=True)
    echo(f"{len(faults)} fault{'s' if len(faults) != 1 else ''}; nothing was changed", err=True)


def say_file(answer: dict[str, Any]) -> None:
    """That the file of ``server.yaml`` says something else, where it does."""
    if answer["file"]:
        echo(f"the file of server.yaml {answer['file']}", err=True)


def say_diff(lines: list[str]) -> None:
    """The lines of a unified diff."""
    colours = {"+": "green", "-": "red", "@": "cyan"}
    for line in lines:
        echo(line, fg=colours.get(line[:1]) if sys.stdout.isatty() else None)
