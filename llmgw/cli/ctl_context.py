"""``llmgw ctl context``: which clusters there are, and which one is asked."""

from __future__ import annotations

import sys
from pathlib import Path

import attrs
import click

from llmgw.cli import contexts
from llmgw.cli.completion import context_names
from llmgw.cli.ctl import _as_json, command
from llmgw.cli.terminal import echo, echo_json, say, table
from llmgw.errors import OperatorError

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@command.group()
def context() -> None:
    """Several clusters by name, in ~/.config/llmgw/contexts.yaml.

    \b
    llmgw ctl context add prod --address https://gw:8001 --ca ca.pem --token-file prod.token
    llmgw ctl context use prod
    llmgw ctl --context prod status
    """


@context.command("list")
@_as_json
def list_contexts(as_json: bool) -> None:
    """Every context; the one in use has a star."""
    found = contexts.load()
    if as_json:
        echo_json({"current": found.current, "contexts": {n: c.address for n, c in found.contexts.items()}})
        return
    table(
        ["", "CONTEXT", "ADDRESS"],
        [["*" if n == found.current else "", n, c.address] for n, c in sorted(found.contexts.items())],
        empty="there is none; see llmgw ctl context add --help",
    )


@context.command()
@click.argument("name", shell_complete=context_names)
@_as_json
def use(name: str, as_json: bool) -> None:
    """Ask this cluster from now on."""
    found = contexts.load()
    found.named(name)
    contexts.save(attrs.evolve(found, current=name))
    say({"current": name}, f"in use: {name}", as_json=as_json)


@context.command()
@click.argument("name")
@click.option("--address", required=True, metavar="URL", help="https://HOST:PORT or http://HOST:PORT.")
@click.option("--token-file", type=_FILE, help="File with the token (mode 0600).")
@click.option("--token-stdin", is_flag=True, help="Read the token from standard input, and keep it with the context.")
@click.option("--ca", type=_FILE, help="CA bundle that the address is checked against. [default: the system's]")
@click.option("--certificate", type=_FILE, help="Your certificate, of llmgw ca issue --person.")
@click.option("--key", type=_FILE, help="Its key.")
@_as_json
def add(
    name: str, address: str, token_file: Path | None, token_stdin: bool, ca: Path | None, certificate: Path | None,
    key: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Add a cluster, or replace the one of this name. The first one is in use at once."""
    contexts.check_name(name)
    if (certificate is None) != (key is None):
        raise click.UsageError("--certificate and --key belong together")
    if [token_file is not None, token_stdin].count(True) > 1:
        raise click.UsageError("say one of --token-file and --token-stdin")
    token = sys.stdin.readline().strip() if token_stdin else ""
    named: tuple[Path | None, ...] = (token_file, ca, certificate, key)
    files = ["" if file is None else str(file.resolve()) for file in named]
    if not (token or token_file or certificate):
        raise click.UsageError("say who you are: --token-file, --token-stdin or --certificate with --key")
    made = contexts.Context(address, files[0], token, files[1], files[2], files[3])
    found = contexts.load()
    contexts.save(contexts.Contexts(found.current or name, {**found.contexts, name: made}))
    say({"added": name}, f"added: {name}", as_json=as_json)


@context.command()
@click.argument("name", shell_complete=context_names)
@_as_json
def remove(name: str, as_json: bool) -> None:
    """Forget a cluster. Files that the context names stay."""
    found = contexts.load()
    found.named(name)
    rest = {n: c for n, c in found.contexts.items() if n != name}
    contexts.save(contexts.Contexts("" if found.current == name else found.current, rest))
    say({"removed": name}, f"removed: {name}", as_json=as_json)


@context.command()
@click.argument("name", required=False, shell_complete=context_names)
@_as_json
def show(name: str | None, as_json: bool) -> None:
    """One context, without its token."""
    found = contexts.load()
    if not (name := name or found.current):
        raise OperatorError("context", "none is in use", "llmgw ctl context use NAME")
    one = attrs.asdict(found.named(name))
    one["token"] = "kept with the context" if one["token"] else ""
    if as_json:
        echo_json({"name": name, **one})
        return
    for key, value in {"name": name, **one}.items():
        if value:
            echo(f"{key}: {value}")
