"""MIG arithmetic: which profiles a card has, where their instances may sit, and which fit beside which.

Numbers: `nvidia-smi mig -lgip` and `-lgipp` of each card, and NVIDIA's MIG user guide
(https://docs.nvidia.com/datacenter/tesla/mig-user-guide/). A table like this is never complete: it explains and
suggests, and what the driver reports holds whether it stands here or not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations

from attrs import field, frozen

from llmgw.hardware.gpu import card_name

_NAME = re.compile(
    r"(?:(?P<compute>[1-9])c\.)?(?P<slices>[1-9])g\.(?P<gb>[0-9]{1,4})gb(?P<attributes>(?:[+-][a-z]+(?:\.[a-z]+)?)*)"
)


@frozen
class ProfileName:
    """A profile's name taken apart. ``compute`` is ``None`` unless the instance has only a part of the GPU instance;
    ``gb`` is the name's number, which is no memory size to calculate with."""

    compute: int | None
    slices: int
    gb: int
    attributes: tuple[str, ...]


@frozen
class MigProfile:
    """One GPU instance profile of one card.

    ``id`` is what `nvidia-smi mig -cgi` takes; ``slices`` are compute slices; ``size`` is how many units of the card's
    placement grid an instance covers, from one of ``starts`` on; ``limit`` is how many a card can have; ``memory_mib``
    is what an instance has as the driver reports it, ``None`` where no driver was seen to report it or two differ.
    """

    name: str
    id: int
    slices: int
    size: int
    starts: tuple[int, ...]
    limit: int
    memory_mib: int | None = None
    aliases: tuple[str, ...] = ()

    @property
    def media(self) -> bool:
        """Whether it takes the card's media extension, of which there is one."""
        return "+me" in self.name

    def excludes(self, other: MigProfile) -> bool:
        """Whether the two want the same media engines: ``+me.all`` takes every one, so beside it only ``-me`` fits
        (the DEC, ENC and JPEG columns of `nvidia-smi mig -lgip`: four of the card's four)."""
        if self.media and other.media:
            return True
        return any(a.name.endswith("+me.all") and not b.name.endswith("-me") for a, b in ((self, other), (other, self)))


@frozen
class MigCard:
    """A card that can be cut: its placement grid in units, its compute slices, and its profiles, smallest first."""

    grid: int
    slices: int
    memory_mib: int
    profiles: tuple[MigProfile, ...]

    def profile(self, name: str) -> MigProfile | None:
        """The GPU instance profile of this name, under whichever name a driver gives it."""
        wanted = gpu_instance_profile(name)
        return next((p for p in self.profiles if wanted == p.name or wanted in p.aliases), None)


@frozen
class Placed:
    """A GPU instance at its place: the first unit that it covers."""

    profile: str
    start: int


