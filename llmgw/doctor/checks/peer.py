"""Another node that was tried: whether ranks on the two can find each other, both ways."""

from __future__ import annotations

from collections.abc import Iterator

from llmgw.doctor.checks.gpu import some
from llmgw.doctor.facts import Facts
from llmgw.doctor.peer_facts import Way
from llmgw.doctor.verdict import Check, Finding, Severity

_CLOCK_S = 5.0
_BECAUSE = ("peer.reach",)


def asked(facts: Facts) -> bool:
    """Whether there is another node to try."""
    return bool(facts.peer.host)


def other(facts: Facts) -> str:
    """How the other node is called here."""
    return facts.peer.name or facts.peer.host


def ways(facts: Facts) -> Iterator[tuple[str, Way]]:
    """Both directions in words."""
    path = facts.peer_path
    here = facts.host.hostname or "this node"
    yield f"from {here} to {other(facts)}", path.there
    yield f"from {other(facts)} to {here}", path.back


def _reach(facts: Facts) -> Finding | None:
    if not facts.peer.trouble:
        return None
    at = f" ({facts.peer.address})" if facts.peer.address not in ("", facts.peer.host) else ""
    return Finding(f"The doctor on {facts.peer.host}{at} cannot be spoken with: {facts.peer.trouble}.")


def _name(facts: Facts) -> Finding | None:
    path, said = facts.peer_path, []
    if path.seen != path.address:
        return Finding(
            f"This node's address {path.address} arrives at {other(facts)} as {path.seen}: what ranks say of where they "
            "are is of no use there.",
            "Give both nodes addresses of one network, without translation (NAT) between them.",
            Severity.FAIL,
        )
    for name, where, found, address in (
        (facts.peer.name, facts.host.hostname or "this node", path.named_here, facts.peer.address),
        (facts.host.hostname, other(facts), path.named_there, path.address),
    ):
        if address not in found:
            said.append(f"on {where} {name or 'the nameless node'} is {some(list(found)) or 'unknown'}, not {address}")
    return Finding(f"Names do not lead to the addresses where the nodes are: {'; '.join(said)}.") if said else None


def _clock(facts: Facts) -> Finding | None:
    ahead = facts.peer_path.ahead_s
    if abs(ahead) < _CLOCK_S:
        return None
    how = "ahead of" if ahead > 0 else "behind"
    return Finding(f"The clock of {other(facts)} is {abs(ahead):.1f} s {how} this one.")


def _ports(facts: Facts) -> Finding | None:
    said = []
    for way, found in ways(facts):
        bad = [f"{p.port} ({p.trouble})" for p in found.ports if p.trouble]
        if bad:
            said.append(f"{way} {len(bad)} of {len(found.ports)} do not open: {some(bad)}")
        elif not found.ports:
            said.append(f"{way} none could be tried")
    return Finding(f"Ports that ranks meet on are shut: {'; '.join(said)}.") if said else None


def _mtu(facts: Facts) -> Finding | None:
    lost, less, silent = [], [], []
    for way, found in ways(facts):
        if found.bulk:
            most = f", and packets above {found.largest} bytes vanish" if 0 < found.largest < found.mtu else ""
            lost.append(f"{way} {found.bulk}{most}")
        elif not found.largest:
            silent.append(way)
        elif found.largest < found.mtu:
            less.append(f"{way} {found.largest} bytes arrive whole, and the interface sends {found.mtu}")
    if lost:
        return Finding(f"Larger transfers do not arrive: {'; '.join(lost)}.", severity=Severity.FAIL)
    if less:
        return Finding(f"The path takes smaller packets than the interface: {'; '.join(less)}.")
    if silent:
        return Finding(
            f"No datagram arrives {' nor '.join(silent)}, so nobody can tell how large they may be.",
            "Let UDP between the nodes in, at least for this; TCP went through.",
            Severity.INFO,
        )
    return None


CHECKS = (
    Check("peer.reach", Severity.FAIL, ("peer",), _reach,
          "Run llmgw doctor --peer-wait there first; then look at routes and firewalls between the nodes.",
          "The other node of --peer does not answer, so nothing of the path to it is known.",
          applies=asked, gate=("peer",)),
    Check("peer.ports", Severity.FAIL, ("peer_path",), _ports,
          "Let the nodes' network in on both (agent.yaml's ports, and net.ipv4.ip_local_port_range for NCCL and Gloo).",
          "Engines and NCCL listen on ports of these ranges, and ranks on the other node dial them.", _BECAUSE,
          applies=asked, gate=("peer",)),
    Check("peer.mtu", Severity.WARN, ("peer_path",), _mtu,
          "Set one MTU on both interfaces and on every switch between; let ICMP \"fragmentation needed\" through.",
          "Packets as large as an interface sends do not get to the other node. Where nobody tells the sender, ranks "
          "connect and then hang.", _BECAUSE, applies=asked, gate=("peer",)),
    Check("peer.clock", Severity.FAIL, ("peer_path",), _clock,
          "Keep both right by one source: systemctl enable --now chronyd (or systemd-timesyncd).",
          "The clocks of the two nodes are 5 s or more apart: certificates, leases and logs do not fit together.",
          _BECAUSE, applies=asked, gate=("peer",)),
    Check("peer.name", Severity.WARN, ("peer_path",), _name,
          "Map both names to the nodes' management addresses, in DNS or in /etc/hosts on both.",
          "A node's name comes to another address on the other node, or its address is translated on the way.",
          _BECAUSE, applies=asked, gate=("peer",)),
)  # fmt: skip
