"""``llmgw ctl keys``: API keys made, shown, changed, rotated and revoked."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import quote

import click

from llmgw.cli.admin_client import client_of
from llmgw.cli.terminal import ago, agreed, echo, echo_json, table
from llmgw.cli.values import NO_LIMIT, limit, moment, seconds
from llmgw.settings.keys import Period

_Command = TypeVar("_Command", bound=Callable[..., Any])

_as_json = click.option("--json", "as_json", is_flag=True, help="The admin API's answer as it is.")


_TERMS = (
    click.option("--name", help="What it is for; only shown."),
    click.option("--owner", help="Who pays for it: a team, a person. llmgw ctl usage sums by it."),
    click.option("--tag", "tags", multiple=True, metavar="TEXT", help="A remark of your own; may be repeated."),
    click.option("--model", "models", multiple=True, metavar="PATTERN",
                 help="A model that it may use, or a pattern with *; may be repeated. [default: all]"),
    click.option("--rpm", "requests_per_minute", callback=limit(int), metavar="N", help="Requests in any 60 s."),
    click.option("--tpm", "tokens_per_minute", callback=limit(int), metavar="N",
                 help="Tokens in any 60 s, prompts and answers."),
    click.option("--concurrent", callback=limit(int), metavar="N",
                 help="Requests under way at once, streams included."),
    click.option("--budget-tokens", callback=limit(int), metavar="N", help="Tokens in a budget period."),
    click.option("--budget-cost", callback=limit(float), metavar="X",
                 help="Cost in a budget period, in the unit of router.prices."),
    click.option("--budget-period", type=click.Choice([p.value for p in Period]),
                 help="When the budget begins anew (UTC). [default: month]"),
    click.option("--expires", callback=moment(1), metavar="WHEN",
                 help="In so long (90d, 12h), or on a day (2027-01-31)."),
)  # fmt: skip


def _terms(command: _Command) -> _Command:
    for option in reversed(_TERMS):
        command = option(command)
    return command


def _body(given: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, as the admin API wants them."""
    body: dict[str, Any] = {}
    for name, value in given.items():
        match name, value:
            case _, None | ():
                continue
            case _, str() if value == NO_LIMIT and name not in ("name", "owner"):
                body[name] = None
            case "tags" | "models", _:
                body[name] = list(value)
            case _:
                body[name] = value
    return body


def limits_of(key: dict[str, Any]) -> str:
    """A key's limits in words."""
    parts = [
        f"{key[name]} {words}"
        for name, words in (
            ("requests_per_minute", "requests/min"),
            ("tokens_per_minute", "tokens/min"),
            ("concurrent", "at once"),
        )
        if key[name] is not None
    ]
    period = "ever" if key["budget_period"] == "total" else f"a {key['budget_period']}"
    if key["budget_tokens"] is not None:
        parts.append(f"{key['budget']['tokens']} of {key['budget_tokens']} tokens {period}")
    if key["budget_cost"] is not None:
        parts.append(f"cost {key['budget']['cost']:.2f} of {key['budget_cost']:g} {period}")
    return ", ".join(parts) or "no limit"


def _until(key: dict[str, Any]) -> str:
    if key["expires"] is None:
        return "never"
    return datetime.fromtimestamp(key["expires"], UTC).strftime("%Y-%m-%d %H:%M")


def _show(rows: list[dict[str, Any]], empty: str = "") -> None:
    now = time.time()
    table(
        ["KEY", "STATE", "AGE", "EXPIRES", "OWNER", "NAME", "MODELS", "LIMITS"],
        [
            [k["id"], k["state"], ago(k["created"], now), _until(k), k["owner"], k["name"], " ".join(k["models"]),
             limits_of(k)]
            for k in rows
        ],
        empty=empty,
        state_column=1,
    )  # fmt: skip


def _done(answer: dict[str, Any], as_json: bool, what: str) -> None:
    if as_json:
        echo_json(answer)
        return
    _show([answer["key"]])
    if "token" in answer:
        echo("\nThe token, which is shown this once and kept nowhere:\n")
        echo(f"  {answer['token']}\n")
    if answer["in_force"]:
        echo(f"{what}; it holds on the router now")
    else:
        echo(f"{what}, but no router has confirmed it: it holds on each as soon as the control plane reaches it")


