"""``llmgw ctl audit``: who did what, and whether the record is whole."""

from __future__ import annotations

import click

from llmgw.cli.admin_client import client_of
from llmgw.cli.ctl_identity import when
from llmgw.cli.terminal import echo, echo_json, table
from llmgw.cli.values import noted_row
from llmgw.store.audit import Noted

_as_json = click.option("--json", "as_json", is_flag=True, help="The admin API's answer as it is.")
_VERIFY_S = 300.0


@click.group(invoke_without_command=True)
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="How many.")
@click.option("--before", type=click.IntRange(1), metavar="SEQ", help="Only what comes before this row.")
@_as_json
@click.pass_context
def audit(ctx: click.Context, limit: int, before: int | None, as_json: bool) -> None:
    """Who did what, newest first: settings, keys, tokens, nodes, CAs, jobs, the brake.

    Rows are numbered without gaps and never dropped. Each carries the digest of the one before it, so that a row that
    was changed or removed is found: llmgw ctl audit verify.
    """
    if ctx.invoked_subcommand is not None:
        return
    more = "" if before is None else f"&before={before}"
    answer = client_of(ctx).get(f"audit?limit={limit}{more}")
    if as_json:
        echo_json(answer)
        return
    table(
        ["SEQ", "WHEN", "WHO", "WHAT", "OBJECT", "REASON", "DETAIL"],
        [
            [str(r["seq"]), when(r["at"]), r["by"], r["action"], r["object"], r["reason"], r["detail"]]
            for r in answer["rows"]
        ],
        empty="nothing yet" if before is None else f"nothing before row {before}",
    )


@audit.command()
@click.option("--noted", callback=noted_row, metavar="SEQ:DIGEST", help="This row has to be there still.")
@_as_json
@click.pass_context
def verify(ctx: click.Context, noted: Noted | None, as_json: bool) -> None:
    """Whether every row is there as it was written.

    The rows alone cannot show that the newest ones were removed, or all of them written anew. So what stands for all
    rows up to the newest is printed: note it down where whoever could change the store cannot, and give it to --noted
    the next time. Exit codes: 0 intact, 1 not.

    \b
    llmgw ctl audit verify --noted 1204:9c1f…
    """
    query = "" if noted is None else f"?noted={noted}"
    answer = client_of(ctx).get(f"audit/verify{query}", _VERIFY_S)
    if as_json:
        echo_json(answer)
    elif answer["intact"]:
        echo(f"intact: {answer['rows'] or 0} rows" + ("" if noted is None else f", row {noted.seq} as it was noted"))
        if answer["newest"]:
            echo(f"to be noted: {answer['newest']}")
    else:
        echo(f"not intact: {answer['wrong']}")
    if not answer["intact"]:
        ctx.exit(1)
