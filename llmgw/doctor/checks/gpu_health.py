"""How the single cards are: memory, clocks, modes, who holds them."""

from __future__ import annotations

from collections.abc import Callable

from llmgw.doctor.checks.gpu import DRIVER, some
from llmgw.doctor.facts import Card, Facts
from llmgw.doctor.verdict import Check, Finding, Severity

_HELD_MIB = 1024


def _each(text: str, wrong: Callable[[Card], str]) -> Callable[[Facts], Finding | None]:
    """A finding that names every card of which ``wrong`` says something."""

    def find(facts: Facts) -> Finding | None:
        said = [f"GPU {card.reading.index}{why}".rstrip() for card in facts.cards if (why := wrong(card))]
        return Finding(f"{text}: {some(said)}.") if said else None

    return find


def _uncorrectable(card: Card) -> str:
    health = card.reading.health
    count, action = health.uncorrected or 0, health.recovery
    if not count and action in ("", "none"):
        return ""
    wanted = f", the driver asks for: {action}" if action not in ("", "none") else ""
    return f" ({count} errors{wanted})"


def _remap_failed(card: Card) -> str:
    health = card.reading.health
    return " " if health.remap_failed or health.unrepairable else ""


def _remap_pending(card: Card) -> str:
    health = card.reading.health
    return " " if health.remap_pending or health.retirement_pending or health.repair_pending else ""


def _slowed(card: Card) -> str:
    return f" ({', '.join(card.slowed)})" if card.slowed else ""


def _modes(facts: Facts) -> Finding | None:
    said = [
        f"GPU {c.reading.index} goes to ECC {'on' if c.ecc_pending else 'off'} at its next reset"
        for c in facts.cards
        if c.ecc is not None and c.ecc_pending is not None and c.ecc != c.ecc_pending
    ]
    if len({c.ecc for c in facts.cards if c.ecc is not None}) > 1:
        said.append(f"ECC is off on {some([f'GPU {c.reading.index}' for c in facts.cards if c.ecc is False])} only")
    return Finding(f"ECC is not the same everywhere: {some(said)}.") if said else None


def _in_use(facts: Facts) -> Finding | None:
    held = [
        f"GPU {c.reading.index} by {p.name} (pid {p.pid}, {p.used_mib} MiB)"
        for c in facts.cards
        for p in c.reading.processes
        if (p.used_mib or 0) > _HELD_MIB
    ]
    return Finding(f"Memory is held by processes: {some(held)}.") if held else None


def _stuck(facts: Facts) -> Finding | None:
    said = [f"pid {s.pid} ({s.name}, state {s.state})" for s in facts.stuck]
    return Finding(f"Processes that hold a GPU cannot end: {some(said)}.") if said else None


CHECKS = (
    Check(
        "gpu.ecc.uncorrectable", Severity.FAIL, ("cards",),
        _each("Memory of a GPU has errors that could not be corrected since boot", _uncorrectable),
        "Reset the GPU or reboot; if it comes again have the card replaced.",
        "Uncorrectable errors were counted since boot, or the driver names an action that the card needs.", DRIVER,
    ),
    Check(
        "gpu.remap.failed", Severity.FAIL, ("cards",),
        _each("No spare row is left for bad memory", _remap_failed),
        "Take the card out of service and have it replaced.",
        "A bad row of memory could not be replaced by a spare one.", DRIVER,
    ),
    Check(
        "gpu.remap.pending", Severity.WARN, ("cards",),
        _each("Bad memory is set aside only after a reset", _remap_pending),
        "Drain the node and reset the GPU; before Ampere: reboot.",
        "The card has found bad memory and will replace it at its next reset.", (*DRIVER, "gpu.remap.failed"),
    ),
    Check(
        "gpu.persistence", Severity.WARN, ("cards", "card_details"),
        _each("Persistence mode is off", lambda c: " " if c.persistence is False else ""),
        "systemctl enable --now nvidia-persistenced",
        "Without it the driver lets a card go whenever nobody uses it: starts are slow and settings get lost.", DRIVER,
    ),
    Check(
        "gpu.throttle", Severity.WARN, ("cards", "card_details"),
        _each("The hardware lowers the clocks", _slowed),
        "Check fans and air flow, power cables, power supplies, and the power cap of the management controller.",
        "Heat or power make the card slow down. A software power cap and an idle card do not count.", DRIVER,
    ),
    Check(
        "gpu.ecc.mode", Severity.WARN, ("cards", "card_details"), _modes,
        "Reset the GPU or reboot; set the same mode on all: nvidia-smi -e 1",
        "A change of ECC mode waits for a reset, or cards of one node differ.", DRIVER,
    ),
    Check(
        "gpu.zombie", Severity.WARN, ("stuck",), _stuck,
        "Wait a minute; what stays in state D or Z until then only a reboot ends.",
        "A process that ended, or hangs in the driver, still holds a card.", DRIVER,
    ),
    Check(
        "gpu.in-use", Severity.INFO, ("cards",), _in_use,
        "Nothing, if they are this node's engines; else stop them or take the GPU out of the pool.",
        "Processes hold more than 1 GiB of a card.", DRIVER,
    ),
)  # fmt: skip
