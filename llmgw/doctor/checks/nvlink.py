"""NVSwitches, the fabric manager, NVLinks, and NVLink over several nodes."""

from __future__ import annotations

import re
from collections import Counter

from llmgw.doctor.checks.gpu import DRIVER, NO_GPU, some
from llmgw.doctor.facts import Facts
from llmgw.doctor.verdict import Check, Finding, Severity
from llmgw.hardware.inventory import AdapterKind

_FATAL = re.compile(r"(?<!non-)\bfatal error (\d+)", re.IGNORECASE)
_SWITCH = re.compile(r"\b[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]\b")
_FATAL_SXID = re.compile(r"SXid \(([^)]+)\): (\d+), Fatal", re.IGNORECASE)
_NVL5 = re.compile(r"\bB[23]00\b")
_MESH = 3
_TRAY = re.compile(r"\bGB[23]00\b")


def tray(facts: Facts) -> bool:
    """A node of a rack whose NVLinks lead to other nodes: it runs IMEX and no fabric manager."""
    return any(_TRAY.search(card.reading.name) or card.reading.fabric_cluster for card in facts.cards)


def nvl5(facts: Facts) -> bool:
    """A board whose switches are managed through adapters of their own."""
    managed = any(a.kind is AdapterKind.SWITCH_MANAGEMENT for a in facts.adapters)
    return not tray(facts) and (managed or any(_NVL5.search(card.reading.name) for card in facts.cards))


def switched(facts: Facts) -> bool:
    """Whether the cards are joined by switches that a fabric manager of this node runs."""
    return not tray(facts) and (bool(facts.nvswitches) or nvl5(facts))


def _not_running(facts: Facts) -> Finding | None:
    service = facts.fabric_manager
    if service.load == "loaded" and service.active == "active":
        return None
    state = "not installed" if service.load in ("", "not-found") else f"{service.active} ({service.result})"
    return Finding(f"The GPUs are joined by NVSwitches and the fabric manager is {state}: CUDA refuses with error 802.")


def _version(facts: Facts) -> Finding | None:
    driver = facts.module.version or facts.driver.version
    manager = facts.fabric_manager_version
    if not driver or not manager or driver == manager:
        return None
    return Finding(
        f"The fabric manager is {manager} and the driver {driver}: they work together only in exactly one version.",
        f"Install nvidia-fabricmanager-{driver.partition('.')[0]} in version {driver} and restart it.",
    )


def _state(facts: Facts) -> Finding | None:
    bad = []
    for card in facts.cards:
        health = card.reading.health
        wrong = health.fabric_state in ("not started", "in progress") or health.fabric_status not in ("", "success")
        if wrong or health.fabric_health == "unhealthy":
            said = [word for word in (health.fabric_state, health.fabric_status, health.fabric_health) if word]
            bad.append(f"GPU {card.reading.index} ({', '.join(said)})")
    return Finding(f"Not part of the NVLink fabric: {some(bad)}.") if bad else None


def _prerequisites(facts: Facts) -> Finding | None:
    lacking = [*facts.missing_tools] + ([] if facts.has_module("ib_umad") else ["the module ib_umad"])
    if not lacking and not any("NV_WARN_NOTHING_TO_DO" in line for line in facts.fabric_manager_log):
        return None
    return Finding(
        f"The fabric manager finds no NVLink 5 switch; missing: {some(lacking) or 'nothing that was looked for'}."
    )


def _sxid(facts: Facts) -> Finding | None:
    found = []
    for line in (*facts.fabric_manager_log, *facts.kernel_log):
        if sxid := _FATAL_SXID.search(line):
            found.append(f"{sxid[1]}: {sxid[2]}")
        elif "nvswitch" in line.lower() and (fatal := _FATAL.search(line)):
            place = _SWITCH.search(line)
            found.append(f"{place[0].lower() if place else 'a switch'}: {fatal[1]}")
    found = list(dict.fromkeys(found))
    return (
        Finding(f"NVSwitches reported fatal errors ({some(found)}); what GPUs send each other may be lost.")
        if found
        else None
    )


