"""``llmgw ctl doctor``: what is wrong with nodes, and what siblings have otherwise."""

from __future__ import annotations

import json
from typing import Any

import click
from attrs import evolve

from llmgw.cli.admin_client import client_of
from llmgw.cli.completion import names
from llmgw.cli.doctor import _COLOURS
from llmgw.cli.terminal import echo
from llmgw.errors import OperatorError

_ANSWER_S = 60.0


@click.command()
@click.argument("nodes", nargs=-1, shell_complete=names("nodes"))
@click.option(
    "--only", multiple=True, metavar="ID", help="Only these checks: an id, or how ids begin (gpu, port.down)."
)
@click.option("--skip", multiple=True, metavar="ID", help="Not these checks.")
@click.option("--strict", is_flag=True, help="Exit code 3 when there are warnings, or siblings that are not alike.")
@click.option("--unknown", is_flag=True, help="Also list what could not be told, and what follows from something else.")
@click.option("--json", "as_json", is_flag=True, help="Each node's report, as llmgw doctor --json, by node.")
@click.option("--no-redact", is_flag=True, help="With --json: keep host names, addresses and UUIDs.")
@click.pass_context
def doctor(
    ctx: click.Context, nodes: tuple[str, ...], only: tuple[str, ...], skip: tuple[str, ...], strict: bool,
    unknown: bool, as_json: bool, no_redact: bool,
) -> None:  # fmt: skip
    """Run llmgw doctor on NODES, or on all that are connected, and hold siblings against each other.

    Nodes with the same cards should have one driver, one NCCL, one firmware and MTU: what is otherwise is a warning
    that names the odd one. Exit codes: 0 nothing failed, 1 something failed on some node or a named one did not answer,
    2 it could not be run, 3 warnings with --strict.
    """
    from llmgw.doctor.checks import CHECKS
    from llmgw.doctor.document import as_json as document_json
    from llmgw.doctor.document import from_json
    from llmgw.doctor.redact import key_of, redacted
    from llmgw.doctor.report import exit_code, lines
    from llmgw.doctor.verdict import chosen, judge

    for name in (*only, *skip):
        if not chosen(CHECKS, (name,), ()):
            raise OperatorError(name, "is no check, and none begins so", "all of them are in docs/doctor.md")
    checks = chosen(CHECKS, only, skip)
    if not as_json:
        echo("reading; this takes up to half a minute", err=True)
    answer: dict[str, Any] = client_of(ctx).post("doctor", {"nodes": list(nodes)}, _ANSWER_S)
    codes = {1} if nodes and answer["failed"] else {0}
    shown: dict[str, Any] = {}
    for node, said in sorted(answer["nodes"].items()):
        document = from_json(said, node)
        verdicts = judge(document.facts, checks)
        codes.add(exit_code(verdicts, strict=strict))
        if as_json:
            if not no_redact and not document.redacted:
                facts = redacted(document.facts, key_of(document.facts))
                document = evolve(document, redacted=True, facts=facts)
            shown[node] = document_json(document, checks)
            continue
        echo(f"\n{node}", bold=True)
        for line in lines(document.facts, verdicts, unknown=unknown):
            echo(f"  {line.text}", fg=_COLOURS.get(line.severity.value) if line.severity else None)
    unequal = answer["unequal"]
    if as_json:
        echo(json.dumps({"nodes": shown, "failed": answer["failed"], "unequal": unequal}, indent=2))
    else:
        if unequal:
            echo("\nSiblings that are not alike", bold=True)
        for found in unequal:
            echo(f"  warn    {found['text']}", fg="yellow")
        for node, why in sorted(answer["failed"].items()):
            echo(f"\n{node} {why}")
        if not answer["nodes"] and not answer["failed"]:
            echo("no node has ever registered; start `llmgw agent` on one")
    if unequal and strict:
        codes.add(3)
    ctx.exit(1 if 1 in codes else max(codes))
