"""What is near what: NVLink domains, and how far an adapter is from a card.

The words for distances are those of `nvidia-smi topo -m`; nearness over PCIe is told from the real paths of sysfs,
which hold every bridge on the way (``pci0000:00/0000:00:01.0/…/0000:18:00.0``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from attrs import frozen

from llmgw.hardware.inventory import AdapterPath, DeviceLink, Fault, Relation
from llmgw.hardware.reading import CardReading, PairReading

_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_FUNCTION = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_FARTHEST = tuple(Relation)
_MESH = 3
"""From this many cards on a domain is made by switches or a board: a card beside it that is in none has lost its
links. Two cards may be joined by a bridge, and the third may never have had one."""


@frozen
class PciPlace:
    """Where a PCI function sits: its host bridge, the bridges down to it, and its NUMA node.

    ``route`` is the real path in sysfs from the host bridge on, the function itself last; empty where not known.
    """

    route: tuple[str, ...]
    numa_node: int | None = None


def route_of(real_path: str) -> tuple[str, ...]:
    """The PCI part of a real sysfs path: host bridge, bridges, function. What lies below a function is left out."""
    parts = real_path.split("/")
    start = next((i for i, part in enumerate(parts) if _ROOT.fullmatch(part)), None)
    if start is None:
        return ()
    functions = [part for part in parts[start + 1 :] if _FUNCTION.fullmatch(part)]
    return (parts[start], *functions) if functions else ()


def relation(a: PciPlace, b: PciPlace) -> Relation | None:
    """How two functions reach each other, or ``None`` when neither path nor NUMA node tells."""
    if a.route and b.route and a.route[0] == b.route[0]:
        shared = sum(1 for _ in _common(a.route, b.route))
        if shared == 1:
            return Relation.PHB
        # Below the last shared bridge each side has a port of the switch and then itself; more is another switch.
        deepest = max(len(a.route), len(b.route)) - shared
        return Relation.PIX if deepest <= 2 else Relation.PXB
    if a.numa_node is not None and b.numa_node is not None:
        return Relation.NODE if a.numa_node == b.numa_node else Relation.SYS
    return Relation.SYS if a.route and b.route else None


def _common(a: Sequence[str], b: Sequence[str]) -> Iterator[str]:
    for one, other in zip(a, b, strict=False):
        if one != other:
            return
        yield one


def near(card: PciPlace, adapters: Mapping[str, PciPlace]) -> tuple[AdapterPath, ...]:
    """The adapters nearer to a card than ``sys``, nearest first and then in the order given."""
    return nearest(
        AdapterPath(name, how) for name, place in adapters.items() if (how := relation(card, place)) is not None
    )


def nearest(paths: Iterable[AdapterPath]) -> tuple[AdapterPath, ...]:
    """Paths to adapters, nearest first, without those that are ``sys``."""
    close = [path for path in paths if path.relation is not Relation.SYS]
    return tuple(sorted(close, key=lambda path: _FARTHEST.index(path.relation)))


def links(pairs: Iterable[PairReading]) -> tuple[DeviceLink, ...]:
    """Pairs of cards as they travel: a card's placement number is its index."""
    return tuple(DeviceLink(p.a, p.b, p.relation, p.nvlinks) for p in pairs)


def nvlink_domains(pairs: Iterable[PairReading], cards: Iterable[CardReading]) -> tuple[tuple[int, ...], ...]:
    """The sets of cards that reach each other over NVLink. A card in MIG mode has none, and a lost one neither."""
    whole = {card.index for card in cards if not card.mig and not card.health.lost}
    domains: list[set[int]] = []
    for pair in pairs:
        if pair.relation is not Relation.NVLINK or not {pair.a, pair.b} <= whole:
            continue
        joined = [domain for domain in domains if domain & {pair.a, pair.b}]
        domains = [domain for domain in domains if domain not in joined]
        domains.append({pair.a, pair.b}.union(*joined))
    return tuple(sorted(tuple(sorted(domain)) for domain in domains))


def nvlink_warnings(cards: Sequence[CardReading], pairs: Sequence[PairReading]) -> tuple[Fault, ...]:
    """Links that should be there and are not."""
    return tuple(_nvlink_warnings(cards, pairs))


def _nvlink_warnings(cards: Sequence[CardReading], pairs: Sequence[PairReading]) -> Iterator[Fault]:
    by_index = {card.index: card for card in cards}
    for domain in nvlink_domains(pairs, cards):
        names = {by_index[index].name for index in domain}
        if len(domain) >= _MESH:
            for card in cards:
                if card.index in domain or card.name not in names or card.mig or card.health.lost:
                    continue
                yield _down(card, domain, pairs)
        most = max((by_index[index].nvlinks_up or 0 for index in domain), default=0)
        for index in domain:
            up = by_index[index].nvlinks_up
            if up is not None and up < most:
                yield Fault(
                    "nvlink-degraded",
                    f"gpu-{index} has {up} of {by_index[index].nvlinks or most} NVLinks active, its peers have {most}",
                    "see nvidia-smi nvlink --status and the kernel log; reset the GPU when it is free",
                )


def _down(card: CardReading, domain: Sequence[int], pairs: Sequence[PairReading]) -> Fault:
    how = {p.relation for p in pairs if card.index in (p.a, p.b) and {p.a, p.b} & set(domain)}
    far = max(how, key=_FARTHEST.index, default=None)
    over = f" over {far.value.upper()}" if far is not None else " in an unknown way"
    return Fault(
        "nvlink-down",
        f"gpu-{card.index} reaches its peers{over} while {len(domain)} others are joined by NVLink: its links are down",
        "see nvidia-smi nvlink --status and the log of nvidia-fabricmanager; reset the GPU, or reboot",
    )
