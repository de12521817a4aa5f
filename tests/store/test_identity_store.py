from __future__ import annotations

from collections.abc import Callable

import trio
from attrs import evolve

from llmgw.store.api import NodeRow
from llmgw.store.identity import DenyRow, Event, HeldRow, IssuedRow, TokenRow
from llmgw.store.sql import SqlStore
from tests.scheduler.clusters import NOW, node

TOKEN = TokenRow("t1", "n1", "d" * 64, NOW, NOW + 900, "me")
EVENT = Event(NOW, "tested", "n1", "me", "because")


async def test_what_was_written_is_there_after_a_restart(opened: Callable[[], SqlStore]) -> None:
    held = HeldRow("n1", "ab", "k", "r", NOW + 5, ("c1", "c2"), NOW)
    issued = IssuedRow("ab", "n1", "k", "r", NOW + 5, NOW)
    denied = DenyRow("key", "f" * 64, "stolen", "me", NOW)
    async with opened() as store:
        people = store.identities
        await people.add_token(TOKEN, EVENT)
        await people.save_held(held)
        await people.save_held(evolve(held, node="n2", cas=None))
        await people.issued(issued, EVENT)
        await people.issued(evolve(issued, serial="ac", at=NOW + 1), EVENT)
        await people.deny(denied, EVENT)
        await people.add_event(evolve(EVENT, kind="last"))
    async with opened() as store:
        people = store.identities
        assert await people.tokens() == (TOKEN,)
        assert await people.token("t1") == TOKEN
        assert await people.token("t2") is None
        assert await people.held() == (held, evolve(held, node="n2", cas=None))
        assert await people.newest_issued() == (evolve(issued, serial="ac", at=NOW + 1),)
        assert await people.denied() == (denied,)
        assert [event.kind for event in await people.events(2)] == ["last", "tested"]


async def test_one_of_many_uses_a_token(opened: Callable[[], SqlStore]) -> None:
    async with opened() as store:
        people = store.identities
        await people.add_token(TOKEN, EVENT)
        won: list[str] = []

        async def use(key: str) -> None:
            if await people.use_token("t1", key, "10.0.0.1", NOW + 1, EVENT):
                won.append(key)

        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(use, str(number))
        (key,) = won
        row = await people.token("t1")
        assert row == evolve(TOKEN, used=NOW + 1, used_key=key, used_from="10.0.0.1")
        assert len(await people.events(100)) == 2, "who loses leaves no event"
        assert not await people.revoke_token("t1", NOW + 2, EVENT)


async def test_a_token_that_expired_or_was_revoked_is_not_used(opened: Callable[[], SqlStore]) -> None:
    async with opened() as store:
        people = store.identities
        await people.add_token(TOKEN, EVENT)
        assert not await people.use_token("t1", "k", "", NOW + 900, EVENT)
        assert not await people.use_token("t0", "k", "", NOW, EVENT)
        assert await people.revoke_token("t1", NOW + 1, EVENT)
        assert not await people.use_token("t1", "k", "", NOW + 2, EVENT)
        assert not await people.revoke_token("t1", NOW + 3, EVENT)
        assert not await people.revoke_token("t0", NOW + 3, EVENT)


async def test_the_deny_list(opened: Callable[[], SqlStore]) -> None:
    async with opened() as store:
        people = store.identities
        await people.deny(DenyRow("node", "n1", "first", "me", NOW), EVENT)
        await people.deny(DenyRow("node", "n1", "second", "me", NOW + 1), EVENT)
        await people.deny(DenyRow("serial", "n1", "other", "me", NOW + 2), EVENT)
        assert [(d.kind, d.reason) for d in await people.denied()] == [("node", "second"), ("serial", "other")]
        assert await people.lift("node", "n1", EVENT)
        assert not await people.lift("node", "n1", EVENT)
        assert [d.kind for d in await people.denied()] == ["serial"]


async def test_a_node_is_forgotten_with_all_that_is_its(opened: Callable[[], SqlStore]) -> None:
    here = node("n1")
    async with opened() as store:
        people = store.identities
        await store.save_node(NodeRow("n1", here.address, "1", here.inventory, here.engines, (), NOW))
        await people.save_held(HeldRow("n1", "ab", "k", "r", NOW, None, NOW))
        await people.issued(IssuedRow("ab", "n1", "k", "r", NOW + 5, NOW), EVENT)
        assert await people.forget_node("n1", EVENT)
        assert await store.nodes() == ()
        assert await people.held() == await people.newest_issued() == ()
        assert not await people.forget_node("n1", EVENT)


async def test_what_is_old_goes(opened: Callable[[], SqlStore]) -> None:
    async with opened() as store:
        people = store.identities
        await people.issued(IssuedRow("a", "n1", "k", "r", NOW, NOW - 86400), EVENT)
        await people.issued(IssuedRow("b", "n2", "k", "r", NOW + 40 * 86400, NOW + 31 * 86400), EVENT)
        assert [row.node for row in await people.newest_issued()] == ["n2"]
