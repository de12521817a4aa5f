"""Finding a place for one replica: every profile in order, every node or set of nodes, and the reasons when none do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from attrs import evolve, frozen

from llmgw.scheduler.explain import Candidate, Refusal
from llmgw.scheduler.feasible import need_of
from llmgw.scheduler.fleet import Fleet, Pool, Ranking, rails_of
from llmgw.scheduler.state import Node
from llmgw.settings.catalog import Model, Profile
from llmgw.settings.memory import arithmetic_of, remedy_of

_MOST_SAID = 6
_LONGEST = 160
"""Bounds of what is stored with each placement: kinds of refusals, and letters of an example."""


@frozen
class Part:
    """What one node gives to a replica."""

    node: str
    devices: tuple[int, ...]


@frozen
class Placement:
    """Where a replica goes: one part a node, rank 0 first, all of one device class, and the fabric between them.

    ``against`` says in short what turned the others down: by filter, how many, and one of them.
    """

    profile: Profile
    device_class: str
    parts: tuple[Part, ...]
    fabric: str | None
    reason: str
    against: str = ""


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
    for at, profile in enumerate(model.profiles):
        if looking := fleet.sizes.looked_for_by(profile):
            # Those after it are not tried: what takes their place would keep it.
            not_yet = _not_yet(profile, looking)
            names = [later.name for later in model.profiles[at:]]
            candidates += [Candidate(view.node.id, name, (not_yet,)) for name in names for view in fleet]
            return NoPlace(f"profile {profile.name}: {not_yet.reason}", not_yet.remedy, tuple(candidates))
        small, least_mib = too_small(model, profile, fleet)
        pool = fleet.pool(need_of(profile, model.placement, least_mib))
        against: dict[str, list[Refusal]] = {}
        together: list[Candidate] = []
        for name in profile.device_class:
            if name in small:
                for node in fleet.classes[name].nodes:
                    against.setdefault(node, []).append(small[name])
                continue
            offers = pool.offers[name]
            if not offers:
                continue
            if (refusal := over_quota(model, profile, name, used, quotas)) is not None:
                for node in offers:
                    against.setdefault(node, []).append(refusal)
                continue
            found = _alone(model, pool, name, here) if profile.nodes == 1 else fabric_of(model, pool, name, here, fleet)
            if isinstance(found, Chosen):
                said = _against(candidates, pool, small, fleet)
                return evolve(_placement(model, profile, name, found, pool, fleet), against=said)
            if found is not None:
                together.append(Candidate("+".join(sorted(offers)), profile.name, (found,)))
                continue
            for node in offers:
                against.setdefault(node, []).append(too_many_here(model, node, here[node]))
        for node, some in pool.refused.items():
            against[node] = [*against.get(node, ()), *some]
        # By all that speaks against a node as it is before what speaks against one more replica there.
        order = sorted(against, key=lambda n: (n not in pool.refused, n))
        candidates += [Candidate(node, profile.name, tuple(against[node])) for node in order]
        candidates += together
    if not len(fleet):
        return NoPlace("no node has registered", "start llmgw agent on a node", ())
    return NoPlace(_summary(candidates), "", tuple(candidates))


def doubt(model: Model, profile: Profile, fleet: Fleet) -> NoPlace | None:
    """Why nothing that serves should give way to this profile: it fits nowhere, or nobody knows yet whether it does."""
    small, _ = too_small(model, profile, fleet)
    there = [name for name in profile.device_class if name in fleet.classes]
    if not fleet.sizes.looked_for_by(profile) and not (there and all(name in small for name in there)):
        return None
    found = place(evolve(model, profiles=(profile,)), fleet, {}, {}, {})
    return found if isinstance(found, NoPlace) else None


def _not_yet(profile: Profile, looking: Sequence[str]) -> Refusal:
    first = ", ".join(looking[:3]) + (f" and {len(looking) - 3} more" if len(looking) > 3 else "")
    reason = f"how large {profile.weights} is, is not known yet: {first} may have it"
    return Refusal("memory", reason, "wait: it is asked, for 10 s at most")


def too_small(model: Model, profile: Profile, fleet: Fleet) -> tuple[dict[str, Refusal], tuple[tuple[str, int], ...]]:
    """The device classes none of whose devices can hold the profile, and what a device of another must have (MiB).

    Asked of classes, not of devices: a class has one size but for its rounding, and what all of it can hold needs no
    question of any node.
    """
    small: dict[str, Refusal] = {}
    some: list[tuple[str, int]] = []
    for name, counted in fleet.sizes.of(model.name, profile).items():
        span = fleet.classes.get(name)
        if span is None or span.least_mib is None or span.most_mib is None or counted.fits(span.least_mib):
            continue
        if counted.fits(span.most_mib):
            some.append((name, counted.least_mib))
            continue
        small[name] = Refusal("memory", arithmetic_of(counted, span.most_mib), remedy_of(profile, counted))
    return small, tuple(some)


@frozen
class Chosen:
    """The nodes of a place, the fabric between them, and how many could have been taken."""

    nodes: tuple[str, ...]
    fabric: str | None
    of: int


def _room(model: Model, ranking: Ranking, here: Mapping[str, int]) -> Iterator[str]:
    """Nodes best first, without those that have as many replicas of the model as they may."""
    most = model.placement.per_node
    for node in ranking.ordered(model.placement.policy, here):
        if most is None or here.get(node, 0) < most:
            yield node


def _alone(model: Model, pool: Pool, name: str, here: Mapping[str, int]) -> Chosen | None:
    ranking = pool.ranked[name]
    node = next(_room(model, ranking, here), None)
    return None if node is None else Chosen((node,), None, len(ranking))


def fabric_of(model: Model, pool: Pool, name: str, here: Mapping[str, int], fleet: Fleet) -> Chosen | Refusal:
    """Nodes of one device class on one fabric with as many rails, or why there are not enough.

    NCCL pairs adapters by position, so nodes with another number of ports of the fabric do not go together.
    """
    count = pool.need.nodes
    groups = {rails: ranking for rails, ranking in pool.rails[name].items() if len(ranking)}
    # The smallest group that is big enough, so that large fabrics stay whole.
    for rails, ranking in sorted(groups.items(), key=lambda g: (len(g[1]), g[0].label, -g[0].ports, g[0].kind)):
        chosen = tuple(itertools.islice(_room(model, ranking, here), count))
        if len(chosen) == count:
            return Chosen(tuple(sorted(chosen)), rails.label, len(ranking))
    there = [
        f"{rails.label} has {len(some)} ({', '.join(some)}, {rails.ports} x {rails.kind})"
        for rails, ranking in sorted(groups.items(), key=lambda g: (g[0].label, g[0].ports, g[0].kind))
        if (some := list(_room(model, ranking, here)))
    ]
    for node in sorted(pool.offers[name]):
        if not rails_of(fleet.view(node).node):
            there.append(f"{node} {_no_fabric(fleet.view(node).node)}")
        elif model.placement.per_node is not None and here.get(node, 0) >= model.placement.per_node:
            there.append(too_many_here(model, node, here[node]).reason)
    reason = f"needs one fabric over {count} nodes of {name}: {'; '.join(there)}"
    remedy = "free or add nodes on one fabric with as many ports each, or use a profile that fits one node"
    return Refusal("fabric", reason, remedy)


def too_many_here(model: Model, node: str, count: int) -> Refusal:
    """Why a node with so many replicas of the model gets no more."""
    most = model.placement.per_node
    reason = f"{node} has {count} of {model.name}, placement.per_node allows {most}"
    return Refusal("per-node", reason, "add nodes, or raise placement.per_node")


def over_quota(
    model: Model, profile: Profile, name: str, used: Mapping[str, int], quotas: Mapping[str, int]
) -> Refusal | None:
    """Whether one more replica would be over its group's quota of a class."""
    most = quotas.get(name)
    if most is None or used.get(name, 0) + profile.devices <= most:
        return None
    reason = f"group {model.group} has {used.get(name, 0)} of its {most} {name}, {profile.devices} more are needed"
    return Refusal("quota", reason, f"raise quotas.{model.group}.{name}, or lower the replicas of the group")


