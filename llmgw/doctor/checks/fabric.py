"""Declared fabrics against the adapters that are here."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from llmgw.doctor.checks.gpu import NO_GPU, some
from llmgw.doctor.facts import Facts
from llmgw.doctor.verdict import Check, Finding, Severity
from llmgw.hardware.fabric import FabricRule, LinkLayer, bond_member, gid_index, natural
from llmgw.hardware.inventory import Adapter, AdapterKind, Port

ABLE = (AdapterKind.INFINIBAND, AdapterKind.ROCE)
BECAUSE = (*NO_GPU, "rdma.modules.missing")
_LAST_OWN = 3
"""A whole machine's GID tables begin at 0; in a pod the first entries, those of the host, cannot be read."""


def named(facts: Facts) -> Iterator[tuple[FabricRule, str, Adapter | None]]:
    """Each adapter that a rule names."""
    for rule in facts.rules:
        for name in rule.adapters:
            yield rule, name, facts.adapter(name.partition(":")[0])


def used(facts: Facts, label: str = "") -> Iterator[tuple[str, Adapter, Port]]:
    """Each port that a fabric has, or that its rule names, with the fabric's label."""
    seen: set[tuple[str, str, int]] = set()
    for fabric in facts.fabrics:
        for item in fabric.ports:
            adapter = facts.adapter(item.adapter)
            for port in () if adapter is None else adapter.ports:
                if adapter is not None and port.number == item.port:
                    seen.add((fabric.label, adapter.name, port.number))
                    if label in ("", fabric.label):
                        yield fabric.label, adapter, port
    for rule, name, adapter in named(facts):
        number = name.partition(":")[2]
        for port in () if adapter is None else adapter.ports:
            key = (rule.label, name.partition(":")[0], port.number)
            if (
                adapter is not None
                and number in ("", str(port.number))
                and key not in seen
                and label in ("", rule.label)
            ):
                seen.add(key)
                yield rule.label, adapter, port


def roce(facts: Facts) -> Iterator[tuple[str, Adapter, Port]]:
    """Active Ethernet ports that a fabric has or should have: of its rule also those without an address."""
    yield from ((f, a, p) for f, a, p in used(facts) if p.state == "active" and p.link_layer == LinkLayer.ETHERNET)
    there = {(a.name, p.number) for _, a, p in used(facts)}
    for rule in facts.rules:
        if rule.link_layer is not LinkLayer.ETHERNET or rule.adapters:
            continue
        for adapter in facts.adapters:
            for port in adapter.ports:
                free = adapter.kind is AdapterKind.ROCE and not adapter.virtual and not adapter.bond
                bare = port.state == "active" and port.link_layer == LinkLayer.ETHERNET and not port.gids
                if free and bare and (adapter.name, port.number) not in there:
                    yield rule.label, adapter, port


def _absent(facts: Facts) -> Finding | None:
    wrong = [(rule, name) for rule, name, adapter in named(facts) if adapter is None]
    if not wrong:
        return None
    bad = [f"{rule.label} names {name}" for rule, name in wrong]
    there = some([a.name for a in facts.adapters], 16) or "none"
    return Finding(
        f"Adapters that do not exist here: {some(bad)}. The node has {there}.",
        _instead(facts, [rule for rule, _ in wrong]),
    )


def suggested(facts: Facts, rule: FabricRule) -> tuple[str, ...]:
    """The list of adapters that the rule would be right with here, by what is right of its own; empty if nothing is.

    On Ethernet the networks of the interfaces tell rails from the rest: equally long prefixes in one wider network.
    """
    right = [(a, p) for r, name, a in named(facts) if r == rule and a is not None for p in _fit(rule, a)
             if name.partition(":")[2] in ("", str(p.number))]  # fmt: skip
    layers = {p.link_layer for _, p in right}
    families = set().union(*(_families(a) for a, _ in right)) if right else set()
    found = []
    for adapter in sorted(facts.adapters, key=lambda a: natural(a.name)):
        ports = [p for p in _fit(rule, adapter) if not adapter.virtual and p.link_layer in layers]
        near = [p for p in ports if p.link_layer != LinkLayer.ETHERNET or families & _families(adapter)]
        whole = len(near) == len(adapter.ports)
        found += [adapter.name if whole else f"{adapter.name}:{p.number}" for p in (near[:1] if whole else near)]
    return tuple(found)


