"""Sections of the settings that are not about one model: defaults of scaling, policy for keys, tracing."""

from __future__ import annotations

import pytest

from llmgw.settings.catalog import Scaling
from llmgw.settings.document import KeyDefaults, KeyPolicy, Settings, Tracing
from llmgw.settings.faults import ConfigError
from llmgw.settings.keys import Period
from llmgw.settings.load import load_settings

PROFILE = "{name: p, engine: vllm, weights: /w, device_class: h100-80g}"


def faults(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_settings(text, "s.yaml")
    return [str(f) for f in caught.value.faults]


def scaling_of(text: str, name: str = "m") -> Scaling | None:
    model = load_settings(text).model(name)
    assert model is not None
    return model.scaling


def models(scaling: str) -> str:
    return f"models: {{m: {{{scaling}profiles: [{PROFILE}]}}}}\n"


def test_what_a_model_leaves_out_of_its_scaling_is_the_section_s() -> None:
    usual = "scaling: {max: 8, target: 4, down_s: 60}\n"
    assert scaling_of(models("scaling: {}, ") + usual) == Scaling(max=8, target=4.0, down_s=60.0)
    assert scaling_of(models("scaling: {max: 2, min: 0}, ") + usual) == Scaling(0, 2, 4.0, down_s=60.0)
    assert scaling_of(models("") + usual) is None, "a model without scaling does not follow its load"
    assert scaling_of(models("scaling: null, ") + usual) is None
    assert load_settings(models("") + usual).scaling == Scaling(max=8, target=4.0, down_s=60.0)


def test_a_wrong_default_is_said_once_where_it_stands() -> None:
    assert faults(models("scaling: {}, ") + "scaling: {target: 0}\n") == [
        "s.yaml:2:11: scaling.target: expected more than 0, found 0"
    ]
    assert faults(models("scaling: {}, ") + "scaling: {target: much}\n") == [
        "s.yaml:2:11: scaling.target: expected a number, found the text 'much'"
    ]
    assert faults(models("scaling: {}, ") + "scaling: {targt: 1}\n") == [
        "s.yaml:2:11: scaling.targt: unknown key (did you mean target?)"
    ]
    assert (
        "models.m.scaling.max: is 4, expected at least 1 and at least min (5)"
        in (faults(models("scaling: {min: 5}, ") + "scaling: {max: 4}\n")[0])
    )


def test_the_policy_for_keys() -> None:
    text = "keys: {limits: {requests_per_minute: 60, budget_cost: 1.5, budget_period: week}, longest_days: 90}"
    limits = KeyDefaults(requests_per_minute=60, budget_cost=1.5, budget_period=Period.WEEK)
    assert load_settings(text).keys == KeyPolicy(limits, 90.0)
    assert load_settings("").keys == KeyPolicy()
    for wrong, said in (
        ("keys: {limits: {concurrent: -1}}", "keys.limits.concurrent: expected 0 to"),
        ("keys: {longest_days: 0}", "keys.longest_days: expected more than 0"),
        ("keys: {limits: {budget_period: year}}", "keys.limits.budget_period: expected one of day, week, month, total"),
        ("keys: {limit: {}}", "keys.limit: unknown key (did you mean limits?)"),
    ):
        assert said in faults(wrong)[0]


def test_tracing() -> None:
    text = "tracing: {endpoint: 'http://h:4318/v1/traces', share: 0.1}"
    assert load_settings(text) == Settings(tracing=Tracing("http://h:4318/v1/traces", 0.1))
    assert "tracing.endpoint: 'h:4318' is no http address" in faults("tracing: {endpoint: 'h:4318'}")[0]
    assert "tracing.share: expected 0 to 1, found 2" in faults("tracing: {endpoint: 'http://h', share: 2}")[0]
    assert "tracing.endpoint: is missing" in faults("tracing: {share: 1}")[0]