def parse_profile(name: str) -> ProfileName | None:
    """``1c.3g.71gb`` and ``1g.24gb+me.all`` taken apart; ``None`` for what is no profile's name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    attributes = tuple(re.findall(r"[+-][a-z.]+", match["attributes"]))
    compute = None if match["compute"] is None else int(match["compute"])
    return ProfileName(compute, int(match["slices"]), int(match["gb"]), attributes)


def gpu_instance_profile(name: str) -> str:
    """The GPU instance that a compute instance is part of: ``3g.71gb`` of ``1c.3g.71gb``."""
    return re.sub(r"^[1-9]c\.", "", name)


def mig_card(device_class: str) -> MigCard | None:
    """The card of a class such as ``h100-80g``; ``None`` when it cannot be cut or is not in the table."""
    return _CARDS.get(device_class.partition("-mig-")[0])


def free_starts(card: MigCard, placed: Sequence[Placed], name: str) -> tuple[int, ...]:
    """Where one more instance of this profile fits beside what is placed."""
    return _free(card, tuple(placed), name)


def _free(card: MigCard, placed: tuple[Placed, ...], name: str) -> tuple[int, ...]:
    profile = card.profile(name)
    if profile is None:
        return ()
    taken: set[int] = set()
    slices = 0
    same = 0
    for item in placed:
        other = card.profile(item.profile)
        if other is None:
            return ()
        taken.update(range(item.start, item.start + other.size))
        slices += other.slices
        same += other is profile
        # Up to the limit of its own profile, an instance never stands in the way of its like by its engines.
        if other is not profile and profile.excludes(other):
            return ()
    if same >= profile.limit or slices + profile.slices > card.slices:
        return ()
    return tuple(s for s in profile.starts if taken.isdisjoint(range(s, s + profile.size)))


def room(card: MigCard, placed: Sequence[Placed]) -> Mapping[str, int]:
    """How many more instances of each profile alone would fit beside what is placed; only those that do."""
    made = {}
    for profile in card.profiles:
        now = tuple(placed)
        count = 0
        # Starts of one profile never overlap each other half way, so taking the first free one loses nothing.
        while starts := _free(card, now, profile.name):
            now = (*now, Placed(profile.name, starts[0]))
            count += 1
        if count:
            made[profile.name] = count
    return made


def arrange(card: MigCard, names: Iterable[str]) -> tuple[Placed, ...] | None:
    """Places for all of these at once, or ``None`` when they do not fit on one card. Exact."""
    wanted = [card.profile(name) for name in names]
    known = [p for p in wanted if p is not None]
    if len(known) != len(wanted) or sum(p.slices for p in known) > card.slices:
        return None
    if sum(p.size for p in known) > card.grid:
        return None
    # What no placement can mend, before places are tried one after another.
    if any(count > p.limit for p, count in Counter(known).items()):
        return None
    if any(a.excludes(b) for a, b in combinations(set(known), 2)):
        return None
    # The largest first: it has the fewest places.
    return _arrange(card, tuple(sorted(known, key=lambda p: (-p.size, -p.slices, p.name))), ())


def _arrange(card: MigCard, left: tuple[MigProfile, ...], placed: tuple[Placed, ...]) -> tuple[Placed, ...] | None:
    if not left:
        return placed
    for start in _free(card, placed, left[0].name):
        # Equal profiles stand in ascending order: their other orders are the same set.
        if placed and placed[-1].profile == left[0].name and start < placed[-1].start:
            continue
        found = _arrange(card, left[1:], (*placed, Placed(left[0].name, start)))
        if found is not None:
            return found
    return None


@lru_cache
def maximal(card: MigCard) -> tuple[tuple[str, ...], ...]:
    """Every set of profiles that fits and to which nothing can be added wherever its instances sit."""
    seen: set[tuple[str, ...]] = set()
    fitting: set[tuple[str, ...]] = {()}
    front: set[tuple[str, ...]] = {()}
    while front:
        grown = set()
        for names in front:
            for profile in card.profiles:
                more = tuple(sorted((*names, profile.name)))
                if more in seen:
                    continue
                seen.add(more)
                if arrange(card, more) is not None:
                    grown.add(more)
        fitting |= grown
        front = grown
    smaller = set()
    for names in fitting:
        counts = Counter(names)
        for name in counts:
            smaller.add(tuple(sorted((counts - Counter([name])).elements())))
    return tuple(sorted(fitting - smaller))


def suggestion(device_class: str) -> str:
    """Profile ids that cut this card into its largest equal parts, for `nvidia-smi mig -cgi`; "" if not known."""
    card = mig_card(device_class)
    if card is None:
        return ""
    plain = [p for p in card.profiles if p.limit > 1 and not re.search(r"[+-]", p.name)]
    best = max(plain, key=lambda p: (p.slices, p.size))
    return ",".join([str(best.id)] * best.limit)


def parent_class(product: str, instances: Iterable[tuple[str, int | None]]) -> str | None:
    """The whole card's class, told by its instances where its own memory may not be read (in a container).

    ``instances`` are profiles with their memory in MiB. ``None`` unless exactly one card of this product has them all.
    """
    known = [(name, mib) for name, mib in instances if name]
    card = card_name(product)
    fitting = [
        name
        for name, made in _CARDS.items()
        if name.rpartition("-")[0] == card and known and all(_could_be(made.profile(n), mib) for n, mib in known)
    ]
    return fitting[0] if len(fitting) == 1 else None


def _could_be(profile: MigProfile | None, mib: int | None) -> bool:
    if profile is None or mib is None or profile.memory_mib is None:
        return profile is not None
    return abs(profile.memory_mib - mib) <= profile.memory_mib // 25


@frozen
class _Sizes:
    """The names and memory that one card's profiles have, in the order 1g, 1g with double memory, 2g, 3g, 4g, 7g."""

    names: tuple[str, ...]
    memory_mib: tuple[int | None, ...]
    aliases: Mapping[str, tuple[str, ...]] = field(factory=dict, hash=False)


