from __future__ import annotations

from attrs import evolve

from llmgw.settings.difference import differences
from llmgw.settings.document import NodeRules, Settings
from llmgw.settings.load import load_settings
from tests.scheduler.clusters import model, profile


def said(before: Settings, after: Settings) -> list[str]:
    return [str(d) for d in differences(before, after)]


def test_what_changed_is_named_by_its_key() -> None:
    old = Settings(
        models=(model("a", 1, profile("p"), profile("q")), model("b")), nodes={"n1": NodeRules({"zone": "a"})}
    )
    assert said(old, old) == []
    more = evolve(old, models=(evolve(old.models[0], replicas=3), old.models[1]))
    assert said(old, more) == ["~ models.a.replicas: 1 -> 3"]
    deep = evolve(old, models=(model("a", 1, profile("p", context_length=4096), profile("q")), old.models[1]))
    assert said(old, deep) == ["~ models.a.profiles.p.context_length: null -> 4096"]
    order = evolve(old, models=(model("a", 1, profile("q"), profile("p")), old.models[1]))
    assert said(old, order) == ["~ models.a.profiles (order): p, q -> q, p"]
    assert said(old, evolve(old, nodes={"n1": NodeRules({"zone": "b"}, ("slow",))})) == [
        '~ nodes.n1.labels.zone: "a" -> "b"',
        '~ nodes.n1.taints: [] -> ["slow"]',
    ]
    (gone,) = said(old, evolve(old, models=(old.models[0],)))
    assert gone.startswith('- models.b: {"profiles": {"p": {')
    (new,) = said(evolve(old, models=(old.models[0],)), old)
    assert new.startswith('+ models.b: {"profiles"')
    assert len(new) < 230


def test_environments_are_not_shown() -> None:
    text = (
        "models: {m: {profiles: [{name: p, engine: vllm, weights: /w, device_class: h100-80g, env: {HF_TOKEN: %s}}]}}"
    )
    old, new = load_settings(text % "hf_one"), load_settings(text % "hf_two")
    assert said(old, new) == ["~ models.m.profiles.p.env.HF_TOKEN: (not shown) -> (not shown)"]
    assert "hf_" not in "".join(said(Settings(), new) + said(new, Settings()))
