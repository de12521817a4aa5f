from __future__ import annotations

from attrs import evolve

from llmgw.router.wire import Load
from llmgw.server.demand import DemandBook
from llmgw.settings.catalog import Scaling
from tests.scheduler.clusters import model, profile, row


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
