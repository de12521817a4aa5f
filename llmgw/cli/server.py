"""``llmgw server``: the router, and the control plane when a model needs one; and its store."""

from __future__ import annotations

from pathlib import Path

import click

from llmgw.cli.files import server_config
from llmgw.cli.server_store import backup, check, restore


@click.group(name="server", invoke_without_command=True)
@click.option("--config", "path", type=click.Path(path_type=Path), default=Path("/etc/llmgw/server.yaml"),
              show_default=True, envvar="LLMGW_CONFIG", help="server.yaml")  # fmt: skip
@click.pass_context
def command(ctx: click.Context, path: Path) -> None:
    """Run the router and the control plane.

    It is only a router as long as the settings list nothing but static endpoints; a model that declares a
    profile makes it a control plane, and agents can connect.

    \b
    SIGTERM, SIGINT  stop: streams in flight finish within router.drain_s, then exit 0; engines go on
    SIGHUP           read the certificates again, and the settings file while nobody changed the settings with
                     llmgw ctl config; what is wrong is reported and ignored
    SIGUSR2          start anew in the same process, with the program and server.yaml as they are now; the router
                     goes on, and its workers are replaced one by one if they are of another version or setup
    """
    ctx.obj = path
    if ctx.invoked_subcommand is not None:
        return
    config = server_config(path)
    from llmgw.server.main import run

    run(config)


for _command in (backup, restore, check):
    command.add_command(_command)
