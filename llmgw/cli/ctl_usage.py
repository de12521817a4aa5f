"""``llmgw ctl usage``: what was used, by key, owner, model and day."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

import click

from llmgw.cli.admin_client import client_of
from llmgw.cli.terminal import echo, echo_json, table
from llmgw.cli.values import moment


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).date().isoformat()


@click.command()
@click.option("--key", help="Only what this key used.")
@click.option("--owner", help="Only what the keys of this owner used.")
@click.option("--model", help="Only of this model.")
@click.option(
    "--since",
    callback=moment(-1),
    metavar="WHEN",
    help="From a day on (2026-12-01), or so long ago (7d). [default: 30d]",
)
@click.option("--by", default="key,model", show_default=True, metavar="WORDS",
              help="What the rows are: key, owner, model, day, or several with commas.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The admin API's answer as it is.")
@click.pass_context
def usage(
    ctx: click.Context,
    key: str | None,
    owner: str | None,
    model: str | None,
    since: float | None,
    by: str,
    as_json: bool,
) -> None:
    """Requests and tokens, by the engines' own count.

    \b
    What each team used this week, and on which days:
      llmgw ctl usage --since 7d --by owner,day
    What one key used of each model:
      llmgw ctl usage --key ID --by model

    Days are UTC. Requests without a key have none. GUESSED counts requests of which the engine never said how many
    tokens they took, because their client left or the engine died: those are estimated.
    """
    given = {"key": key, "owner": owner, "model": model, "since": None if since is None else _day(since), "by": by}
    query = urlencode({name: value for name, value in given.items() if value is not None})
    answer: dict[str, Any] = client_of(ctx).get(f"usage?{query}")
    if as_json:
        echo_json(answer)
        return
    groups = answer["by"]
    table(
        [*(g.upper() for g in groups), "REQUESTS", "FAILED", "GUESSED", "PROMPT", "COMPLETION", "COST"],
        [
            [*(str(r[g]) or "-" for g in groups), *(f"{r[n]}" for n in ("requests", "failed", "estimated")),
             f"{r['prompt']}", f"{r['completion']}", f"{r['cost']:g}" if r["cost"] else ""]
            for r in answer["usage"]
        ],
        empty="",
    )  # fmt: skip
    echo(f"\n{answer['since']} to {answer['until']} (UTC)" + ("" if answer["usage"] else ": nothing was used"))
