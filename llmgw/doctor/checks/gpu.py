"""Whether the GPUs are there and the driver answers."""

from __future__ import annotations

from llmgw.discovery.kmsg_text import EventKind, event_of
from llmgw.doctor.facts import Facts
from llmgw.doctor.verdict import Check, Finding, Severity

NO_GPU = ("gpu.none",)
DRIVER = (*NO_GPU, "gpu.driver.unreachable", "gpu.driver.library-mismatch")
"""What explains everything that a card does not do."""

_RESET = frozenset({62, 64, 74, 95, 109, 119, 120, 136, 140, 143, 154, 155, 156, 158})
"""Xids after which the card needs to be reset, or the node rebooted (NVIDIA's Xid catalogue)."""

_LOST_XID = 79
_MISMATCH, _BLOCKED = "driver-mismatch", "blocked"
_NOT_HERE = frozenset({"not-found", "not-runnable"})
_NO_DRIVER = frozenset({"driver-missing", "no-gpu", *_NOT_HERE})
"""Answers of which the check's own remedy says more."""


def some(items: list[str], most: int = 4) -> str:
    """A list for a sentence: not more of it than helps."""
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def ours(facts: Facts) -> list[str]:
    """The GPUs that are not kept for virtual machines."""
    return [gpu.address for gpu in facts.pci_gpus if gpu.driver != "vfio-pci"]


def has_gpus(facts: Facts) -> bool:
    """Whether the bus has a GPU for us."""
    return bool(ours(facts))


def _none(facts: Facts) -> Finding | None:
    if facts.pci_gpus or facts.cards or facts.smi.code == _BLOCKED:
        return None
    return Finding("There is no NVIDIA GPU on the PCI bus.")


def _should_answer(facts: Facts) -> bool:
    """Whether a driver should answer: a guest of WSL has its GPUs on no bus."""
    return has_gpus(facts) or facts.smi.code == _BLOCKED


def _mismatched(facts: Facts) -> bool:
    return _MISMATCH in (facts.smi.code, facts.nvml.code)


def _unreachable(facts: Facts) -> Finding | None:
    smi, nvml = facts.smi, facts.nvml
    if not smi.code or not nvml.code or facts.cards or _mismatched(facts):
        return None
    # What nvidia-smi says explains more, but not that it is not there.
    told = nvml if smi.code in _NOT_HERE and nvml.said else smi
    said = told.said or told.code
    if nvml.said and nvml.code != smi.code:
        said = f"{smi.said or smi.code}; {nvml.said}"
    hint = " nouveau is loaded in its place." if facts.has_module("nouveau") else ""
    count = len(ours(facts))
    there = f"The PCI bus has {count} NVIDIA GPU{'' if count == 1 else 's'}" if count else "GPUs are not on the PCI bus"
    remedy = "" if told.code in _NO_DRIVER else told.remedy
    return Finding(f"{there} and their driver gives no answer: {said}.{hint}", remedy)


def _mismatch(facts: Facts) -> Finding | None:
    if not _mismatched(facts):
        return None
    loaded = facts.module.version or "of another version"
    said = facts.smi.said if facts.smi.code == _MISMATCH else facts.nvml.said
    return Finding(
        f"The kernel runs NVIDIA module {loaded}, the libraries on disk are newer or older ({said}): "
        "no process can start to use a GPU any more."
    )


def _smi_broken(facts: Facts) -> Finding | None:
    if not facts.smi.code or facts.nvml.code:
        return None
    less = "The GPUs were read through NVML: what only nvidia-smi tells of them could not be told."
    if facts.smi.code in _NOT_HERE:
        return Finding(
            f"There is no nvidia-smi. {less}", "Install NVIDIA's driver utilities, to be told more.", Severity.INFO
        )
    return Finding(f"The driver answers and nvidia-smi does not as it should ({facts.smi.said}). {less}")


def _nvml_broken(facts: Facts) -> Finding | None:
    if facts.smi.code or not facts.nvml.code:
        return None
    return Finding(
        f"nvidia-smi answers and NVML does not ({facts.nvml.said}): the agent reads the GPUs through nvidia-smi alone.",
        facts.nvml.remedy,
    )


def _lost(facts: Facts) -> Finding | None:
    events = [event for event in map(event_of, facts.kernel_log) if event is not None]
    gone = {e.pci_address or "?" for e in events if e.kind is EventKind.GPU_LOST or e.code == _LOST_XID}
    gone |= {card.reading.pci_address for card in facts.cards if card.reading.health.lost}
    shown = {card.reading.pci_address for card in facts.cards}
    if facts.cards:
        gone |= {address for address in ours(facts) if address not in shown}
    if not gone and facts.smi.code != "gpu-lost":
        return None
    named = some(sorted(gone)) or "unnamed"
    left = sum(1 for card in facts.cards if not card.reading.health.lost and card.reading.pci_address not in gone)
    return Finding(f"{len(gone) or 1} of this machine's GPUs is gone from the bus ({named}); {left} still answer.")


