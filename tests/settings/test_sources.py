from __future__ import annotations

import json

import pytest

from llmgw.engines.weights import weights_of
from llmgw.errors import OperatorError
from llmgw.settings.catalog import EngineKind
from llmgw.settings.faults import ConfigError
from llmgw.settings.load import load_settings
from llmgw.settings.load_agent import load_agent
from llmgw.settings.sources import HubSource, allowed, hub_source, is_rule

PROFILE = {"name": "p", "engine": "vllm", "device_class": "h100-80g"}
SHA = "a" * 40


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("hf:org/name", HubSource("org/name")),
        ("hf:org/name@v1.0", HubSource("org/name", "v1.0")),
        (f"hf:org/name@{SHA}", HubSource("org/name", SHA)),
        ("hf:org/name:q4/m.gguf", HubSource("org/name", "main", "q4/m.gguf")),
        ("hf:org/name@r:m.gguf", HubSource("org/name", "r", "m.gguf")),
        *((text, None) for text in (
            "org/name", "/w", "hf:org", "hf:org/name@", "hf:org/name:", "hf:org/name:/etc/passwd", "hf:../name",
            "hf:org/name:a/../../b", "hf:org/na me", "hf:org/name@a/b", "hf:org/name:a//b", "hf:-org/name",
        )),
    ],
)  # fmt: skip
def test_what_names_something_on_a_hub(text: str, source: HubSource | None) -> None:
    assert hub_source(text) == source
    if source is not None:
        assert hub_source(str(source)) == source


def test_the_allow_list() -> None:
    source = HubSource("org/name")
    assert allowed(source, ("hf:org/name",))
    assert allowed(source, ("hf:other/x", "hf:org/*"))
    for rules in ((), ("hf:org/nam",), ("hf:org/name2",), ("hf:or/*",), ("hf:Org/name",)):
        assert not allowed(source, rules)
    assert is_rule("hf:org/*")
    assert not any(is_rule(rule) for rule in ("hf:*/*", "hf:*", "org/name", "hf:org/name@main", "hf:org/na*", ""))


def document(weights: str, **rules: object) -> str:
    profile = {**PROFILE, "weights": weights}
    return json.dumps({"models": {"m": {"profiles": [profile]}}, "weights": rules})


def faults(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(text, "s.yaml")
    return str(caught.value)


def test_settings_name_what_may_be_fetched() -> None:
    settings = load_settings(document("hf:org/name@v1", sources=["hf:org/*"], mirror="https://m.example", offline=True))
    assert settings.weights.sources == ("hf:org/*",)
    assert load_settings(document("/models/x")).weights.sources == ()
    said = faults(document("hf:org/name@v1", sources=["hf:other/*"]))
    assert "models.m.profiles[0].weights" in said
    assert "hf:org/name@v1 is not in weights.sources" in said
    assert "add hf:org/name there" in said
    assert "names nothing on a hub" in faults(document("hf:org"))
    assert "'*' is not a source" in faults(document("/w", sources=["*"]))
    assert "is not the address of a mirror" in faults(document("/w", mirror="ftp://m"))


def test_llama_cpp_wants_a_file() -> None:
    text = document("hf:org/name", sources=["hf:org/name"]).replace("vllm", "llamacpp")
    assert "takes files only" in faults(text)
    load_settings(document("hf:org/name:m-q4.gguf", sources=["hf:org/name"]).replace("vllm", "llamacpp"))


def test_an_engine_is_never_given_what_is_not_on_the_node() -> None:
    with pytest.raises(OperatorError, match="are not on this node"):
        weights_of("hf:org/name", EngineKind.VLLM, "/")


AGENT = """\
id: n1
control_planes: ["h:8443"]
tls: {certificate: c, key: k, ca: a}
state_dir: state
"""


def test_where_an_agent_keeps_weights() -> None:
    config = load_agent(AGENT, "agent.yaml", "/etc/llmgw")
    assert (config.weights_cache, config.weights.reserve_gib) == ("/etc/llmgw/state/hub", 10.0)
    config = load_agent(AGENT + "weights: {cache: /nfs/hub, token_file: hf.token}\n", "agent.yaml", "/etc/llmgw")
    assert (config.weights_cache, config.weights.token_file) == ("/nfs/hub", "/etc/llmgw/hf.token")
    with pytest.raises(ConfigError, match="reserve_gib"):
        load_agent(AGENT + "weights: {reserve_gib: -1}\n", "agent.yaml", "/etc/llmgw")
