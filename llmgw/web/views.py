"""The JSON that the admin API answers with, from the cluster's state. Pure, and never a secret in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import attrs

from llmgw.hardware.health import stranger
from llmgw.hardware.inventory import Device, Fault, Inventory
from llmgw.scheduler.brake import HELD, brake
from llmgw.scheduler.drains import drain_view
from llmgw.scheduler.explain import Candidate, Unplaced
from llmgw.scheduler.feasible import NodeView, unusable
from llmgw.scheduler.scale import Scale
from llmgw.scheduler.state import ClusterState, Node, NodeState, placed_on
from llmgw.scheduler.summary import ReplicaView, ShardView, model_views, replica_views
from llmgw.settings.agent_part import SettingsState
from llmgw.settings.catalog import Model
from llmgw.settings.document import Settings
from llmgw.store.api import StoredDecision
from llmgw.web.source import Identity, RouterStatus

Json = dict[str, Any]


def _fault(fault: Fault) -> Json:
    return {"code": fault.code, "reason": fault.reason, "remedy": fault.remedy}


def _device(device: Device, holder: str | None) -> Json:
    held = stranger(device, ours=holder is not None)
    return {
        "number": device.number,
        "label": device.label,
        "uuid": device.uuid,
        "name": device.name,
        "device_class": device.device_class,
        "total_mib": device.total_mib,
        "used_mib": device.used_mib,
        "faults": [_fault(f) for f in (*device.faults, *((held,) if held is not None else ()))],
        "temperature_c": device.load.temperature_c,
        "power_w": device.load.power_w,
        "utilization_percent": device.load.utilization_percent,
        "shard": holder,
    }


def inventory_view(inventory: Inventory) -> Json:
    """A node's hardware without what only the machine's owner should see (serials are not read at all)."""
    return {
        "source": inventory.source,
        "simulated": inventory.simulated,
        "hostname": inventory.host.hostname,
        "system": inventory.host.system,
        "kernel": inventory.host.kernel,
        "cpus": inventory.host.cpus,
        "memory_mib": inventory.host.memory_mib,
        "driver": inventory.driver.version if inventory.driver else None,
        "adapters": [
            {"name": a.name, "kind": a.kind.value, "ports": [{"number": p.number, "state": p.state} for p in a.ports]}
            for a in inventory.adapters
        ],
        "fabrics": [
            {
                "label": f.label,
                "kind": f.kind.value,
                "ports": [f"{p.adapter}:{p.port}" for p in f.ports],
                "faults": [_fault(fault) for fault in f.faults],
            }
            for f in inventory.fabrics
        ],
        "nvlink_domains": [list(domain) for domain in inventory.nvlink_domains],
        "warnings": [_fault(f) for f in inventory.warnings],
    }


def _holders(state: ClusterState) -> dict[str, dict[int, str]]:
    """Which shard has which device of which node: as a row says, or as its agent reports what no row knows of yet."""
    made: dict[str, dict[int, str]] = {}
    for node in state.nodes:
        here = made[node.id] = {}
        for report in node.reports:
            if not report.state.ended:
                here |= dict.fromkeys(placed_on(node.inventory, report.devices, report.uuids), report.shard)
    for row in state.replicas:
        for shard in row.shards:
            if shard.node in made:
                made[shard.node] |= dict.fromkeys(shard.devices, shard.shard)
    return made


def brake_view(state: ClusterState) -> Json | None:
    """The brake while it is on: why, and which nodes fell silent."""
    found = brake(state.nodes, state.liveness, state.brake_released)
    if found is None:
        return None
    return {"reason": found.reason, "nodes": list(found.nodes), "of": found.of, "since": found.since}


def drained_view(node: Node, state: ClusterState) -> Json | None:
    """A node's drain while it lasts: who wants it and why, what leaves, what has no other place, what comes next."""
    found = drain_view(node, state)
    if found is None or node.drained is None:
        return None
    return attrs.asdict(node.drained) | {"leaving": list(found.leaving), "staying": list(found.staying),
                                         "empty": found.empty, "next": found.next}  # fmt: skip


