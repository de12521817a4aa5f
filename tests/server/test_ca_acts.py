"""What the audit says of the CAs follows from what it said before and from the files, whoever changed those."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.server.ca_acts import changes, said
from llmgw.store.identity import Event

roots = st.dictionaries(st.sampled_from("abc"), st.just("CN=a root"), max_size=3)
issuers = st.tuples(st.sampled_from("abc"), st.sampled_from("xy")) | st.just(("", ""))


def test_a_rotation_is_told_step_by_step() -> None:
    acts: list[Event] = []

    def told(trusted: str, issuing: tuple[str, str]) -> list[tuple[str, str, str]]:
        made = changes(acts, {root: f"CN={root}" for root in trusted}, issuing, 1.0, "server cp")
        acts.extend(made)
        assert all(act.by == "server cp" for act in made)
        return [(act.kind, act.node, act.detail) for act in made]

    assert told("a", ("a", "x")) == [("ca.trust", "a", "CN=a"), ("ca.issue", "a", "x")]
    assert told("a", ("a", "x")) == []
    assert told("ab", ("a", "x")) == [("ca.trust", "b", "CN=b")]
    assert told("ab", ("b", "y")) == [("ca.issue", "b", "y")]
    assert told("b", ("b", "y")) == [("ca.retire", "a", "")]
    assert told("b", ("b", "z")) == [("ca.issue", "b", "z")], "another issuing CA below the same root"
    assert told("b", ("", "")) == [("ca.stop", "b", "z")]
    assert told("a", ("", "")) == [("ca.trust", "a", "CN=a"), ("ca.retire", "b", "")]


@given(st.lists(st.tuples(roots, issuers), max_size=6))
def test_what_was_said_is_what_is_there(steps: list[tuple[dict[str, str], tuple[str, str]]]) -> None:
    acts: list[Event] = []
    for trusted, issuing in steps:
        acts += changes(acts, trusted, issuing, 1.0, "server")
        assert said(acts) == (frozenset(trusted), issuing)
        assert changes(acts, trusted, issuing, 2.0, "server") == ()
