from __future__ import annotations

import socket

from attrs import evolve

from llmgw.router.choose import EJECT_AFTER, EJECT_S
from llmgw.router.pool import Directory, Engine
from llmgw.router.sockets import Peer
from llmgw.router.table import Endpoint, Route, Table

A = Endpoint("a", "127.0.0.1", 1, "sk-a")
B = Endpoint("b", "::1", 2)


async def test_ejected_after_failures_in_a_row_and_forgiven_by_one_answer() -> None:
    engine = Engine(A)
    for _ in range(EJECT_AFTER - 1):
        engine.failed(100)
    engine.worked()
    engine.failed(100)
    assert engine.ejected_until == 0
    for _ in range(EJECT_AFTER - 1):
        engine.failed(101)
    assert engine.ejected_until == 101 + EJECT_S
    engine.worked()
    assert (engine.ejected_until, engine.failures) == (0, 0)


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
    (engine,) = found[1]
    both = directory.find("n")
    assert both is not None
    assert both[1][0] is engine, "one engine of two models is one engine"
    with engine.busy():
        directory.use(Table(2, (Route("m", (evolve(A, draining=True),)),)))
        again = directory.find("m")
        assert again is not None
        assert again[1][0] is engine
        assert engine.draining
        directory.use(Table(3, (Route("m", (evolve(A, port=9),)),)))
        moved = directory.find("m")
        assert moved is not None
        assert moved[1][0] is not engine
        assert directory.outstanding() == {"a": 1}
    assert directory.outstanding() == {"a": 0}
    assert directory.find("n") is None


def test_an_engine_behind_two_names_counts_once_and_as_the_first() -> None:
    directory = Directory()
    directory.use(Table(1, (Route("m", (A,)), Route("m:sql", (A,)), Route("n", (B,)))))
    _, (base,) = directory.find("m") or ((), ())
    _, (adapter,) = directory.find("m:sql") or ((), ())
    assert base is adapter
    with base.busy():
        assert directory.in_flight() == {("m", "a"): 1, ("n", "b"): 0}
