"""Finding a place for one replica: every profile in order, every node or set of nodes, and the reasons when none do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from llmgw.scheduler.explain import Candidate, Refusal
from llmgw.scheduler.feasible import Choice, NodeView, devices_of, node_refusals
from llmgw.scheduler.state import Node
from llmgw.settings.catalog import Model, Profile


@frozen
class Part:
    """What one node gives to a replica."""

    node: str
    devices: tuple[int, ...]


@frozen
class Placement:
    """Where a replica goes: one part a node, rank 0 first, and the fabric that connects them."""

    profile: Profile
    parts: tuple[Part, ...]
    fabric: str | None
    reason: str


@frozen
class NoPlace:
    """Nowhere, and why: the sentence for the whole, and each candidate with what turned it down."""

    reason: str
    remedy: str
    candidates: tuple[Candidate, ...]


@frozen
class _Offer:
    """Devices of one class that a node could give."""

    view: NodeView
    choice: Choice


@frozen
class _Rails:
    """Which nodes could run one replica together: the same fabric of the same kind, over as many ports."""

    label: str
    kind: str
    ports: int


def views(nodes: Iterable[Node], taken: Mapping[str, Mapping[int, str]]) -> tuple[NodeView, ...]:
    """The nodes with what is taken on each."""
    return tuple(NodeView(node, taken.get(node.id, {})) for node in nodes)


def place(
    model: Model, nodes: Sequence[NodeView], here: Mapping[str, int], profiles: Sequence[Profile] | None = None
) -> Placement | NoPlace:
    """A place for one more replica of ``model``; ``here`` counts its replicas by node.

    Profiles are tried in the operator's order: a place for an earlier one is better than any for a later one.
    """
    candidates: list[Candidate] = []
    for profile in model.profiles if profiles is None else profiles:
        offers, refused = _offers(profile, nodes)
        candidates += refused
        if profile.nodes == 1:
            if offers:
                best = min((o for some in offers.values() for o in some), key=lambda o: _score(o, here))
                return _placement(profile, (best,), None, sum(len(some) for some in offers.values()))
            continue
        found = _together(profile, offers, here)
        if isinstance(found, Placement):
            return found
        candidates += found
    if not nodes:
        return NoPlace("no node has registered", "start llmgw agent on a node", ())
    return NoPlace(_summary(candidates), "", tuple(candidates))


def _offers(profile: Profile, nodes: Sequence[NodeView]) -> tuple[dict[str, list[_Offer]], list[Candidate]]:
    """What each node could give, by device class in the profile's order, and why the others cannot."""
    offers: dict[str, list[_Offer]] = {name: [] for name in profile.device_class}
    refused: list[Candidate] = []
    for view in nodes:
        against = list(node_refusals(profile, view))
        found = False
        if not against:
            for name in profile.device_class:
                if not any(d.device_class == name for d in view.node.inventory.devices):
                    continue
                choice = devices_of(profile, name, view)
                if isinstance(choice, Refusal):
                    against.append(choice)
                    continue
                offers[name].append(_Offer(view, choice))
                found = True
                if profile.nodes == 1:
                    break
        if not found:
            refused.append(Candidate(view.node.id, profile.name, tuple(against)))
    return {name: some for name, some in offers.items() if some}, refused


def _together(
    profile: Profile, offers: Mapping[str, Sequence[_Offer]], here: Mapping[str, int]
) -> Placement | list[Candidate]:
    """Nodes of one device class on one fabric with as many rails, or why there are not enough.

    NCCL pairs adapters by position, so nodes with another number of ports of the fabric do not go together.
    """
    refused: list[Candidate] = []
    for name, some in offers.items():
        groups: dict[_Rails, list[_Offer]] = {}
        islands: list[str] = []
        for offer in some:
            reached = [
                _Rails(f.label, f.kind.value, len(f.ports))
                for f in offer.view.node.inventory.fabrics
                if f.ports and not f.faults
            ]
            if not reached:
                islands.append(f"{offer.view.node.id} {_no_fabric(offer.view.node)}")
            for each in reached:
                groups.setdefault(each, []).append(offer)
        fitting = {rails: group for rails, group in groups.items() if len(group) >= profile.nodes}
        if fitting:
            # The smallest group that is big enough, so that large fabrics stay whole.
            rails, group = min(fitting.items(), key=lambda g: (len(g[1]), g[0].label, -g[0].ports))
            chosen = sorted(sorted(group, key=lambda o: _score(o, here))[: profile.nodes], key=lambda o: o.view.node.id)
            return _placement(profile, tuple(chosen), rails.label, len(group))
        there = [
            f"{rails.label} has {len(group)} ({', '.join(o.view.node.id for o in group)}, {rails.ports} x {rails.kind})"
            for rails, group in sorted(groups.items(), key=lambda g: (g[0].label, g[0].ports))
        ]
        reason = f"needs one fabric over {profile.nodes} nodes of {name}: {'; '.join([*there, *islands])}"
        remedy = "free or add nodes on one fabric with as many ports each, or use a profile that fits one node"
        together = "+".join(o.view.node.id for o in some)
        refused.append(Candidate(together, profile.name, (Refusal("fabric", reason, remedy),)))
    return refused


def _no_fabric(node: Node) -> str:
    """Why a node is an island."""
    faults = [f"{f.label}: {f.faults[0].reason}" for f in node.inventory.fabrics if f.faults]
    return f"is on no fabric that works ({'; '.join(faults)})" if faults else "is on no fabric"


def _placement(profile: Profile, offers: Sequence[_Offer], fabric: str | None, of: int) -> Placement:
    where = []
    for offer in offers:
        inventory = offer.view.node.inventory
        labels = [d.label for n in offer.choice.devices if (d := inventory.device(n)) is not None]
        where.append(f"{offer.view.node.id}: {', '.join(labels)}")
    over = f" over fabric {fabric}" if fabric is not None else ""
    others = f", of {of} nodes that could" if of > len(offers) else ""
    reason = f"profile {profile.name} on {'; '.join(where)} ({offers[0].choice.device_class}){over}{others}"
    parts = tuple(Part(offer.view.node.id, offer.choice.devices) for offer in offers)
    return Placement(profile, parts, fabric, reason)


def _score(offer: _Offer, here: Mapping[str, int]) -> tuple[int, int, str]:
    """Smaller is better. Pack: the node that has the fewest free devices left; then the one with fewer replicas of
    the same model; then by name, so that the same question always gets the same answer."""
    view = offer.view
    free = sum(1 for d in view.node.inventory.devices if not d.faults and d.number not in view.taken)
    return free, here.get(view.node.id, 0), view.node.id


def _summary(candidates: Sequence[Candidate]) -> str:
    """One sentence out of all refusals: how many candidates each filter turned down."""
    by_filter: dict[str, int] = {}
    for candidate in candidates:
        for refusal in candidate.refusals[:1]:
            by_filter[refusal.filter] = by_filter.get(refusal.filter, 0) + 1
    parts = ", ".join(f"{count} by {name}" for name, count in sorted(by_filter.items(), key=lambda i: (-i[1], i[0])))
    total = len(candidates)
    return f"no node can take it: {total} candidate{'s' if total != 1 else ''} turned down ({parts})"
