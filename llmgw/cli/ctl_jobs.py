"""``llmgw ctl jobs``, ``fetch`` and ``install``: long work on nodes, begun, watched and cancelled."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from llmgw.cli.admin_client import client_of
from llmgw.cli.completion import names
from llmgw.cli.ctl import _as_json, command
from llmgw.cli.follow import follow, watching
from llmgw.cli.terminal import ago, echo, echo_json, table
from llmgw.settings.catalog import EngineKind
from llmgw.store.files import read_text


def _show(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        echo_json(answer)
        return
    now = answer["now"]
    table(
        ["JOB", "STATE", "SINCE", "NODE", "WHAT", "WHY"],
        [
            [j["id"], j["state"], ago(j["since"], now), j["node"], f"{j['kind']} {j['subject']}", j["says"]]
            for j in answer["jobs"]
        ],
        empty="no job was ever begun; see llmgw ctl fetch and llmgw ctl install",
        state_column=1,
    )
    for job in answer["jobs"]:
        if job["remedy"]:
            echo(f"{job['id']}: {job['remedy']}")


@command.command()
@click.argument("job", required=False)
@click.option("--cancel", is_flag=True, help="End this job; whole files that were fetched stay.")
@_as_json
@watching
@click.pass_context
def jobs(ctx: click.Context, job: str | None, cancel: bool, as_json: bool, watch: bool) -> None:
    """Every job, or one with its steps and its result."""
    if job is None:
        if cancel:
            raise click.UsageError("--cancel needs the id of a job")
        if watch:
            follow(client_of(ctx), ("jobs",), lambda told: _show(told, as_json=False), as_json)
            return
        _show(client_of(ctx).get("jobs"), as_json)
        return
    if watch:
        raise click.UsageError("--watch shows every job; leave the id out")
    client, path = client_of(ctx), f"jobs/{quote(job, safe='')}"
    answer = client.post(f"{path}/cancel", {}) if cancel else client.get(path)
    _show(answer, as_json)
    if not as_json:
        (found,) = answer["jobs"]
        for step in found["steps"]:
            echo(f"  {time.strftime('%H:%M:%S', time.localtime(step['since']))} {step['name']}")
        for key, value in found["result"].items():
            echo(f"  {key}: {value}")


@command.command()
@click.argument("model", shell_complete=names("models"))
@click.option("--node", required=True, shell_complete=names("nodes"), help="Which node shall have it.")
@click.option("--update", is_flag=True, help="Ask again what a branch points to.")
@_as_json
@click.pass_context
def fetch(ctx: click.Context, model: str, node: str, update: bool, as_json: bool) -> None:
    """Have a node fetch a model's weights (or hf:org/name@revision) before they are needed."""
    _show(client_of(ctx).post("jobs", {"node": node, "fetch": {"weights": model, "update": update}}), as_json)


@command.command()
@click.argument("engine", type=click.Choice([kind.value for kind in EngineKind]))
@click.option("--node", required=True, shell_complete=names("nodes"), help="Which node shall have it.")
@click.option("--name", help="What to call it. [default: the engine's name]")
@click.option("--version", required=True, help="Its version, which is part of its folder's name.")
@click.option("--lock", type=click.Path(path_type=Path), help="A requirements file with hashes.")
@click.option("--wheels", help="A folder of wheels on the node, for installs without an index.")
@click.option("--package", "packages", multiple=True, help="With --wheels: what to install. [default: ENGINE==VERSION]")
@click.option("--python", "python", default="", help="The node's Python to make the environment with.")
@_as_json
@click.pass_context
def install(ctx: click.Context, engine: str, node: str, name: str | None, version: str, lock: Path | None,
            wheels: str | None, packages: tuple[str, ...], python: str, as_json: bool) -> None:  # fmt: skip
    """Have a node install an engine beside those it has, and start shards with it from then on."""
    if (lock is None) == (wheels is None):
        raise click.UsageError("give --lock or --wheels")
    asked = {
        "engine": engine,
        "name": name or engine,
        "version": version,
        "lock": "" if lock is None else read_text(lock),
        "wheels": wheels or "",
        "packages": list(packages) or ([] if wheels is None else [f"{engine}=={version}"]),
        "python": python,
    }
    _show(client_of(ctx).post("jobs", {"node": node, "install": asked}), as_json)
