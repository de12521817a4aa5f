"""The audit: a chain that shows what was changed in it, and acts that are in it exactly when what they say happened."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.errors import OperatorError
from llmgw.settings.keys import ApiKey
from llmgw.store.api import StaleBase
from llmgw.store.audit import Act, AuditRow, Chain, Noted, broken, sealed
from llmgw.store.keys import KeyEvent
from llmgw.store.sql import SqlStore

acts = st.builds(Act, st.floats(0, 2e9), *[st.text(max_size=8)] * 5)


def chain(given_: list[Act]) -> list[AuditRow]:
    rows: list[AuditRow] = []
    for act in given_:
        rows.append(sealed(act, len(rows) + 1, rows[-1].digest if rows else ""))
    return rows


@given(st.lists(acts, max_size=6), st.data())
def test_whatever_is_changed_is_found(given_: list[Act], data: st.DataObject) -> None:
    rows = chain(given_)
    assert broken(rows) is None
    if not rows:
        return
    at = data.draw(st.integers(0, len(rows) - 1))
    row = rows[at]
    for changed in (
        evolve(row, by=row.by + "x"), evolve(row, at=row.at + 1), evolve(row, action="other.act"),
        evolve(row, object=row.object + "x"), evolve(row, reason=row.reason + "x"),
        evolve(row, detail=row.detail + "x"),
    ):  # fmt: skip
        if changed != row:
            assert f"row {row.seq} was changed" in str(broken([*rows[:at], changed, *rows[at + 1 :]]))
    without = broken([*rows[:at], *rows[at + 1 :]])
    assert (without is None) == (at == len(rows) - 1), "only the newest can go unseen: its digest is what to note down"
    # Written anew from here on, with numbers and digests that fit each other: what was noted down does not.
    forged = chain([*given_[:at], evolve(given_[at], by=given_[at].by + "x"), *given_[at + 1 :]])
    assert broken(forged) is None
    assert forged[-1].digest != rows[-1].digest


def test_it_is_followed_in_pieces() -> None:
    rows = chain([Act(float(n), "me", "tested.it", str(n)) for n in range(7)])
    follower = Chain()
    assert follower.follow(rows[:3]) is None
    assert follower.follow(rows[3:]) is None
    assert (follower.count, follower.digest) == (7, rows[-1].digest)
    assert Chain().follow(rows[1:]) == "row 1 is missing: after row 0 comes row 2"


async def test_an_act_is_recorded_with_what_it_did_or_not_at_all(opened: Callable[[], SqlStore]) -> None:
    async with opened() as store:
        first = await store.add_settings("a: 1", "ada", "begun", 1.0)
        await store.record(Act(2.0, "bob\0", "node.drain", "n1", "new disk"))
        key = await store.keys.add_key(ApiKey("k", 0, 0, "d", 3.0), KeyEvent(3.0, "k", "key.create", "ada", ""))
        with pytest.raises(OperatorError):
            await store.keys.change_key(evolve(key, version=99), KeyEvent(4.0, "k", "key.change", "eve", ""))
        assert await store.add_settings("a: 1", "eve", "the same", 5.0) == first
        with pytest.raises(StaleBase) as stale:
            await store.add_settings("a: 2", "eve", "late", 6.0, base=0)
        assert stale.value.newest == first
        second = await store.add_settings("a: 2", "ada", "better", 7.0, base=1, action="settings.rollback")
        rows = await store.audit(10)
        assert [(r.seq, r.by, r.action, r.object, r.reason) for r in rows] == [
            (4, "ada", "settings.rollback", "revision 2", "better"),
            (3, "ada", "key.create", "k", ""),
            (2, "bob\ufffd", "node.drain", "n1", "new disk"),
            (1, "ada", "settings.change", "revision 1", "begun"),
        ]
        assert await store.audit(1, before=3) == (rows[2],)
        assert broken(reversed(rows)) is None
        assert (await store.verify_audit()).wrong is None
        assert await store.revisions(9) == (second, first)
        assert await store.revisions(9, before=2) == (first,)
        assert (await store.revision(1), await store.revision(3)) == (first, None)
        for row in rows:
            chain = await store.verify_audit(Noted(row.seq, row.digest))
            assert (chain.wrong, chain.newest) == (None, Noted(4, rows[0].digest))
        newest = Noted(4, rows[0].digest)
        assert "row 2 is another than was noted" in ((await store.verify_audit(Noted(2, newest.digest))).wrong or "")
        await store.database.write(lambda c: c.execute("UPDATE audit SET by = 'eve' WHERE seq = 2"))
        assert (await store.verify_audit()).wrong == "row 2 was changed: its content does not fit its digest"
        await store.database.write(lambda c: c.execute("DELETE FROM audit WHERE seq = 2"))
        assert (await store.verify_audit()).wrong == "row 2 is missing: after row 1 comes row 3"
        # The end of it is missed by nobody who did not note it.
        await store.database.write(lambda c: c.execute("DELETE FROM audit WHERE seq > 1"))
        assert (await store.verify_audit()).wrong is None
        wrong = (await store.verify_audit(newest)).wrong
        assert wrong is not None
        assert wrong.startswith("row 4, which was noted, is missing: the audit ends with row 1; what came after was")
        # Nor a history that is whole, and another.
        await store.database.write(lambda c: c.execute("DELETE FROM audit"))
        assert "the audit is empty" in ((await store.verify_audit(newest)).wrong or "")
        for number in range(4):
            await store.record(Act(8.0, "eve", "made.up", str(number)))
        assert (await store.verify_audit()).wrong is None
        assert "row 4 is another than was noted" in ((await store.verify_audit(newest)).wrong or "")


def test_a_noted_row_is_written_as_it_is_read() -> None:
    noted = Noted(12, "ab" * 32)
    assert Noted.of(str(noted)) == noted
    for text in (
        "",
        "12",
        "0:" + "a" * 64,
        "12:" + "a" * 63,
        "12:" + "A" * 64,
        "12:" + "a" * 64 + "\n",
        "١:" + "a" * 64,
    ):
        assert Noted.of(text) is None
