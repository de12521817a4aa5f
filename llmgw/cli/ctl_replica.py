"""``llmgw ctl replica``: one replica started anew or stopped, and its engines' logs."""

from __future__ import annotations

import json
from urllib.parse import quote

import click

from llmgw.cli.admin_client import client_of
from llmgw.cli.completion import names
from llmgw.cli.ctl import _as_json, command
from llmgw.cli.ctl_node import say_effect
from llmgw.cli.terminal import echo, echo_json
from llmgw.errors import OperatorError


@command.group()
def replica() -> None:
    """What is done to one replica: restart, stop, logs.

    \b
    llmgw ctl replica restart llama-3.1-8b-12 --reason "memory grows"
    llmgw ctl replica logs llama-3.1-8b-12 -f

    Their names are in `llmgw ctl replicas`. How many there are is the settings' to say: what is stopped is replaced
    while the model wants it.
    """


def _order(ctx: click.Context, name: str, what: str, reason: str, *, as_json: bool) -> None:
    answer = client_of(ctx).post(f"replicas/{quote(name, safe='')}/{what}", {"reason": reason})
    if as_json:
        echo_json(answer)
    else:
        say_effect(answer)


_reason = click.option("--reason", default="", help="Why; shown with the replica, in why and in the audit.")


@replica.command()
@click.argument("name", metavar="REPLICA", shell_complete=names("replicas"))
@_reason
@_as_json
@click.pass_context
def restart(ctx: click.Context, name: str, reason: str, as_json: bool) -> None:
    """Start REPLICA anew, over all of its nodes.

    Where there is room for both, another one is ready before it is drained and stopped (not with `update: replace`).
    Else it is drained, stopped and started on the same devices. If what was to replace it does not come up, it stays.
    """
    _order(ctx, name, "restart", reason, as_json=as_json)


@replica.command()
@click.argument("name", metavar="REPLICA", shell_complete=names("replicas"))
@_reason
@_as_json
@click.pass_context
def stop(ctx: click.Context, name: str, reason: str, as_json: bool) -> None:
    """Drain and stop REPLICA. While the model wants as many, another one takes its place; the answer says where.

    To have one less for good, lower the model's replicas in the settings.
    """
    _order(ctx, name, "stop", reason, as_json=as_json)


@replica.command()
@click.argument("name", metavar="REPLICA", shell_complete=names("replicas"))
@click.option("--rank", type=click.IntRange(0, 999), default=0, show_default=True, help="Of several nodes, which one.")
@click.option("-n", "--lines", type=click.IntRange(0, 10_000), default=200, show_default=True, help="The last so many.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until Ctrl-C or its end.")
@click.option("--previous", is_flag=True, help="Of the start before this one.")
@click.option("--json", "as_json", is_flag=True, help="The admin API's answer as it is: an object a line.")
@click.pass_context
def logs(ctx: click.Context, name: str, rank: int, lines: int, follow: bool, previous: bool, as_json: bool) -> None:
    """What the engine of REPLICA writes, from its node, over the agent's link.

    Keys, tokens and passwords are hidden, and control characters do nothing to your terminal. Whoever reads too slowly
    is told how much was left out. Exit code 2 when it cannot be had: its node is away, or there is no such log.
    """
    if follow and previous:
        raise click.UsageError("the start before has ended: there is nothing to follow")
    asked = f"rank={rank}&lines={lines}&follow={int(follow)}&previous={int(previous)}"
    read = 0
    for said in client_of(ctx).lines(f"replicas/{quote(name, safe='')}/logs?{asked}"):
        if as_json:
            echo(json.dumps(said))
        elif said.get("skipped"):
            echo(f"… about {said['skipped']} bytes are left out", err=True)
        for line in said.get("lines", ()) if not as_json else ():
            echo(line)
        read += len(said.get("lines", ()))
        if (end := said.get("end")) and not read:
            raise OperatorError(f"replica {name}", end)
        if end and not as_json:
            echo(end, err=True)
