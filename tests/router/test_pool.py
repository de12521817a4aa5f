from __future__ import annotations

import socket

from attrs import evolve

from llmgw.router.pool import Directory, Engine
from llmgw.router.sockets import Peer
from llmgw.router.table import Endpoint, Route, Table
from llmgw.settings.catalog import Routing
from llmgw.settings.document import RouterSettings

A = Endpoint("a", "127.0.0.1", 1, "sk-a")
B = Endpoint("b", "::1", 2)


def test_what_an_engine_is_told_of_itself() -> None:
    assert Engine(A).head_lines == b"host: 127.0.0.1:1\r\nauthorization: Bearer sk-a\r\n"
    assert Engine(B).head_lines == b"host: [::1]:2\r\n"


async def test_kept_connections_are_used_newest_first_and_not_for_ever() -> None:
    engine = Engine(A)
    pairs = [socket.socketpair() for _ in range(3)]
    peers = [Peer(ours) for ours, _ in pairs]
    for at, peer in enumerate(peers):
        engine.give_back(peer, 10.0 + at)
    assert engine.take_idle(13) is peers[2]
    engine.sweep(41.5)
    assert peers[0].sock.fileno() == peers[1].sock.fileno() == -1 or engine.take_idle(41.5) is None
    assert engine.take_idle(100) is None
    peers[2].close()
    for _, theirs in pairs:
        theirs.close()


def test_engines_live_on_from_table_to_table() -> None:
    directory = Directory()
    directory.use(Table(1, (Route("m", (A,)), Route("n", (A, B)))))
    found = directory.find("m")
    assert found is not None
    (engine,) = found.engines
    both = directory.find("n")
    assert both is not None
    assert both.engines[0] is engine, "one engine of two models is one engine"
    directory.began(engine, 10)
    directory.use(Table(2, (Route("m", (evolve(A, draining=True),)),)))
    again = directory.find("m")
    assert again is not None
    assert again.engines[0] is engine
    assert engine.draining
    directory.use(Table(3, (Route("m", (evolve(A, port=9),)),)))
    moved = directory.find("m")
    assert moved is not None
    assert moved.engines[0] is not engine
    assert directory.outstanding() == {"a": 1}
    directory.ended(engine, 10)
    assert directory.outstanding() == {"a": 0}
    assert directory.find("n") is None


def test_an_engine_behind_two_names_counts_once_and_as_the_first() -> None:
    directory = Directory()
    directory.use(Table(1, (Route("m", (A,)), Route("m:sql", (A,)), Route("n", (B,)))))
    found, adapter = directory.find("m"), directory.find("m:sql")
    assert found is not None
    assert adapter is not None
    (base,) = found.engines
    assert adapter.engines == (base,)
    directory.began(base, 10)
    assert directory.in_flight() == {("m", "a"): 1, ("n", "b"): 0}
    directory.ended(base, 10)


def test_what_engines_say_of_themselves_lives_on_over_tables() -> None:
    directory = Directory()
    directory.fill(["b"])
    directory.use(Table(1, (Route("m", (A, B)),)))
    found = directory.find("m")
    assert found is not None
    assert [engine.full for engine in found.engines] == [False, True]
    directory.fill(["a"])
    assert [engine.full for engine in found.engines] == [True, False]
    directory.use(Table(2, (Route("m", (A, evolve(B, port=3))),)))
    found = directory.find("m")
    assert found is not None
    assert [engine.full for engine in found.engines] == [True, False]


def test_a_model_s_own_times_come_before_the_router_s() -> None:
    directory = Directory()
    own = Routing(connect_timeout_s=1, first_byte_timeout_s=7, total_timeout_s=9)
    directory.use(Table(1, (Route("m", (A,), routing=own), Route("n", (B,))), RouterSettings(idle_timeout_s=3)))
    times = [found.timeouts for name in ("m", "n") if (found := directory.find(name)) is not None]
    assert [(t.connect_s, t.first_byte_s, t.idle_s, t.total_s) for t in times] == [(1, 7, 3, 9), (2, 600, 3, 3600)]
