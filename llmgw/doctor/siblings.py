"""What machines that should be alike have otherwise: versions and settings, and which of them is the odd one. Pure.

Only what decides whether ranks of one replica work together, or equally fast, is compared; and only between machines
that have the thing at all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from attrs import frozen

from llmgw.doctor.facts import Facts


@frozen
class Unequal:
    """A thing that siblings have in more than one way. ``odd`` are the nodes in the minority, ``usual`` what most have.

    Without a majority ``usual`` is empty, and every node is odd.
    """

    thing: str
    usual: str
    odd: Mapping[str, str]
    why: str

    def __str__(self) -> str:
        """In one sentence."""
        odd = ", ".join(f"{node} has {value}" for node, value in self.odd.items())
        return f"{self.thing}: {odd}" + (f", the others {self.usual}" if self.usual else "") + f". {self.why}"


_DRIVER = "NCCL between different drivers is not tested by anybody; upgrade the odd ones."
_NCCL = "Ranks of one replica must have one NCCL version, or the first collective fails or hangs."
_ENGINE = "Ranks of one replica must run one version of their engine."
_FIRMWARE = "Adapters of different firmware negotiate and congest differently; flash the odd ones."
_MTU = "Frames that one end sends and the other drops make transfers hang; set one MTU, on switches too."
_GID = "A GID index that differs cannot be given to all ranks in one NCCL_IB_GID_INDEX."
_RATE = "The slowest port sets the pace of every collective."
_VBIOS = "Cards of one kind should have one VBIOS."
_COUNT = "A rail that one node lacks carries nothing on any of them."


def unequal(nodes: Mapping[str, Facts]) -> tuple[Unequal, ...]:
    """Everything that these machines have in more than one way, in a fixed order; what one alone has is no difference.

    Machines are siblings of those with the same cards.
    """
    groups: dict[tuple[tuple[str, int], ...], dict[str, Facts]] = defaultdict(dict)
    for node, facts in sorted(nodes.items()):
        kinds = Counter(card.reading.name for card in facts.cards)
        groups[tuple(sorted(kinds.items()))][node] = facts
    return tuple(found for _, members in sorted(groups.items()) for found in _of(members))


def _of(members: Mapping[str, Facts]) -> Iterator[Unequal]:
    things: dict[str, dict[str, str]] = defaultdict(dict)
    whys: dict[str, str] = {}
    for node, facts in members.items():
        for thing, value, why in _things(facts):
            if value:
                things[thing][node] = value
                whys[thing] = why
    for thing, values in things.items():
        counted = Counter(values.values()).most_common()
        if len(counted) < 2:
            continue
        usual = counted[0][0] if counted[0][1] > counted[1][1] else ""
        odd = {node: value for node, value in values.items() if value != usual}
        yield Unequal(thing, usual, odd, whys[thing])


def _things(facts: Facts) -> Iterator[tuple[str, str, str]]:
    yield "NVIDIA driver", facts.driver.version, _DRIVER
    yield "kernel module", facts.module.flavour, _DRIVER
    for engine in facts.engines:
        yield f"{engine.kind}", engine.version, _ENGINE
        yield f"NCCL of {engine.kind}", engine.nccl, _NCCL
    for name, vbios in sorted({(card.reading.name, card.vbios) for card in facts.cards}):
        yield f"VBIOS of {name}", vbios, _VBIOS
    firmware: dict[str, set[str]] = defaultdict(set)
    for adapter in facts.adapters:
        if adapter.board and not adapter.virtual:
            firmware[adapter.board].add(adapter.firmware)
    for board, versions in sorted(firmware.items()):
        yield f"firmware of adapters {board}", ", ".join(sorted(versions - {""})), _FIRMWARE
    for fabric in facts.fabrics:
        yield from _fabric(facts, fabric.label)


def _fabric(facts: Facts, label: str) -> Iterator[tuple[str, str, str]]:
    ports = [port for fabric in facts.fabrics if fabric.label == label for port in fabric.ports]
    if not ports:
        return
    yield f"ports on fabric {label}", str(len(ports)), _COUNT
    yield f"GID index on fabric {label}", _listed(p.gid.index for p in ports if p.gid is not None), _GID
    rates, mtus = set(), set()
    for port in ports:
        adapter = facts.adapter(port.adapter)
        if adapter is None:
            continue
        rates |= {p.rate_gbps for p in adapter.ports if p.number == port.port and p.rate_gbps is not None}
        mtus |= {dev.mtu for name in adapter.netdevs if (dev := facts.netdev(name)) is not None and dev.mtu is not None}
    yield f"rate on fabric {label}, Gb/s", _listed(rates), _RATE
    yield f"MTU on fabric {label}", _listed(mtus), _MTU


def _listed(values: Iterator[int] | set[float] | set[int]) -> str:
    return ", ".join(f"{value:g}" for value in sorted(set(values)))
