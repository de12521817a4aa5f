"""Cards in MIG mode: the states in which nothing can run on them."""

from __future__ import annotations

from llmgw.doctor.checks.gpu import DRIVER, some
from llmgw.doctor.facts import Facts
from llmgw.doctor.verdict import Check, Finding, Severity


def any_mig(facts: Facts) -> bool:
    """Whether a card is in MIG mode."""
    return any(card.reading.mig for card in facts.cards)


def _empty(facts: Facts) -> Finding | None:
    carved = {instance.card for instance in facts.mig_instances}
    bad = [
        f"GPU {c.reading.index}"
        for c in facts.cards
        if c.reading.mig
        and not c.reading.instances
        and not c.reading.instances_trouble
        and c.reading.index not in carved
    ]
    return Finding(f"MIG mode is on and nothing is carved: {some(bad)}. Nothing can run there.") if bad else None


def _pending(facts: Facts) -> Finding | None:
    bad = [
        f"GPU {c.reading.index} goes {'into' if c.reading.mig_pending else 'out of'} MIG mode"
        for c in facts.cards
        if c.reading.mig is not None and c.reading.mig_pending is not None and c.reading.mig != c.reading.mig_pending
    ]
    return Finding(f"A change of MIG mode waits for a reset: {some(bad)}.") if bad else None


def _no_compute(facts: Facts) -> Finding | None:
    used = {(c.reading.index, i.gpu_instance) for c in facts.cards for i in c.reading.instances}
    bad = [
        f"GPU {g.card} instance {g.number} ({g.profile})" for g in facts.mig_instances if (g.card, g.number) not in used
    ]
    return (
        Finding(f"GPU instances without a compute instance: {some(bad)}. Their memory is lost to all.") if bad else None
    )


def _mixed(facts: Facts) -> Finding | None:
    unused = sorted({d.device_class for d in facts.devices if d.mig is not None} - {*facts.wanted_classes})
    if unused and facts.wanted_classes:
        return Finding(
            f"MIG devices are here that no model of the catalog names: {some(unused, 8)}. They stay empty.",
            "Name the class in a model's device_class, or carve the card into what models use.",
            Severity.WARN,
        )
    profiles = sorted({i.profile for c in facts.cards for i in c.reading.instances if i.profile})
    return None if len(profiles) < 2 else Finding(f"MIG devices of several profiles are here: {some(profiles, 8)}.")


CHECKS = (
    Check(
        "mig.empty", Severity.FAIL, ("cards",), _empty,
        "Carve it (nvidia-smi mig -cgi PROFILE -C), or turn MIG mode off (nvidia-smi -i INDEX -mig 0).",
        "A card in MIG mode without an instance is of no use to anybody, not even as a whole.", DRIVER,
    ),
    Check(
        "mig.no-compute", Severity.FAIL, ("mig_instances", "cards"), _no_compute,
        "nvidia-smi mig -cci -gi NUMBER makes the compute instance; -dgi takes the GPU instance away.",
        "CUDA shows compute instances only; a GPU instance without one holds memory for nothing.",
        DRIVER, applies=any_mig, gate=("cards",),
    ),
    Check(
        "mig.pending", Severity.WARN, ("cards",), _pending,
        "Stop what uses the card and reset it: nvidia-smi -i INDEX -r",
        "The mode that was set is not the one in force.", DRIVER,
    ),
    Check(
        "mig.mixed", Severity.INFO, ("cards",), _mixed,
        "Nothing, if the catalog has a profile for each of them.",
        "Each MIG profile is a device class of its own; those that no model names stay empty. Which ones models name only "
        "the control plane knows: llmgw ctl doctor says it, as a warning.", DRIVER,
    ),
)  # fmt: skip
