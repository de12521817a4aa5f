"""``llmgw ctl``: what the control plane knows, as tables or JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from llmgw.cli.admin_client import client_of
from llmgw.cli.completion import context_names
from llmgw.cli.ctl_brake import brake, say_brake
from llmgw.cli.ctl_keys import keys
from llmgw.cli.ctl_plan import plan
from llmgw.cli.ctl_usage import usage
from llmgw.cli.ctl_why import why
from llmgw.cli.explain import scaling_line, short_lines
from llmgw.cli.follow import follow, watching
from llmgw.cli.terminal import ago, drained_line, echo, echo_json, table

_Show = Callable[[dict[str, Any]], None]

_as_json = click.option("--json", "as_json", is_flag=True, help="The admin API's answer as it is.")


@click.group(name="ctl")
@click.option("--config", type=click.Path(path_type=Path), envvar="LLMGW_CONFIG",
              help="server.yaml of the control plane, to find its address and token. "
                   "[default: ./server.yaml, then /etc/llmgw/server.yaml]")  # fmt: skip
@click.option("--admin", metavar="URL", envvar="LLMGW_ADMIN", help="Address of the admin listener.")
@click.option("--token-file", type=click.Path(path_type=Path), envvar="LLMGW_TOKEN_FILE",
              help="File with the admin token (mode 0600).")  # fmt: skip
@click.option("--context", "context_name", metavar="NAME", shell_complete=context_names,
              help="Ask the cluster of this name: see llmgw ctl context. [env var: LLMGW_CONTEXT]")  # fmt: skip
@click.pass_context
def command(
    ctx: click.Context, config: Path | None, admin: str | None, token_file: Path | None, context_name: str | None
) -> None:
    """Ask the control plane what runs where, and why.

    Exit codes: 0 answered, 1 the answer is bad news (status --exit-code, plan, audit verify, doctor, node drain --wait)
    or was not confirmed, 2 wrong usage or refused, 3 the control plane does not answer, 4 somebody else changed the
    settings meanwhile (config).
    """
    ctx.obj = (admin, token_file, config, context_name)


command.add_command(plan)
command.add_command(why)
command.add_command(brake)
command.add_command(keys)
command.add_command(usage)


def _devices(node: dict[str, Any]) -> str:
    classes: dict[str, list[int]] = {}
    for device in node["devices"]:
        total_free = classes.setdefault(device["device_class"], [0, 0])
        total_free[0] += 1
        total_free[1] += node["state"] == "connected" and node["drained"] is None and device["unusable"] is None
    return ", ".join(f"{total} x {name} ({free} free)" for name, (total, free) in classes.items()) or "none"


def _settings(held: dict[str, Any]) -> str:
    """Which revision of its settings a node's agent runs on, and which it is to."""
    if held["state"] == "applied":
        return f"{held['applied']} applied"
    return f"{held['wanted']} {held['state']}" + (f", {held['applied']} applied" if held["applied"] else "")


def _node_state(node: dict[str, Any]) -> str:
    return f"{node['state']}, drained" if node["drained"] is not None else str(node["state"])


@command.command()
@_as_json
@watching
@click.pass_context
def nodes(ctx: click.Context, as_json: bool, watch: bool) -> None:
    """Every node: its state, why, since when, and what happens next."""
    _answered(ctx, "nodes", _show_nodes, as_json, watch)


def _answered(ctx: click.Context, part: str, show: _Show, as_json: bool, watch: bool) -> None:
    if watch:
        follow(client_of(ctx), (part, "brake"), show, as_json)
        return
    answer = client_of(ctx).get(part)
    if as_json:
        echo_json(answer)
    else:
        show(answer)


def _show_nodes(answer: dict[str, Any]) -> None:
    now = answer["now"]
    table(
        ["NODE", "STATE", "SINCE", "DEVICES", "SETTINGS", "WHY", "NEXT"],
        [
            [
                n["id"],
                _node_state(n),
                ago(n["since"], now),
                _devices(n),
                _settings(n["settings"]),
                n["reason"],
                n["next"],
            ]
            for n in answer["nodes"]
        ],
        empty="no node has ever registered; start `llmgw agent` on one",
        state_column=1,
    )
    for node in answer["nodes"]:
        if (drained := node["drained"]) is not None:
            echo(drained_line(node["id"], drained, now))
    for node in answer["nodes"]:
        if reason := node["settings"]["reason"]:
            word = node["settings"]["state"]
            echo(f"{node['id']}: settings of revision {node['settings']['wanted']} {word}: {reason}")
        if simulated := node["inventory"]["simulated"]:
            echo(f"{node['id']} is a simulated machine: {simulated}")
        for device in node["devices"]:
            for fault in device["faults"]:
                echo(f"{node['id']} {device['label']}: {fault['reason']}. {fault['remedy']}".rstrip(". ") + ".")
        for warning in node["inventory"]["warnings"]:
            echo(f"{node['id']}: {warning['reason']}. {warning['remedy']}".rstrip(". ") + ".")
    say_brake(answer)


