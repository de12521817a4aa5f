"""What every node could still give, kept up as placements are made: a placement costs what it changes, not a scan."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

from attrs import evolve, frozen

from llmgw.scheduler.explain import Refusal
from llmgw.scheduler.feasible import Choice, Need, NodeView, devices_of, node_refusals
from llmgw.scheduler.memory import Sizes
from llmgw.scheduler.state import Node
from llmgw.settings.catalog import Packing

Score = tuple[bool, int]
_NONE: Mapping[str, Iterable[int]] = MappingProxyType({})


@frozen
class Rails:
    """Which nodes could run one replica together: the same fabric of the same kind, over as many ports."""

    label: str
    kind: str
    ports: int


class Ranking:
    """Nodes in the order in which a policy takes them, without sorting them all for each placement."""

    def __init__(self) -> None:
        self._nodes: dict[Score, list[str]] = {}
        self._score: dict[str, Score] = {}

    def __len__(self) -> int:
        return len(self._score)

    def put(self, node: str, choice: Choice) -> None:
        """The node could give this."""
        score = (choice.breaks, choice.after)
        self._score[node] = score
        insort(self._nodes.setdefault(score, []), node)

    def drop(self, node: str) -> None:
        """The node gives nothing any more."""
        score = self._score.pop(node, None)
        if score is not None:
            some = self._nodes[score]
            del some[bisect_left(some, node)]
            if not some:
                del self._nodes[score]

    def ordered(self, policy: Packing, here: Mapping[str, int]) -> Iterator[str]:
        """Best first. ``here`` counts the model's replicas by node.

        Pack: no wholly free NVLink domain is broken, then the fewest free devices are left, then the fewest replicas of
        the model, then by name. Spread: the fewest replicas of the model, then the most free devices.
        """
        if policy is Packing.PACK:
            for score in sorted(self._nodes):
                yield from self._fewest_first(self._nodes[score], here)
            return
        later: list[tuple[int, int, str]] = []
        for score in sorted(self._nodes, key=lambda s: (-s[1], s[0])):
            for node in self._nodes[score]:
                if count := here.get(node, 0):
                    later.append((count, -score[1], node))
                else:
                    yield node
        for _, _, node in sorted(later):
            yield node

    @staticmethod
    def _fewest_first(nodes: Sequence[str], here: Mapping[str, int]) -> Iterator[str]:
        later = []
        for node in nodes:
            if here.get(node, 0):
                later.append((here[node], node))
            else:
                yield node
        for _, node in sorted(later):
            yield node


class Pool:
    """Every node's answer to one need: what it could give, or why not; ``by_filter`` has whom which filter refused."""

    def __init__(self, need: Need) -> None:
        self.need = need
        self.refused: dict[str, tuple[Refusal, ...]] = {}
        self.by_filter: dict[str, dict[str, None]] = {}
        self.offers: dict[str, dict[str, Choice]] = {name: {} for name in need.classes}
        self.ranked: dict[str, Ranking] = {name: Ranking() for name in need.classes}
        self.rails: dict[str, dict[Rails, Ranking]] = {name: {} for name in need.classes}
        self.stale: dict[str, None] = {}

    def ask(self, view: NodeView) -> None:
        """Ask a node (again)."""
        name = view.node.id
        self._forget(name)
        against = list(node_refusals(self.need, view))
        if not against:
            for device_class in self.need.classes:
                if device_class not in view.by_class:
                    continue
                found = devices_of(self.need, device_class, view)
                if isinstance(found, Refusal):
                    against.append(found)
                    continue
                self.offers[device_class][name] = found
                self.ranked[device_class].put(name, found)
                if self.need.nodes > 1:
                    for rails in rails_of(view.node):
                        self.rails[device_class].setdefault(rails, Ranking()).put(name, found)
        if not any(name in some for some in self.offers.values()):
            self.refused[name] = tuple(against)
            self.by_filter.setdefault(against[0].filter, {})[name] = None

    def _forget(self, name: str) -> None:
        if (against := self.refused.pop(name, None)) is not None:
            del self.by_filter[against[0].filter][name]
        for device_class in self.need.classes:
            if self.offers[device_class].pop(name, None) is not None:
                self.ranked[device_class].drop(name)
                for ranking in self.rails[device_class].values():
                    ranking.drop(name)


def rails_of(node: Node) -> tuple[Rails, ...]:
    """The sound fabrics that the node is on."""
    return tuple(Rails(f.label, f.kind.value, len(f.ports)) for f in node.inventory.fabrics if f.ports and not f.faults)


@frozen
class ClassSpan:
    """The nodes that have a class, and the least and the most memory of its devices, which its name rounds to GiB."""

    nodes: tuple[str, ...]
    least_mib: int | None
    most_mib: int | None


class Fleet:
    """All nodes, what is taken on each, and what was asked of them so far. Lives within one pass.

    ``sizes`` says how much memory profiles need, ``leaving`` has the devices by node that count as free because what
    runs there is going to leave them.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        taken: Mapping[str, Mapping[int, str]],
        sizes: Sizes | None = None,
        leaving: Mapping[str, Iterable[int]] = _NONE,
    ) -> None:
        self.sizes = sizes or Sizes()
        self._views = {
            node.id: NodeView(node, dict(taken.get(node.id, {})), frozenset(leaving.get(node.id, ()))) for node in nodes
        }
        self._pools: dict[Need, Pool] = {}

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[NodeView]:
        return iter(self._views.values())

    def view(self, node: str) -> NodeView:
        """A node with what is taken on it."""
        return self._views[node]

    @cached_property
    def classes(self) -> Mapping[str, ClassSpan]:
        """Every device class that there is: its nodes, and how much memory its devices have."""
        nodes: dict[str, list[str]] = {}
        totals: dict[str, set[int]] = {}
        for view in self._views.values():
            for name, devices in view.by_class.items():
                nodes.setdefault(name, []).append(view.node.id)
                totals.setdefault(name, set()).update(d.total_mib for d in devices if d.total_mib is not None)
        return {
            name: ClassSpan(tuple(some), min(totals[name], default=None), max(totals[name], default=None))
            for name, some in nodes.items()
        }

    def pool(self, need: Need) -> Pool:
        """Every node's answer to a need, as of now."""
        pool = self._pools.get(need)
        if pool is None:
            pool = self._pools[need] = Pool(need)
            pool.stale = dict.fromkeys(self._views)
        for name in pool.stale:
            pool.ask(self._views[name])
        pool.stale = {}
        return pool

    def take(self, node: str, devices: Iterable[int], shard: str) -> None:
        """These devices have a shard by now."""
        view = self._views[node]
        self._views[node] = evolve(view, taken={**view.taken, **dict.fromkeys(devices, shard)})
        for pool in self._pools.values():
            pool.stale[node] = None
