from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmgw.settings.faults import ConfigError
from llmgw.settings.yaml import MAX_BYTES, MAX_NODES, read


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &x 1", "f:1:4: a: anchors are not allowed (&x)"),
        ("a: [b, *x]", "f:1:8: a[1]: aliases are not allowed (*x)"),
        ("a: !!str 1", "f:1:4: a: tags are not allowed (tag:yaml.org,2002:str)"),
        ("a: !python/object:os.system x", "f:1:4: a: tags are not allowed"),
        ("a: 1\nb: 2\na: 3", "f:3:1: the key a stands here twice (first in line 1)"),
        ("<<: {a: 1}", "f:1:1: merge keys are not allowed"),
        ("x:\n  1: 2", 'f:2:3: x: the key 1 is not text (write "1")'),
        ("? [a]\n: 1", "f:1:3: a key must be text"),
        ("a: [1", "f:1:6: not valid YAML: expected ',' or ']'"),
        ("a: 1\n---\nb: 1", "f:2:1: a second document begins here"),
        ("%YAML 1.1\n---\na: 1", "f:2:1: YAML directives are not allowed"),
        ("a:\n  b: \x07", "f:2:6: control character U+0007"),
        ('a:\n  b: "x\\0"', "f:2:6: a.b: U+0000 is no character of a text"),
        ('"\\ud83dx": 1', "f:1:1: U+D83D is no character of a text"),
        ("[" * 60, "nested deeper than 32 levels"),
        ("a: " * 60, "not valid YAML"),
        ("a: " + "x" * MAX_BYTES, "the document is larger than 1048576 bytes"),
        ("{" + ",".join(f"k{n}: 1" for n in range(MAX_NODES)) + "}", "more than 20000 keys and values"),
    ],
)
def test_refused_by_name_and_soon(text: str, said: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        read(text, "f")
    assert said in str(caught.value.faults[0])
    assert time.monotonic() - began < 5, "about a second, with room for a slow machine"


def test_values_of_the_core_schema_and_their_places() -> None:
    document = read("a: no\nb: 12:30\nc: [0x10, 0o17, -3, 1e3, .5, true, ~, 'true', 1_000]\nd:\n  - e: x", "f")
    assert document.value == {
        "a": "no",
        "b": "12:30",
        "c": [16, 15, -3, 1000.0, 0.5, True, None, "true", "1_000"],
        "d": [{"e": "x"}],
    }
    place = document.place(("d", 0, "e"))
    assert (place.line, place.column) == (5, 5)
    assert document.place(("d", 0, "nothing")) == place


def test_an_empty_document_is_nothing() -> None:
    assert read("# only a comment\n", "f").value is None


@given(st.one_of(st.text(max_size=200), st.text(alphabet="a:-[]{}&*!|>?'\" \n#,%", max_size=80)))
@example("a: 'x")
@example("\t- a")
@example("? ?")
@example("!<")
def test_nothing_else_ever_comes_out(text: str) -> None:
    found = ()
    try:
        read(text, "f")
    except ConfigError as wrong:
        found = wrong.faults
    assert all(f.line >= 1 and f.column >= 1 and f.problem for f in found)


def test_a_character_that_json_writes_as_two() -> None:
    assert read('{"a": "\\ud83d\\ude00"}', "f").value == {"a": "\U0001f600"}
