"""The keys of a worker: who is let in, and that no stale copy undoes a revocation."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.router.keys import KeyRefused, KeyTable
from llmgw.settings.keys import ApiKey, digest_of, token_of

SECRET = "s" * 40
ID = "aaaaaaaaaaaa"
TOKEN = token_of(ID, SECRET)


def key(version: int = 1, ident: str = ID, secret: str = SECRET, **more: object) -> ApiKey:
    return evolve(ApiKey(ident, 1, version, digest_of(token_of(ident, secret).encode()), 0.0), **more)


def table(*keys: ApiKey) -> KeyTable:
    made = KeyTable()
    made.apply(0, max((k.version for k in keys), default=0), keys, last=True)
    return made


def bearer(token: str = TOKEN) -> bytes:
    return b"Bearer " + token.encode()


def refused(keys: KeyTable, authorization: bytes, now: float = 10.0) -> str:
    with pytest.raises(KeyRefused) as found:
        keys.find(authorization, now)
    return found.value.reason


def test_let_in() -> None:
    keys = table(key())
    for _ in range(2):
        assert keys.find(bearer(), 10).key.id == ID
    assert keys.find(b"bearer  " + TOKEN.encode() + b" ", 10).key.id == ID


def test_not_let_in() -> None:
    keys = table(key())
    assert refused(keys, b"") == "missing"
    for wrong in (b"Bearer ", b"Basic " + TOKEN.encode(), bearer("sk-x"), bearer(TOKEN[:-1] + "t"),
                  bearer(token_of("b" * 12, SECRET)), TOKEN.encode(), b"Bearer " + digest_of(TOKEN.encode()).encode()):  # fmt: skip
        assert refused(keys, wrong) == "wrong"
    assert refused(table(key(digest="0" * 64)), bearer()) == "wrong"


def test_expiry_holds_for_what_was_seen_too() -> None:
    keys = table(key(expires=20.0))
    assert keys.find(bearer(), 19.9)
    assert refused(keys, bearer(), 20.0) == "expired"
    assert keys.find(bearer(), 19.9), "a clock that was put back"


def test_a_rotated_secret_is_good_for_as_long_as_was_said() -> None:
    new = token_of(ID, "n" * 40)
    keys = table(key())
    assert keys.find(bearer(), 1)
    rotated = key(2, digest=digest_of(new.encode()), old_digest=digest_of(TOKEN.encode()), old_until=30.0)
    keys.apply(1, 2, (rotated,), last=True)
    assert keys.find(bearer(new), 29)
    assert keys.find(bearer(), 29)
    assert refused(keys, bearer(), 30) == "expired"
    assert keys.find(bearer(new), 30)
    assert refused(table(evolve(rotated, old_until=0.0)), bearer()) == "expired"


def test_revoked_at_once_and_for_good() -> None:
    keys = table(key())
    assert keys.find(bearer(), 1)
    keys.apply(1, 2, (key(2, revoked=1.0),), last=True)
    assert refused(keys, bearer()) == "revoked"
    assert refused(keys, bearer(TOKEN[:-1] + "t")) == "wrong", "only who has the secret hears more"
    keys.apply(0, 1, (key(1),), last=True)  # a stale copy
    assert refused(keys, bearer()) == "revoked"
    assert keys.version == 2


def test_complete_only_when_the_last_page_joined_on() -> None:
    keys = KeyTable()
    keys.apply(3, 4, (key(4),), last=True)
    assert not keys.complete
    assert keys.version == 0
    keys.apply(0, 3, (key(3, ident="b" * 12),), last=False)
    assert not keys.complete
    keys.apply(3, 4, (key(4),), last=True)
    assert keys.complete
    assert (keys.version, len(keys)) == (4, 2)


def test_models() -> None:
    holder = table(key(models=("m*",))).find(bearer(), 1)
    assert [holder.allows(name) for name in ("m", "m2", "x", "m", "x")] == [True, True, False, True, False]
    for n in range(3000):
        assert not holder.allows(f"x{n}")
    assert len(holder._allowed) <= 1000


@given(st.lists(st.integers(0, 9), max_size=12), st.data())
def test_no_order_of_pages_undoes_a_change(versions: list[int], data: st.DataObject) -> None:
    """Control planes that are too old, pages twice, in any order: of each key the newest that ever came holds."""
    history = [key(n + 1, ident="abc"[n % 3] * 12, revoked=1.0 if n > 4 else None) for n in range(10)]
    keys = KeyTable()
    newest: dict[str, int] = {}
    for version in versions:
        base = data.draw(st.integers(0, version))
        page = history[base:version]
        keys.apply(base, version, page, last=True)
        for entry in page:
            newest[entry.id] = max(newest.get(entry.id, 0), entry.version)
        assert {h.key.id: h.key.version for h in keys.holders()} == newest
        for entry in history[: keys.version]:
            assert newest[entry.id] >= entry.version, "no gap is left behind the version"
