from __future__ import annotations

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.link.identity import CLIENT_AUTH, SERVER_AUTH, Certificate, Rules, check, is_id

NOW = 1_800_000_000.0
RULES = Rules("t")
LEAF = Certificate("CN=n1", "CN=ca", 7, NOW - 10, NOW + 10, ("URI:spiffe://t/llmgw/node/n1",), (CLIENT_AUTH,))
ISSUER = Certificate("CN=ca", "CN=root", 8, NOW - 100, NOW + 100)


def claim(leaf: Certificate = LEAF, issuer: Certificate = ISSUER, claimed: str = "n1") -> str | None:
    refused = check((leaf, issuer), claimed, NOW, RULES)
    if refused is None:
        return None
    assert refused.remedy
    assert refused.wanted
    assert refused.found
    assert str(leaf) == refused.certificate
    return refused.claim


def test_the_right_one() -> None:
    assert claim() is None


def test_each_wrong_one_by_its_claim() -> None:
    assert claim(evolve(LEAF, not_after=NOW - 1)) == "validity"
    assert claim(evolve(LEAF, not_before=NOW + 1)) == "validity"
    assert claim(issuer=evolve(ISSUER, not_after=NOW - 1)) == "validity"
    assert claim(evolve(LEAF, usages=(SERVER_AUTH,))) == "usage"
    assert claim(evolve(LEAF, usages=())) == "usage"
    assert claim(evolve(LEAF, names=())) == "identity"
    assert claim(evolve(LEAF, names=(*LEAF.names, "DNS:x"))) == "identity"
    assert claim(evolve(LEAF, names=(*LEAF.names, *LEAF.names))) == "identity"
    assert claim(evolve(LEAF, names=("DNS:n1",))) == "identity"
    assert claim(evolve(LEAF, names=("URI:spiffe://other/llmgw/node/n1",))) == "identity"
    assert claim(evolve(LEAF, names=("URI:spiffe://t/llmgw/server/n1",))) == "identity"
    assert claim(evolve(LEAF, names=("URI:spiffe://t/llmgw/node/n1/x",))) == "identity"
    assert claim(claimed="n2") == "node id"
    assert claim(evolve(LEAF, fault="no extensions")) == "certificate"
    assert check((), "n1", NOW, RULES) is not None
    assert check((LEAF,), "n1", NOW, RULES) is not None


names = st.sampled_from(
    ["URI:spiffe://t/llmgw/node/n1", "URI:spiffe://t/llmgw/node/n2", "DNS:n1", "URI:x", "URI:spiffe://t/llmgw/node/"]
)
certificates = st.builds(
    Certificate, st.just("s"), st.just("i"), st.integers(0, 9), st.sampled_from([NOW - 5, NOW + 5]),
    st.sampled_from([NOW - 3, NOW + 9]), st.lists(names, max_size=3).map(tuple),
    st.lists(st.sampled_from([CLIENT_AUTH, SERVER_AUTH]), max_size=2).map(tuple), st.sampled_from(["", "", "broken"]),
)  # fmt: skip


@given(st.lists(certificates, max_size=3), st.sampled_from(["n1", "n2", "", "../x"]))
def test_nobody_gets_in_but_the_right_one(chain: list[Certificate], claimed: str) -> None:
    if check(tuple(chain), claimed, NOW, RULES) is not None:
        return
    leaf = chain[0]
    assert len(chain) >= 2
    assert leaf.names == (f"URI:spiffe://t/llmgw/node/{claimed}",)
    assert is_id(claimed)
    assert CLIENT_AUTH in leaf.usages
    assert all(c.not_before <= NOW <= c.not_after and not c.fault for c in chain)
