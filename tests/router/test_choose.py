from __future__ import annotations

import json
import random
import zlib
from collections import Counter

from attrs import evolve, field, frozen
from hypothesis import given
from hypothesis import strategies as st

from llmgw.router.choose import ROOM, ROOM_LEAST, Choice, Reason, choose, conversation, seed_of
from llmgw.router.health import CONNECT_FAILURES, Health


@frozen
class Engine:
    outstanding: int = 0
    tokens: int = 0
    draining: bool = False
    full: bool = False
    seed: int = 0
    health: Health = field(factory=Health, eq=False)


def out() -> Health:
    """Of an engine that is left alone until 5."""
    health = Health()
    for _ in range(CONNECT_FAILURES):
        health.failed(0)
    return health


def picks(engines: list[Engine], key: int | None = None, draws: int = 200) -> Counter[int]:
    found = [choose(engines, (), 0.0, n / draws, key) for n in range(draws)]
    return Counter(choice.at for choice in found if choice is not None)


def test_the_less_loaded_of_two() -> None:
    assert picks([Engine(tokens=9), Engine(tokens=1)]) == {1: 200}
    assert picks([Engine(tokens=1), Engine(tokens=9)]) == {0: 200}
    assert picks([Engine(tokens=1, full=True), Engine(tokens=9)]) == {1: 200}, "its own word counts more"
    three = picks([Engine(tokens=5), Engine(tokens=1), Engine(tokens=9)])
    assert 2 not in three
    assert three[1] > three[0] > 0, "not everybody's favourite"
    assert len(picks([Engine()] * 4)) == 4


def test_draining_and_tried_are_never_asked_and_those_that_are_out_last() -> None:
    assert choose([Engine(draining=True), Engine(tokens=9)], (), 0, 0.5) == Choice(1, Reason.ONLY)
    assert choose([Engine(), Engine(tokens=9)], {0}, 0, 0.5) == Choice(1, Reason.ONLY)
    assert choose([Engine(health=out()), Engine(tokens=9)], (), 1, 0.5) == Choice(1, Reason.ONLY)
    assert choose([Engine(health=out())], (), 1, 0.5) == Choice(0, Reason.ONLY), "never the last one"
    assert choose([Engine(health=out()), Engine(tokens=9)], (), 6, 0.5) == Choice(0, Reason.LEAST)
    assert choose([], (), 0, 0.5) is None
    assert choose([Engine()], {0}, 0, 0.5) is None


ENGINES = [Engine(seed=seed_of(f"shard-{n}")) for n in range(8)]


def test_a_conversation_stays_and_conversations_spread() -> None:
    homes = [picks(ENGINES, key, 3) for key in range(400)]
    assert all(len(home) == 1 for home in homes)
    each = Counter(index for home in homes for index in home)
    assert len(each) == 8
    assert max(each.values()) < 2 * 400 / 8


def test_one_engine_more_or_less_moves_only_its_own_conversations() -> None:
    for key in range(200):
        before = choose(ENGINES, (), 0, 0.5, key)
        after = choose(ENGINES[:-1], (), 0, 0.5, key)
        assert before is not None
        assert after is not None
        assert before.at == after.at or before.at == 7


def test_without_room_all_of_a_conversation_go_to_the_same_next_one() -> None:
    home = choose(ENGINES, (), 0, 0.5, 77)
    assert home is not None
    assert home.reason is Reason.AFFINITY
    for busy in (evolve(ENGINES[home.at], outstanding=ROOM_LEAST), evolve(ENGINES[home.at], full=True)):
        engines = [busy if n == home.at else e for n, e in enumerate(ENGINES)]
        moved = {choose(engines, (), 0, n / 10, 77) for n in range(10)}
        assert len(moved) == 1
        (choice,) = moved
        assert choice is not None
        assert choice.at != home.at
        assert choice.reason is Reason.ROOM
    loaded = [evolve(e, outstanding=100) for e in ENGINES]
    assert choose(loaded, (), 0, 0.5, 77) == home, "its share is no reason to move"