def _placement(model: Model, profile: Profile, name: str, chosen: Chosen, pool: Pool, fleet: Fleet) -> Placement:
    parts, where = [], []
    for node in chosen.nodes:
        devices = pool.offers[name][node].devices
        parts.append(Part(node, devices))
        inventory = fleet.view(node).node.inventory
        labels = [d.label for n in devices if (d := inventory.device(n)) is not None]
        where.append(f"{node}: {', '.join(labels)}")
    over = f" over fabric {chosen.fabric}" if chosen.fabric is not None else ""
    others = f", of {chosen.of} nodes that could" if chosen.of > len(chosen.nodes) else ""
    counted = fleet.sizes.of(model.name, profile).get(name)
    memory = "" if counted is None else f"; {counted.short}"
    reason = f"profile {profile.name} on {'; '.join(where)} ({name}){over}{others}{memory}"
    return Placement(profile, name, tuple(parts), chosen.fabric, reason)


def _against(before: Sequence[Candidate], pool: Pool, small: Mapping[str, Refusal], fleet: Fleet) -> str:
    """What turned down the profiles that come before the chosen one, and the nodes that could not have it."""
    said = []
    profiles = {c.profile: [o for o in before if o.profile == c.profile] for c in before}
    for profile, candidates in list(profiles.items())[:_MOST_SAID]:
        firsts: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            firsts.setdefault(candidate.refusals[0].filter, []).append(candidate)
        counts = {name: (len(some), f"{some[0].node}: {some[0].refusals[0].reason}") for name, some in firsts.items()}
        said.append(f"profile {profile} has no place ({_counted(counts)})")
    others = {
        name: (len(nodes), f"{node}: {pool.refused[node][0].reason}")
        for name, nodes in pool.by_filter.items()
        if nodes
        for node in (min(nodes),)
    }
    if small:
        first = next(iter(small))
        count = sum(len(fleet.classes[name].nodes) for name in small)
        others["memory"] = (count, f"{first}: {small[first].reason}")
    if others:
        said.append(f"other nodes could not ({_counted(others)})")
    return "; ".join(said)


def _counted(counts: Mapping[str, tuple[int, str]]) -> str:
    """``3 by devices, such as n4: 1 of 1 devices short: …``, the most frequent filter first."""
    ranked = sorted(counts.items(), key=lambda i: (-i[1][0], i[0]))[:_MOST_SAID]
    return "; ".join(
        f"{count} by {name}, such as {text if len(text) <= _LONGEST else f'{text[:_LONGEST]}…'}"
        for name, (count, text) in ranked
    )


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
