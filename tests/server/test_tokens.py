"""What a token is worth, in any order of uses, revocations and waits: one key at most ever gets anything for it."""

from __future__ import annotations

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from llmgw.errors import OperatorError
from llmgw.link import tokens
from llmgw.server.tokens import refusal, state
from llmgw.store.identity import TokenRow

NOW = 1_800_000_000.0
TOKEN = tokens.new("c" * 64)
ROW = TokenRow(TOKEN.id, "n1", TOKEN.digest, NOW, NOW + 900, "me")


def found(
    row: TokenRow | None = ROW, digest: str = TOKEN.digest, node: str = "", key: str = "k", now: float = NOW
) -> str:
    refused = refusal(row, digest, node, key, now)
    return "" if refused is None else f"{refused.wanted}; {refused.found}; {refused.remedy}"


def test_each_answer() -> None:
    assert found() == ""
    assert found(node="n1") == ""
    assert found(None) == found(digest="0" * 64) != ""
    assert found(None, "0" * 64) == found(None), "nobody's secret opens nothing"
    assert "expired at" in found(now=NOW + 900)
    assert "revoked at" in found(evolve(ROW, revoked=NOW + 1))
    assert "used at" in found(evolve(ROW, used=NOW + 1, used_key="other", used_from="10.0.0.1:5"))
    assert "10.0.0.1:5" in found(evolve(ROW, used=NOW + 1, used_key="other", used_from="10.0.0.1:5"))
    assert found(evolve(ROW, used=NOW + 1, used_key="k")) == ""
    assert "expired at" in found(evolve(ROW, used=NOW + 1, used_key="k"), now=NOW + 900)
    assert "a request to be n2" in found(node="n2")
    assert found(evolve(ROW, revoked=NOW + 1), "0" * 64) == found(None), (
        "what became of it is told to who has the secret"
    )


def test_words() -> None:
    assert [state(ROW, NOW), state(ROW, NOW + 900)] == ["open", "expired"]
    assert [state(evolve(ROW, used=NOW), NOW + 900), state(evolve(ROW, revoked=NOW), NOW)] == ["used", "revoked"]


@given(st.text(max_size=200))
def test_any_text_is_a_token_or_none(text: str) -> None:
    try:
        parsed = tokens.parse(text)
    except OperatorError as wrong:
        assert len(text) < 20 or text not in str(wrong), "what may hold a secret is not repeated"
    else:
        assert str(parsed) == text.strip()


def test_there_and_back() -> None:
    assert tokens.parse(f" {TOKEN}\n") == TOKEN
    assert TOKEN.secret not in repr(TOKEN)
    assert tokens.new("c" * 64) != tokens.new("c" * 64)


class Life(RuleBasedStateMachine):
    """The store's compare-and-set, and nothing but it, changes the row."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.now = ROW, NOW
        self.got: set[str] = set()
        self.revoked_unused = False

    @rule(seconds=st.floats(0, 600))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(key=st.sampled_from("abc"), right=st.booleans())
    def join(self, key: str, right: bool) -> None:
        refused = refusal(self.row, TOKEN.digest if right else "0" * 64, "", key, self.now)
        if refused is not None:
            return
        assert right
        if not self.row.used:
            assert not self.row.revoked
            assert self.now < self.row.expires
            self.row = evolve(self.row, used=self.now, used_key=key)
        assert not self.revoked_unused
        self.got.add(key)

    @rule()
    def revoke(self) -> None:
        if not self.row.used and not self.row.revoked:
            self.row, self.revoked_unused = evolve(self.row, revoked=self.now), True

    @invariant()
    def one_key_at_most(self) -> None:
        assert len(self.got) <= 1


TestLife = Life.TestCase
