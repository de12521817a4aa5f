"""Every key of the settings has documentation, an example that loads, and an error that says where and what."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from llmgw.settings.convert import strict_converter
from llmgw.settings.edit import put
from llmgw.settings.faults import ConfigError, dotted
from llmgw.settings.key_docs import DOCS, SECTIONS
from llmgw.settings.keypath import at, resolve
from llmgw.settings.load import load_settings
from llmgw.settings.reference import Key, keys, render
from llmgw.settings.yaml import read

BASE = """\
models:
  m:
    group: g
    profiles:
      - {name: p, engine: vllm, weights: /models/m, device_class: h100-80g}
  e: {endpoints: [http://10.0.0.8:8000]}
"""
KEYS = {key.path: key for key in keys()}
_NAMES = {"NAME": "m", "profiles[]": "profiles[0]", "MODEL": "m", "ID": "gpu-1", "GROUP": "g", "CLASS": "h100-80g",
          "LABEL": "ib", "KIND": "vllm"}  # fmt: skip


def here(path: str) -> str:
    if path == "models.NAME.endpoints":
        return "models.e.endpoints"
    for name, ours in _NAMES.items():
        path = path.replace(name, ours)
    return path


def document(path: str, value: str) -> str:
    text = BASE
    for other, beside in DOCS[path].along:
        text = put(text, here(other), beside)
    return put(text, here(path), value)


def fault(path: str, value: str) -> Any:
    """The fault at the very place of the value."""
    text = document(path, value)
    with pytest.raises(ConfigError) as caught:
        load_settings(text, "s.yaml")
    found = read(text, "s.yaml")
    keyed = resolve(here(path), found.value)
    place = found.place(keyed)
    exact = [f for f in caught.value.faults if f.path.startswith(dotted(keyed))]
    assert exact, caught.value
    assert exact[0].line == place.line
    assert exact[0].path != dotted(keyed) or exact[0].column == place.column
    return exact[0]


def test_every_key_is_documented_and_nothing_else_is() -> None:
    assert set(KEYS) == set(DOCS)
    assert {path.split(".")[0] for path in KEYS} == set(SECTIONS)
    assert all(doc.meaning.endswith(".") and doc.example for doc in DOCS.values())


@pytest.mark.parametrize("path", KEYS)
def test_its_example_loads_and_is_what_it_says(path: str) -> None:
    text = document(path, DOCS[path].example)
    load_settings(text)
    value = read(text, "s").value
    assert at(resolve(here(path), value), value) == read(DOCS[path].example, "e").value


@pytest.mark.parametrize("path", KEYS)
def test_a_value_of_another_type_is_refused_where_it_stands(path: str) -> None:
    words = KEYS[path].type
    wrong = "{a: 1}" if not words.startswith("mapping") else "[a]"
    said = fault(path, wrong)
    assert re.search(r"expected |is not a range", said.problem), said
    assert "mapping" in said.problem or "list" in said.problem


@pytest.mark.parametrize("path", [path for path, doc in DOCS.items() if doc.wrong])
def test_a_value_that_cannot_be_is_refused_with_what_could(path: str) -> None:
    assert len(fault(path, DOCS[path].wrong).problem) > 5


@pytest.mark.parametrize("path", [p for p in KEYS if not p.endswith(("CLASS", "labels"))])
def test_a_mistyped_key_is_told_the_right_one(path: str) -> None:
    parent, _, name = path.rpartition(".")
    mistyped = f"{here(parent)}.{name}x" if parent else f"{name}x"
    text = BASE
    for other, beside in DOCS[path].along:
        text = put(text, here(other), beside)
    with pytest.raises(ConfigError) as caught:
        load_settings(put(text, mistyped if path != "models.NAME.endpoints" else "models.e.endpointsx", "1"))
    assert f"did you mean {name}?" in str(caught.value)


def _rules(key: Key) -> bool:
    """Whether a number may be anything at all: then there is no wrong one."""
    return key.type in ("number", "whole number")


def test_every_number_has_bounds_and_a_test_of_them() -> None:
    free = {path for path, key in KEYS.items() if _rules(key) and not DOCS[path].wrong}
    assert free == {"models.NAME.priority"}


def test_defaults_are_those_of_the_classes() -> None:
    plain = strict_converter().unstructure(load_settings(BASE))
    for path, key in KEYS.items():
        words = path.split(".")
        if words[0] in ("router", "liveness", "scaling", "keys") and "prices" not in words:
            value: Any = plain
            for word in words:
                value = value[word]
            written = read(key.default, "d").value
            same = abs(written - value) < 1e-3 if isinstance(value, float) else written == value
            assert same, path


def test_the_documentation_is_what_the_command_prints() -> None:
    file = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
    assert file.read_text() == render(), "run: llmgw config reference > docs/reference/settings.md"