def _seven(total_mib: int, sizes: _Sizes) -> MigCard:
    """A card of seven compute and eight memory slices (A100 and every data-centre card since)."""
    shape = (
        (19, 1, 1, tuple(range(7)), 7),
        (15, 1, 2, (0, 2, 4, 6), 4),
        (14, 2, 2, (0, 2, 4), 3),
        (9, 3, 4, (0, 4), 2),
        (5, 4, 4, (0,), 1),
        (0, 7, 8, (0,), 1),
    )
    made = []
    for (number, slices, size, starts, limit), name, mib in zip(shape, sizes.names, sizes.memory_mib, strict=True):
        aliases = sizes.aliases.get(name, ())
        made.append(MigProfile(name, number, slices, size, starts, limit, mib, aliases))
        if number == 19:
            media = tuple(f"{alias}+me" for alias in aliases)
            made.append(MigProfile(f"{name}+me", 20, slices, size, starts, 1, mib, media))
    return MigCard(8, 7, total_mib, tuple(made))


def _names(*sizes: int) -> tuple[str, ...]:
    return tuple(f"{slices}g.{gb}gb" for slices, gb in zip((1, 1, 2, 3, 4, 7), sizes, strict=True))


_A100_40 = _seven(40960, _Sizes(_names(5, 10, 10, 20, 20, 40), (4864, 9984, 9984, 20096, 20096, 40448)))
_A100_80 = _seven(81920, _Sizes(_names(10, 20, 20, 40, 40, 80), (9728, 19968, 19968, 40192, 40192, 80640)))
_H100_80 = _seven(81559, _Sizes(_names(10, 20, 20, 40, 40, 80), (9984, 20096, 20096, 40448, 40448, None)))
_H100_96 = _seven(97871, _Sizes(_names(12, 24, 24, 48, 48, 96), (11264, 23552, 23552, None, None, None)))
_H200 = _seven(143771, _Sizes(_names(18, 35, 35, 71, 71, 141), (16384, 33280, 33280, 71424, 71424, 143360)))

_A30 = MigCard(
    4,
    4,
    24576,
    (
        MigProfile("1g.6gb", 14, 1, 1, (0, 1, 2, 3), 4, 5952),
        MigProfile("1g.6gb+me", 21, 1, 1, (0, 1, 2, 3), 1, 5952),
        MigProfile("2g.12gb", 5, 2, 2, (0, 2), 2, 11968),
        MigProfile("2g.12gb+me", 6, 2, 2, (0, 2), 1, 11968),
        MigProfile("4g.24gb", 0, 4, 4, (0,), 1, 24000),
    ),
)
_RTX_PRO_6000 = MigCard(
    12,
    4,
    97887,
    tuple(
        MigProfile(f"{slices}g.{gb}gb{suffix}", number, slices, 3 * slices, starts, limit, mib)
        for slices, gb, mib, starts, kinds in (
            (1, 24, None, (0, 3, 6, 9),
             (("", 14, 4), ("+me", 21, 1), ("+gfx", 47, 4), ("+me.all", 65, 1), ("-me", 67, 4))),
            (2, 48, 48512, (0, 6), (("", 5, 2), ("+gfx", 35, 2), ("+me.all", 64, 1), ("-me", 66, 2))),
            (4, 96, 97408, (0,), (("", 0, 1), ("+gfx", 32, 1))),
        )
        for suffix, number, limit in kinds
    ),
)  # fmt: skip

_CARDS: Mapping[str, MigCard] = {
    "a30-24g": _A30,
    "a100-40g": _A100_40,
    "a100-80g": _A100_80,
    "a800-80g": _A100_80,
    "h100-80g": _H100_80,
    "h800-80g": _H100_80,
    "h100-nvl-94g": _seven(95830, _Sizes(_names(12, 24, 24, 47, 47, 94), (10880, 22016, 22016, 47232, 47232, 94848))),
    "h100-96g": _H100_96,
    "h20-96g": _H100_96,
    "gh200-96g": _H100_96,
    "gh200-143g": _seven(146831, _Sizes(_names(18, 36, 36, 72, 72, 144), (17920, 36096, 36096, None, None, None))),
    "h200-140g": _H200,
    "h200-nvl-140g": _H200,
    "b200-179g": _seven(183359, _Sizes(_names(23, 45, 45, 90, 90, 180), (None, 45312, 45312, None, None, None))),
    "gb200-185g": _seven(
        189471,
        _Sizes(
            _names(23, 47, 47, 93, 93, 186),
            (None, 46592, 46592, None, None, None),
            {"1g.23gb": ("1g.24gb",), "3g.93gb": ("3g.95gb",), "4g.93gb": ("4g.95gb",), "7g.186gb": ("7g.189gb",)},
        ),
    ),
    "b300-269g": _seven(275040, _Sizes(_names(34, 67, 67, 135, 135, 269), (None,) * 6)),
    "gb300-278g": _seven(284208, _Sizes(_names(35, 70, 70, 139, 139, 278), (None,) * 6)),
    "rtx-pro-6000-96g": _RTX_PRO_6000,
}