def _node(node: Node, holders: dict[int, str], state: ClusterState, *, held: bool) -> Json:
    seen = NodeView(node, holders)
    return {
        "id": node.id,
        "state": node.state.value,
        "since": node.since,
        "reason": node.reason,
        "next": HELD if held and node.state is not NodeState.CONNECTED else node.next,
        "address": node.address,
        "version": node.version,
        "labels": dict(node.labels),
        "taints": list(node.taints),
        "settings": {
            "state": node.settings.state.value,
            "wanted": node.settings.wanted,
            "applied": node.settings.applied,
            "reason": node.settings.reason,
        },
        "drained": drained_view(node, state),
        "engines": [e.value for e in node.engines],
        "installs": [
            {
                "engine": i.engine.value,
                "name": i.name,
                "version": i.version,
                "path": i.path,
                "says": i.says,
                "current": i.current,
            }
            for i in node.installs
        ],
        "devices": [
            _device(d, holders.get(d.number)) | {"unusable": unusable(d, seen)} for d in node.inventory.devices
        ],
        "weights": [{"name": w.name, "weights_bytes": w.weights_bytes, "source": w.source} for w in node.weights],
        "inventory": inventory_view(node.inventory),
    }


def nodes_view(state: ClusterState, only: str | None = None) -> list[Json]:
    """Every node, by id: its state and why, what it has, and which shard holds which device."""
    holders = _holders(state)
    held = brake(state.nodes, state.liveness, state.brake_released) is not None
    return [_node(n, holders[n.id], state, held=held) for n in state.nodes if only is None or n.id == only]


def candidates_view(candidates: Iterable[Candidate]) -> list[Json]:
    """What was looked at, with what spoke against each."""
    return [
        {
            "node": c.node,
            "profile": c.profile,
            "refusals": [{"filter": r.filter, "reason": r.reason, "remedy": r.remedy} for r in c.refusals],
        }
        for c in candidates
    ]


def unplaced_view(item: Unplaced) -> Json:
    """What has no place, since when, and every candidate."""
    return {
        "wanted": item.wanted,
        "running": item.running,
        "reason": item.reason,
        "since": item.since,
        "candidates": candidates_view(item.candidates),
    }


def _scaling(model: Model, scale: Scale | None) -> Json | None:
    """How many replicas the load makes of a model, what would change that, and when."""
    rules = model.scaling
    if rules is None:
        return None
    made: Json = {"min": rules.min, "max": rules.max, "number": model.replicas, "want": None, "since": None,
                  "changed": None, "reason": "it is looked at in the next pass"}  # fmt: skip
    if scale is not None:
        made |= {"number": scale.number, "want": scale.want, "since": scale.since, "changed": scale.changed,
                 "reason": scale.reason}  # fmt: skip
    return made


def models_view(settings: Settings, state: ClusterState, unplaced: tuple[Unplaced, ...], now: float) -> list[Json]:
    """Every model of the catalog, in its order; ``unplaced`` explains what has no place."""
    placed = {view.name: view for view in model_views(state, unplaced, now)}
    missing = {item.model: item for item in unplaced}
    made: list[Json] = []
    for model in settings.models:
        view = placed.get(model.name)
        if view is None:
            made.append(
                {
                    "name": model.name,
                    "state": "static",
                    "wanted": len(model.endpoints),
                    "ready": None,
                    "reason": "served by engines that llmgw does not run",
                    "since": None,
                    "next": "",
                    "endpoints": list(model.endpoints),
                    "public": "is served elsewhere",
                    "scaling": None,
                    "unplaced": None,
                }
            )
            continue
        item = missing.get(model.name)
        made.append(
            {
                "name": view.name,
                "state": view.state,
                "wanted": view.wanted,
                "ready": view.ready,
                "reason": view.reason,
                "since": view.since,
                "next": view.next,
                "endpoints": [],
                "public": view.public,
                "scaling": _scaling(model, view.scale),
                "unplaced": None if item is None else unplaced_view(item),
            }
        )
    return made