@click.group()
def keys() -> None:
    """API keys: who may use which models, how much of them, and until when.

    \b
    A first key, and then closing the router for everybody without one:
      llmgw ctl keys create --owner search-team --model 'llama-*' --rpm 600
      (in the settings)  router: {auth: keys}
    A key for a person, with a budget and an end:
      llmgw ctl keys create --owner ada --budget-tokens 5000000 --expires 90d
    It leaked:
      llmgw ctl keys revoke ID        or, with the same limits and a new secret:
      llmgw ctl keys rotate ID

    Clients send the token as Authorization: Bearer or as x-api-key. Limits are given as numbers, `none` takes one away.
    """


@keys.command()
@_terms
@_as_json
@click.pass_context
def create(ctx: click.Context, /, as_json: bool, **given: Any) -> None:
    """Make a key. Its token is printed once; the store has only its SHA-256.

    --rpm, --tpm and --concurrent are counted by each control plane for itself: where several route, a key can have as
    many times as much. Budgets are the whole cluster's.
    """
    _done(client_of(ctx).post("keys", _body(given)), as_json, "made")


@keys.command(name="list")
@click.option("--owner", help="Only those of this owner.")
@click.option("--all", "every", is_flag=True, help="Expired and revoked ones too.")
@_as_json
@click.pass_context
def list_(ctx: click.Context, owner: str | None, every: bool, as_json: bool) -> None:
    """Keys, their limits, and how much of their budgets is used."""
    answer = client_of(ctx).get("keys")
    shown = [k for k in answer["keys"] if (owner is None or k["owner"] == owner) and (every or k["state"] == "active")]
    if as_json:
        echo_json({"keys": shown})
        return
    _show(shown, "" if answer["keys"] else "there is no key; see llmgw ctl keys create --help")
    if hidden := len(answer["keys"]) - len(shown):
        echo(f"{hidden} more are not shown; see --all" if owner is None else f"{hidden} others")


@keys.command()
@click.argument("key")
@_as_json
@click.pass_context
def show(ctx: click.Context, key: str, as_json: bool) -> None:
    """One key, and everything that was done to it."""
    answer = client_of(ctx).get(f"keys/{quote(_id_of(key), safe='')}")
    if as_json:
        echo_json(answer)
        return
    _show([answer["key"]])
    if answer["key"]["tags"]:
        echo(f"tags: {', '.join(answer['key']['tags'])}")
    if answer["key"]["old_secret_until"] is not None:
        echo(f"its old secret is good for another {answer['key']['old_secret_until'] - time.time():.0f} s")
    echo()
    for event in answer["events"]:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["at"]))
        echo(f"{at}  {event['action']} by {event['by']}" + (f": {event['detail']}" if event["detail"] else ""))


@keys.command(name="set")
@click.argument("key")
@_terms
@_as_json
@click.pass_context
def set_(ctx: click.Context, /, key: str, as_json: bool, **given: Any) -> None:
    """Change what is given, and nothing else; `none` takes a limit away.

    It holds for the next request of the key. What was used already still counts.
    """
    body = _body(given)
    if not body:
        raise click.UsageError("nothing is given that should change")
    _done(client_of(ctx).post(f"keys/{quote(_id_of(key), safe='')}", body), as_json, "changed")


@keys.command()
@click.argument("key")
@click.option("--keep-old", callback=seconds, default="0s", show_default=True, metavar="TIME",
              help="For how long the old secret is good as well: 1h, 7d.")  # fmt: skip
@_as_json
@click.pass_context
def rotate(ctx: click.Context, key: str, keep_old: float, as_json: bool) -> None:
    """Give a key a new secret. Its id, limits and what it used stay."""
    path = f"keys/{quote(_id_of(key), safe='')}/rotate"
    _done(client_of(ctx).post(path, {"keep_old_s": keep_old}), as_json, "rotated")


@keys.command()
@click.argument("key")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_as_json
@click.pass_context
def revoke(ctx: click.Context, key: str, yes: bool, as_json: bool) -> None:
    """End a key for good. What is under way for it is cut, and its next request refused."""
    ident = _id_of(key)
    if not (yes or agreed("llmgw ctl keys revoke", f"revoke {ident} for good?")):
        ctx.exit(1)
    _done(client_of(ctx).post(f"keys/{quote(ident, safe='')}/revoke", {}), as_json, "revoked")


def _id_of(text: str) -> str:
    """The id, where somebody gives a whole token or its beginning."""
    parts = text.split("_")
    return parts[1] if len(parts) > 1 else text
