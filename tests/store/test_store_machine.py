"""Anything that is done to a store, in any order, against a model of it; in SQLite and in PostgreSQL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
import trio
from attrs import evolve
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from llmgw.errors import OperatorError
from llmgw.settings.keys import ApiKey
from llmgw.store.api import NodeRow, SettingsRevision, StaleBase
from llmgw.store.audit import Act
from llmgw.store.audit_table import record as record_act
from llmgw.store.database import Connection, StoreError
from llmgw.store.identity import DenyRow, Event, TokenRow
from llmgw.store.keys import KeyEvent
from llmgw.store.sql import SqlStore
from tests.scheduler.clusters import NOW, node, row
from tests.store.test_store import record

_T = TypeVar("_T")

FEW = st.sampled_from(["a", "b", "c"])
# What people type, and what nobody does: quotes, percent signs and marks of values are no part of a statement.
WORDS = st.one_of(st.text(max_size=12), st.sampled_from(["?", "%s", ":limit", "';--", "a\0b", "\ufffd", "🜁"]))
PLAIN = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)


class Fails(Exception):
    pass


class Machine(RuleBasedStateMachine):
    """``told`` is every act in order, as action and object."""

    def __init__(self, opened: Callable[[], SqlStore]) -> None:
        super().__init__()
        self.opened = opened
        self.told: list[tuple[str, str]] = []
        self.settings: list[SettingsRevision] = []
        self.nodes: dict[str, NodeRow] = {}
        self.keys: dict[str, ApiKey] = {}
        self.tokens: dict[str, TokenRow] = {}
        self.denied: dict[tuple[str, str], DenyRow] = {}
        self.epoch = 0
        self.placed: tuple[tuple[str, ...], int] = ((), 1)
        self.store = opened()
        self.run(self.store.__aenter__)

    def run(self, work: Callable[[], Awaitable[_T]]) -> _T:
        async def bounded() -> _T:
            with trio.fail_after(30):
                return await work()

        return trio.run(bounded)

    def teardown(self) -> None:
        wrong = self.run(self.store.verify_audit).wrong
        self.run(lambda: self.store.__aexit__(None, None, None))
        assert wrong is None

    @rule()
    def reopen(self) -> None:
        self.run(lambda: self.store.__aexit__(None, None, None))
        self.store = self.opened()
        self.run(self.store.__aenter__)

    @rule(text=PLAIN, by=PLAIN, reason=PLAIN, base=st.sampled_from([None, -1, 0]))
    def change_settings(self, text: str, by: str, reason: str, base: int | None) -> None:
        """``base`` counts from the newest."""
        newest = self.settings[-1] if self.settings else None
        number = 0 if newest is None else newest.revision
        asked = None if base is None else number + base
        if newest is not None and base == -1:
            with pytest.raises(StaleBase) as stale:
                self.run(lambda: self.store.add_settings(text, by, reason, NOW, base=asked))
            assert stale.value.newest == newest
            return
        made = self.run(lambda: self.store.add_settings(text, by, reason, NOW, base=asked))
        if newest is not None and text == newest.text:
            assert made == newest
            return
        assert (made.revision, made.text, made.author, made.reason) == (number + 1, text, by, reason)
        self.settings.append(made)
        self.told.append(("settings.change", f"revision {made.revision}"))

    @rule(by=WORDS, thing=WORDS, reason=WORDS, detail=WORDS)
    def act(self, by: str, thing: str, reason: str, detail: str) -> None:
        made = self.run(lambda: self.store.record(Act(NOW, by, "tested.it", thing, reason, detail)))
        assert made.seq == len(self.told) + 1
        self.told.append(("tested.it", thing.replace("\0", "\ufffd")))

    @rule()
    def fail_in_the_middle(self) -> None:
        """What was done before the failure is not there afterwards."""

        def work(connection: Connection) -> None:
            record_act(connection, Act(NOW, "x", "never.seen", "x"))
            connection.execute("DELETE FROM node")
            raise Fails

        with pytest.raises(Fails):
            self.run(lambda: self.store.database.write(work))

    @rule(name=FEW, version=PLAIN, heard=st.floats(0, 2e9))
    def save_node(self, name: str, version: str, heard: float) -> None:
        here = node(name)
        self.nodes[name] = NodeRow(name, here.address, version, here.inventory, here.engines, (), heard)
        self.run(lambda: self.store.save_node(self.nodes[name]))

    @rule(name=FEW)
    def forget_node(self, name: str) -> None:
        event = Event(NOW, "node.forget", name, "me", "")
        known = self.nodes.pop(name, None) is not None
        assert self.run(lambda: self.store.identities.forget_node(name, event)) == known
        if known:
            self.told.append(("node.forget", name))

    @rule(name=FEW, owner=PLAIN, stale=st.booleans())
    def key(self, name: str, owner: str, stale: bool) -> None:
        keys = self.store.keys
        old = self.keys.get(name)
        if old is None:
            new = ApiKey(name, 0, 0, "d" * 64, NOW, owner=owner)
            made = self.run(lambda: keys.add_key(new, KeyEvent(NOW, name, "key.create", "me", "")))
            self.told.append(("key.create", name))
        else:
            new = evolve(old, owner=owner, version=old.version - stale)
            if stale:
                with pytest.raises(OperatorError, match="was changed by somebody else"):
                    self.run(lambda: keys.change_key(new, KeyEvent(NOW, name, "key.change", "me", "")))
                return
            made = self.run(lambda: keys.change_key(new, KeyEvent(NOW, name, "key.change", "me", "")))
            self.told.append(("key.change", name))
        assert made.version > max((key.version for key in self.keys.values()), default=0)
        self.keys[name] = made

    @rule(name=FEW, what=st.sampled_from(["token.use", "token.revoke"]))
    def token(self, name: str, what: str) -> None:
        people = self.store.identities
        old = self.tokens.get(name)
        if old is None:
            self.tokens[name] = TokenRow(name, "n1", "d" * 64, NOW, NOW + 900, "me")
            event = Event(NOW, "token.create", "n1", "me", "")
            self.run(lambda: people.add_token(self.tokens[name], event))
            self.told.append(("token.create", "n1"))
            return
        event = Event(NOW, what, "n1", "me", "")
        if what == "token.use":
            done = self.run(lambda: people.use_token(name, "k", "10.0.0.1", NOW + 1, event))
            new = evolve(old, used=NOW + 1, used_key="k", used_from="10.0.0.1")
        else:
            done = self.run(lambda: people.revoke_token(name, NOW + 1, event))
            new = evolve(old, revoked=NOW + 1)
        assert done == (not old.used and not old.revoked)
        if done:
            self.tokens[name] = new
            self.told.append((what, "n1"))

    @rule(kind=st.sampled_from(["node", "serial"]), value=FEW, reason=PLAIN, lift=st.booleans())
    def deny(self, kind: str, value: str, reason: str, lift: bool) -> None:
        people = self.store.identities
        if lift:
            known = self.denied.pop((kind, value), None) is not None
            assert self.run(lambda: people.lift(kind, value, Event(NOW, "node.lift", value, "me", ""))) == known
            if known:
                self.told.append(("node.lift", value))
            return
        self.denied[kind, value] = DenyRow(kind, value, reason, "me", NOW)
        self.run(lambda: people.deny(self.denied[kind, value], Event(NOW, "node.deny", value, "me", "")))
        self.told.append(("node.deny", value))

    @rule()
    def take_over(self) -> None:
        taken = self.run(self.store.new_epoch)
        assert taken == self.epoch + 1
        self.epoch = taken

    @rule(serials=st.sets(st.integers(1, 20), max_size=4), old=st.booleans(), release=st.booleans())
    def decide(self, serials: set[int], old: bool, release: bool) -> None:
        epoch = self.epoch - old
        made = record(epoch, max(serials, default=0) + 1, replicas=tuple(row(n) for n in serials))
        if old:
            with pytest.raises(StoreError, match="was taken since"):
                self.run(lambda: self.store.save_pass(made))
            with pytest.raises(StoreError, match="was taken since"):
                self.run(lambda: self.store.release_brake(epoch, NOW, "me", NOW))
        elif release:
            self.run(lambda: self.store.release_brake(epoch, NOW, "me", NOW, ("n1", "n2")))
            self.told.append(("brake.release", "n1, n2"))
        else:
            self.run(lambda: self.store.save_pass(made))
            self.placed = tuple(sorted(f"m-{n}" for n in serials)), made.next_serial

    @invariant()
    def it_is_as_it_should_be(self) -> None:
        store = self.store

        async def look() -> None:
            assert [(r.action, r.object) for r in reversed(await store.audit(10_000))] == self.told
            assert list(reversed(await store.revisions(1000))) == self.settings
            assert await store.settings() == (self.settings[-1] if self.settings else None)
            assert await store.nodes() == tuple(self.nodes[n] for n in sorted(self.nodes))
            assert (await store.keys.keys())[1] == tuple(sorted(self.keys.values(), key=lambda k: k.version))
            assert {t.id: t for t in await store.identities.tokens()} == self.tokens
            assert {(d.kind, d.value): d for d in await store.identities.denied()} == self.denied
            replicas, serial = await store.replicas()
            assert (tuple(r.id for r in replicas), serial) == self.placed
            pages = []
            before: int | None = None
            while page := await store.audit(3, before):
                pages += page
                before = page[-1].seq
            assert [p.seq for p in pages] == list(range(len(self.told), 0, -1))

        self.run(look)


def test_whatever_is_done_in_whatever_order(new_store: Callable[[], Callable[[], SqlStore]]) -> None:
    run_state_machine_as_test(
        lambda: Machine(new_store()),
        settings=settings(
            settings.default, max_examples=15, stateful_step_count=25, suppress_health_check=list(HealthCheck)
        ),
    )
