"""The interface over which ranks find each other, names, addresses, and the firewall."""

from __future__ import annotations

import ipaddress

from llmgw.doctor.checks.gpu import NO_GPU, some
from llmgw.doctor.facts import Facts
from llmgw.doctor.node_facts import Variable
from llmgw.doctor.verdict import Check, Finding, Severity
from llmgw.engines.nccl import interfaces_selected

_CONTAINERS = ("lo", "docker", "br-", "veth", "virbr", "cni", "cali", "flannel", "tailscale")


def values(facts: Facts, *names: str) -> list[Variable]:
    """The variables of these names that say something."""
    return [v for v in facts.variables if v.name in names and v.value]


def several(facts: Facts) -> bool:
    """Whether replicas over several nodes can be meant: a fabric is declared."""
    return bool(facts.rules)


def _usable(facts: Facts) -> list[str]:
    return [
        n.name for n in facts.netdevs
        if n.up and not n.name.startswith("lo")
        and any(not ipaddress.ip_interface(a).ip.is_link_local for a in n.addresses)
    ]  # fmt: skip


def _missing(facts: Facts) -> Finding | None:
    names = [n.name for n in facts.netdevs]
    for variable in values(facts, "NCCL_SOCKET_IFNAME"):
        if variable.value.startswith("^"):
            continue
        selected = interfaces_selected(variable.value, names)
        usable = [name for name in selected if name in _usable(facts)]
        if not usable:
            why = (
                "is no interface of this machine"
                if not selected
                else f"is {some(list(selected))}, down or without an address"
            )
            return Finding(f"{variable.source} says NCCL_SOCKET_IFNAME={variable.value}, which {why}.", _name_it(facts))
    if facts.interface and facts.interface not in _usable(facts) and facts.netdev(facts.interface) is not None:
        return Finding(f"The agent's address is on {facts.interface}, which is down.")
    return None


def _name_it(facts: Facts) -> str:
    return f"Name the interface that carries the agent's address: {facts.interface}." if facts.interface else ""


def _gloo(facts: Facts) -> Finding | None:
    names = {n.name for n in facts.netdevs}
    for variable in values(facts, "GLOO_SOCKET_IFNAME"):
        bad = [word for word in variable.value.split(",") if word not in names]
        if bad:
            return Finding(
                f"{variable.source} says GLOO_SOCKET_IFNAME={variable.value}; Gloo looks for an interface of exactly that "
                f"name, and there is none: {some(bad)}.",
                _name_it(facts),
            )
    return None


def _loopback(facts: Facts) -> Finding | None:
    found = [ipaddress.ip_address(a) for a in facts.host_addresses]
    if any(not a.is_loopback and not a.is_link_local for a in found) and not found[0].is_loopback:
        return None
    said = some([str(a) for a in found]) or "nothing"
    return Finding(
        f"The host's own name resolves to {said}: ranks that meet by name would listen where nobody reaches them."
    )


def _hostip(facts: Facts) -> Finding | None:
    here = {str(ipaddress.ip_interface(a).ip) for n in facts.netdevs for a in n.addresses}
    for variable in values(facts, "VLLM_HOST_IP", "SGLANG_HOST_IP"):
        if variable.value not in here:
            return Finding(f"{variable.source} says {variable.name}={variable.value}, no address of this machine.")
    return None


def _ambiguous(facts: Facts) -> Finding | None:
    names = [n.name for n in facts.netdevs]
    for variable in values(facts, "NCCL_SOCKET_IFNAME"):
        if variable.value[0] in "^=":
            continue
        words = variable.value.split(",")
        extra = [name for name in interfaces_selected(variable.value, names) if name not in words]
        if extra and any(word in names for word in words):
            first = words[0]
            return Finding(
                f"{variable.source} says NCCL_SOCKET_IFNAME={variable.value}, a prefix that also takes {some(extra)}.",
                f"NCCL_SOCKET_IFNAME=={first} and GLOO_SOCKET_IFNAME={first}: NCCL needs the second = and Gloo takes none.",
            )
    return None