def _links(facts: Facts) -> Finding | None:
    known = [card.reading for card in facts.cards if not card.reading.health.lost and not card.reading.mig]
    most = Counter(r.nvlinks_up for r in known if r.nvlinks_up).most_common(1)
    bad = []
    for reading in known:
        total = reading.nvlinks if reading.nvlinks is not None else (most[0][0] if most else 0)
        up = reading.nvlinks_up or 0
        if total and most and up < max(total or 0, most[0][0] or 0):
            bad.append(f"GPU {reading.index} has {up} of {max(total or 0, most[0][0] or 0)}")
    joined = {index for domain in facts.nvlink_domains for index in domain}
    largest = max((len(domain) for domain in facts.nvlink_domains), default=0)
    if largest >= _MESH and not bad:
        # Two bridged pairs beside single cards are how a machine is built; a card beside a mesh has lost its links.
        bad = [f"GPU {r.index} reaches none of {largest} that reach each other" for r in known if r.index not in joined]
    return Finding(f"NVLinks are down: {some(bad)}. Tensor parallelism over them is slow or fails.") if bad else None


def _imex(facts: Facts) -> Finding | None:
    state = facts.imex.state or "silent"
    if facts.imex.channel and state.upper() in ("UP", "READY"):
        return None
    what = "has no channel" if not facts.imex.channel else f"is {state.lower()}"
    return Finding(f"These cards have NVLinks to other nodes, and IMEX {what}: NCCL from 2.27 on stops there.")


CHECKS = (
    Check(
        "nvswitch.fm.not-running", Severity.FAIL, ("fabric_manager", "cards"), _not_running,
        "Install nvidia-fabricmanager in the driver's version; systemctl enable --now nvidia-fabricmanager; then restart "
        "the engines.",
        "On a board with NVSwitches nothing can use CUDA before the fabric manager has set them up.",
        DRIVER, applies=switched, gate=("cards",),
    ),
    Check(
        "nvswitch.fm.version", Severity.FAIL, ("fabric_manager_version", "module"), _version,
        "Bring both to one version and restart nvidia-fabricmanager.",
        "All parts of the two version numbers must be equal, also when the service says that it runs.",
        NO_GPU, applies=switched, gate=("cards",),
    ),
    Check(
        "nvswitch.nvl5.prereq", Severity.FAIL, ("missing_tools", "modules"), _prerequisites,
        "Install nvlsm, infiniband-diags and libnvsdm; load ib_umad at boot; restart nvidia-fabricmanager.",
        "The switches of B200 and B300 boards are set up through InfiniBand's management, whose parts must be there.",
        DRIVER, applies=nvl5, gate=("cards",),
    ),
    Check(
        "nvswitch.fabric.state", Severity.FAIL, ("cards",), _state,
        "Restart nvidia-fabricmanager and read /var/log/fabricmanager.log; on a rack look at IMEX and the switches.",
        "A card that is not registered with its switches cannot reach the others.",
        (*DRIVER, "nvswitch.fm.not-running", "nvswitch.fm.version", "nvswitch.nvl5.prereq"),
    ),
    Check(
        "nvswitch.sxid.fatal", Severity.FAIL, ("fabric_manager_log", "kernel_log"), _sxid,
        "Stop the engines and reset all GPUs and switches together, or reboot; have the board replaced if it repeats.",
        "A switch wrote an error that it does not recover from. Those called non-fatal are left out.",
        NO_GPU, applies=switched, gate=("cards",),
    ),
    Check(
        "nvlink.down", Severity.FAIL, ("cards",), _links,
        "Reset the GPUs and restart the fabric manager; if they stay down the board needs service.",
        "A card has fewer NVLinks up than it has, or than its siblings have.",
        (*DRIVER, "gpu.lost", "nvswitch.fm.not-running", "nvswitch.fm.version"),
    ),
    Check(
        "imex.not-ready", Severity.FAIL, ("imex", "cards"), _imex,
        "Start nvidia-imex with the same list of nodes everywhere, or give engines NCCL_MNNVL_ENABLE=0.",
        "NVLink over several nodes needs the IMEX daemon and its channel on each.",
        DRIVER, applies=tray, gate=("cards",),
    ),
)  # fmt: skip
