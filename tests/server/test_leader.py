"""Leadership: taken by one, held on time, given up before anybody else can have it; and writes that come too late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from attrs import evolve

from llmgw.router.wire import Load
from llmgw.server.leader import Leadership
from llmgw.server.loads import together
from llmgw.settings.keys import ApiKey
from llmgw.store.audit import Act
from llmgw.store.database import LostLeadError, StoreAwayError
from llmgw.store.identity import Event
from llmgw.store.keys import KeyEvent
from llmgw.store.lease import RENEW_S, STOP_S, TTL_S, Leader, Leases
from llmgw.store.opening import store_of
from llmgw.store.people import AdminToken
from tests.scheduler.clusters import NOW, row
from tests.store.postgresql import Postgresql, running
from tests.store.test_store import record

EVENT = Event(NOW, "node.forget", "n1", "ada", "")
A, B = Leader("host/a", "a:8443", "a:8001"), Leader("host/b", "b:8443", "b:8001")


class Lease(Leases):
    """A lease whose database does what the test says. Its clock is Trio's."""

    def __init__(self) -> None:
        self.holder = ""
        self.epoch = 0
        self.until = 0.0
        self.fault: Callable[[], object] = lambda: None
        self.hangs = False
        self.slow_s = 0.0
        self.renewed: list[float] = []

    async def _asked(self) -> float:
        if self.hangs:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        self.fault()
        return trio.current_time()

    async def take(self, me: Leader) -> int | None:
        now = await self._asked()
        if self.holder and self.holder != me.holder and self.until > now:
            return None
        self.holder, self.epoch, self.until = me.holder, self.epoch + 1, now + TTL_S
        return self.epoch

    async def renew(self, me: Leader, epoch: int) -> bool:
        now = await self._asked()
        if (self.holder, self.epoch) != (me.holder, epoch) or self.until <= now:
            return False
        self.renewed.append(now)
        self.until = now + TTL_S
        await trio.sleep(self.slow_s)
        return True

    async def release(self, me: Leader, epoch: int) -> None:
        now = await self._asked()
        if (self.holder, self.epoch) == (me.holder, epoch):
            self.until = now

    async def leader(self) -> Leader | None:
        now = await self._asked()
        known = {A.holder: A, B.holder: B}
        return evolve(known[self.holder], epoch=self.epoch) if self.until > now else None


def away() -> None:
    raise StoreAwayError("postgresql://h/d", "cannot be used", "check")


async def test_it_is_held_for_as_long_as_it_is_renewed(autojump_clock: trio.testing.MockClock) -> None:
    lease = Lease()
    leadership = Leadership(lease, A)
    assert await leadership.take()
    assert (leadership.leads, leadership.epoch, leadership.known) == (True, 1, A)
    with trio.move_on_after(10 * RENEW_S + 1):
        await leadership.hold()
    assert len(lease.renewed) == 10
    # A short fault is nothing, however often.
    lease.fault = away
    with trio.move_on_after(STOP_S / 2):
        await leadership.hold()
    lease.fault = lambda: None
    with trio.move_on_after(3 * RENEW_S):
        await leadership.hold()
    assert lease.until > trio.current_time()


@pytest.mark.parametrize("how", ["away", "hangs"])
async def test_it_is_given_up_before_anybody_else_can_have_it(how: str, autojump_clock: trio.testing.MockClock) -> None:
    lease = Lease()
    leadership = Leadership(lease, A)
    assert await leadership.take()
    taken = trio.current_time()
    if how == "away":
        lease.fault = away
    lease.hangs = how == "hangs"
    why = await leadership.hold()
    assert trio.current_time() - taken == pytest.approx(STOP_S, abs=0.1)
    assert trio.current_time() < lease.until - 4, "seconds before it can be another's"
    assert f"could not be renewed for {STOP_S:g} s" in why


async def test_what_counts_is_when_a_renewal_was_begun(autojump_clock: trio.testing.MockClock) -> None:
    """The answer may be slow: the database renewed the lease when it was asked, or soon after, but no later."""
    lease = Lease()
    leadership = Leadership(lease, A)
    assert await leadership.take()
    lease.slow_s = 4.0
    began = trio.current_time() + RENEW_S
    with trio.move_on_after(RENEW_S + 4.5):
        await leadership.hold()
    lease.slow_s, lease.hangs = 0.0, True
    await leadership.hold()
    assert trio.current_time() - began == pytest.approx(STOP_S, abs=0.1)


async def test_it_is_kept_however_long_a_start_takes(autojump_clock: trio.testing.MockClock) -> None:
    lease = Lease()
    one, other = Leadership(lease, A), Leadership(lease, B)
    over: list[str] = []
    assert await one.take()
    async with one.kept(over.append):
        await trio.sleep(4 * TTL_S)
        assert not await other.take()
        await one.release()
        assert await other.take()
        await trio.sleep(4 * RENEW_S)
    assert over == [], "what is released is not lost"