def _count(facts: Facts) -> Finding | None:
    here = {card.reading.uuid for card in facts.cards}
    missing = [uuid for uuid in facts.known_cards if uuid not in here]
    if not missing:
        return None
    return Finding(
        f"This node is known to have {len(facts.known_cards)} GPUs, and {len(here)} are here; missing: {some(missing)}."
    )


def _uvm(facts: Facts) -> Finding | None:
    lacking = [] if facts.has_module("nvidia_uvm") else ["the module nvidia_uvm"]
    if "nvidia-uvm" not in facts.nodes:
        lacking.append("/dev/nvidia-uvm")
    return Finding(f"CUDA needs what is not here: {some(lacking)}.") if lacking else None


def _xid(facts: Facts) -> Finding | None:
    said: dict[str, str] = {}
    codes: dict[str, set[int]] = {}
    for event in map(event_of, facts.kernel_log):
        if event is not None and event.kind is EventKind.XID and event.code is not None:
            codes.setdefault(event.pci_address, set()).add(event.code)
            grave = event.code in _RESET or (event.code in (48, 63) and {48, 63} <= codes[event.pci_address])
            if grave:
                said[event.pci_address] = f"{event.pci_address or 'a GPU'}: Xid {event.code}, {event.meaning}"
    return (
        Finding(f"The kernel log has errors of GPUs that a reset must end: {some(list(said.values()))}.")
        if said
        else None
    )


CHECKS = (
    Check(
        "gpu.none", Severity.INFO, ("pci_gpus",), _none,
        "Nothing, if engines on the CPU are meant to run here.",
        "The PCI bus shows no NVIDIA GPU, so nothing about GPUs and their networks is judged.",
    ),
    Check(
        "gpu.driver.unreachable", Severity.FAIL, ("smi", "pci_gpus"), _unreachable,
        "modprobe nvidia; if that fails, install the driver for the running kernel (DKMS, Secure Boot), take nouveau "
        "out, and reboot.",
        "The bus has GPUs, and neither nvidia-smi nor NVML gets an answer from the driver, or none in time.",
        applies=_should_answer, gate=("pci_gpus",),
    ),
    Check(
        "gpu.driver.library-mismatch", Severity.FAIL, ("smi", "pci_gpus"), _mismatch,
        "Drain the node and reboot it; keep NVIDIA's packages out of unattended upgrades.",
        "The driver's packages were upgraded under the loaded module. What runs goes on, nothing new starts.",
        NO_GPU,
    ),
    Check(
        "gpu.source.smi", Severity.WARN, ("smi", "nvml"), _smi_broken,
        "Run nvidia-smi by hand, and see which one is meant: type -a nvidia-smi",
        "NVML answers and nvidia-smi hangs, fails or prints something else, so that less is known of the GPUs. Where "
        "there is none at all it is only said.",
        DRIVER, applies=has_gpus, gate=("pci_gpus",),
    ),
    Check(
        "gpu.source.nvml", Severity.WARN, ("smi", "nvml"), _nvml_broken,
        "Install llmgw with its dependencies, and NVIDIA's user-space packages in the driver's version.",
        "nvidia-smi answers and NVML does not. Agents read GPUs through NVML and take nvidia-smi in its place, which "
        "takes longer.",
        DRIVER, applies=has_gpus, gate=("pci_gpus",),
    ),
    Check(
        "gpu.lost", Severity.FAIL, ("pci_gpus", "cards"), _lost,
        "Reboot the node; if it happens again check power, cooling and the seat of the card.",
        "The driver shows fewer GPUs than the bus has, marks one as lost, or the kernel log says that one is gone.",
        DRIVER,
    ),
    Check(
        "gpu.count.expected", Severity.FAIL, ("known_cards", "cards"), _count,
        "Repair the card, or accept what is here: llmgw agent inventory --accept",
        "A card that this node had before is missing, so replicas that count on it cannot start.",
        ("gpu.driver.unreachable", "gpu.driver.library-mismatch", "gpu.lost"),
    ),
    Check(
        "gpu.uvm.missing", Severity.FAIL, ("modules", "nodes"), _uvm,
        "nvidia-modprobe -u -c=0, and add nvidia-uvm to /etc/modules-load.d",
        "Without unified memory's module and device CUDA ends with error 999.",
        DRIVER,
        applies=lambda facts: has_gpus(facts) and facts.has_module("nvidia"), gate=("pci_gpus",),
    ),
    Check(
        "gpu.xid.reset", Severity.FAIL, ("kernel_log",), _xid,
        "Take the node out of service and reset the GPU (nvidia-smi -r), or reboot.",
        "Since boot the driver wrote an Xid after which a card cannot be trusted before it is reset.",
        (*DRIVER, "gpu.lost"),
    ),
)  # fmt: skip