def _fit(rule: FabricRule, adapter: Adapter) -> list[Port]:
    return [
        p for p in adapter.ports
        if adapter.kind in ABLE and p.state == "active" and not bond_member(adapter, p)
        and rule.link_layer in (None, p.link_layer)
    ]  # fmt: skip


def _families(adapter: Adapter) -> set[tuple[int, str]]:
    """Prefix length and wider network (/16, /48 of IPv6) of each address that other nodes can reach."""
    found = set()
    for address in map(ipaddress.ip_interface, adapter.addresses):
        wide = min(address.network.prefixlen, 16 if address.version == 4 else 48)
        if not address.is_link_local:
            found.add((address.network.prefixlen, str(address.network.supernet(new_prefix=wide))))
    return found


def _instead(facts: Facts, rules: list[FabricRule]) -> str:
    """The remedy that names right lists as agent.yaml has them; empty where none can be told."""
    told = {rule.label: suggested(facts, rule) for rule in rules}
    lists = [f"fabrics: {{{label}: {{adapters: [{', '.join(names)}]}}}}" for label, names in told.items() if names]
    if not lists:
        return ""
    return (
        f"By link layer and subnets this node's agent.yaml should have {'; '.join(lists)}. A link_layer or a subnet "
        "is right on all nodes, a list of names on one only."
    )


def _wrong_type(facts: Facts) -> Finding | None:
    bad: list[str] = []
    wrong: list[FabricRule] = []
    for rule, name, adapter in named(facts):
        if adapter is None or adapter.kind is AdapterKind.SWITCH_MANAGEMENT:
            continue
        before = len(bad)
        if adapter.kind not in ABLE:
            bad.append(f"{rule.label} names {name}, which is {adapter.kind.value}")
        elif rule.link_layer and not any(p.link_layer == rule.link_layer for p in adapter.ports):
            layers = some(sorted({p.link_layer for p in adapter.ports}))
            bad.append(f"{rule.label} is {rule.link_layer.value}, {name} is {layers}")
        elif any(bond_member(adapter, p) for p in adapter.ports) and suggested(facts, rule):
            bad.append(f"{rule.label} names {name}, a member of {adapter.bond}, which its other adapters are not")
        wrong += [rule] * (len(bad) - before)
    return Finding(f"Not what the fabric is declared to be: {some(bad)}.", _instead(facts, wrong)) if bad else None


def _management(facts: Facts) -> Finding | None:
    bad = [f"{n} in {r.label}" for r, n, a in named(facts) if a is not None and a.kind is AdapterKind.SWITCH_MANAGEMENT]
    return Finding(f"Adapters that run the NVLink switches are declared as a network: {some(bad)}.") if bad else None


def _mixed(facts: Facts) -> Finding | None:
    bad = [f.label for f in facts.fabrics if any(fault.code == "mixed-link-layers" for fault in f.faults)]
    return (
        Finding(f"InfiniBand and Ethernet are in one fabric: {some(bad)}. NCCL hangs over both at once.")
        if bad
        else None
    )


def _unusable(facts: Facts) -> Finding | None:
    bad = [
        f.label for f in facts.fabrics
        if not f.ports and not any(fault.code == "mixed-link-layers" for fault in f.faults)
    ]  # fmt: skip
    return Finding(f"No port of the fabric can be used: {some(bad)}. NCCL would speak TCP instead.") if bad else None


def _rails(facts: Facts) -> Finding | None:
    bad = []
    for rule, fabric in zip(facts.rules, facts.fabrics, strict=False):
        wanted = len(rule.adapters) or _expected(facts, rule)
        if fabric.ports and len(fabric.ports) < wanted:
            bad.append(f"{fabric.label} has {len(fabric.ports)} of {wanted}")
    return (
        Finding(f"Rails are missing: {some(bad)}. Replicas over several nodes are slower, or do not pair.")
        if bad
        else None
    )


def _expected(facts: Facts, rule: FabricRule) -> int:
    """How many ports a rule would match if all of them were well: at most as many as there are cards."""
    if rule.subnets:
        return 0
    fit = [
        a for a in facts.adapters
        if a.kind in ABLE and not a.virtual and not a.bond and any(p.link_layer == rule.link_layer for p in a.ports)
    ]  # fmt: skip
    return min(len(fit), len(facts.cards))


def _gid_none(facts: Facts) -> Finding | None:
    bad = [
        f"{a.name} port {p.number} ({p.gid_trouble or 'empty'})"
        for _, a, p in roce(facts)
        if not p.gids and "self-assigned" not in p.gid_trouble and "namespace" not in p.gid_trouble
    ]
    return Finding(f"RoCE ports without an address that other nodes can reach: {some(bad)}.") if bad else None


