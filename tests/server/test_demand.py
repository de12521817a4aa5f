"""What a model has to do, from what the router and the engines say."""

from __future__ import annotations

from attrs import evolve

from llmgw.router.wire import Load
from llmgw.scheduler.scale import Demand, EngineLoad
from llmgw.server.demand import DemandBook
from llmgw.settings.catalog import Scaling
from tests.scheduler.clusters import model, profile, row

OF = evolve(model(), scaling=Scaling(0, 4))
ROWS = (row(1), row(2, devices=(1,)), row(3, of=model("other")))


def of(book: DemandBook) -> Demand:
    return book.of((OF, model("other")), ROWS)["m"]


def test_nothing_is_known_before_the_router_said_something() -> None:
    book = DemandBook(100)
    book.worked("n1", (EngineLoad("m-1.0", 1, 3, 0),))
    assert book.of((OF,), ROWS) == {}
    book.routed(Load({}), 101)
    assert book.of((model("other"),), ROWS) == {}, "whose number is fixed needs none"


def test_the_router_and_the_engines_are_put_together() -> None:
    book = DemandBook(100)
    book.routed(Load({"m-1.0": 3, "m-2.0": 2, "other-3.0": 50}, {"m": 4}), 101)
    assert of(book) == Demand(running=5, waiting=4, asked=101)
    book.worked("n1", (EngineLoad("m-1.0", 1, 2, 1, 0.5), EngineLoad("m-2.0", 1, 2, 0, 0.9)))
    assert of(book) == Demand(running=4, waiting=5, kv_usage=0.7, asked=101), "one of the five waits in an engine"
    book.worked("n1", (EngineLoad("m-1.0", 1, 20, 1, 0.5), EngineLoad("m-2.0", 7, 99, 99)))
    assert of(book) == Demand(running=20, waiting=5, kv_usage=0.5, asked=101), "past the router, and of this start only"
    book.gone("n1")
    assert of(book) == Demand(running=5, waiting=4, asked=101)


def test_when_the_last_request_came() -> None:
    book = DemandBook(100)
    book.routed(Load({}, {}, {"m": 7}), 150)
    assert of(book).asked == 150
    book.routed(Load({}, {}, {"m": 7}), 160)
    assert of(book).asked == 150
    book.routed(Load({}, {}, {"m": 8}), 170)
    assert of(book).asked == 170
    book.routed(Load({}, {}, {}), 180)
    assert of(book).asked == 170, "a router that began anew has counted nothing yet"
    book.routed(Load({}, {}, {"m": 1}), 190)
    assert of(book).asked == 190


def test_whoever_asks_for_an_adapter_asks_for_its_model() -> None:
    scaled = evolve(model(), profiles=(profile(lora={"sql": "/a"}),), scaling=Scaling(min=0))
    book = DemandBook(100.0)
    assert book.of([scaled], [row()]) == {}
    book.routed(Load({"m-1.0": 3}, {"m:sql": 2, "m": 1, "other": 9}, {"m": 1, "m:sql": 2}), 150.0)
    found = book.of([scaled], [row()])["m"]
    assert (found.running, found.waiting, found.asked) == (3, 3, 150.0)
    book.routed(Load({"m-1.0": 0}, {}, {"m": 1, "m:sql": 3}), 170.0)
    assert book.of([scaled], [row()])["m"].asked == 170.0
    plain = evolve(scaled, profiles=(profile(),))
    assert book.of([plain], [row()])["m"].asked == 150.0


def test_engines_that_have_no_room_by_their_own_word() -> None:
    book = DemandBook(100)
    assert book.full() == ()
    assert book.worked("n1", (EngineLoad("m-1.0", 1, 9, 1), EngineLoad("m-2.0", 1, 9, 0, 0.94)))
    assert book.worked("n2", (EngineLoad("a-1.0", 1, 9, 0, 0.95), EngineLoad("b-1.0", 1, 0, 0)))
    assert book.full() == ("a-1.0", "m-1.0")
    # Only what is news is to be passed on.
    assert not book.worked("n1", (EngineLoad("m-1.0", 1, 9, 3), EngineLoad("m-2.0", 1, 8, 0, 0.1)))
    assert not book.worked("n3", ())
    assert book.gone("n1")
    assert not book.gone("n1")
    assert book.full() == ("a-1.0",)
    assert book.worked("n2", (EngineLoad("a-1.0", 1, 1, 0, 0.2),))
    assert book.full() == ()
