"""What the settings tell an agent: checked as its file is, merged in one way, and never what only the file may say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.errors import OperatorError
from llmgw.settings import yaml
from llmgw.settings.agent_part import (
    NodeSettings,
    agent_part,
    beside,
    digest_of,
    in_words,
    merged,
    node_settings,
    part_of,
    set_by_both,
    without_nulls,
    written_long,
)
from llmgw.settings.catalog import EngineKind
from llmgw.settings.daemon import AgentConfig, GpuSource, LogLevel
from llmgw.settings.document import AgentSettings, Settings
from llmgw.settings.faults import ConfigError
from llmgw.settings.load import kind_of, load_settings

FILE = """\
id: n1
control_planes: [cp:8443]
tls: {certificate: c.pem, key: k.pem, ca: ca.pem}
state_dir: /state
"""


def of(text: str, node: str = "n1", revision: int = 3) -> NodeSettings:
    return node_settings(load_settings(text), node, revision)


def together(file: str, settings: str) -> AgentConfig:
    return beside(yaml.read(FILE + file, "agent.yaml"), "/etc/llmgw", of(settings))


def faults(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_settings(text)
    return [str(f) for f in caught.value.faults]


def test_defaults_and_a_node_of_its_own() -> None:
    text = """\
agents:
  default:
    ports: 20000-20100
    weights: {reserve_gib: 20}
    engines: {vllm: [/opt/vllm, serve]}
  nodes:
    n1:
      weights: {cache: /nfs/hub}
      engines: {vllm: {version: "0.12"}, sglang: [sgl]}
      discovery: nvml
