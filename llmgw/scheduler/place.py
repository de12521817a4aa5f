"""Finding a place for one replica: every profile in order, every node, and the reasons when none will do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from llmgw.scheduler.explain import Candidate, Refusal
from llmgw.scheduler.feasible import Choice, NodeView, devices_of, node_refusals
from llmgw.scheduler.state import Node
from llmgw.settings.catalog import Model, Profile


@frozen
class Placement:
    """Where a replica goes. One shard on one node for now."""

    profile: Profile
    node: str
    devices: tuple[int, ...]
    reason: str


@frozen
class NoPlace:
    """Nowhere, and why: the sentence for the whole, and each candidate with what turned it down."""

    reason: str
    remedy: str
    candidates: tuple[Candidate, ...]


def views(nodes: Iterable[Node], taken: Mapping[str, Mapping[int, str]]) -> tuple[NodeView, ...]:
    """The nodes with what is taken on each."""
    return tuple(NodeView(node, taken.get(node.id, {})) for node in nodes)


def _score(view: NodeView, replicas_here: int) -> tuple[int, int, str]:
    """Smaller is better. Pack: the node that has the fewest free devices left; then the one with fewer replicas of
    the same model; then by name, so that the same question always gets the same answer."""
    free = sum(1 for d in view.node.inventory.devices if not d.faults and d.number not in view.taken)
    return free, replicas_here, view.node.id


def _try(profile: Profile, view: NodeView) -> Choice | tuple[Refusal, ...]:
    refusals = node_refusals(profile, view)
    if refusals:
        return refusals
    there = {d.device_class for d in view.node.inventory.devices}
    against: list[Refusal] = []
    for name in profile.device_class:
        if name not in there:
            continue
        found = devices_of(profile, name, view)
        if isinstance(found, Choice):
            return found
        against.append(found)
    return tuple(against)


def place(
    model: Model, nodes: Sequence[NodeView], here: Mapping[str, int], profiles: Sequence[Profile] | None = None
) -> Placement | NoPlace:
    """A place for one more replica of ``model``; ``here`` counts its replicas by node.

    Profiles are tried in the operator's order: a place for an earlier one is better than any for a later one.
    """
    candidates: list[Candidate] = []
    for profile in model.profiles if profiles is None else profiles:
        choices: list[tuple[NodeView, Choice]] = []
        for view in nodes:
            found = _try(profile, view)
            if isinstance(found, Choice):
                choices.append((view, found))
            else:
                candidates.append(Candidate(view.node.id, profile.name, found))
        if choices:
            view, choice = min(choices, key=lambda c: _score(c[0], here.get(c[0].node.id, 0)))
            labels = [d.label for n in choice.devices if (d := view.node.inventory.device(n)) is not None]
            others = f", of {len(choices)} nodes that could" if len(choices) > 1 else ""
            reason = f"profile {profile.name} on {view.node.id}: {', '.join(labels)} ({choice.device_class}){others}"
            return Placement(profile, view.node.id, choice.devices, reason)
    if not nodes:
        return NoPlace("no node has registered", "start llmgw agent on a node", ())
    return NoPlace(_summary(candidates), "", tuple(candidates))


def _summary(candidates: Sequence[Candidate]) -> str:
    """One sentence out of all refusals: how many candidates each filter turned down."""
    by_filter: dict[str, int] = {}
    for candidate in candidates:
        for refusal in candidate.refusals[:1]:
            by_filter[refusal.filter] = by_filter.get(refusal.filter, 0) + 1
    parts = ", ".join(f"{count} by {name}" for name, count in sorted(by_filter.items(), key=lambda i: (-i[1], i[0])))
    total = len(candidates)
    return f"no node can take it: {total} candidate{'s' if total != 1 else ''} turned down ({parts})"
