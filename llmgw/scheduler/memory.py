"""Sizes of profiles as one pass sees them: the estimate, corrected by what ran, and who is still looking.

What ran corrects what is counted, by this rule. A profile that has served on a device class fits there, whatever the
arithmetic says. On another class it needs no more than the least that it was ever seen to run in, and with llama.cpp,
which takes what it needs and no more, just what it was seen to take. A correction moves the figure by a quarter upward
and a half downward at most, so one odd measurement can make no model unplaceable where it ran, and elsewhere only one
that is within a quarter of the limit; an edited profile begins anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from attrs import evolve, frozen

from llmgw.settings.catalog import EngineKind, Profile
from llmgw.settings.digest import profile_digest
from llmgw.settings.memory import GIB, MIB, Amount, Estimate, estimate
from llmgw.settings.weight_facts import WeightFacts

MOST_UP, MOST_DOWN = 1.25, 0.5
_NOTICED = 1.01
"""A figure that is less than this above the known one is not worth writing down."""

_NONE: Mapping[str, Estimate] = MappingProxyType({})


@frozen
class Learned:
    """The most that a shard of this profile was seen holding of any one device of this class while it served.

    ``digest`` names the profile with its model (:func:`llmgw.settings.digest.profile_digest`); ``at`` is in epoch
    seconds.
    """

    digest: str
    device_class: str
    held_mib: int
    at: float


def absorbed(known: Learned | None, new: Learned) -> Learned:
    """What is known after another measurement: the higher of the two, and the known one where they hardly differ."""
    return new if known is None or new.held_mib > known.held_mib * _NOTICED else known


def corrected(counted: Estimate, kind: EngineKind, device_class: str, ran: Iterable[Learned]) -> Estimate:
    """The estimate for one device class with what was measured of this very profile."""
    known = sorted(ran, key=lambda r: (r.held_mib, r.device_class))
    if not known:
        return counted
    here = next((r for r in known if r.device_class == device_class), None)
    exact = kind is EngineKind.LLAMACPP
    taken = here or (known[-1] if exact else known[0])
    held = taken.held_mib * MIB
    least, most = int(counted.counted * MOST_DOWN), int(counted.counted * MOST_UP) if exact else counted.counted
    size = max(least, min(most, held))
    measured = None
    if size != counted.counted:
        bound = "" if size == held else f", of which {size / GIB:.1f} are believed"
        measured = Amount(size, f"learned: it ran in {held / GIB:.1f} on {taken.device_class}{bound}")
    return evolve(counted, measured=measured, proven=here is not None)


class Sizes:
    """What profiles need, each counted once. Lives within one pass.

    ``weights`` are the facts by what profiles call the weights, ``looking`` the nodes that have not said yet whether
    they have them.
    """

    def __init__(
        self,
        weights: Mapping[str, WeightFacts] = MappingProxyType({}),
        learned: Iterable[Learned] = (),
        looking: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    ) -> None:
        self._weights = weights
        self._looking = looking
        self._learned: dict[str, list[Learned]] = {}
        for item in learned:
            self._learned.setdefault(item.digest, []).append(item)
        self._made: dict[tuple[str, Profile], Mapping[str, Estimate]] = {}

    def of(self, model: str, profile: Profile) -> Mapping[str, Estimate]:
        """By device class; empty where nobody can tell, or where the operator has said it by ``memory_gib``."""
        key = (model, profile)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._count(model, profile)
        return found

    def _count(self, model: str, profile: Profile) -> Mapping[str, Estimate]:
        counted = None if profile.memory_gib is not None else estimate(profile, self._weights.get(profile.weights))
        if counted is None:
            return _NONE
        ran = self._learned.get(profile_digest(model, profile), ()) if self._learned else ()
        return {name: corrected(counted, profile.engine, name, ran) for name in profile.device_class}

    def looked_for_by(self, profile: Profile) -> tuple[str, ...]:
        """The nodes whose answer may still tell how large it is, where nobody's has yet."""
        if profile.memory_gib is not None or profile.weights in self._weights:
            return ()
        return self._looking.get(profile.weights, ())
