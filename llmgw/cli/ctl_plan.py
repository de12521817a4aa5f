"""``llmgw ctl plan``: what would go where, and why not elsewhere, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from llmgw.cli.admin_client import client_of
from llmgw.cli.completion import names
from llmgw.cli.explain import short_lines
from llmgw.cli.terminal import echo, echo_json, few, table
from llmgw.settings.load import load_settings
from llmgw.store.files import read_text

_TIMEOUT_S = 120.0
_MOST_MOVES = 60


@click.command()
@click.argument("model", required=False, shell_complete=names("models"))
@click.option("--settings", type=click.Path(path_type=Path), help="A settings document to be used instead of today's.")
@click.option("--replicas", type=click.IntRange(0, 10_000), help="So many replicas of MODEL.")
@click.option("--profile", help="This profile as MODEL's only one.")
@click.option("--drain", metavar="NODE", help="With this node drained.")
@click.option("--force", is_flag=True, help="With --drain: what has no other place is stopped.")
@click.option("--json", "as_json", is_flag=True, help="The admin API's answer as it is, every candidate with it.")
@click.pass_context
def plan(
    ctx: click.Context,
    model: str | None,
    settings: Path | None,
    replicas: int | None,
    profile: str | None,
    drain: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Show what would go where, counted by device class, and why not elsewhere. Nothing is changed.

    \b
    llmgw ctl plan llama-3.1-8b --replicas 4     one model with another number
    llmgw ctl plan --settings settings.yaml      what applying this file would do
    llmgw ctl plan --drain gpu-1                 what draining this node would do
    llmgw ctl plan                               what follows by itself

    It plays passes forward from what is known now: engines that are told to end do end, and those that are started
    come up. Exit code 1 when something of it would have no place.
    """
    if model is None and (replicas is not None or profile is not None):
        raise click.UsageError("--replicas and --profile are a MODEL's; name it")
    if force and drain is None:
        raise click.UsageError("--force is about a node to be drained; name it with --drain")
    asked: dict[str, Any] = {"model": model, "replicas": replicas, "profile": profile, "drain": drain}
    if force:
        asked["force"] = True
    if settings is not None:
        text = read_text(settings)
        load_settings(text, str(settings))  # with every fault of the file, before anybody is asked
        asked["settings"] = text
    answer = client_of(ctx).post("plan", {k: v for k, v in asked.items() if v is not None}, _TIMEOUT_S)
    if as_json:
        echo_json(answer)
    else:
        _show(answer, model)
    if not answer["fits"]:
        ctx.exit(1)


def _show(answer: dict[str, Any], asked: str | None) -> None:
    if answer["brake"]:
        echo(f"{answer['brake']}\n")
    if answer["asked"]["settings"]:
        for line in answer["differences"] or ["the settings do not differ"]:
            echo(line)
        echo()
    show_moves(answer["steps"])
    concerned = [m for m in answer["models"] if _differs(m) or m["name"] == asked or m["name"] in answer["lacking"]]
    if concerned:
        echo()
        table(["MODEL", "CHANGE", "WANTED", "PLACED", "ON"], [_model(m) for m in concerned], empty="")
    echo()
    table(
        ["DEVICE CLASS", "DEVICES", "USED NOW", "USED THEN", "FREE THEN"],
        [[c["device_class"], *(str(c[k]) for k in ("total", "before", "after", "free"))] for c in answer["classes"]],
        empty="no node has a device",
    )
    for told in answer["elsewhere"]:
        if told["candidates"]:
            echo(f"\n{told['model']}, profile {told['profile']}, on {few(told['nodes'])}; why not elsewhere:")
            for line in short_lines(told["candidates"]):
                echo(line)
    for item in answer["unplaced"]:
        anyway = " (today as well)" if item["anyway"] else ""
        echo(f"\n{item['model']}{anyway}: {item['running']} of {item['wanted']} placed. {item['reason']}")
        for line in short_lines(item["candidates"]):
            echo(line)
    for note in answer["notes"]:
        echo(f"\n{note}")
    echo("\neverything has a place" if answer["fits"] else f"\nno place for all of {', '.join(answer['lacking'])}")


def show_moves(steps: list[dict[str, Any]]) -> None:
    """What a plan's passes would do, as a table."""
    if not steps:
        echo("nothing is placed, stopped or moved")
        return
    rows = [row for step in steps for row in _step(step)]
    table(["WHEN", "WHAT", "REPLICA", "WHERE", "WHY"], rows[:_MOST_MOVES], empty="")
    if len(rows) > _MOST_MOVES:
        echo(f"… and {len(rows) - _MOST_MOVES} more, see --json")


def _step(step: dict[str, Any]) -> Iterator[list[str]]:
    ended = f"{few(step['ended'])} ended" if step["ended"] else ""
    ready = f"{few(step['ready'])} ready" if step["ready"] else ""
    wait = f"in {step['at_s']:.0f} s" if step["at_s"] else ""
    happened = " and ".join(part for part in (ended, ready) if part)
    when = ", ".join(part for part in (wait, f"once {happened}" if happened else "") if part) or "now"
    for move in step["moves"]:
        places = "; ".join(f"{p['node']}: {', '.join(p['devices'])}" for p in move["places"]) or move["node"]
        why = f"{move['reason']} (without the change as well)" if move["anyway"] else move["reason"]
        yield [when, move["kind"], move["replica"] or move["model"], places, why]
        when = ""


def _differs(model: dict[str, Any]) -> bool:
    moved = any(c["before"] != c["after"] for c in model["classes"])
    return moved or model["change"] != "same" or model["placed"][0] != model["placed"][1]


def _model(model: dict[str, Any]) -> list[str]:
    on = ", ".join(_arrow(c["before"], c["after"], f" x {c['device_class']}") for c in model["classes"])
    return [model["name"], model["change"], _arrow(*model["wanted"]), _arrow(*model["placed"]), on]


def _arrow(before: int, after: int, of: str = "") -> str:
    return f"{after}{of}" if before == after else f"{before} -> {after}{of}"
