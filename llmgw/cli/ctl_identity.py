"""``llmgw ctl token``, ``deny`` and ``identities``: who may be a node."""

from __future__ import annotations

import time
from urllib.parse import quote

import click

from llmgw.cli.admin_client import client_of
from llmgw.cli.completion import names
from llmgw.cli.ctl import _as_json, command
from llmgw.cli.terminal import ago, echo, echo_json, say, table
from llmgw.cli.values import seconds


def when(at: float | None) -> str:
    """A time for people, in the local zone; empty for none."""
    return "" if not at else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


@command.group()
def token() -> None:
    """Tokens with which nodes join: `llmgw agent join TOKEN`."""


@token.command("create")
@click.option("--node", required=True, metavar="ID", help="The id that the node will have.")
@click.option(
    "--ttl", callback=seconds, metavar="TIME", default="15m", show_default=True, help="How long it may be used."
)
@_as_json
@click.pass_context
def create(ctx: click.Context, node: str, ttl: float, as_json: bool) -> None:
    """Make a token for one node. It is shown once and works once.

    Whoever has it can be that node until it is used or expires: hand it over as you would a password.
    """
    answer = client_of(ctx).post("tokens", {"node": node, "ttl_s": ttl})
    if as_json:
        echo_json(answer)
        return
    echo(answer["token"])
    echo(f"for node {answer['node']}, until {when(answer['expires'])}, once; on the node:", err=True)
    echo("  llmgw agent join TOKEN --server HOST:PORT", err=True)


@token.command("list")
@_as_json
@click.pass_context
def list_tokens(ctx: click.Context, as_json: bool) -> None:
    """Every token that is remembered, newest first; none of them can be read from here."""
    answer = client_of(ctx).get("tokens")
    if as_json:
        echo_json(answer)
        return
    table(
        ["TOKEN", "NODE", "STATE", "CREATED", "EXPIRES", "USED FROM"],
        [
            [t["id"], t["node"], t["state"], when(t["created"]), when(t["expires"]), t["used_from"]]
            for t in answer["tokens"]
        ],
        empty="no token was ever made; see llmgw ctl token create",
        state_column=2,
    )


@token.command("revoke")
@click.argument("token_id", metavar="TOKEN")
@_as_json
@click.pass_context
def revoke(ctx: click.Context, token_id: str, as_json: bool) -> None:
    """Revoke a token by its id before it is used. A node that has joined is kept out with `llmgw ctl deny`."""
    name = token_id.removeprefix("llmgw_join_").partition(".")[0]
    answer = client_of(ctx).post(f"tokens/{quote(name, safe='')}/revoke", {})
    say(answer, f"revoked: {name}", as_json=as_json)


@command.group()
def deny() -> None:
    """Keep nodes out, by id, serial number or key, whatever their certificates say.

    An open session ends within a second. What runs on the node runs on and is still sent requests: for that there is
    `llmgw ctl node forget`.
    """


def _deny(kind: str, what: str) -> click.Command:
    @click.argument("value", metavar=kind.upper(), shell_complete=names("nodes") if kind == "node" else None)
    @click.option("--reason", required=True, help="Why; whoever is refused is told.")
    @_as_json
    @click.pass_context
    def work(ctx: click.Context, value: str, reason: str, as_json: bool) -> None:
        answer = client_of(ctx).post("deny", {"kind": kind, "value": value, "reason": reason})
        (row,) = answer["denied"]
        say(answer, f"denied: {row['kind']} {row['value']}", as_json=as_json)

    return click.command(kind, help=what)(work)


for _kind, _what in (
    ("node", "Keep out every certificate of this node."),
    ("serial", "Keep out one certificate, or all below a CA, by its serial number in hexadecimal."),
    ("key", "Keep out a key, by SHA-256 of its SubjectPublicKeyInfo, in every certificate that it is in."),
):
    deny.add_command(_deny(_kind, _what))


@deny.command("list")
@_as_json
@click.pass_context
def list_denied(ctx: click.Context, as_json: bool) -> None:
    """The deny list."""
    answer = client_of(ctx).get("deny")
    if as_json:
        echo_json(answer)
        return
    table(
        ["KIND", "VALUE", "SINCE", "REASON", "BY"],
        [[d["kind"], d["value"], when(d["at"]), d["reason"], d["by"]] for d in answer["denied"]],
        empty="nobody is denied",
    )


@deny.command("lift")
@click.argument("kind", type=click.Choice(["node", "serial", "key"]))
@click.argument("value")
@_as_json
@click.pass_context
def lift(ctx: click.Context, kind: str, value: str, as_json: bool) -> None:
    """Let somebody in again."""
    answer = client_of(ctx).post("deny/lift", {"kind": kind, "value": value})
    say(answer, f"lifted: {kind} {value}", as_json=as_json)


@command.command()
@click.option(
    "--events",
    type=click.IntRange(1, 1000),
    metavar="N",
    help="Instead, the newest N events: tokens, certificates, the deny list, and who was turned away.",
)
@_as_json
@click.pass_context
def identities(ctx: click.Context, events: int | None, as_json: bool) -> None:
    """The CAs that are trusted and who needs which, and every node's certificate."""
    if events is not None:
        answer = client_of(ctx).get(f"identities/events?limit={events}")
        if as_json:
            echo_json(answer)
            return
        table(
            ["WHEN", "WHAT", "NODE", "BY", "DETAIL"],
            [[when(e["at"]), e["kind"], e["node"], e["by"], e["detail"]] for e in answer["events"]],
            empty="nothing yet",
        )
        return
    answer = client_of(ctx).get("identities")
    if as_json:
        echo_json(answer)
        return
    for ca in answer["cas"]:
        roles = [word for word, has in (("issues", ca["issuing"]), ("ours is from it", ca["ours"])) if has]
        echo(f"CA {ca['subject']}  SHA-256 {ca['sha256']}  until {when(ca['not_after'])[:10]}"
                   + (f"  ({', '.join(roles)})" if roles else ""))  # fmt: skip
        for title, nodes in (("not trusted yet by", ca["lacking"]), ("still needed by", ca["needing"])):
            if nodes and len(answer["cas"]) > 1:
                echo(f"  {title} " + "; ".join(f"{n['node']}: {n['reason']}" for n in nodes))
    echo()
    table(
        ["NODE", "SERIAL", "ENDS", "KEY (SHA-256)", "SAID"],
        [
            [n["node"], n["serial"], when(n["not_after"]), n["key"], f"{ago(n['at'], answer['now'])} ago"]
            for n in answer["nodes"]
        ],
        empty="no node has ever connected",
    )
