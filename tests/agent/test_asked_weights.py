from __future__ import annotations

from pathlib import Path

import trio
import trio.testing

from llmgw.agent.weights import MOST_NAMES, Weights
from llmgw.link.messages import WeightsFound
from llmgw.settings.weight_facts import WeightFacts


def put(path: Path, size: int) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x" * size)


async def test_it_tells_what_is_here_and_when_that_changes(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    autojump_clock.autojump_threshold = 0.001
    told: list[WeightsFound] = []
    weights = Weights(str(tmp_path), tmp_path / "hub", 60, lambda: told.append(weights.found))
    nursery.start_soon(weights.run)
    await trio.sleep(200)
    assert told == [], "nobody asked"
    put(tmp_path / "a/m.bin", 10)
    began = trio.current_time()
    weights.ask(("a", "b", "a"))
    while not told or told[-1].asked != ("a", "b"):
        await trio.sleep(0.01)
    assert trio.current_time() - began < 5, "asked, it looks at once"
    here = WeightFacts("a", 10, "1 file")
    assert told[-1] == WeightsFound(("a", "b"), (here,))
    count = len(told)
    await trio.sleep(500)
    assert len(told) == count, "nothing is new"
    put(tmp_path / "b/m.bin", 20)
    await trio.sleep(100)
    assert told[-1] == WeightsFound(("a", "b"), (here, WeightFacts("b", 20, "1 file")))
    weights.ask(("b",))
    assert told[-1] == WeightsFound(("b",), (WeightFacts("b", 20, "1 file"),)), "who asks is answered at once"
    (tmp_path / "b/m.bin").unlink()
    await trio.sleep(100)
    assert told[-1] == WeightsFound(("b",), ())
    nursery.cancel_scope.cancel()


async def test_too_many_names_are_not_looked_at(tmp_path: Path) -> None:
    weights = Weights(str(tmp_path), tmp_path, 60, lambda: None)
    weights.ask(f"m{n}" for n in range(MOST_NAMES + 5))
    with trio.move_on_after(0.0):
        await weights.run()
    assert weights.found == WeightsFound((), ())
    assert len(weights._names) == MOST_NAMES
