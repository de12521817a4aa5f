"""Which weights each node was asked to look for, and which of them it has looked at. In memory only."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from attrs import evolve, frozen

from llmgw.link.messages import WeightsFound
from llmgw.settings.document import Settings
from llmgw.settings.weight_facts import WeightFacts

PATIENCE_S = 10.0
"""A node that was asked is waited for so long; a disk may hang."""


def named_weights(settings: Settings) -> tuple[str, ...]:
    """What the catalog's profiles call their weights."""
    return tuple(dict.fromkeys(p.weights for m in settings.models for p in m.profiles))


def merged(known: Iterable[WeightFacts], found: WeightsFound, named: Collection[str]) -> tuple[WeightFacts, ...]:
    """What a node has by its newest word, and by older ones where it has not looked again yet."""
    of_old = {facts.name: facts for facts in known if facts.name in named and facts.name not in found.asked}
    return tuple((of_old | {facts.name: facts for facts in found.weights}).values())


@frozen
class _Asked:
    names: frozenset[str]
    at: float
    answered: frozenset[str]


class WeightsBook:
    """By node; one that is not in it does not look at weights, or is not connected."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Asked] = {}

    def registered(self, node: str, found: WeightsFound | None) -> None:
        """A node came, with what it had looked at before."""
        self._nodes.pop(node, None)
        if found is not None:
            self._nodes[node] = _Asked(frozenset(), 0.0, frozenset(found.asked))

    def gone(self, node: str) -> None:
        """Its session ended."""
        self._nodes.pop(node, None)

    def ask(self, node: str, names: Iterable[str], now: float) -> bool:
        """Whether the node is to be told of these names: they are not what it was told before."""
        known, wanted = self._nodes.get(node), frozenset(names)
        if known is None or known.names == wanted:
            return False
        self._nodes[node] = evolve(known, names=wanted, at=now)
        return True

    def answered(self, node: str, found: WeightsFound) -> None:
        """It looked at these."""
        if (known := self._nodes.get(node)) is not None:
            self._nodes[node] = evolve(known, answered=frozenset(found.asked))

    def looking(self, node: str, now: float) -> frozenset[str]:
        """What it may still say something of."""
        known = self._nodes.get(node)
        if known is None or now - known.at >= PATIENCE_S:
            return frozenset()
        return known.names - known.answered