def show_models(models: list[dict[str, Any]], now: float) -> None:
    """Models as a table, and under it why something has no place, and what makes their numbers."""
    table(
        ["MODEL", "STATE", "READY", "SINCE", "WHY", "NEXT"],
        [
            [
                m["name"],
                m["state"],
                f"{m['wanted']} endpoints" if m["ready"] is None else f"{m['ready']}/{m['wanted']}",
                ago(m["since"], now),
                m["reason"],
                m["next"],
            ]
            for m in models
        ],
        empty="no model is offered; add one with llmgw ctl config edit",
        state_column=1,
    )
    for model in models:
        if (unplaced := model["unplaced"]) is not None:
            echo(f"\n{model['name']}: {unplaced['running']} of {unplaced['wanted']} placed. {unplaced['reason']}")
            for line in short_lines(unplaced["candidates"]):
                echo(line)
    scaled = [m for m in models if m["scaling"] is not None]
    for at, model in enumerate(scaled):
        echo(("" if at else "\n") + f"{model['name']}: {scaling_line(model['scaling'], now)}")


@command.command()
@_as_json
@watching
@click.pass_context
def models(ctx: click.Context, as_json: bool, watch: bool) -> None:
    """Every model, and for what has no place the candidates with the reasons that turned them down.

    A few for each reason; --json has every one.
    """
    _answered(ctx, "models", _show_models, as_json, watch)


def _show_models(answer: dict[str, Any]) -> None:
    show_models(answer["models"], answer["now"])
    say_brake(answer)


def memory(replica: dict[str, Any]) -> str:
    """The most memory that its processes were seen holding on any one of its devices: while loading, while serving."""
    known = {word: [mib for mib in replica[f"{word}_mib"] if mib is not None] for word in ("load", "serving")}
    words = {"load": "loading", "serving": "serving"}
    return ", ".join(f"{max(mibs) / 1024:.1f} GiB {words[word]}" for word, mibs in known.items() if mibs)


@command.command()
@_as_json
@watching
@click.pass_context
def replicas(ctx: click.Context, as_json: bool, watch: bool) -> None:
    """Every replica: where it runs, its state, why, since when, and what happens next.

    One that runs over several nodes has a line for each of its ranks below it.
    """
    _answered(ctx, "replicas", _show_replicas, as_json, watch)


def _show_replicas(answer: dict[str, Any]) -> None:
    now = answer["now"]
    table(
        ["REPLICA", "STATE", "SINCE", "NODE", "DEVICES", "MEMORY", "PID", "WHY", "NEXT"],
        [
            [
                r["id"],
                r["state"],
                ago(r["since"], now),
                ", ".join(r["nodes"]),
                ", ".join(r["devices"]),
                memory(r),
                str(r["pid"] or ""),
                r["reason"],
                r["next"],
            ]
            for replica in answer["replicas"]
            for r in (replica, *_ranks(replica))
        ],
        empty="no replica is placed; llmgw ctl models says what is wanted, and why it has no place",
        state_column=1,
    )
    for replica in answer["replicas"]:
        for warning in replica["warnings"]:
            echo(f"{replica['id']} on {warning}")
        if replica["log_path"] and replica["state"] != "ready":
            echo(f"{replica['id']}: its log is {replica['log_path']} on {replica['nodes'][0]}")
    say_brake(answer)


def _ranks(replica: dict[str, Any]) -> list[dict[str, Any]]:
    if len(replica["shards"]) < 2:
        return []
    return [
        {**s, "id": f"  rank {s['rank']}", "state": s["state"] or "", "nodes": [s["node"]]} for s in replica["shards"]
    ]


@command.command()
@_as_json
@click.option("--exit-code", is_flag=True, help="Exit with 1 when the cluster is not healthy.")
@watching
@click.pass_context
def status(ctx: click.Context, as_json: bool, exit_code: bool, watch: bool) -> None:
    """The cluster at a glance."""
    client = client_of(ctx)
    if watch:
        follow(client, ("status",), lambda told: _show_status({**told["status"], "now": told["now"]}), as_json)
        return
    answer = client.get("status")
    if as_json:
        echo_json(answer)
    else:
        _show_status(answer)
    if exit_code and not answer["healthy"]:
        ctx.exit(1)


def role_of(answer: dict[str, Any]) -> str:
    """What a control plane is among others, by its status."""
    if not answer["control_plane"]:
        return "router only"
    if not answer["leads"]:
        return f"control plane that follows {answer['leader']}" if answer["leader"] else "control plane; nobody leads"
    return "control plane that leads" if answer["leader"] else "control plane"


def _show_status(answer: dict[str, Any]) -> None:
    now = answer["now"]
    role = role_of(answer)
    echo(f"llmgw {answer['version']}, {role}, cluster {answer['cluster']}, epoch {answer['epoch']}, "
               f"up {ago(answer['started'], now)}")  # fmt: skip
    router = answer["router"]
    echo(f"router {router['listen']}: {router['state']}, {router['streams']} requests in flight"
               + (f" ({router['reason']})" if router["reason"] else ""))  # fmt: skip
    for worker in router["workers"] if len(router["workers"]) > 1 else ():
        echo(f"  worker {worker['pid']}: {worker['state']} for {ago(worker['since'], now)}, "
                   f"{worker['streams']} requests in flight"
                   + (f" ({worker['reason']})" if worker["reason"] else ""))  # fmt: skip
    if router["keys"]:
        echo(f"clients need an API key; {router['active_keys']} are active")
    else:
        echo("THE ROUTER IS OPEN: whoever reaches it may use every model (router.auth: keys closes it)")
    counts = ", ".join(f"{count} {state}" for state, count in answer["nodes"].items() if count)
    echo(f"nodes: {counts or 'none'}\n")
    show_models(answer["models"], answer["now"])
    echo("\nhealthy" if answer["healthy"] else "\nnot healthy: " + "; ".join(answer["problems"]))
