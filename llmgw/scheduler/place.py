"""Finding a place for one replica: every profile in order, every node or set of nodes, and the reasons when none do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from attrs import frozen

from llmgw.scheduler.explain import Candidate, Refusal
from llmgw.scheduler.feasible import need_of
from llmgw.scheduler.fleet import Fleet, Pool, Ranking, rails_of
from llmgw.scheduler.state import Node
from llmgw.settings.catalog import Model, Profile


@frozen
class Part:
    """What one node gives to a replica."""

    node: str
    devices: tuple[int, ...]


@frozen
class Placement:
    """Where a replica goes: one part a node, rank 0 first, all of one device class, and the fabric between them."""

    profile: Profile
    device_class: str
    parts: tuple[Part, ...]
    fabric: str | None
    reason: str


@frozen
class NoPlace:
    """Nowhere, and why: the sentence for the whole, and each candidate with what turned it down."""

    reason: str
    remedy: str
    candidates: tuple[Candidate, ...]


def place(
    model: Model, fleet: Fleet, here: Mapping[str, int], used: Mapping[str, int], quotas: Mapping[str, int]
) -> Placement | NoPlace:
    """A place for one more replica of ``model``; ``here`` counts its replicas by node.

    ``used`` counts the devices that the model's group has, by class, and ``quotas`` how many it may have. Profiles are
    tried in the operator's order, and classes in the profile's: a place for an earlier one is better than any other.
    """
    candidates: list[Candidate] = []
    for profile in model.profiles:
        pool = fleet.pool(need_of(profile, model.placement))
        against: dict[str, list[Refusal]] = {}
        together: list[Candidate] = []
        for name in profile.device_class:
            offers = pool.offers[name]
            if not offers:
                continue
            if (refusal := _over_quota(model, profile, name, used, quotas)) is not None:
                for node in offers:
                    against.setdefault(node, []).append(refusal)
                continue
            found = _alone(model, pool, name, here) if profile.nodes == 1 else _together(model, pool, name, here, fleet)
            if isinstance(found, _Chosen):
                return _placement(profile, name, found, pool, fleet)
            if profile.nodes > 1 and found is not None:
                together.append(Candidate("+".join(sorted(offers)), profile.name, (found,)))
                continue
            for node in offers:
                against.setdefault(node, []).append(_too_many_here(model, node, here[node]))
        candidates += [Candidate(node, profile.name, pool.refused[node]) for node in sorted(pool.refused)]
        candidates += [Candidate(node, profile.name, tuple(some)) for node, some in sorted(against.items())]
        candidates += together
    if not len(fleet):
        return NoPlace("no node has registered", "start llmgw agent on a node", ())
    return NoPlace(_summary(candidates), "", tuple(candidates))


@frozen
class _Chosen:
    nodes: tuple[str, ...]
    fabric: str | None
    of: int


def _room(model: Model, ranking: Ranking, here: Mapping[str, int]) -> Iterator[str]:
    """Nodes best first, without those that have as many replicas of the model as they may."""
    most = model.placement.per_node
    for node in ranking.ordered(model.placement.policy, here):
        if most is None or here.get(node, 0) < most:
            yield node


def _alone(model: Model, pool: Pool, name: str, here: Mapping[str, int]) -> _Chosen | None:
    ranking = pool.ranked[name]
    node = next(_room(model, ranking, here), None)
    return None if node is None else _Chosen((node,), None, len(ranking))


def _together(model: Model, pool: Pool, name: str, here: Mapping[str, int], fleet: Fleet) -> _Chosen | Refusal:
    """Nodes of one device class on one fabric with as many rails, or why there are not enough.

    NCCL pairs adapters by position, so nodes with another number of ports of the fabric do not go together.
    """
    count = pool.need.nodes
    groups = {rails: ranking for rails, ranking in pool.rails[name].items() if len(ranking)}
    # The smallest group that is big enough, so that large fabrics stay whole.
    for rails, ranking in sorted(groups.items(), key=lambda g: (len(g[1]), g[0].label, -g[0].ports)):
        chosen = tuple(itertools.islice(_room(model, ranking, here), count)) if len(ranking) >= count else ()
        if len(chosen) == count:
            return _Chosen(tuple(sorted(chosen)), rails.label, len(ranking))
    there = [
        f"{rails.label} has {len(some)} ({', '.join(some)}, {rails.ports} x {rails.kind})"
        for rails, ranking in sorted(groups.items(), key=lambda g: (g[0].label, g[0].ports))
        if (some := list(_room(model, ranking, here)))
    ]
    for node in sorted(pool.offers[name]):
        if not rails_of(fleet.view(node).node):
            there.append(f"{node} {_no_fabric(fleet.view(node).node)}")
        elif model.placement.per_node is not None and here.get(node, 0) >= model.placement.per_node:
            there.append(_too_many_here(model, node, here[node]).reason)
    reason = f"needs one fabric over {count} nodes of {name}: {'; '.join(there)}"
    remedy = "free or add nodes on one fabric with as many ports each, or use a profile that fits one node"
    return Refusal("fabric", reason, remedy)


def _too_many_here(model: Model, node: str, count: int) -> Refusal:
    most = model.placement.per_node
    reason = f"{node} has {count} of {model.name}, placement.per_node allows {most}"
    return Refusal("per-node", reason, "add nodes, or raise placement.per_node")


def _over_quota(
    model: Model, profile: Profile, name: str, used: Mapping[str, int], quotas: Mapping[str, int]
) -> Refusal | None:
    most = quotas.get(name)
    if most is None or used.get(name, 0) + profile.devices <= most:
        return None
    reason = f"group {model.group} has {used.get(name, 0)} of its {most} {name}, {profile.devices} more are needed"
    return Refusal("quota", reason, f"raise quotas.{model.group}.{name}, or lower the replicas of the group")


def _placement(profile: Profile, name: str, chosen: _Chosen, pool: Pool, fleet: Fleet) -> Placement:
    parts, where = [], []
    for node in chosen.nodes:
        devices = pool.offers[name][node].devices
        parts.append(Part(node, devices))
        inventory = fleet.view(node).node.inventory
        labels = [d.label for n in devices if (d := inventory.device(n)) is not None]
        where.append(f"{node}: {', '.join(labels)}")
    over = f" over fabric {chosen.fabric}" if chosen.fabric is not None else ""
    others = f", of {chosen.of} nodes that could" if chosen.of > len(chosen.nodes) else ""
    reason = f"profile {profile.name} on {'; '.join(where)} ({name}){over}{others}"
    return Placement(profile, name, tuple(parts), chosen.fabric, reason)


def _no_fabric(node: Node) -> str:
    """Why a node is an island."""
    faults = [f"{f.label}: {f.faults[0].reason}" for f in node.inventory.fabrics if f.faults]
    return f"is on no fabric that works ({'; '.join(faults)})" if faults else "is on no fabric"


def _summary(candidates: Sequence[Candidate]) -> str:
    """One sentence out of all refusals: how many candidates each filter turned down."""
    by_filter: dict[str, int] = {}
    for candidate in candidates:
        for refusal in candidate.refusals[:1]:
            by_filter[refusal.filter] = by_filter.get(refusal.filter, 0) + 1
    parts = ", ".join(f"{count} by {name}" for name, count in sorted(by_filter.items(), key=lambda i: (-i[1], i[0])))
    total = len(candidates)
    return f"no node can take it: {total} candidate{'s' if total != 1 else ''} turned down ({parts})"
