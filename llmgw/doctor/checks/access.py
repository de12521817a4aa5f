"""Locked memory, and whether the adapters can be opened at all."""

from __future__ import annotations

from llmgw.doctor.checks.gpu import NO_GPU, some
from llmgw.doctor.facts import Facts
from llmgw.doctor.verdict import Check, Finding, Severity
from llmgw.hardware.inventory import AdapterKind

_MIB = 1024 * 1024


def _running(facts: Facts) -> Finding | None:
    limit = facts.limits.memlock_bytes
    total = (facts.host.memory_mib or facts.memory.total_mib) * _MIB
    if limit is None or limit >= (total or 1 << 62):
        return None
    reload = "systemctl daemon-reload, then " if facts.unit.stale else ""
    return Finding(
        f"The running agent may lock {limit // 1024} KiB of memory, and so may every engine that it starts: RDMA fails "
        "to register memory.",
        f"LimitMEMLOCK=infinity in the agent's unit, {reload}systemctl restart {facts.unit.name or 'the agent'}; "
        "limits.conf is not read for services.",
    )


def _unit(facts: Facts) -> Finding | None:
    if facts.unit.memlock != "infinity":
        return Finding(f"The unit {facts.unit.name} has LimitMEMLOCK={facts.unit.memlock or 'unset'}.")
    if facts.unit.stale:
        return Finding(f"The unit {facts.unit.name} was changed on disk and systemd has not read it again.")
    return None


def _nodes(facts: Facts) -> Finding | None:
    bad = [f"{a.name} ({f.reason})" for a in facts.adapters for f in a.faults if f.code == "no-verbs"]
    return (
        Finding(f"Adapters that cannot be opened: {some(bad)}. NCCL would speak TCP and say nothing.") if bad else None
    )


def _modules(facts: Facts) -> Finding | None:
    if not facts.pci_nics or any(a.kind is not AdapterKind.SOFTWARE for a in facts.adapters):
        return None
    return Finding(f"{len(facts.pci_nics)} cards on the PCI bus can do RDMA, and no RDMA driver shows one of them.")


def _installed(facts: Facts) -> bool:
    return facts.unit.load == "loaded"


CHECKS = (
    Check(
        "agent.memlock.running", Severity.FAIL, ("limits", "unit"), _running,
        "LimitMEMLOCK=infinity in the agent's unit, then restart it.",
        "The process has the limit that it was started with, whatever files say by now.", NO_GPU,
        applies=lambda facts: facts.unit.pid > 0, gate=("unit",),
    ),
    Check(
        "agent.memlock.unit", Severity.FAIL, ("unit",), _unit,
        "LimitMEMLOCK=infinity in the unit; systemctl daemon-reload; restart the agent.",
        "The unit decides what the agent gets at its next start.", (*NO_GPU, "agent.memlock.running"),
        applies=_installed, gate=("unit",),
    ),
    Check(
        "rdma.modules.missing", Severity.FAIL, ("pci_nics", "adapters"), _modules,
        "modprobe mlx5_ib ib_uverbs rdma_ucm (or the vendor's driver), install rdma-core, and load them at boot.",
        "The bus has RDMA cards, and /sys/class/infiniband has none of them.", NO_GPU,
    ),
    Check(
        "rdma.verbs.no-device-node", Severity.FAIL, ("adapters",), _nodes,
        "modprobe ib_uverbs; give a container --device /dev/infiniband; let the agent's user open it (group rdma).",
        "sysfs shows an adapter that programs cannot open.", (*NO_GPU, "rdma.modules.missing"),
    ),
)  # fmt: skip
