"""Why a replica that has a place did not get another one: every other node, and the profiles before its own. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import frozen

from llmgw.scheduler.explain import Candidate, Refusal
from llmgw.scheduler.feasible import need_of
from llmgw.scheduler.fleet import Fleet, Pool, rails_of
from llmgw.scheduler.place import fabric_of, over_quota, too_many_here, too_small
from llmgw.settings.catalog import Model, Profile


@frozen
class Settled:
    """What places of one model and profile came to: their nodes, device class and fabric."""

    nodes: frozenset[str]
    device_class: str
    fabric: str | None


@frozen
class Room:
    """What was left after the placement, as :func:`llmgw.scheduler.place.place` takes it.

    A placement only takes: whatever can be had after it could be had before it too.
    """

    fleet: Fleet
    here: Mapping[str, int]
    used: Mapping[str, int]
    quotas: Mapping[str, int]


def elsewhere(model: Model, profile: Profile, settled: Settled, room: Room) -> tuple[Candidate, ...]:
    """Each other candidate with what spoke against it."""
    made: list[Candidate] = []
    for earlier in model.profiles:
        if earlier.name == profile.name:
            break
        made += _earlier(model, earlier, room)
    pool, small = _asked(model, profile, room)
    for view in room.fleet:
        node = view.node.id
        if node not in settled.nodes:
            against = [small[name] for name in view.by_class if name in small]
            against += pool.refused.get(node) or _others(model, profile, settled, node, room)
            made.append(Candidate(node, profile.name, tuple(against)))
    return tuple(made)


def _asked(model: Model, profile: Profile, room: Room) -> tuple[Pool, dict[str, Refusal]]:
    """Every node's answer, and the device classes that are too small for the profile."""
    small, least_mib = too_small(model, profile, room.fleet)
    return room.fleet.pool(need_of(profile, model.placement, least_mib)), small


def _earlier(model: Model, profile: Profile, room: Room) -> Iterable[Candidate]:
    """Every node for a profile that the model would rather have."""
    pool, small = _asked(model, profile, room)
    for view in room.fleet:
        node = view.node.id
        against = [*(small[name] for name in view.by_class if name in small), *pool.refused.get(node, ())]
        if against:
            yield Candidate(node, profile.name, tuple(against))
    for name in profile.device_class:
        if name in small:
            continue
        offers = sorted(pool.offers[name])
        if offers and profile.nodes > 1 and over_quota(model, profile, name, room.used, room.quotas) is None:
            found = fabric_of(model, pool, name, room.here, room.fleet)
            if isinstance(found, Refusal):
                yield Candidate("+".join(offers), profile.name, (found,))
            continue
        for node in offers:
            yield Candidate(node, profile.name, (_bounds(model, profile, name, node, room) or _late(name),))


def _others(model: Model, profile: Profile, settled: Settled, node: str, room: Room) -> Iterable[Refusal]:
    """Why a node that could take it did not get it, by the classes that it offers."""
    pool, small = _asked(model, profile, room)
    order = {name: at for at, name in enumerate(profile.device_class)}
    chosen = order.get(settled.device_class, len(order))
    for name in profile.device_class:
        if node not in pool.offers[name] or name in small:
            continue
        if order[name] < chosen:
            yield _bounds(model, profile, name, node, room) or _late(name)
        elif (many := _too_many(model, node, room)) is not None:
            yield many
        elif order[name] > chosen:
            reason = f"could give {name}, which the profile names after {settled.device_class}"
            yield Refusal("preference", reason)
        elif settled.fabric is not None and settled.fabric not in {
            r.label for r in rails_of(room.fleet.view(node).node)
        }:
            yield Refusal("fabric", f"{node} is not on fabric {settled.fabric}", f"connect it to {settled.fabric}")
        else:
            first = ", ".join(sorted(settled.nodes)[:3]) + (" and others" if len(settled.nodes) > 3 else "")
            reason = f"could take it as well; {model.placement.policy.value} takes {first} first"
            yield Refusal("preference", reason)


def _bounds(model: Model, profile: Profile, name: str, node: str, room: Room) -> Refusal | None:
    return over_quota(model, profile, name, room.used, room.quotas) or _too_many(model, node, room)


def _too_many(model: Model, node: str, room: Room) -> Refusal | None:
    most = model.placement.per_node
    count = room.here.get(node, 0)
    return too_many_here(model, node, count) if most is not None and count >= most else None


def _late(name: str) -> Refusal:
    return Refusal("preference", f"its {name} was not free yet")
