"""``llmgw config``: check what was written before a daemon has to; and what the daemons say to each other."""

from __future__ import annotations

import json
from pathlib import Path

import click

from llmgw.cli.terminal import echo
from llmgw.settings.faults import ConfigError
from llmgw.settings.load import kind_of, load_server, load_settings
from llmgw.settings.load_agent import load_agent
from llmgw.store.files import read_text


@click.group(name="config")
def command() -> None:
    """Check configuration files, and print the keys of the settings and the schema of the link's messages."""


@command.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--kind", type=click.Choice(["server", "agent", "settings"]), help="What FILE is; told by its keys if left out."
)
@click.option("--json", "as_json", is_flag=True, help="Faults as JSON.")
@click.pass_context
def check(ctx: click.Context, file: Path, kind: str | None, as_json: bool) -> None:
    """Check FILE (server.yaml, agent.yaml or a settings document) and show every fault in it at once.

    Exit code 0 when it can be used, 2 when not.
    """
    text = read_text(file)
    try:
        kind = kind or kind_of(text, str(file))
        folder = str(file.resolve().parent)
        if kind == "server":
            load_server(text, str(file), folder)
        elif kind == "agent":
            load_agent(text, str(file), folder)
        else:
            load_settings(text, str(file))
    except ConfigError as wrong:
        if as_json:
            echo(json.dumps({"file": str(file), "ok": False, "faults": [f.as_dict() for f in wrong.faults]}, indent=2))
        else:
            for fault in wrong.faults:
                echo(str(fault), err=True)
            count = len(wrong.faults)
            echo(f"{file}: {count} fault{'s' if count != 1 else ''}; nothing of it is used", err=True)
        ctx.exit(2)
    if as_json:
        echo(json.dumps({"file": str(file), "kind": kind, "ok": True, "faults": []}, indent=2))
    else:
        echo(f"{file}: correct ({kind})")


@command.command()
def reference() -> None:
    """Print every key of the settings: what it means, its type, unit, default and an example.

    docs/reference/settings.md is its output.
    """
    from llmgw.settings.reference import render

    echo(render(), nl=False)


@command.command()
def openapi() -> None:
    """Print the OpenAPI document of the admin API; docs/openapi.json is its output."""
    from llmgw.web.openapi import document

    echo(json.dumps(document(), indent=2))


@command.command("link-schema")
def link_schema() -> None:
    """Print the JSON schema of every message between agents and control planes.

    docs/link.schema.json is its output, so that a review sees what a change does to the wire.
    """
    from llmgw.link.codec import DOWN, JOIN_ANSWERS, JOINING, UP
    from llmgw.link.messages import PROTOCOL
    from llmgw.web.schema import wire_schema

    tables = {"up": UP, "down": DOWN, "joining": JOINING, "joining-answers": JOIN_ANSWERS}
    echo(json.dumps(wire_schema("llmgw link", PROTOCOL, tables), indent=2))
