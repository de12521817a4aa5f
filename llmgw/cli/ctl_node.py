"""``llmgw ctl node``: nodes that are to be empty for a while, and nodes that are gone."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

import click

from llmgw.cli.admin_client import AdminClient, client_of
from llmgw.cli.completion import names
from llmgw.cli.ctl import _as_json, command
from llmgw.cli.explain import short_lines
from llmgw.cli.terminal import agreed, echo, echo_json

_POLL_S = 1.0
_SAME = 5
"""So many looks in a row at which nothing leaves any more: what is left has no other place."""


@command.group()
def node() -> None:
    """What is done to nodes: drain, undrain, forget.

    \b
    llmgw ctl node drain gpu-1 --reason "new fans" --wait    empty it before you work on it
    llmgw ctl node undrain gpu-1                             give it work again
    llmgw ctl node forget gpu-1                              it is gone for good

    `llmgw ctl plan --drain gpu-1` shows what a drain would do. To keep a node out whatever it says: `llmgw ctl deny`.
    """


@node.command()
@click.argument("name", metavar="NODE", shell_complete=names("nodes"))
@click.option("--reason", default="", help="Why; shown with the node, in why and in the audit.")
@click.option("--force", is_flag=True, help="Stop also what has no other place.")
@click.option("--wait", is_flag=True, help="Wait until nothing more leaves it.")
@click.option("--timeout", type=click.FloatRange(min=0), metavar="S", help="With --wait: so many seconds at most.")
@_as_json
@click.pass_context
def drain(
    ctx: click.Context, name: str, reason: str, force: bool, wait: bool, timeout: float | None, as_json: bool
) -> None:
    """Empty NODE: it gets nothing new, and what runs there goes elsewhere.

    What serves goes only once its replacement is ready, so that no request fails. What has no other place serves on,
    with every reason said, and leaves as soon as there is one; --force stops it. The same command again changes reason
    and force. It holds over restarts until `llmgw ctl node undrain`.

    With --wait exit code 0 says that the node is empty, 1 that something stays or the time is over.
    """
    client = client_of(ctx)
    answer = client.post(f"nodes/{quote(name, safe='')}/drain", {"reason": reason, "force": force})
    if not as_json:
        echo(f"drained: {name}")
        say_effect(answer)
    if wait:
        answer |= {"drained": _wait(client, name, timeout, quiet=as_json)}
    if as_json:
        echo_json(answer)
    if wait and not (answer["drained"] or {}).get("empty"):
        ctx.exit(1)


def _wait(client: AdminClient, name: str, timeout: float | None, *, quiet: bool) -> Any:
    """Look until it is empty, or nothing leaves it for a while; what it is then."""
    ends = None if timeout is None else time.monotonic() + timeout
    said, same = "", 0
    while True:
        nodes = client.get("nodes")["nodes"]
        drained = next((n["drained"] for n in nodes if n["id"] == name), None)
        if drained is None or drained["empty"]:
            if not quiet:
                echo(f"{name} is no longer drained" if drained is None else f"{name} is empty")
            return drained
        same = 0 if drained["leaving"] else same + 1
        if not quiet and drained["next"] != said:
            said = drained["next"]
            echo(f"  {said}")
        if same >= _SAME or (ends is not None and time.monotonic() >= ends):
            if not quiet:
                echo(f"{name} is not empty; why: llmgw ctl models, or llmgw ctl why {name}")
            return drained
        time.sleep(_POLL_S)


@node.command()
@click.argument("name", metavar="NODE", shell_complete=names("nodes"))
@click.option("--reason", default="", help="Why; shown in why and in the audit.")
@_as_json
@click.pass_context
def undrain(ctx: click.Context, name: str, reason: str, as_json: bool) -> None:
    """Give NODE work again. What left it stays where it is."""
    answer = client_of(ctx).post(f"nodes/{quote(name, safe='')}/undrain", {"reason": reason})
    if as_json:
        echo_json(answer)
    else:
        echo(f"undrained: {name}" if answer["undrained"] else f"{name} was not drained")


@node.command()
@click.argument("name", metavar="NODE", shell_complete=names("nodes"))
@click.option("--yes", is_flag=True, help="Do not ask.")
@_as_json
@click.pass_context
def forget(ctx: click.Context, name: str, yes: bool, as_json: bool) -> None:
    """Forget NODE, which is not connected: what ran there is placed elsewhere at once, the router lets go of it.

    Engines on the node are not stopped; its agent can do that: `llmgw agent stop-engines`. It is no ban: with a
    certificate that is good the node registers anew. A ban is `llmgw ctl deny`.
    """
    if not (yes or agreed("llmgw ctl node forget", f"forget {name}, and replace what ran there?")):
        ctx.exit(1)
    answer = client_of(ctx).post(f"nodes/{quote(name, safe='')}/forget", {})
    if as_json:
        echo_json(answer)
    else:
        echo(f"forgotten: {name}")


def say_effect(answer: dict[str, Any]) -> None:
    """What follows, replica by replica, and why what has no place has none."""
    for fate in answer["replicas"]:
        echo(f"  {fate['replica']} {fate['word']}: {fate['reason']}")
    for item in answer["unplaced"]:
        echo(f"\n{item['model']}: {item['running']} of {item['wanted']} placed. {item['reason']}")
        for line in short_lines(item["candidates"]):
            echo(line)
