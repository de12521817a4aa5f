"""``llmgw ca``: the local certificate authority of a cluster."""

from __future__ import annotations

import time
from pathlib import Path

import click

from llmgw.cli.ca_rotate import rotate
from llmgw.cli.terminal import echo
from llmgw.link import ca


@click.group(name="ca")
def command() -> None:
    """Make the cluster's own certificate authority, and certificates for its nodes and control planes."""


command.add_command(rotate)


@command.command()
@click.option("--dir", "folder", type=click.Path(path_type=Path), default=Path("ca"), show_default=True,
              help="Folder to make; it must not hold a CA yet.")  # fmt: skip
@click.option("--trust-domain", default="llmgw.local", show_default=True, help="Name of this cluster in certificates.")
def init(folder: Path, trust_domain: str) -> None:
    """Make a root and an issuing CA (P-256). Keys are 0600 in a 0700 folder.

    Keep root.key offline: only the issuing CA is needed to issue certificates.
    """
    ca.init(folder, trust_domain, time.time())
    echo(f"made a CA for {trust_domain} in {folder}")
    echo(f"next: llmgw ca issue --dir {folder} --server localhost --out certs/server")


@command.command()
@click.option("--dir", "folder", type=click.Path(path_type=Path), default=Path("ca"), show_default=True,
              help="The CA's folder.")  # fmt: skip
@click.option("--node", "node", metavar="ID", help="Issue for the agent of this node.")
@click.option("--server", "names", metavar="NAME", multiple=True,
              help="Issue for a control plane reached under this host name or address; may be repeated.")  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder for certificate, key and CA bundle."
)
@click.option("--days", type=click.IntRange(1, 3650), default=90, show_default=True, help="Validity.")
@click.option("--person", metavar="NAME", help="Issue for a person, to use the admin API with; needs --role.")
@click.option("--role", type=click.Choice(["viewer", "operator", "admin"]), help="What the person may do.")
def issue(
    folder: Path, node: str | None, names: tuple[str, ...], out: Path, days: int, person: str | None, role: str | None
) -> None:
    """Issue a certificate for a node (--node ID), a control plane (--server NAME) or a person (--person NAME)."""
    if [node is not None, bool(names), person is not None].count(True) != 1:
        raise click.UsageError("say one of --node ID, --server NAME and --person NAME")
    if (person is None) != (role is None):
        raise click.UsageError("--person NAME and --role ROLE belong together")
    if person is not None and role is not None:
        made = ca.issue_person(folder, person, role, out, days, time.time())
    elif node is not None:
        made = ca.issue_node(folder, node, out, days, time.time())
    else:
        made = ca.issue_server(folder, names, out, days, time.time())
    echo(f"certificate: {made.certificate}\nkey:         {made.key}\nca:          {made.ca}")
