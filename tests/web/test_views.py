from __future__ import annotations

from typing import Any

from attrs import evolve

from llmgw.hardware.inventory import AdapterKind, DeviceProcess, Fabric, FabricPort, Fault, Load
from llmgw.scheduler.state import ShardState
from llmgw.web.views import nodes_view
from tests.scheduler.clusters import cluster, device, model, node, report, row


def devices(*nodes: Any, **more: Any) -> list[dict[str, Any]]:
    (view,) = nodes_view(cluster(nodes, (model(),), **more))
    found: list[dict[str, Any]] = view["devices"]
    return found


def test_memory_of_a_stranger_is_a_fault_and_that_of_a_shard_is_not() -> None:
    busy = evolve(device(0), used_mib=70_000, processes=(DeviceProcess(4711, "python", 70_000),))
    (alone,) = devices(node(devices=(busy,)))
    assert [f["reason"] for f in alone["faults"]] == ["gpu-0 holds 68 GiB by pid 4711 python"]
    ours = row()
    (placed,) = devices(node(devices=(busy,)), replicas=(ours,))
    assert (placed["faults"], placed["shard"]) == ([], "m-1.0")
    (reported,) = devices(node(devices=(busy,), reports=(report(ours, ShardState.READY),)))
    assert (reported["faults"], reported["shard"]) == ([], "m-1.0")
    (ended,) = devices(node(devices=(busy,), reports=(report(ours, ShardState.STOPPED),)))
    assert [f["code"] for f in ended["faults"]] == ["memory-held"]


def test_a_shard_is_shown_at_the_number_that_its_device_has_now() -> None:
    told = evolve(report(row(), ShardState.READY), uuids=("GPU-a",))
    here = node(devices=(evolve(device(0), uuid="GPU-b"), evolve(device(1), uuid="GPU-a")), reports=(told,))
    assert [d["shard"] for d in devices(here)] == [None, "m-1.0"]


def test_load_and_fabrics() -> None:
    here = node(devices=(evolve(device(0), load=Load(61, 300, None)),))
    fabric = Fabric("rack-1", AdapterKind.INFINIBAND, (FabricPort("mlx5_0", 1),), (Fault("port-down", "x", "y"),))
    (view,) = nodes_view(
        cluster((evolve(here, inventory=evolve(here.inventory, fabrics=(fabric,), nvlink_domains=((0, 1),))),), ())
    )
    assert (view["devices"][0]["temperature_c"], view["devices"][0]["utilization_percent"]) == (61, None)
    assert view["inventory"]["fabrics"] == [
        {
            "label": "rack-1",
            "kind": "infiniband",
            "ports": ["mlx5_0:1"],
            "faults": [{"code": "port-down", "reason": "x", "remedy": "y"}],
        }
    ]
    assert view["inventory"]["nvlink_domains"] == [[0, 1]]
