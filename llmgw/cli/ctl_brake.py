"""``llmgw ctl brake``: whether the control plane suspects itself, and the word that the silent nodes are gone."""

from __future__ import annotations

from typing import Any

import click

from llmgw.cli.admin_client import client_of
from llmgw.cli.terminal import ago, agreed, echo, echo_json
from llmgw.errors import OperatorError


def say_brake(answer: dict[str, Any]) -> None:
    """The brake, under whatever else is shown while it is on."""
    if answer.get("brake") is not None:
        echo(f"\n{answer['brake']['reason']}")


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="The admin API's answer as it is.")
@click.pass_context
def brake(ctx: click.Context, as_json: bool) -> None:
    """Whether the brake is on: many nodes fell silent together, and nothing is replaced.

    It goes off by itself when they are back; `llmgw ctl brake release` says that they are gone.
    """
    if ctx.invoked_subcommand is not None:
        return
    answer = client_of(ctx).get("brake")
    if as_json:
        echo_json(answer)
        return
    held = answer["brake"]
    if held is None:
        echo("the brake is off")
        return
    echo(f"{held['reason']}\n\nsilent, the last one for {ago(held['since'], answer['now'])}:")
    for node in held["nodes"]:
        echo(f"  {node}")


@brake.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="The admin API's answer as it is.")
@click.pass_context
def release(ctx: click.Context, yes: bool, as_json: bool) -> None:
    """Say that the nodes which are silent now are gone: what ran there is placed elsewhere.

    Nodes that fall silent later count anew. If a node does come back, its engines serve until their replacements are
    ready.
    """
    client = client_of(ctx)
    held = client.get("brake")["brake"]
    if held is None:
        raise OperatorError("llmgw ctl brake release", "the brake is not on", "there is nothing to release")
    if not yes:
        some = ", ".join(held["nodes"][:10]) + (" …" if len(held["nodes"]) > 10 else "")
        asked = f"{len(held['nodes'])} of {held['of']} nodes are gone ({some}); replace what ran there?"
        if not agreed("llmgw ctl brake release", asked):
            echo("the brake stays on", err=True)
            ctx.exit(1)
    answer = client.post("brake/release", {"nodes": held["nodes"]})
    if as_json:
        echo_json(answer)
    else:
        echo(f"released: what ran on {', '.join(answer['nodes'])} is placed elsewhere")
