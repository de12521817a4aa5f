"""``llmgw ctl admin-token`` and ``whoami``: who may use the admin API."""

from __future__ import annotations

from urllib.parse import quote

import click

from llmgw.cli.admin_client import client_of
from llmgw.cli.ctl import _as_json, command
from llmgw.cli.ctl_identity import when
from llmgw.cli.terminal import echo, echo_json, say, table
from llmgw.cli.values import seconds


@command.group("admin-token")
def admin_token() -> None:
    """Tokens of the admin API, for people and programs. Nodes join with `llmgw ctl token`."""


@admin_token.command("create")
@click.argument("name")
@click.option("--role", type=click.Choice(["viewer", "operator", "admin"]), default="viewer", show_default=True,
              help="viewer reads, operator changes what runs, admin also says who may do what.")  # fmt: skip
@click.option("--ttl", callback=seconds, metavar="TIME", default="90d", show_default=True, help="How long it is good.")
@_as_json
@click.pass_context
def create(ctx: click.Context, name: str, role: str, ttl: float, as_json: bool) -> None:
    """Make a token for NAME. It is shown once; put it into a file of mode 0600."""
    answer = client_of(ctx).post("admin-tokens", {"name": name, "role": role, "ttl_s": ttl})
    if as_json:
        echo_json(answer)
        return
    echo(answer["token"])
    echo(f"{answer['role']} {answer['name']}, until {when(answer['expires'])}, id {answer['id']}", err=True)


@admin_token.command("list")
@_as_json
@click.pass_context
def list_tokens(ctx: click.Context, as_json: bool) -> None:
    """Every token, newest first; none of them can be read from here."""
    answer = client_of(ctx).get("admin-tokens")
    if as_json:
        echo_json(answer)
        return
    table(
        ["TOKEN", "NAME", "ROLE", "STATE", "EXPIRES", "LAST USED", "BY"],
        [
            [t["id"], t["name"], t["role"], t["state"], when(t["expires"]), when(t["used"]), t["by"]]
            for t in answer["tokens"]
        ],
        empty="no token was ever made but the one in admin.token; see llmgw ctl admin-token create",
        state_column=3,
    )


@admin_token.command("revoke")
@click.argument("token_id", metavar="TOKEN")
@_as_json
@click.pass_context
def revoke(ctx: click.Context, token_id: str, as_json: bool) -> None:
    """Revoke a token by its id. Whoever watches with it is cut off within ten seconds."""
    name = token_id.removeprefix("llmgw_admin_").partition(".")[0]
    answer = client_of(ctx).post(f"admin-tokens/{quote(name, safe='')}/revoke", {})
    say(answer, f"revoked: {answer['name']}", as_json=as_json)


@command.command()
@_as_json
@click.pass_context
def whoami(ctx: click.Context, as_json: bool) -> None:
    """Who you are at the admin API, and your role."""
    answer = client_of(ctx).get("whoami")
    if as_json:
        echo_json(answer)
    else:
        echo(f"{answer['name']}, {answer['role']}")
