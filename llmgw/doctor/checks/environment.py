"""What variables and files tell NCCL, by NCCL's own rules."""

from __future__ import annotations

from llmgw.doctor.checks.gpu import NO_GPU, some
from llmgw.doctor.checks.management import values
from llmgw.doctor.facts import Facts
from llmgw.doctor.network import plans
from llmgw.doctor.node_facts import Variable
from llmgw.doctor.verdict import Check, Finding, Severity
from llmgw.engines.nccl import ports_selected
from llmgw.hardware.fabric import natural
from llmgw.hardware.inventory import AdapterKind

_HARMFUL = {
    "NCCL_IB_DISABLE": "turns InfiniBand and RoCE off",
    "NCCL_P2P_DISABLE": "keeps GPUs from talking over NVLink and PCIe",
    "NCCL_SHM_DISABLE": "keeps ranks of a node from sharing memory",
    "NCCL_NVLS_ENABLE": "decides over NVLink's own reductions",
    "NCCL_NET": "picks the transport",
    "NCCL_NET_GDR_LEVEL": "decides over GPUDirect",
    "NCCL_CROSS_NIC": "decides how rails are paired",
    "NCCL_IB_HCA": "picks the adapters",
    "NCCL_IB_GID_INDEX": "pins a GID index",
    "NCCL_SOCKET_IFNAME": "picks the interface",
}
_NEEDS_ONE = frozenset({"NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"})


def selection(facts: Facts, value: str) -> list[str]:
    """The ports that NCCL takes with this value, as it names them, in natural order."""
    found = sorted(ports_selected(value, facts.adapters), key=lambda p: (natural(p[0]), p[1]))
    return [f"{name}:{port}" for name, port in found]


def _why(facts: Facts, value: str) -> str:
    listed = value.lstrip("^=").split(",")
    names = [word.partition(":")[0] for word in listed]
    there = [a.name for a in facts.adapters]
    exact = value.lstrip("^").startswith("=")
    if any(word != word.strip() for word in listed):
        return "a space is part of a name to NCCL"
    if any(word[:1] in ("^", "=") for word in listed[1:]):
        return "^ and = count once, at the front"
    if not any(names):
        return "a list without a name takes every adapter"
    if any(name.endswith("_dma") for name in names):
        return "NCCL's filter knows adapters without _dma"
    unknown = [n for n in names if n and not any(a == n if exact else a.startswith(n) for a in there)]
    if unknown:
        return f"{some(unknown)} is not here"
    prefixes = [n for n in names if n and not exact and any(a != n and a.startswith(n) for a in there) and n in there]
    if prefixes and not value.startswith("^"):
        return f"{some(prefixes)} is a prefix of others"
    managed = [a.name for a in facts.adapters if a.kind is AdapterKind.SWITCH_MANAGEMENT]
    taken = {port.partition(":")[0] for port in selection(facts, value)}
    if taken & set(managed):
        return f"it takes {some(sorted(taken & set(managed)))}, which run the NVLink switches"
    return ""


def _hca(facts: Facts) -> Finding | None:
    for variable in values(facts, "NCCL_IB_HCA"):
        if why := _why(facts, variable.value):
            taken = some(selection(facts, variable.value), 12) or "no port at all, and speak TCP"
            right = next((f"={','.join(p.meant)}" for p in plans(facts) if p.meant), "")
            return Finding(
                f"{variable.source} says NCCL_IB_HCA={variable.value}: {why}. NCCL would take {taken}.",
                f"NCCL_IB_HCA={right}" if right else "Name adapters exactly: NCCL_IB_HCA==NAME:PORT,NAME:PORT",
            )
    return None


def _per_rank(facts: Facts) -> Finding | None:
    meant = {frozenset(plan.meant) for plan in plans(facts) if plan.meant}
    for engine in facts.engines:
        for word in engine.command:
            name, _, value = word.partition("=")
            if name == "NCCL_IB_HCA" and meant and frozenset(selection(facts, value)) not in meant:
                taken = some(selection(facts, value)) or "no port"
                return Finding(f"The command of {engine.kind} sets {word} ({taken}), which is no fabric's whole list.")
    return None


def _files(facts: Facts) -> Finding | None:
    said = [_effect(v) for v in facts.variables if v.source != "environment" and _effective(v)]
    cut = [plan.fabric for plan in plans(facts) if plan.meant and not plan.ports]
    said += [f"on fabric {name} NCCL would take no port and speak TCP" for name in cut]
    return Finding(f"Files of NCCL decide for every engine of this node: {some(said, 8)}.") if said else None


def _effective(variable: Variable) -> bool:
    if variable.name in _NEEDS_ONE:
        return variable.value.strip() not in ("", "0")
    return variable.name in _HARMFUL


def _effect(variable: Variable) -> str:
    return f"{variable.source} {_HARMFUL[variable.name]} ({variable.name}={variable.value})"


def _inherited(facts: Facts) -> Finding | None:
    found = [f"{v.name}={v.value}" for v in facts.variables if v.source == "environment"]
    return (
        Finding(f"The agent's environment has variables that its engines do not get: {some(found)}.") if found else None
    )


CHECKS = (
    Check("env.hca.syntax", Severity.FAIL, ("variables", "adapters"), _hca,
          "Name adapters exactly: NCCL_IB_HCA==NAME:PORT,NAME:PORT",
          "A list of adapters does not mean what it looks like by NCCL's rules.", NO_GPU),
    Check("env.hca.per-rank", Severity.FAIL, ("engines", "fabrics"), _per_rank,
          "Give every rank the whole list of its fabric: NCCL takes the adapter that is near by itself.",
          "Ranks of one shard must have one list, the fabric's; a command that sets its own undoes that.", NO_GPU),
    Check("env.nccl.conf", Severity.WARN, ("variables",), _files,
          "Take it out of the file, or declare it in the profile that needs it.",
          "/etc/nccl.conf and ~/.nccl.conf hold for everything that llmgw does not set itself.", NO_GPU),
    Check("env.inherited", Severity.INFO, ("variables",), _inherited,
          "Nothing. What an engine shall have belongs into its profile's env.",
          "llmgw gives engines a short list of the agent's variables, and none of NCCL's.", NO_GPU),
)  # fmt: skip