def _gid_self(facts: Facts) -> Finding | None:
    bad = [f"{a.name} port {p.number} ({p.gid_trouble})" for _, a, p in roce(facts) if "self-assigned" in p.gid_trouble]
    return (
        Finding(f"RoCE ports that gave themselves an address: {some(bad)}. NCCL takes it and times out.")
        if bad
        else None
    )


def _gid_pinned(facts: Facts) -> Finding | None:
    for variable in facts.variables:
        if variable.name != "NCCL_IB_GID_INDEX" or variable.value == "":
            continue
        value = variable.value.strip()
        number = int(value) if value.isascii() and value.isdigit() else None
        bad = [f"{a.name} (has {some([str(g.index) for g in p.gids])})"
               for _, a, p in roce(facts) if p.gids and number not in {g.index for g in p.gids}]  # fmt: skip
        if bad or number is None:
            why = (
                f"is no number, which NCCL takes for 0, on {some(bad) or 'every port'}"
                if number is None
                else f"is no usable entry of {some(bad)}"
            )
            return Finding(f"{variable.source} pins NCCL_IB_GID_INDEX={variable.value}, which {why}.")
    return None


def _gid_differs(facts: Facts) -> Finding | None:
    bad = [
        f"{fabric.label} ({some([f'{p.adapter} {p.gid.index}' for p in fabric.ports if p.gid], 8)})"
        for fabric in facts.fabrics
        if fabric.kind is AdapterKind.ROCE and len(fabric.ports) > 1 and gid_index(fabric) is None
    ]
    return (
        Finding(f"The GID index is not the same on all adapters: {some(bad)}. One setting cannot fit them.")
        if bad
        else None
    )


def _gid_foreign(facts: Facts) -> Finding | None:
    bad = [f"{s.adapter} port {s.port} begins at {s.index}" for s in facts.gid_starts if s.index > _LAST_OWN]
    bad += [f"{a.name} port {p.number}" for _, a, p in roce(facts) if not p.gids and "namespace" in p.gid_trouble]
    return Finding(f"GIDs belong to another network namespace: {some(bad)}.") if bad else None


def _subnets(facts: Facts) -> Finding | None:
    for fabric in facts.fabrics:
        networks = []
        for item in fabric.ports:
            adapter = facts.adapter(item.adapter)
            networks += [ipaddress.ip_interface(a).network for a in (adapter.addresses if adapter else ())]
        if fabric.kind is AdapterKind.ROCE and len(networks) > 1 and len(set(networks)) == len(networks):
            return Finding(
                f"Every rail of {fabric.label} is a network of its own ({some([str(n) for n in networks])})."
            )
    return None


def _firmware(facts: Facts) -> Finding | None:
    bad = []
    for fabric in facts.fabrics:
        boards: dict[str, set[str]] = {}
        for _, adapter, _ in used(facts, fabric.label):
            boards.setdefault(adapter.board, set()).add(adapter.firmware)
        bad += [f"{fabric.label}: {board} has {' and '.join(sorted(v))}" for board, v in boards.items() if len(v) > 1]
    vbios: dict[str, set[str]] = {}
    for card in facts.cards:
        if card.vbios:
            vbios.setdefault(card.reading.name, set()).add(card.vbios)
    bad += [f"{name}: VBIOS {' and '.join(sorted(v))}" for name, v in vbios.items() if len(v) > 1]
    return Finding(f"Firmware of equal parts differs: {some(bad)}.") if bad else None


def _software(facts: Facts) -> Finding | None:
    bad = [
        a.name for a in facts.adapters if a.kind is AdapterKind.SOFTWARE and any(p.state == "active" for p in a.ports)
    ]
    return (
        Finding(f"RDMA in software is active: {some(bad)}. An NCCL that is told nothing would take it.")
        if bad
        else None
    )


def _unknown(facts: Facts) -> Finding | None:
    bad = [
        a.name for a in facts.adapters
        if facts.rules and a.kind in ABLE and not a.virtual and not a.bond and not facts.in_fabric(a.name)
        and any(p.state == "active" for p in a.ports)
    ]  # fmt: skip
    return Finding(f"Adapters that are up and in no fabric: {some(bad, 8)}.") if bad else None