engines = st.lists(
    st.builds(
        Engine, st.integers(0, 50), st.integers(0, 50), st.booleans(), st.booleans(), st.integers(0, 2**64 - 1),
        st.builds(Health) | st.builds(out),
    ),
    max_size=6,
)  # fmt: skip


@given(engines, st.sets(st.integers(0, 5)), st.floats(0, 1, exclude_max=True), st.none() | st.integers(0, 2**33))
def test_whatever_there_is(them: list[Engine], tried: set[int], draw: float, key: int | None) -> None:
    choice = choose(them, tried, 2.0, draw, key)
    asked = [n for n, e in enumerate(them) if n not in tried and not e.draining]
    if choice is None:
        assert not asked
        return
    assert choice.at in asked
    well = [n for n in asked if not them[n].health.out(2.0)] or asked
    assert choice.at in well
    assert (choice.reason is Reason.ONLY) == (len(well) == 1)
    engine = them[choice.at]
    if len(well) > 1 and key is None:
        worst = max((them[n].full, them[n].tokens) for n in well)
        ties = sum((them[n].full, them[n].tokens) == worst for n in well)
        assert ties > 1 or (engine.full, engine.tokens) != worst
    if choice.reason is Reason.AFFINITY:
        share = (1 + sum(them[n].outstanding for n in well)) / len(well)
        assert engine.outstanding < max(ROOM_LEAST, ROOM * share)
        assert not engine.full


def test_many_requests_of_few_conversations_are_spread_by_the_bound() -> None:
    source = random.Random(3)
    counts = [0] * 8
    for _ in range(4000):
        now = [evolve(e, outstanding=count) for e, count in zip(ENGINES, counts, strict=True)]
        choice = choose(now, (), 0, source.random(), source.randrange(3))
        assert choice is not None
        counts[choice.at] += 1
        assert max(counts) <= max(ROOM_LEAST, ROOM * sum(counts) / 8 + 1)


def chat(*contents: str) -> bytes:
    roles = ["system", *["user", "assistant"] * 5]
    return json.dumps([{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]).encode()


def test_a_conversation_is_told_by_its_beginning() -> None:
    first = conversation(chat("be kind", "hello"))
    assert first is not None
    assert first == conversation(chat("be kind", "hello", "hi!", "how are you?"))
    assert first != conversation(chat("be kind", "good day"))
    assert first != conversation(chat("be rude", "hello"))
    long = "x" * 5000
    assert conversation(chat(long, "a")) != conversation(chat(long, "b")), "a long beginning hides no difference"
    assert conversation(chat("a" + long, "a")) != conversation(chat("b" + long, "a"))
    assert conversation(chat(long, "a")) == conversation(chat(long, "a", "b", "c"))
    swapped = b'[{"content":"%b","role":"user"}%b]'
    assert conversation(swapped % (b"a", b"")) != conversation(swapped % (b"b", b""))
    assert conversation(swapped % (b"a", b"")) == conversation(swapped % (b"a", b',{"content":"b","role":"assistant"}'))


@given(contents=st.lists(st.text(max_size=40), min_size=2, max_size=6), more=st.integers(0, 5))
def test_every_turn_of_a_conversation_has_its_key(contents: list[str], more: int) -> None:
    turns = [conversation(chat(*contents[: 2 + n])) for n in range(len(contents) - 1)]
    assert len(set(turns)) == 1


def test_no_conversation_is_read_for_ever() -> None:
    begins = b"[" + b"{}," * 300_000
    assert conversation(begins + b"{}]") == conversation(begins + b'{"role":"user"}]') == zlib.crc32(begins[:4096])
    endless = b'[{"role":"user","content":"' + b"x" * 300_000
    assert conversation(endless + b'1"}]') == conversation(endless + b'2"}]')


def test_other_ways_to_begin() -> None:
    assert conversation(b"") is None
    assert conversation(b'"Once upon"') == conversation(b'"Once upon"') != conversation(b'"Twice"')
    assert conversation(b'["user","b"]') == conversation(b'["user","b"]') != conversation(b'["user","c"]')
    assert conversation(b"[]") is not None
    assert conversation(b"null") is not None
    one = conversation(chat("s", "u"), b"session-1")
    assert one == conversation(b"", b"session-1") != conversation(b"", b"session-2")
