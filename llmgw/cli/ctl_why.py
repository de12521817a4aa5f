"""``llmgw ctl why``: one replica, model or node as it is, and the decisions that made it so."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from llmgw.cli.admin_client import client_of
from llmgw.cli.completion import names
from llmgw.cli.explain import scaling_line, short_lines
from llmgw.cli.terminal import ago, drained_line, echo, echo_json, few, table


@click.command()
@click.argument("name", shell_complete=names("models", "nodes", "replicas"))
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="So many decisions at most.")
@click.option("--json", "as_json", is_flag=True, help="The admin API's answer as it is.")
@click.pass_context
def why(ctx: click.Context, name: str, limit: int, as_json: bool) -> None:
    """Explain the replica, model or node NAME: its state, why, what happens next, and the decisions about it.

    \b
    llmgw ctl why llama-3.1-8b         a model: how its requests are routed, what has no place
    llmgw ctl why llama-3.1-8b:sql     an adapter, and the model that has it
    llmgw ctl why llama-3.1-8b-12      a replica; those that are gone are found as well
    llmgw ctl why gpu-1                a node, and who has its devices
    """
    answer = client_of(ctx).get(f"why/{quote(name, safe='')}?limit={limit}")
    if as_json:
        echo_json(answer)
        return
    now = answer["now"]
    if answer["gone"]:
        echo(f"{answer['gone']} {name} is gone; what was decided about it:")
    if (adapter := answer["adapter"]) is not None:
        _adapter(adapter)
    if (model := answer["model"]) is not None:
        _model(model, now)
    if (replica := answer["replica"]) is not None:
        _replica(replica, now)
    if (node := answer["node"]) is not None:
        _node(node, now)
    if answer["brake"] is not None:
        echo(f"\n{answer['brake']['reason']}")
    if not answer["decisions"]:
        echo("\nno decision is stored about it")
        return
    echo()
    table(
        ["AGO", "DECISION", "REPLICA", "NODE", "WHY"],
        [
            [ago(d["at"], now), d["kind"], d["replica"] or d["model"], few(d["nodes"]), d["reason"]]
            for d in answer["decisions"]
        ],
        empty="",
    )


def _head(kind: str, thing: dict[str, Any], now: float) -> None:
    name = thing.get("id") or thing["name"]
    since = f" for {ago(thing['since'], now)}" if thing["since"] is not None else ""
    echo(f"{kind} {name}: {thing['state']}{since}: {thing['reason']}")
    if thing["next"]:
        echo(f"  next: {thing['next']}")


def _adapter(adapter: dict[str, Any]) -> None:
    echo(f"adapter {adapter['name']} of model {adapter['model']}: {adapter['state']}, its users are told that it "
               f"{adapter['public']}")  # fmt: skip
    echo(f"  replicas that were started with it: {', '.join(adapter['replicas']) or 'none'}")
    if adapter["without"]:
        echo(f"  replicas without it: {', '.join(adapter['without'])}")
    if adapter["profiles_without"]:
        echo(f"  profiles without it: {', '.join(adapter['profiles_without'])}")


def _model(model: dict[str, Any], now: float) -> None:
    _head("model", model, now)
    if model["ready"] is not None:
        echo(f"  {model['ready']} of {model['wanted']} ready; its users are told that it {model['public']}")
    if (scaling := model["scaling"]) is not None:
        echo(f"  {scaling_line(scaling, now)}")
    for url in model["endpoints"]:
        echo(f"  {url}")
    for replica in model["replicas"]:
        where = f"{', '.join(replica['nodes'])}: {', '.join(replica['devices'])}"
        echo(f"  {replica['id']} {replica['state']} with profile {replica['profile']} on {where}")
    _routing(model["routing"], now)
    for change in model["changes"]:
        echo(f"  {change}")
    if (unplaced := model["unplaced"]) is not None:
        echo(f"  {unplaced['wanted'] - unplaced['running']} without a place: {unplaced['reason']}")
        for line in short_lines(unplaced["candidates"]):
            echo(f"  {line}")


def _routing(routing: dict[str, Any], now: float) -> None:
    echo(f"  routing: {routing['balance']}: {routing['rule']}")
    if routing["concurrency"] is not None:
        echo(f"  at most {routing['concurrency']} requests at a replica; {routing['queue']} wait for up to "
                   f"{routing['queue_s']:g} s")  # fmt: skip
    for one in routing["replicas"]:
        engine = "" if one["running"] is None else f"; its engine: {one['running']} running, {one['waiting']} waiting"
        engine += "" if one["kv_usage"] is None else f", {one['kv_usage']:.0%} of the KV cache"
        echo(f"    {one['endpoint']}: {one['requests']} requests with {one['tokens']} tokens outstanding{engine}")
        for note in one["notes"]:
            echo(f"      {note}")
    if routing["choices"]:
        taken = ", ".join(f"{count} {reason}" for reason, count in sorted(routing["choices"].items()))
        echo(f"  why replicas were taken, since the router began: {taken}")
    if routing["waits"]:
        echo(f"  {routing['waiting']} requests wait: {routing['waits']}")
    for turned in routing["refused"]:
        echo(f"  turned away in the last 5 min: {turned['count']} {turned['code']}, the last one "
                   f"{ago(turned['last'], now)} ago: {turned['message']}")  # fmt: skip


def _replica(replica: dict[str, Any], now: float) -> None:
    _head("replica", replica, now)
    fabric = f" over fabric {replica['fabric']}" if replica["fabric"] else ""
    echo(f"  of model {replica['model']}, profile {replica['profile']}{fabric}, start {replica['generation']}")
    for shard in replica["shards"]:
        where = f"{shard['node']}: {', '.join(shard['devices'])}"
        pid = f", pid {shard['pid']}" if shard["pid"] else ""
        echo(f"  {shard['shard']} on {where}: {shard['state'] or 'placed'}{pid}: {shard['reason']}")
        if shard.get("remedy"):
            echo(f"    {shard['remedy']}")
    for warning in replica["warnings"]:
        echo(f"  {warning}")
    if replica["log_path"]:
        echo(f"  its log is {replica['log_path']} on {replica['nodes'][0]}")


def _node(node: dict[str, Any], now: float) -> None:
    _head("node", node, now)
    labels = ", ".join(f"{k}={v}" for k, v in node["labels"].items()) or "none"
    engines = ", ".join(node["engines"]) or "none"
    if (drained := node["drained"]) is not None:
        echo(f"  {drained_line(node['id'], drained, now)}")
    echo(f"  labels: {labels}; taints: {', '.join(node['taints']) or 'none'}; engines: {engines}")
    silent = "" if node["state"] == "connected" else f"not given out: the node is {node['state']}"
    if not silent and node["drained"] is not None:
        silent = "not given out: the node is drained"
    for device in node["devices"]:
        holder = f"has {device['shard']}" if device["shard"] else ""
        faults = "; ".join(f["reason"] for f in device["faults"])
        other = device["unusable"] or "" if not holder and not faults else ""
        state = "; ".join(part for part in (holder, faults, other or (silent if not holder else "")) if part) or "free"
        echo(f"  {device['label']} {device['device_class']}: {state}")