def replicas_view(state: ClusterState, now: float) -> list[Json]:
    """Every replica, by id."""
    return [replica_json(view) for view in replica_views(state, now)]


def replica_json(view: ReplicaView) -> Json:
    """One replica."""
    return {
        "id": view.id,
        "model": view.model,
        "profile": view.profile,
        "nodes": list(view.nodes),
        "devices": list(view.devices),
        "state": view.state,
        "reason": view.reason,
        "since": view.since,
        "next": view.next,
        "endpoint": view.endpoint,
        "pid": view.pid,
        "generation": view.generation,
        "progress": view.progress,
        "fabric": view.fabric,
        "shards": [_shard(shard) for shard in view.shards],
        "load_mib": list(view.load_mib),
        "serving_mib": list(view.serving_mib),
        "warnings": list(view.warnings),
        "log_path": view.log_path,
    }


def _shard(view: ShardView) -> Json:
    report = view.report
    made: Json = {"shard": view.shard, "rank": view.rank, "node": view.node, "devices": list(view.devices),
                  "load_mib": list(view.load_mib), "serving_mib": list(view.serving_mib)}  # fmt: skip
    if report is None:
        return made | {"state": None, "reason": "not reported yet", "since": None, "next": "", "pid": None}
    return made | {
        "state": report.state.value,
        "reason": report.reason,
        "remedy": report.remedy,
        "since": report.since,
        "next": report.next,
        "pid": report.pid,
        "progress": report.progress,
        "log_tail": list(report.log_tail),
    }


def decisions_view(decisions: tuple[StoredDecision, ...]) -> list[Json]:
    """Decisions, newest first."""
    return [
        {
            "pass": d.pass_id,
            "at": d.at,
            "kind": d.decision.kind.value,
            "model": d.decision.model,
            "replica": d.decision.replica,
            "node": d.decision.node,
            "nodes": list(d.decision.nodes),
            "reason": d.decision.reason,
        }
        for d in decisions
    ]


def status_view(
    identity: Identity, router: RouterStatus, settings: Settings, state: ClusterState,
    unplaced: tuple[Unplaced, ...], now: float, ready: str,
) -> Json:  # fmt: skip
    """The cluster at a glance. ``healthy`` is false when a model lacks a replica, a node is not connected or refused
    its settings, or the brake is on."""
    held = brake_view(state)
    nodes = Counter(n.state for n in state.nodes)
    models = models_view(settings, state, unplaced, now)
    short = [m["name"] for m in models if m["ready"] is not None and m["ready"] < m["wanted"]]
    away = [n.id for n in state.nodes if n.state is not NodeState.CONNECTED]
    refused = [n.id for n in state.nodes if n.settings.state is SettingsState.REFUSED]
    return {
        "version": identity.version,
        "cluster": identity.cluster,
        "epoch": identity.epoch,
        "control_plane": identity.control_plane,
        "settings_revision": identity.settings_revision,
        "started": identity.started,
        "leads": identity.leads,
        "leader": identity.leader,
        "now": now,
        "brake": held,
        "healthy": held is None and not short and not away and not refused and not ready,
        "problems": [
            *([held["reason"]] if held is not None else []),
            *([ready] if ready else []),
            *(f"model {name} lacks replicas" for name in short),
            *(f"node {name} is not connected" for name in away),
            *(f"node {name} refused its settings" for name in refused),
        ],
        "router": {
            "listen": router.listen,
            "state": router.state,
            "reason": router.reason,
            "since": router.since,
            "pid": router.pid,
            "streams": router.streams,
            "keys": router.keys,
            "active_keys": router.active_keys,
            "workers": [attrs.asdict(worker) for worker in router.workers],
        },
        "nodes": {s.value: nodes[s] for s in NodeState},
        "models": models,
    }