"""
    mine, other = together("", text), beside(yaml.read(FILE, "a"), "/", of(text, "n2"))
    assert (mine.port_first, mine.port_last) == (other.port_first, other.port_last) == (20000, 20100)
    assert (mine.weights.reserve_gib, mine.weights.cache) == (20, "/nfs/hub")
    assert (other.weights.reserve_gib, other.weights.cache) == (20, "")
    vllm, sglang = mine.engine(EngineKind.VLLM), mine.engine(EngineKind.SGLANG)
    assert vllm is not None
    assert (vllm.command, vllm.version) == (("/opt/vllm", "serve"), "0.12")
    assert sglang is not None
    assert other.engine(EngineKind.SGLANG) is None
    assert (mine.discovery.source, other.discovery.source) == (GpuSource.NVML, GpuSource.AUTO)


def test_the_settings_win_over_the_file_and_null_takes_it_back() -> None:
    file = "ports: 30000-30010\nlog: {level: debug}\ndiscovery: {source: none, interval_s: 5}\nweights: {cache: hub}\n"
    made = together(file, "agents: {default: {ports: null, discovery: {interval_s: null}}, nodes: {n1: {log: null}}}")
    assert (made.port_first, made.port_last) == (20000, 20999)
    assert made.log.level is LogLevel.INFO
    assert (made.discovery.source, made.discovery.interval_s) == (GpuSource.NONE, 60)
    assert made.weights.cache == "/etc/llmgw/hub", "relative paths are below the file's folder"


def test_a_mapping_over_a_null_does_not_bring_the_file_back() -> None:
    """The node says more of what the default took away; what was below stays away."""
    text = "agents: {default: {weights: null}, nodes: {n1: {weights: {reserve_gib: 5}}}}"
    made = together("weights: {cache: /hub, reserve_gib: 1}\n", text)
    assert (made.weights.cache, made.weights.reserve_gib) == ("", 5)


def test_nothing_said_is_the_file_alone() -> None:
    settings = of("models: {}")
    assert settings.text == "{}"
    assert together("ports: 30000-30010\n", "agents:") == beside(yaml.read(FILE + "ports: 30000-30010\n", "a"), "/etc/llmgw", None)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("default: {id: x}", "settings.yaml:1:20: agents.default.id: belongs into agent.yaml on the node (the agent"),
        ("default: {state_dir: null}", "agents.default.state_dir: belongs into agent.yaml on the node"),
        ("nodes: {n1: {address: 10.0.0.1}}", "agents.nodes.n1.address: belongs into agent.yaml on the node"),
        ("nodes: {n1: {tls: {}}}", "settings.yaml:1:23: agents.nodes.n1.tls: belongs into agent.yaml"),
        ("nodes: {n1: {trust_domain: a}}", "agents.nodes.n1.trust_domain: belongs"),
        ("default: {control_planes: ['a:1']}", "agents.default.control_planes: belongs"),
        ("default: {prots: 1-2}", "agents.default.prots: unknown key (did you mean ports?)"),
        ("default: {prots: null}", "agents.default.prots: unknown key (did you mean ports?)"),
        ("default: {port_first: 1}", "agents.default.port_first: unknown key (did you mean ports?)"),
        ("default: {weights: {cahce: null}}", "agents.default.weights.cahce: unknown key (did you mean cache?)"),
        ("default: {engines: {vlm: null}}", "agents.default.engines.vlm: unknown engine (did you mean vllm?)"),
        ("default: {engines: {vllm: {versoin: null}}}", "agents.default.engines.vllm.versoin: unknown key"),
        ("default: {fabrics: {'': null}}", "agents.default.fabrics.: is not a label"),
        ("default: {weights: {'': null}}", "unknown key"),
        ("default: {ports: 2-1}", "agents.default.ports: 2-1 is not a range within 1024-65535"),
        ("default: {discovery: magic}", "agents.default.discovery.source: expected one of auto, nvml"),
        ("default: {weights: {reserve_gib: -1}}", "agents.default.weights.reserve_gib: expected at least 0, found -1"),
        ("default: {log: {level: loud}}", "agents.default.log.level: expected one of debug"),
        ("default: 5", "agents.default: expected a mapping, found the number 5"),
        ("nodes: {'a b': {}}", "agents.nodes.a b: is not a node id"),
        ("nodes: [n1]", "agents.nodes: expected a mapping, found a list"),
        ("defaults: {}", "agents.defaults: unknown key (did you mean default?)"),
        ("default: {engines: {vllm: []}}", "agents.default.engines.vllm.command: is empty"),
    ],
)
def test_faults_of_the_section(text: str, said: str) -> None:
    assert any(said in fault for fault in faults(f"agents: {{{text}}}")), faults(f"agents: {{{text}}}")


def test_all_faults_at_once() -> None:
    found = faults(
        "agents: {default: {id: x, ports: 5}, nodes: {n1: {log: 1}, n2: {weights: {cache: 1}}}}\nmodles: {}\n"
    )
    paths = (
        "agents.default.id",
        "agents.default.ports",
        "agents.nodes.n1.log",
        "agents.nodes.n2.weights.cache",
        "modles",
    )
    assert [any(f" {path}: " in f for f in found) for path in paths] == [True] * 5
    assert len(found) == 5


def test_half_an_engine_is_right_where_the_file_may_have_the_rest() -> None:
    text = 'agents: {default: {engines: {vllm: {version: "0.12"}}}}'
    assert together("engines: {vllm: [x, serve]}\n", text).engines[0].version == "0.12"
    with pytest.raises(ConfigError) as caught:
        together("", text)
    assert in_words(caught.value) == "engines.vllm.command: is missing"


def test_settings_that_only_make_settings_are_told_by_it() -> None:
    assert kind_of("agents: {}", "x") == "settings"


def test_which_keys_both_say() -> None:
    document = yaml.read(FILE + "ports: 30000-30010\ndiscovery: nvml\nlog: {level: debug}\nweights_dir: /w\n", "a")
    text = "agents: {default: {ports: 1024-1030, discovery: {source: none, timeout_s: 3}, log: {format: text}}}"
    assert set_by_both(document, of(text)) == ("discovery.source", "ports")
    assert set_by_both(document, None) == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "are no mapping"),
        ("{", "are no JSON"),
        ('{"id": "x"}', "say id, which only agent.yaml may"),
        ('{"tls": null, "state_dir": "/x"}', "say state_dir, tls, which only agent.yaml may"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "are no JSON (RecursionError)"),
    ],
)
def test_what_travelled_and_is_no_settings(text: str, said: str) -> None:
    with pytest.raises(OperatorError) as caught:
        beside(yaml.read(FILE, "a"), "/", NodeSettings(7, digest_of(text), text))
    assert said in str(caught.value)
    assert "revision 7" in caught.value.thing


def test_what_was_changed_on_its_way_is_not_believed() -> None:
    with pytest.raises(OperatorError, match="are not what their digest says"):
        part_of(evolve(of("agents: {default: {ports: 1024-1030}}"), text="{}"))


KEYS = st.sampled_from(["ports", "weights", "log", "engines", "a"])
VALUES = st.recursive(
    st.none() | st.integers(0, 3) | st.lists(st.integers(0, 2), max_size=2),
    lambda inner: st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
PARTS = st.dictionaries(KEYS, VALUES, max_size=4).map(written_long)


@given(PARTS, PARTS, PARTS)
def test_it_does_not_matter_which_two_are_merged_first(a: Any, b: Any, c: Any) -> None:
    assert without_nulls(merged(merged(a, b), c)) == without_nulls(merged(a, merged(b, c)))


@given(PARTS, PARTS)
def test_merging_again_changes_nothing(a: Any, b: Any) -> None:
    once = merged(a, b)
    assert merged(once, b) == once
    assert merged(once, once) == once
    assert merged({}, b) == b
    assert merged(b, {}) == b


def looked_up(value: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    at: Any = value
    for key in path:
        at = at.get(key) if isinstance(at, Mapping) else None
    return at


def leaves(value: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found: list[tuple[tuple[str, ...], Any]] = []
    for key, inner in value.items():
        here = (*path, key)
        found += leaves(inner, here) if isinstance(inner, Mapping) else [(here, inner)]
    return found


@given(PARTS, PARTS)
def test_what_is_above_holds_and_what_it_does_not_name_stays(a: Any, b: Any) -> None:
    made = without_nulls(merged(a, b))
    for path, value in leaves(b):
        assert looked_up(made, path) == value
    for path, value in leaves(a):
        if value is not None and untouched(b, path):
            assert looked_up(made, path) == value


def untouched(over: Any, path: tuple[str, ...]) -> bool:
    for key in path:
        if not isinstance(over, Mapping):
            return False
        if key not in over:
            return True
        over = over[key]
    return False


def shuffled(value: Any, order: Any) -> Any:
    if isinstance(value, Mapping):
        items = [(k, shuffled(v, order)) for k, v in value.items()]
        order.shuffle(items)
        return dict(items)
    return value


@given(PARTS, PARTS, st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(a: Any, b: Any, order: Any) -> None:
    one = Settings(agents=AgentSettings(a, {"n1": b}))
    two = Settings(agents=AgentSettings(shuffled(a, order), {"n1": shuffled(b, order)}))
    assert node_settings(one, "n1", 1) == node_settings(two, "n1", 1)
    assert json.loads(node_settings(one, "n1", 1).text) == agent_part(two, "n1")
