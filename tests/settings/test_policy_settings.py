"""What the settings say of placement, priorities, scaling, nodes and quotas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmgw.settings.catalog import Packing, PlacementRules, Scaling, Update
from llmgw.settings.document import NodeRules
from llmgw.settings.faults import ConfigError
from llmgw.settings.load import load_settings

DOCUMENT = """\
models:
  chat:
    profiles:
      - {name: p, engine: vllm, weights: /w, device_class: h100-80g}
    placement: {policy: spread, nodes: {rack: a}, tolerate: [batch], per_node: 2}
    priority: 10
    min_run_s: 60
    group: research
    update: replace
    scaling: {min: 0, max: 4, target: 20, idle_s: 300}
nodes:
  gpu-1: {labels: {rack: a}, taints: [batch]}
quotas:
  research: {h100-80g: 8}
liveness: {brake_share: 0.5, brake_nodes: 4, brake_window_s: 30}
"""


def test_a_whole_document() -> None:
    settings = load_settings(DOCUMENT)
    (chat,) = settings.models
    assert chat.placement == PlacementRules(Packing.SPREAD, {"rack": "a"}, ("batch",), 2)
    assert (chat.priority, chat.min_run_s, chat.group, chat.update) == (10, 60.0, "research", Update.REPLACE)
    assert chat.scaling == Scaling(min=0, max=4, target=20.0, idle_s=300.0)
    assert settings.nodes == {"gpu-1": NodeRules({"rack": "a"}, ("batch",))}
    assert settings.quotas == {"research": {"h100-80g": 8}}
    assert (settings.liveness.brake_share, settings.liveness.brake_nodes) == (0.5, 4)


MODEL: dict[str, Any] = {"profiles": [{"name": "p", "engine": "vllm", "weights": "/w", "device_class": "h100-80g"}]}


def fault_of(top: dict[str, Any], **of_model: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(json.dumps({"models": {"m": {**MODEL, **of_model}}, **top}), "s.yaml")
    (fault,) = caught.value.faults
    return str(fault)


@pytest.mark.parametrize(
    ("of_model", "said"),
    [
        ({"placement": {"policy": "random"}}, "models.m.placement.policy: expected one of pack, spread"),
        ({"placement": {"per_node": 0}}, "models.m.placement.per_node: expected at least 1, found 0"),
        ({"placement": {"node": {}}}, "did you mean nodes?"),
        ({"update": "roll"}, "models.m.update: expected one of surge, replace"),
        ({"min_run_s": -1}, "models.m.min_run_s: expected at least 0 seconds, found -1"),
        ({"aliases": ["a b"]}, "models.m.aliases[0]: 'a b' is not a model name"),
        ({"aliases": ["m"]}, "models.m.aliases[0]: m is a name already"),
        ({"aliases": ["x", "x"]}, "models.m.aliases[1]: x is an alias of m already"),
        ({"routing": {"concurrency": 0}}, "models.m.routing.concurrency: expected at least 1, found 0"),
        ({"routing": {"queue": -1}}, "models.m.routing.queue: expected at least 0, found -1"),
        ({"routing": {"queue_s": 0}}, "models.m.routing.queue_s: expected more than 0 seconds, found 0"),
        ({"routing": {"total_timeout_s": -1}}, "models.m.routing.total_timeout_s: expected more than 0 seconds"),
        ({"routing": {"balance": "best"}}, "models.m.routing.balance: expected"),
        ({"scaling": {"min": 3, "max": 2}}, "models.m.scaling.max: is 2, expected at least 1 and at least min (3)"),
        ({"scaling": {"min": 0, "max": 0}}, "models.m.scaling.max: is 0, expected at least 1"),
        ({"scaling": {"min": -1}}, "models.m.scaling.min: expected at least 0, found -1"),
        ({"scaling": {"target": 0}}, "models.m.scaling.target: expected more than 0, found 0"),
        ({"scaling": {"hold_s": 0}}, "models.m.scaling.hold_s: expected more than 0, found 0"),
        ({"scaling": {"cooldown_s": -1}}, "models.m.scaling.cooldown_s: expected at least 0 seconds, found -1"),
        ({"scaling": {}, "replicas": 2}, "models.m.scaling: stands beside replicas"),
        ({"scaling": {}, "profiles": [], "endpoints": ["http://h:1"]}, "is of a model that is not placed"),
    ],
)
def test_what_is_wrong_of_a_model_is_named(of_model: dict[str, Any], said: str) -> None:
    assert said in fault_of({}, **of_model)


@pytest.mark.parametrize(
    ("top", "said"),
    [
        ({"nodes": {"gpu 1": {}}}, "is not a node id"),
        ({"nodes": {"gpu-1": {"taints": ["a b"]}}}, "nodes.gpu-1.taints[0]: 'a b' is not a taint"),
        ({"nodes": {"gpu-1": {"label": {}}}}, "did you mean labels?"),
        ({"quotas": {"other": {"h100-80g": 1}}}, "quotas.other: is the group of no model"),
        ({"quotas": {"g": {"H100 80 GB": 1}}}, "is not a device class"),
        ({"quotas": {"g": {"h100-80g": -1}}}, "quotas.g.h100-80g: expected at least 0, found -1"),
        ({"liveness": {"brake_share": 0}}, "liveness.brake_share: expected more than 0 and at most 1, found 0"),
        ({"liveness": {"brake_nodes": 0}}, "liveness.brake_nodes: expected at least 1, found 0"),
        ({"liveness": {"brake_window_s": 0}}, "liveness.brake_window_s: expected more than 0 seconds, found 0"),
    ],
)
def test_what_is_wrong_of_the_rest_is_named(top: dict[str, Any], said: str) -> None:
    assert said in fault_of(top, group="g")
