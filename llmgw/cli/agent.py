"""``llmgw agent``: the node's daemon, and what it would say of this node's hardware."""

from __future__ import annotations

import json
from pathlib import Path

import click
import trio

from llmgw.cli.files import agent_config
from llmgw.cli.inventory import show_inventory
from llmgw.settings.daemon import Discovery


@click.group(name="agent", invoke_without_command=True)
@click.option("--config", "path", type=click.Path(path_type=Path), default=Path("/etc/llmgw/agent.yaml"),
              show_default=True, envvar="LLMGW_AGENT_CONFIG", help="agent.yaml")  # fmt: skip
@click.pass_context
def command(ctx: click.Context, path: Path) -> None:
    """Run this node's agent.

    It dials out to the control plane, reports the hardware, and starts, watches and stops engines. Engines
    outlive it: SIGTERM ends the agent within a second and leaves every engine serving; the next agent on the
    same state folder adopts them.
    """
    ctx.obj = path
    if ctx.invoked_subcommand is None:
        config = agent_config(path)
        from llmgw.agent.main import run

        run(config)


@command.command()
@click.option("--json", "as_json", is_flag=True, help="The inventory as it travels in the registration message.")
@click.option("--root", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Read this folder as if it were the machine's root.")  # fmt: skip
@click.pass_context
def inventory(ctx: click.Context, as_json: bool, root: Path | None) -> None:
    """Show the hardware of this machine as the scheduler would see it.

    Reads what agent.yaml says under `discovery` when that file is there, and this machine otherwise.
    """
    from llmgw.discovery.probe import discover
    from llmgw.link.codec import converter

    path: Path = ctx.obj
    if root is not None:
        config = Discovery(root=str(root.resolve()))
    else:
        config = agent_config(path).discovery if path.exists() else Discovery()
    found = trio.run(discover, config)
    if as_json:
        click.echo(json.dumps(converter().unstructure(found), indent=2))
    else:
        show_inventory(found)


@command.command("stop-engines")
@click.option(
    "--grace", type=click.FloatRange(0), default=30.0, show_default=True, help="Seconds from SIGTERM to SIGKILL."
)
@click.pass_context
def stop_engines(ctx: click.Context, grace: float) -> None:
    """Stop every engine of this node, when its agent does not run.

    For taking a node out of service, or one that is cut off from its control plane. While the agent runs, lower the
    replicas in the settings instead.
    """
    from llmgw.agent.stop import stop_engines as stop

    stopped = stop(Path(agent_config(ctx.obj).state_dir), grace)
    click.echo("\n".join(f"stopped {name}" for name in stopped) or "no engine was running")