CHECKS = (
    Check("fabric.declared.absent", Severity.FAIL, ("rules", "adapters"), _absent,
          "Correct agent.yaml; a link_layer or a subnet is right on all nodes, a list of names on one only.",
          "agent.yaml names an adapter that is not here. Equal machines number them differently.", BECAUSE),
    Check("fabric.declared.wrong-type", Severity.FAIL, ("rules", "adapters"), _wrong_type,
          "Correct the rule, or set the port's protocol (mlxconfig LINK_TYPE_P1) and power the machine off and on.",
          "A named adapter speaks another protocol than the fabric, is of a kind that carries none, or alone is in a bond.", BECAUSE),
    Check("fabric.declared.nvlink-mgmt", Severity.FAIL, ("rules", "adapters"), _management,
          "Take them out of the rule.",
          "Some boards show the management of their NVLink switches as InfiniBand adapters.", BECAUSE),
    Check("fabric.mixed-linklayer", Severity.FAIL, ("fabrics",), _mixed,
          "Give the rule a link_layer, or declare two fabrics.",
          "NCCL refuses or hangs when one run has both.", BECAUSE),
    Check("fabric.no-usable-port", Severity.FAIL, ("fabrics",), _unusable,
          "Bring a port up (see the findings on ports), or give the profile another fabric.",
          "No port of the fabric is active with an address. NCCL falls back to TCP without an error.",
          (*BECAUSE, "fabric.declared.absent", "fabric.declared.wrong-type", "fabric.declared.nvlink-mgmt",
           "port.down", "port.init", "roce.gid.none", "roce.gid.linklocal-ipv4", "roce.gid.foreign-netns")),
    Check("roce.gid.none", Severity.FAIL, ("adapters", "fabrics"), _gid_none,
          "Give the port's interface an address of the fabric's network that stays (netplan, NetworkManager), and bring "
          "it up.",
          "Without a RoCE v2 address NCCL uses a link-local one and times out.", BECAUSE),
    Check("roce.gid.linklocal-ipv4", Severity.FAIL, ("adapters", "fabrics"), _gid_self,
          "Give it a static address and turn link-local addressing off on fabric ports.",
          "An address of 169.254.0.0/16 passes NCCL's own filter and reaches nobody.", BECAUSE),
    Check("roce.gid.pinned-wrong", Severity.FAIL, ("variables", "adapters", "fabrics"), _gid_pinned,
          "Unset it: llmgw gives each fabric the index that fits, and NCCL from 2.21 on finds it by itself.",
          "A variable or file pins a GID index at which this node has no usable address.", BECAUSE),
    Check("port.rails.count", Severity.WARN, ("fabrics", "adapters", "rules"), _rails,
          "See the findings on ports; until then the fabric has what its remaining rails carry.",
          "Fewer ports are active than the fabric has rails.",
          (*BECAUSE, "port.down", "port.init", "fabric.declared.absent", "fabric.declared.wrong-type",
           "fabric.declared.nvlink-mgmt", "roce.gid.none", "roce.gid.linklocal-ipv4")),
    Check("roce.gid.index-differs", Severity.WARN, ("fabrics",), _gid_differs,
          "Nothing with NCCL from 2.21 on: llmgw gives it the range of addresses. For older ones give all ports equally "
          "many addresses. An index may move again when an address changes.",
          "The RoCE v2 address stands at different places of the adapters' tables.", BECAUSE),
    Check("roce.gid.foreign-netns", Severity.WARN, ("gid_starts", "adapters"), _gid_foreign,
          "Run the agent in the engines' network namespace, and NCCL from 2.26.2 on.",
          "The low entries of a GID table cannot be read here, as in a pod with interfaces of its own.", BECAUSE),
    Check("fw.mixed", Severity.WARN, ("adapters", "fabrics", "cards", "card_details"), _firmware,
          "Bring them to one version (mlxfwmanager for adapters).",
          "Equal adapters of a fabric, or equal cards, run different firmware.", BECAUSE),
    Check("soft.rdma", Severity.WARN, ("adapters",), _software,
          "rdma link delete NAME, or leave it: llmgw names the adapters that NCCL shall use.",
          "An rxe or siw device is active.", NO_GPU),
    Check("fabric.subnets.rails", Severity.INFO, ("fabrics", "adapters"), _subnets,
          "Where rails cannot reach each other, give the profile NCCL_CROSS_NIC=0.",
          "Traffic between different rails needs routes, which not every network has.", BECAUSE),
    Check("unknown.adapter", Severity.INFO, ("adapters", "rules"), _unknown,
          "Declare a fabric in agent.yaml if it shall carry traffic of engines.",
          "An adapter is up and no declared fabric has it.", BECAUSE),
)  # fmt: skip
