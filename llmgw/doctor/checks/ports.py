"""Ports of adapters: link, rate, counters."""

from __future__ import annotations

import re
from collections import Counter

from llmgw.doctor.checks.fabric import BECAUSE, used
from llmgw.doctor.checks.gpu import some
from llmgw.doctor.facts import Counter as PortCounter
from llmgw.doctor.facts import Facts
from llmgw.doctor.verdict import Check, Finding, Severity

LINK_COUNTERS = (
    "symbol_error", "link_error_recovery", "port_rcv_errors", "local_link_integrity_errors", "port_xmit_discards",
)  # fmt: skip
ROCE_COUNTERS = ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err")
FLAP_COUNTER = "link_downed"
_GROWTH = 10
"""Errors between the two readings below which nothing is said."""
_DOWN = re.compile(r"Link (?:DOWN|down)|lost carrier")
_WIDE = frozenset({0xFF, 0xFFFF, 0xFFFFFFFF})
"""What a counter that has run full shows; it stays there."""


def _name(counter: PortCounter) -> str:
    return f"{counter.adapter} port {counter.port}"


def _down(facts: Facts) -> Finding | None:
    said, remedy = [], ""
    for fabric, adapter, port in used(facts):
        if port.state in ("active", "init", "armed", "unknown"):
            continue
        physical = port.physical_state or "no physical state"
        said.append(f"{adapter.name} port {port.number} of {fabric} ({physical})")
        if physical.lower() == "disabled":
            remedy = (
                remedy
                or f"ip link set {some(list(adapter.netdevs)) or 'its interface'} up, or enable the switch port; check that both ends have one speed."
            )
    return Finding(f"Ports are down: {some(said, 8)}.", remedy) if said else None


def _init(facts: Facts) -> Finding | None:
    said = [
        f"{a.name} port {p.number} of {f} (lid {p.lid if p.lid is not None else 'none'})"
        for f, a, p in used(facts)
        if p.state in ("init", "armed") and p.link_layer == "infiniband"
    ]
    return Finding(f"Ports have a link and nobody configures them: {some(said, 8)}.") if said else None


def _rate(facts: Facts) -> Finding | None:
    said = []
    for fabric in facts.fabrics:
        rates = {
            f"{a.name} port {p.number}": p.rate_gbps
            for _, a, p in used(facts, fabric.label)
            if p.state == "active" and p.rate_gbps
        }
        if not rates:
            continue
        usual = Counter(rates.values()).most_common(1)[0][0] or 0
        best = max(rate or 0 for rate in rates.values())
        usual = best if list(rates.values()).count(best) * 2 >= len(rates) else usual
        said += [
            f"{name} at {rate:g} Gb/s, its siblings at {usual:g}"
            for name, rate in rates.items()
            if rate and rate < usual
        ]
    return Finding(f"Ports are slower than the others of their fabric: {some(said)}.") if said else None


def _flap(facts: Facts) -> Finding | None:
    said = [
        f"{_name(c)} {c.growth} times in {facts.counted_s:g} s"
        for c in facts.counters
        if c.name == FLAP_COUNTER and c.growth and c.before not in _WIDE
    ]
    lines: Counter[str] = Counter()
    for line in facts.kernel_log:
        if _DOWN.search(line):
            lines[
                next(
                    (a.name for a in facts.adapters if a.name in line or (a.pci_address and a.pci_address in line)),
                    "a port",
                )
            ] += 1
    said += [f"{name} {count} times in the kernel log" for name, count in lines.items() if count >= 2]
    return Finding(f"Links were lost: {some(said)}. Every job over them ends at each loss.") if said else None


def _grown(facts: Facts, names: tuple[str, ...]) -> list[str]:
    return [
        f"{_name(c)}: {c.name} +{c.growth}"
        for c in facts.counters
        if c.name in names and c.growth >= _GROWTH and c.after not in _WIDE
    ]


