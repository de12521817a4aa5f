"""``llmgw agent``: the node's daemon, and what it would say of this node's hardware."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import trio
from attrs import evolve

from llmgw import __version__
from llmgw.cli.agent_join import join
from llmgw.cli.agent_status import status
from llmgw.cli.files import agent_config, agent_in_force
from llmgw.cli.inventory import show_inventory
from llmgw.cli.terminal import echo
from llmgw.errors import OperatorError
from llmgw.hardware.fabric import FabricRule
from llmgw.hardware.inventory import Inventory
from llmgw.settings.daemon import Discovery, GpuSource

if TYPE_CHECKING:
    from llmgw.discovery.machine import Machine

_PATIENCE_S = 2.0


@click.group(name="agent", invoke_without_command=True)
@click.option("--config", "path", type=click.Path(path_type=Path), default=Path("/etc/llmgw/agent.yaml"),
              show_default=True, envvar="LLMGW_AGENT_CONFIG", help="agent.yaml")  # fmt: skip
@click.pass_context
def command(ctx: click.Context, path: Path) -> None:
    """Run this node's agent.

    It dials out to the control plane, reports the hardware, and starts, watches and stops engines. Engines
    outlive it: SIGTERM ends the agent within a second and leaves every engine serving; the next agent on the
    same state folder adopts them. It starts again on settings that the control plane sends, and on an agent.yaml that
    was edited; SIGHUP reads that now, and tries settings again that were refused.
    """
    ctx.obj = path
    if ctx.invoked_subcommand is None:
        from llmgw.agent.main import run

        run(path)


command.add_command(join)
command.add_command(status)


@command.command()
@click.option("--json", "as_json", is_flag=True, help="The inventory as it travels in the registration message.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of what --json prints, and nothing else.")
@click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Read this folder: a capture made with --save, or one that stands in for a machine's root.",
)
@click.option(
    "--run-programs",
    is_flag=True,
    help="With --root: run that folder's programs (usr/bin/nvidia-smi, …). Only for a folder of your own.",
)
@click.option(
    "--source", type=click.Choice([s.value for s in GpuSource]), help="How GPUs are read, whatever agent.yaml says."
)
@click.option(
    "--save",
    type=click.Path(path_type=Path),
    help="Capture what was read into this new folder, for support; serials and host name are blanked.",
)
@click.option(
    "--accept",
    is_flag=True,
    help="Take the cards that are here now for those that this node shall have: ends warnings of missing ones.",
)
@click.pass_context
def inventory(
    ctx: click.Context, as_json: bool, schema: bool, root: Path | None, run_programs: bool, source: str | None,
    save: Path | None, accept: bool,
) -> None:  # fmt: skip
    """Show the hardware of this machine as the scheduler would see it.

    Reads what agent.yaml and the settings that its agent keeps say under `discovery` and `fabrics` when that file is
    there, and this machine otherwise.
    Exit code 1 when GPUs were meant to be read and could not be.
    """
    if schema:
        from llmgw.web.schema import json_schema

        echo(json.dumps(json_schema(Inventory), indent=2))
        return
    path: Path = ctx.obj
    config = agent_in_force(path) if path.exists() else None
    discovery = Discovery() if config is None else config.discovery
    rules: Sequence[FabricRule] = () if config is None else config.fabrics
    if root is not None:
        discovery = Discovery(root=str(root.resolve()))
    if source is not None:
        discovery = evolve(discovery, source=GpuSource(source))
    if accept and (root is not None or config is None):
        raise OperatorError(
            "--accept", "needs this node's agent.yaml", f"name it: llmgw agent --config {path} inventory"
        )
    found = _read(discovery, rules, save, run_programs=run_programs or root is None)
    if config is not None and root is None:
        from llmgw.agent.hardware import Known
        from llmgw.hardware.known import known_cards

        known = Known(Path(config.state_dir))
        if accept:
            known.write(known_cards(found))
        found = known.compare(found, remember=False)
    if as_json:
        from llmgw.link.codec import converter

        echo(json.dumps(converter().unstructure(found), indent=2))
    else:
        show_inventory(found, {} if config is None or root is not None else _shards(Path(config.state_dir)))
        if save is not None:
            echo(f"\nsaved in {save}; read it with: llmgw agent inventory --root {save}")
    if found.source == "none" and discovery.source is not GpuSource.NONE and not _harmless(found):
        ctx.exit(1)


def _shards(state_dir: Path) -> dict[str, str]:
    """The shards of this node that have not ended, by the UUIDs of their devices; none where they may not be read."""
    from llmgw.agent import records

    made: dict[str, str] = {}
    try:
        for folder in records.folders(state_dir / "shards"):
            if records.end(folder) is None:
                record = records.read(folder)
                made |= dict.fromkeys(record.uuids, record.shard)
    except (OSError, OperatorError):
        return made
    return made


def _harmless(inventory: Inventory) -> bool:
    """Whether there is simply no GPU."""
    return any(w.code == "no-gpu" for w in inventory.warnings)


def _read(discovery: Discovery, rules: Sequence[FabricRule], save: Path | None, *, run_programs: bool) -> Inventory:
    from llmgw.discovery.capture import CapturedMachine, Recorder, is_capture
    from llmgw.discovery.machine import FilesOnly, LiveMachine, programs_of

    root = Path(discovery.root)
    machine: Machine
    if is_capture(root):
        machine = captured = CapturedMachine(root)
        rules = captured.rules
    elif run_programs:
        machine = LiveMachine(discovery)
    elif there := programs_of(root):
        raise OperatorError(
            f"--root {root}",
            f"holds programs ({', '.join(str(path.relative_to(root)) for path in there)}), and is no capture",
            "a folder that somebody sent could hold anything; for one that you made yourself add --run-programs",
        )
    else:
        machine = FilesOnly(discovery)
    if save is None:
        return trio.run(_patiently, discovery, rules, machine)
    if save.exists():
        raise OperatorError(f"--save {save}", "exists already", "name a new folder")
    recorder = Recorder(machine, socket.gethostname())
    found = trio.run(_patiently, discovery, rules, recorder)
    if discovery.source is not GpuSource.NONE:
        # Whoever reads the capture wants to see what both ways say.
        for source in (GpuSource.NVIDIA_SMI, GpuSource.NVML):
            trio.run(_patiently, evolve(discovery, source=source), rules, recorder)
    about = {
        "llmgw": __version__,
        "source": found.source,
        "captured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    fresh = save.with_name(f".{save.name}.new")
    try:
        recorder.save(fresh, found.host, rules, {**about, "simulated": found.simulated})
        fresh.rename(save)
    except OSError as failed:
        shutil.rmtree(fresh, ignore_errors=True)
        raise OperatorError(f"--save {save}", f"cannot be written: {failed.strerror}", "") from failed
    return found


async def _patiently(discovery: Discovery, rules: Sequence[FabricRule], machine: Machine) -> Inventory:
    """Read, and say what is waited for when it takes long."""
    from llmgw.discovery.probe import discover

    async def say() -> None:
        await trio.sleep(_PATIENCE_S)
        limit = f"each program may take {discovery.timeout_s:g} s"
        echo(f"still reading; a driver that hangs is left behind, {limit}", err=True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(say)
        found = await discover(discovery, rules, machine)
        nursery.cancel_scope.cancel(reason="read")
    return found


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
    echo("\n".join(f"stopped {name}" for name in stopped) or "no engine was running")