async def test_the_lease_of_a_start_that_fails_is_free_at_once(autojump_clock: trio.testing.MockClock) -> None:
    lease = Lease()
    one, other = Leadership(lease, A), Leadership(lease, B)
    assert await one.take()
    assert not await other.take()
    over: list[str] = []
    with pytest.RaisesGroup(ValueError, flatten_subgroups=True):
        async with other.kept(over.append), one.kept(over.append):
            raise ValueError("a port that is taken")
    assert await other.take(), "one that only looked on has released nothing of its own"


async def test_whoever_looks_on_hears_that_nobody_leads(autojump_clock: trio.testing.MockClock) -> None:
    lease = Lease()
    one, other = Leadership(lease, A), Leadership(lease, B)
    assert await one.take()
    assert not await other.take()
    heard = trio.Event()
    with trio.fail_after(TTL_S + 2):
        async with other.kept(lambda why: heard.set() if why == "nobody leads" else None):
            await heard.wait()


async def test_who_was_stopped_for_long_learns_that_it_lost(autojump_clock: trio.testing.MockClock) -> None:
    lease = Lease()
    one, other = Leadership(lease, A), Leadership(lease, B)
    assert await one.take()
    assert not await other.take()
    assert other.known == A
    followed = trio.current_time()
    with trio.fail_after(TTL_S + 2):
        await other.follow()
    assert trio.current_time() - followed >= TTL_S - 1
    assert await other.take()
    assert other.epoch == 2
    assert "could not be renewed" in await one.hold() or "taken by another" in await one.hold()


@pytest.fixture(scope="module")
def postgresql() -> Iterator[Postgresql]:
    with running() as server:
        yield server


async def test_nothing_of_an_earlier_leader_is_written(tmp_path: Path, postgresql: Postgresql) -> None:
    address = postgresql.database()
    async with store_of(address, tmp_path) as one, store_of(address, tmp_path) as other:
        first, second = Leases(one.database), Leases(other.database)
        epoch = await first.take(A)
        assert epoch is not None
        one.lead(epoch)
        assert await second.take(B) is None
        assert await second.leader() == A
        assert await first.renew(A, epoch)
        assert not await first.renew(B, epoch)
        await one.record(Act(NOW, "ada", "tested.it", "1"))
        # The same holder comes back under a new epoch: of its former life nothing is written either.
        assert await first.take(A) == epoch + 1
        assert not await first.renew(A, epoch)
        for write in (
            lambda: one.record(Act(NOW, "ada", "tested.it", "2")),
            lambda: one.add_settings("a: 1", "ada", "", NOW),
            lambda: one.save_pass(record(epoch, 9, replicas=(row(8),))),
            lambda: one.identities.forget_node("n1", EVENT),
            lambda: one.people.add(AdminToken("t1", "ada", "admin", "", NOW, NOW + 9, "eve")),
            lambda: one.people.revoke("t0", "eve", NOW),
            lambda: one.people.used("t0", NOW),
            lambda: one.keys.add_key(ApiKey("k1", 0, 0, "d", NOW), KeyEvent(NOW, "k1", "created", "ada", "")),
        ):
            with pytest.raises(LostLeadError, match=f"epoch {epoch + 1} was taken since"):
                await write()
        await first.release(A, epoch)
        assert await second.leader() == A, "an old epoch releases nothing"
        await first.release(A, epoch + 1)
        assert await second.leader() is None
        assert await second.take(B) == epoch + 2
        assert [r.object for r in await other.audit(9)] == ["1"]
        assert await other.replicas() == ((), 1)


async def test_what_others_write_is_seen_to_have_changed(tmp_path: Path, postgresql: Postgresql) -> None:
    address = postgresql.database()
    async with store_of(address, tmp_path) as one, store_of(address, tmp_path) as other:
        seen = await other.changes()
        await one.add_settings("a: 1", "ada", "", NOW)
        assert await other.changes() != seen
        leases = Leases(one.database)
        seen = await other.changes()
        await leases.save_load("host/a", "mine")
        await Leases(other.database).save_load("host/b", "theirs")
        assert await leases.loads("host/a") == ("theirs",)
        assert await other.changes() == seen, "what routers have to do is no change of the cluster"


def test_loads_are_summed() -> None:
    assert together(()) == Load({}, {}, {})
    both = together((Load({"a": 1}, {"m": 2}, {"m": 3}), Load({"a": 1, "b": 1}, {}, {"m": 1})))
    assert both == Load({"a": 2, "b": 1}, {"m": 2}, {"m": 4})