def _unset(facts: Facts) -> Finding | None:
    if facts.interface or values(facts, "NCCL_SOCKET_IFNAME"):
        return None
    usable = _usable(facts)
    doubtful = [n for n in usable if n.startswith((*_CONTAINERS, "ib"))]
    if len(usable) < 2 or not doubtful:
        return None
    first = next((n for n in usable if n.startswith("ib")), usable[0])
    return Finding(f"Nothing names the interface where ranks meet; NCCL would take {first} of {some(usable, 8)}.")


def _firewall(facts: Facts) -> Finding | None:
    if not facts.firewall.drops:
        return None
    address = facts.address
    if address and any(_covers(rule, address) for rule in facts.firewall.allows):
        return None
    ports = f" (ports {facts.port_range})" if facts.port_range else ""
    return Finding(
        f"{facts.firewall.program} drops new connections; NCCL opens them between nodes on any high port{ports}."
    )


def _covers(rule: str, address: str) -> bool:
    for word in rule.replace(",", " ").split():
        try:
            if "/" in word and ipaddress.ip_address(address) in ipaddress.ip_network(word, strict=False):
                return True
        except ValueError:
            continue
    return False


def _is_fabric(facts: Facts) -> Finding | None:
    for adapter in facts.adapters:
        label = facts.in_fabric(adapter.name)
        if label and facts.interface and facts.interface in (*adapter.netdevs, adapter.bond):
            return Finding(
                f"Ranks meet over {facts.interface}, which is {adapter.name} of fabric {label}: one fault ends both."
            )
    return None


CHECKS = (
    Check("mgmt.ifname.missing", Severity.FAIL, ("variables", "netdevs"), _missing,
          "Name the interface that carries the agent's address.",
          "A setting names an interface that is not there, is down or has no address.", NO_GPU),
    Check("mgmt.gloo.syntax", Severity.FAIL, ("variables", "netdevs"), _gloo,
          "Name one interface, without = and ^ and without an address.",
          "Gloo knows neither prefixes nor exclusions nor addresses.", NO_GPU),
    Check("mgmt.hostname.loopback", Severity.FAIL, ("host_addresses",), _loopback,
          "Map the name to the management address in /etc/hosts or DNS.",
          "The host's name resolves to a loopback or link-local address, or not at all.", NO_GPU, applies=several),
    Check("mgmt.hostip.env", Severity.FAIL, ("variables", "netdevs"), _hostip,
          "Set it on each node to that node's own address, or leave it out: llmgw sets it.",
          "An engine is told to be at an address that this machine does not have.", NO_GPU),
    Check("mgmt.ifname.ambiguous", Severity.WARN, ("variables", "netdevs"), _ambiguous,
          "Put a second = before the name.",
          "NCCL takes a name for a prefix: bond0 is bond0.2973 too.", (*NO_GPU, "mgmt.ifname.missing")),
    Check("mgmt.ifname.unset", Severity.WARN, ("netdevs", "variables"), _unset,
          "Set the agent's address in agent.yaml to one of this machine: its interface is what ranks are told.",
          "Several interfaces are up and NCCL would choose by itself.", NO_GPU, applies=several),
    Check("mgmt.firewall", Severity.WARN, ("firewall",), _firewall,
          "Let the other nodes' network in on the management interface. What a cloud filters cannot be seen from here.",
          "The policy for incoming connections is to drop, and no rule lets this node's network in.", NO_GPU,
          applies=several),
    Check("mgmt.is-fabric", Severity.WARN, ("adapters", "fabrics"), _is_fabric,
          "Give the agent an address on a management network, where there is one.",
          "Ranks find each other over an interface that is a rail of a fabric.", NO_GPU),
)  # fmt: skip