def _errors(facts: Facts) -> Finding | None:
    said = _grown(facts, LINK_COUNTERS)
    return Finding(f"Errors grew within {facts.counted_s:g} s: {some(said)}.") if said else None


def _roce(facts: Facts) -> Finding | None:
    said = _grown(facts, ROCE_COUNTERS)
    return Finding(f"RoCE loses packets, within {facts.counted_s:g} s: {some(said)}.") if said else None


def _unreadable(facts: Facts) -> Finding | None:
    said: dict[str, list[str]] = {}
    for c in facts.counters:
        if c.trouble:
            said.setdefault(_name(c), []).append(c.trouble)
        elif c.name == FLAP_COUNTER and c.after in _WIDE:
            said.setdefault(_name(c), []).append(f"{c.name} has run full at {c.after} and says nothing any more")
    each = [f"{port} ({'; '.join(dict.fromkeys(troubles))})" for port, troubles in said.items()]
    return Finding(f"Not all counters can be read: {some(each)}.") if each else None


def _mtu(facts: Facts) -> Finding | None:
    said = []
    for fabric in facts.fabrics:
        mtus = {
            n.name: n.mtu
            for _, a, p in used(facts, fabric.label)
            if p.link_layer == "ethernet"
            for n in facts.netdevs
            if n.name in a.netdevs and n.mtu
        }
        if not mtus:
            continue
        usual = Counter(mtus.values()).most_common(1)[0][0]
        said += [f"{name} has {mtu}, the others {usual}" for name, mtu in mtus.items() if mtu != usual]
        said += [f"{name} has {mtu}" for name, mtu in mtus.items() if mtu == usual and mtu is not None and mtu < 1500]
    return Finding(f"MTUs do not fit: {some(said)}. NCCL hangs where two ends differ.") if said else None


CHECKS = (
    Check("port.down", Severity.FAIL, ("adapters", "rules"), _down,
          "Check the cable, its module and the switch port; a virtual function without a GUID needs one.",
          "A port that a fabric counts on has no link. Ports that nobody declared are not judged.", BECAUSE),
    Check("port.init", Severity.FAIL, ("adapters", "rules"), _init,
          "See that a subnet manager runs and reaches the port, and that its partition and GUID are known to it.",
          "An InfiniBand port has light and no subnet manager. Just after boot that is normal.", BECAUSE),
    Check("port.rate.low", Severity.WARN, ("adapters", "fabrics"), _rate,
          "Seat or replace the cable, check speed and FEC at the switch (mlxlink).",
          "An active port runs below the usual rate of its fabric. What is down is not compared.", BECAUSE),
    Check("port.flap", Severity.WARN, ("counters", "kernel_log"), _flap,
          "Clean or replace cable and optics, and look at the module's temperature.",
          "A link went down between the two readings, or at least twice since boot.", (*BECAUSE, "port.down")),
    Check("port.errors", Severity.WARN, ("counters",), _errors,
          "Clean or replace cable and optics; discards on InfiniBand come from congestion or a wrong MTU.",
          "Error counters grew between two readings. Old counts are not judged.", BECAUSE),
    Check("roce.counters", Severity.WARN, ("counters",), _roce,
          "Make flow control the same on adapters and switches (PFC, ECN, trust mode, NCCL_IB_TC), and the MTU too.",
          "Counters of lost and repeated packets grew between two readings.", BECAUSE),
    Check("roce.mtu", Severity.WARN, ("netdevs", "fabrics"), _mtu,
          "Set one MTU (4200 or 9000) on every rail and switch port, so that it survives a reboot.",
          "Interfaces of one fabric have different MTUs, or one below 1500.", BECAUSE),
    Check("counters.unreadable", Severity.INFO, ("counters",), _unreadable,
          "Nothing for iWARP and virtual functions; else update the adapter's firmware.",
          "Some counters of a port cannot be read, or are full, so its quality is not judged by them.", BECAUSE),
)  # fmt: skip
