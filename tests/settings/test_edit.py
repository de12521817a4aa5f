"""Values of a settings document's text set and taken away: what was to be changed is, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import define
from hypothesis import given
from hypothesis import strategies as st

from llmgw.errors import OperatorError
from llmgw.settings.document import Auth
from llmgw.settings.edit import Set, Unset, edited, get, put, removed
from llmgw.settings.faults import ConfigError
from llmgw.settings.keypath import at, resolve
from llmgw.settings.merge3 import ABSENT, changes, merge, merged, quoted
from llmgw.settings.yaml import read

TEXT = """\
# top
models:
  # the small one
  llama-3.1-8b:   # beside
    replicas: 2   # two
    profiles:
      - name: one-l40s   # p
        engine: vllm
        # w
        weights: /models/x
        device_class: l40s-45g
      - {name: two, engine: vllm, weights: /m, device_class: [a10-22g, l4-22g], gpus: 2, tp: 2}
  # legacy
  legacy:
    endpoints: [http://10.0.0.7:8000]
# r
router: {auth: open, idle_timeout_s: 120}   # router
liveness:
  lost_s: 90
# end
"""


def lines_of_difference(new: str, old: str = TEXT) -> list[str]:
    before, after = old.splitlines(), new.splitlines()
    return [f"-{x}" for x in before if x not in after] + [f"+{x}" for x in after if x not in before]


@pytest.mark.parametrize(
    ("path", "value", "changed"),
    [
        ("models.llama-3.1-8b.replicas", "4", ["-    replicas: 2   # two", "+    replicas: 4   # two"]),
        ("models.llama-3.1-8b.profiles.one-l40s.context_length", "4096", ["+        context_length: 4096"]),
        ("models.llama-3.1-8b.profiles[0].context_length", "4096", ["+        context_length: 4096"]),
        ("models.new", "{endpoints: ['http://h:1']}", ["+  new: {endpoints: [http://h:1]}"]),
        ('models."n.1".endpoints', '["http://h:1"]', ["+  n.1:", "+    endpoints: [http://h:1]"]),
        ("weights.sources", "['hf:org/*']", ["+weights:", '+  sources: ["hf:org/*"]']),
        (
            "router.auth",
            "keys",
            [
                "-router: {auth: open, idle_timeout_s: 120}   # router",
                "+router: {auth: keys, idle_timeout_s: 120}   # router",
            ],
        ),
    ],
)
def test_a_value_is_set_where_it_stands(path: str, value: str, changed: list[str]) -> None:
    assert lines_of_difference(put(TEXT, path, value)) == changed


@pytest.mark.parametrize(
    ("path", "changed"),
    [
        ("models.llama-3.1-8b.replicas", ["-    replicas: 2   # two"]),
        ("models.legacy", ["-  legacy:", "-    endpoints: [http://10.0.0.7:8000]"]),
        ("models.llama-3.1-8b.profiles.one-l40s.name",
         ["-      - name: one-l40s   # p", "-        engine: vllm", "+      - engine: vllm"]),
        ("liveness.lost_s", ["-liveness:", "-  lost_s: 90", "+liveness: {}"]),
    ],
)  # fmt: skip
def test_a_value_is_taken_away_and_comments_stay(path: str, changed: list[str]) -> None:
    assert lines_of_difference(removed(TEXT, path)) == changed


def test_get_says_what_is_written_or_else_what_holds() -> None:
    assert (get(TEXT, "router.auth").value, get(TEXT, "router.auth").written) == ("open", True)
    assert (get(TEXT, "router.total_timeout_s").value, get(TEXT, "router.total_timeout_s").written) == (3600.0, False)
    assert get(TEXT, "models.llama-3.1-8b.profiles.one-l40s.tp").value == 1
    with pytest.raises(OperatorError, match=r"router: has no autth\. did you mean auth\?"):
        get(TEXT, "router.autth")


def test_what_does_not_load_is_refused_with_its_line() -> None:
    text, settings = edited(TEXT, (Set("router.auth", "keys"), Unset("models.legacy")))
    assert (settings.router.auth, settings.model("legacy")) == (Auth.KEYS, None)
    assert "# legacy" in text
    with pytest.raises(ConfigError, match=r"s\.yaml:5:5: models\.llama-3\.1-8b\.replicas: expected at least 0, found"):
        edited(TEXT, (Set("models.llama-3.1-8b.replicas", "-1"),), "s.yaml")
    with pytest.raises(ConfigError, match="anchors are not allowed"):
        put(TEXT, "router", "&a {auth: open}")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", "is empty"),
        ("a..b", "has nothing between two dots"),
        ("a.", "ends with a dot"),
        ('a."b', "that nothing closes"),
        ("a[b", "that nothing closes"),
        ("models[x]y", "goes on with 'y'"),
        ("router.auth.x", "leads through"),
        ("models.llama-3.1-8b.profiles[7].tp", "is item 7 of a list that has 2"),
    ],
)
def test_what_is_no_path(path: str, said: str) -> None:
    with pytest.raises(OperatorError, match=r"path|leads|item") as caught:
        put(TEXT, path, "1")
    assert said in str(caught.value)


# Whatever a document looks like. Comments carry the path of what they belong to.

_KEYS = st.sampled_from(["a", "b", "c d", "n.1", "x-y", "true", "7"])
_SCALARS = st.one_of(
    st.integers(-999, 999), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False, width=16),
    st.sampled_from(["x", "1", "no", "a: b", "# x", "", " s ", "hf:org/*", "üñ", "- x", "é'\"", "null", "{}", "l\nm"]),
)  # fmt: skip
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.dictionaries(_KEYS, inner, max_size=4) | st.lists(inner, max_size=3), max_leaves=12
)


@define
class _Writer:
    """Writes a value in whatever style is drawn."""

    draw: Any
    comments: list[tuple[str, ...]]

    def comment(self, path: tuple[Any, ...], kind: str) -> str:
        self.comments.append((kind, *map(str, path)))
        return f"#{len(self.comments) - 1}#"

    def scalar(self, value: Any) -> str:
        if isinstance(value, str) and "\n" not in value and "'" not in value and self.draw(st.booleans()):
            return f"'{value}'"
        return json.dumps(value, ensure_ascii=False)

    def flow(self, value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{json.dumps(k)}: {self.flow(v)}" for k, v in value.items()) + "}"
        return "[" + ", ".join(map(self.flow, value)) + "]" if isinstance(value, list) else self.scalar(value)

    def beside(self, path: tuple[Any, ...]) -> str:
        return f"  {self.comment(path, 'beside')}" if self.draw(st.booleans()) else ""

    def before(self, path: tuple[Any, ...], indent: int) -> list[str]:
        drawn = self.draw(st.integers(0, 3))
        return [] if drawn > 1 else [""] if drawn else [" " * indent + self.comment(path, "before")]

    def value(self, value: Any, path: tuple[Any, ...], indent: int) -> list[str]:
        """Lines; the first stands behind the key."""
        if not isinstance(value, dict | list) or not value or self.draw(st.integers(0, 2)) == 0:
            if value is None and self.draw(st.booleans()):
                return [self.beside(path)]
            return [f" {self.flow(value)}{self.beside(path)}"]
        return [self.beside(path), *self.block(value, path, indent)]

    def block(self, value: Any, path: tuple[Any, ...], indent: int) -> list[str]:
        lines = []
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            here = (*path, key)
            lines += self.before(here, indent)
            if isinstance(value, dict):
                first, *rest = self.value(inner, here, indent + 2)
                lines += [f"{' ' * indent}{json.dumps(key)}:{first}", *rest]
            elif isinstance(inner, dict) and inner and self.draw(st.booleans()):
                first, *rest = [line for line in self.block(inner, here, indent + 2) if line]
                if first.lstrip().startswith("#"):
                    lines += [f"{' ' * indent}-", first, *rest]
                else:
                    lines += [f"{' ' * indent}- {first.lstrip()}", *rest]
            else:
                first, *rest = self.value(inner, here, indent + 2)
                lines += [f"{' ' * indent}-{first}", *rest]
        return lines


@st.composite
def documents(draw: Any) -> tuple[str, Any, list[tuple[str, ...]]]:
    value = draw(st.dictionaries(_KEYS, _VALUES, min_size=1, max_size=4))
    writer = _Writer(draw, [])
    lines = writer.block(value, (), 0)
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    text = newline.join(lines) + (newline if draw(st.booleans()) else "")
    return text, value, writer.comments


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += paths(inner, (*path, key))
    return found


def kept(text: str, comments: list[tuple[str, ...]]) -> set[int]:
    return {number for number in range(len(comments)) if f"#{number}#" in text}


@given(documents(), st.data())
def test_set_then_get_and_every_comment_elsewhere_stays(made: tuple[str, Any, Any], data: st.DataObject) -> None:
    text, value, comments = made
    assert read(text, "t").value == value
    path = data.draw(st.sampled_from(paths(value)))
    new = data.draw(_VALUES)
    changed = put(text, quoted(path), json.dumps(new, ensure_ascii=False))
    assert get_of(changed, path) == new
    inside = {n for n, (kind, *where) in enumerate(comments) if tuple(where[: len(path)]) == tuple(map(str, path))
              and (len(where) > len(path) or kind == "beside")}  # fmt: skip
    assert kept(changed, comments) >= set(range(len(comments))) - inside


def get_of(text: str, path: tuple[Any, ...]) -> Any:
    return at(path, read(text, "t").value)


@given(documents(), st.data())
def test_a_new_key_is_added_and_every_comment_stays(made: tuple[str, Any, Any], data: st.DataObject) -> None:
    text, value, comments = made
    outer = data.draw(st.sampled_from([p for p in [(), *paths(value)] if isinstance(at(p, value), dict | None)]))
    new = data.draw(_VALUES)
    changed = put(text, quoted((*outer, "new.key", "below")), json.dumps(new, ensure_ascii=False))
    assert get_of(changed, (*outer, "new.key", "below")) == new
    assert kept(changed, comments) == set(range(len(comments)))


@given(documents(), st.data())
def test_what_is_taken_away_is_gone_with_its_own_comments_alone(
    made: tuple[str, Any, Any], data: st.DataObject
) -> None:
    text, value, comments = made
    path = data.draw(st.sampled_from(paths(value)))
    changed = removed(text, quoted(path))
    below = {n for n, (kind, *where) in enumerate(comments) if tuple(where[: len(path)]) == tuple(map(str, path))
             and (len(where) > len(path) or kind == "beside")}  # fmt: skip
    assert kept(changed, comments) >= set(range(len(comments))) - below
    assert resolve(quoted(path), value) == path


# Three versions


def test_three_versions_of_a_document() -> None:
    theirs = put(put(TEXT, "models.llama-3.1-8b.replicas", "3"), "router.idle_timeout_s", "60")
    mine = put(put(TEXT, "models.llama-3.1-8b.replicas", "4"), "liveness.lost_s", "100")
    found = merge(TEXT, theirs, mine)
    assert [str(c) for c in found.mine_only] == ["~ liveness.lost_s: 90 -> 100"]
    (conflict,) = found.conflicts
    assert str(conflict.theirs[0]) == '~ models."llama-3.1-8b".replicas: 2 -> 3'
    assert str(conflict.mine[0]) == '~ models."llama-3.1-8b".replicas: 2 -> 4'
    assert lines_of_difference(merged(theirs, found), theirs) == ["-  lost_s: 90", "+  lost_s: 100"]


def test_one_removes_what_the_other_changes() -> None:
    found = merge(TEXT, removed(TEXT, "models.legacy"), put(TEXT, "models.legacy.aliases", "[old]"))
    assert [conflict.path for conflict in found.conflicts] == [("models", "legacy")]
    assert found.mine_only == ()


_TREES = st.dictionaries(st.sampled_from("abc"), st.recursive(
    st.integers(0, 3), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=6
), max_size=3)  # fmt: skip


@given(_TREES, _TREES, _TREES)
def test_what_a_merge_promises(base: Any, theirs: Any, mine: Any) -> None:
    b, t, m = (json.dumps(value) for value in (base, theirs, mine))
    assert changes(b, b) == ()
    found = merge(b, t, m)
    together = merged(t, found)
    if theirs == base:
        assert (found.conflicts, read(together, "t").value) == ((), mine)
    if mine in (base, theirs):
        assert (found.conflicts, read(together, "t").value) == ((), theirs)
    other = merge(b, m, t)
    assert bool(other.conflicts) == bool(found.conflicts)
    for change in found.mine_only:
        if change.after is not ABSENT:
            assert get_of(together, change.path) == change.after
