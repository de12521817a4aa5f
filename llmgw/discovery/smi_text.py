"""What `nvidia-smi` prints, as values. Pure functions of text; only :class:`DiscoveryError` comes out of them.

Element names and their changes over driver versions: NVIDIA's nvsmi_device DTDs v7 (R352) to v13 (R580). A field is
looked for under every name that it ever had and is ``None`` when it is absent or one of the driver's many ways of
saying so (`N/A`, `[N/A]`, `Not Supported`, `Unknown Error`, …): unknown is never zero.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from attrs import frozen

from llmgw.discovery.faults import DiscoveryError
from llmgw.hardware.inventory import DeviceProcess, Fault

MAX_XML_CHARS = 16 * 1024 * 1024
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_MIG_LINE = re.compile(r"\s+MIG (\S+)\s+Device\s+(\d{1,4}):\s+\(UUID: (MIG-[^)\s]+)\)")
_GPU_LINE = re.compile(r"GPU (\d{1,4}): (.*?) \(UUID: ([^)\s]+)\)")


@frozen
class SmiMig:
    """One MIG device as the XML has it: no name and no UUID, those are in `-L`."""

    index: int
    gpu_instance: int | None
    compute_instance: int | None
    total_mib: int | None
    used_mib: int | None
    uncorrected: int | None
    uuid: str | None


@frozen
class SmiGpu:
    """One card. ``index`` is its position in the output, which is NVML's index."""

    index: int
    uuid: str
    name: str
    pci_address: str
    total_mib: int | None
    used_mib: int | None
    mig_mode: str | None
    mig_pending: str | None
    migs: tuple[SmiMig, ...]
    processes: tuple[tuple[DeviceProcess, int | None, int | None], ...]
    faults: tuple[Fault, ...]


@frozen
class SmiLog:
    """All of `nvidia-smi -q -x`."""

    driver_version: str
    cuda_version: str
    gpus: tuple[SmiGpu, ...]
    attached: int | None


@frozen
class ListedMig:
    """A MIG device of `nvidia-smi -L`."""

    card: int
    index: int
    profile: str
    uuid: str


def _text(parent: Element | None, *paths: str) -> str | None:
    """The first of these paths that is there and says something; ``None`` for every spelling of "no value"."""
    if parent is None:
        return None
    for path in paths:
        found = parent.find(path)
        text = "" if found is None or found.text is None else found.text.strip()
        if text and text.strip("[]") not in ("N/A", "None", "Not Supported", "Unknown", "Unknown Error", "ERR!"):
            return text
    return None


def _number(parent: Element | None, *paths: str) -> int | None:
    text = _text(parent, *paths)
    match = None if text is None else _NUMBER.match(text)
    if match is None:
        return None
    value = int(float(match[0]))
    return value if value >= 0 else None


def parse_xml(text: str) -> SmiLog:
    """`nvidia-smi -q -x`. Raises :class:`DiscoveryError` when it is not that at all; a bad card hides no other."""
    start = text.find("<nvidia_smi_log")
    if start < 0 or len(text) > MAX_XML_CHARS:
        reason = "its output is no nvidia_smi_log" if start < 0 else "its output is longer than it can be"
        raise DiscoveryError("malformed", "nvidia-smi -q -x", reason, "run it by hand and look at what it prints")
    # Without the prologue there is no DOCTYPE, so no entity can be declared; messages may stand before and after.
    end = text.rfind("</nvidia_smi_log>")
    body = text[start : end + len("</nvidia_smi_log>")] if end > start else text[start:]
    try:
        root = ElementTree.fromstring(body)  # noqa: S314 - no DOCTYPE is left in it, see above
    except (ElementTree.ParseError, ValueError, RecursionError) as wrong:
        raise DiscoveryError(
            "malformed", "nvidia-smi -q -x", f"its XML is broken: {wrong}", "run it by hand"
        ) from wrong
    return SmiLog(
        driver_version=_text(root, "driver_version") or "",
        cuda_version=_text(root, "cuda_version") or "",
        gpus=tuple(_gpu(index, gpu) for index, gpu in enumerate(root.findall("gpu"))),
        attached=_number(root, "attached_gpus"),
    )


def pci_address(text: str) -> str:
    """A bus id as sysfs writes it: ``00000000:8F:00.0`` is ``0000:8f:00.0``."""
    domain, _, rest = text.strip().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest.lower()}"
    except ValueError:
        return text.strip().lower()


def _gpu(index: int, gpu: Element) -> SmiGpu:
    memory = gpu.find("fb_memory_usage")
    migs = tuple(_mig(m) for m in gpu.findall("mig_devices/mig_device"))
    return SmiGpu(
        index=index,
        uuid=_text(gpu, "uuid") or "",
        name=_text(gpu, "product_name") or "unknown GPU",
        pci_address=pci_address(_text(gpu, "pci/pci_bus_id") or gpu.get("id") or ""),
        total_mib=_number(memory, "total"),
        used_mib=_number(memory, "used"),
        mig_mode=_text(gpu, "mig_mode/current_mig"),
        mig_pending=_text(gpu, "mig_mode/pending_mig"),
        migs=migs,
        processes=tuple(_processes(gpu)),
        faults=tuple(_faults(gpu)),
    )


def _mig(mig: Element) -> SmiMig:
    # The text output says "Shared FB Memory Usage" by 590; whether the tag follows is not known, so both are read.
    memory = mig.find("fb_memory_usage")
    if memory is None:
        memory = mig.find("shared_fb_memory_usage")
    index = _number(mig, "index")
    return SmiMig(
        index=-1 if index is None else index,
        gpu_instance=_number(mig, "gpu_instance_id"),
        compute_instance=_number(mig, "compute_instance_id"),
        total_mib=_number(memory, "total"),
        used_mib=_number(memory, "used"),
        uncorrected=_number(mig, "ecc_error_count/volatile_count/sram_uncorrectable"),
        uuid=_text(mig, "uuid"),
    )


def _processes(gpu: Element) -> Iterator[tuple[DeviceProcess, int | None, int | None]]:
    """Holders of memory with their instance ids. A pid may stand twice, for compute and graphics: once is enough."""
    seen: set[tuple[int, int | None, int | None]] = set()
    for info in gpu.findall("processes/process_info"):
        pid = _number(info, "pid")
        instance, compute = _number(info, "gpu_instance_id"), _number(info, "compute_instance_id")
        if pid is None or (pid, instance, compute) in seen:
            continue
        seen.add((pid, instance, compute))
        name = (_text(info, "process_name") or "unknown").rsplit("/", 1)[-1]
        yield DeviceProcess(pid, name[:80], _number(info, "used_memory")), instance, compute


def _uncorrected(gpu: Element) -> int | None:
    """Uncorrected volatile ECC errors in any of three layouts: up to Volta, Turing to R535, Ampere from R555 on."""
    volatile = gpu.find("ecc_errors/volatile")
    if volatile is None:
        return None
    counts = [
        _number(volatile, path)
        for path in (
            "double_bit/total",
            "sram_uncorrectable",
            "dram_uncorrectable",
            "sram_uncorrectable_parity",
            "sram_uncorrectable_secded",
        )
    ]
    known = [c for c in counts if c is not None]
    return sum(known) if known else None


def _yes(gpu: Element, *paths: str) -> bool:
    return (_text(gpu, *paths) or "").lower().startswith("yes")


def _faults(gpu: Element) -> Iterator[Fault]:
    """Why this card must not get work, most serious first."""
    everything = " ".join(
        (gpu.findtext(p) or "")
        for p in ("fb_memory_usage/total", "fb_memory_usage/used", "uuid", "product_name", "utilization/gpu_util",
                  "temperature/gpu_temp", "performance_state")
    )  # fmt: skip
    if "GPU is lost" in everything:
        yield Fault("failed", "GPU is lost", "reboot the node; if it comes back, check its power and slot")
        return
    if "requires reset" in everything:
        # Such a card reports 0 MiB in use: without this it would look like the freest of all.
        yield Fault(
            "needs-reset", "the driver says that the GPU requires a reset", "run nvidia-smi --gpu-reset, or reboot"
        )
    if "Unknown Error" in (gpu.findtext("fb_memory_usage/total") or ""):
        yield Fault(
            "failed", "the driver cannot read its memory (Unknown Error)", "look for Xid lines in the kernel log"
        )
    if (count := _uncorrected(gpu)) is not None and count > 0:
        yield Fault(
            "ecc-uncorrected",
            f"has {count} uncorrected ECC error{'s' if count > 1 else ''} since the driver was loaded",
            "reset the GPU; if they come back, replace it",
        )
    for path, what in (
        ("remapped_rows/remapped_row_failure", "row remapping failed"),
        ("ecc_errors/aggregate/sram_threshold_exceeded", "the SRAM error threshold is exceeded"),
        ("ecc_errors/volatile/unrepairable_memory", "memory is unrepairable"),
        ("ecc_errors/aggregate/unrepairable_memory", "memory is unrepairable"),
    ):
        if _yes(gpu, path):
            yield Fault("failed", what, "replace the GPU")
    action = _text(gpu, "gpu_recovery_action")
    pending = (
        ("remapped_rows/remapped_row_pending", "a row remapping is pending"),
        ("retired_pages/pending_retirement", "a page retirement is pending"),
        ("retired_pages/pending_blacklist", "a page retirement is pending"),
        ("gpu_reset_status/reset_required", "a reset is required"),
    )
    why = next((what for path, what in pending if _yes(gpu, path)), None)
    if why is None and action is not None:
        why = f"the driver recommends: {action}"
    if why is not None:
        yield Fault("needs-reset", why, "run nvidia-smi --gpu-reset, or reboot")
    state, status = _text(gpu, "fabric/state"), _text(gpu, "fabric/status")
    if state == "In Progress":
        yield Fault("not-ready", "the NVLink fabric is still being set up", "wait; else restart nvidia-fabricmanager")
    elif state == "Completed" and status not in (None, "Success"):
        yield Fault("not-ready", f"NVLink fabric: {status}", "see the log of nvidia-fabricmanager")
    elif _text(gpu, "fabric/health/summary") == "Unhealthy":
        yield Fault("not-ready", "the NVLink fabric is unhealthy", "see the log of nvidia-fabricmanager")


def parse_list(text: str) -> tuple[ListedMig, ...]:
    """The MIG devices of `nvidia-smi -L`: what they are called and their UUIDs. Lines that are neither are skipped."""
    card: int | None = None
    made = []
    for line in text.splitlines():
        if match := _GPU_LINE.match(line):
            card = int(match[1])
        elif (match := _MIG_LINE.match(line)) and card is not None:
            made.append(ListedMig(card, int(match[2]), match[1], match[3]))
    return tuple(made)


def parse_capabilities(text: str) -> dict[str, int]:
    """Ten times the compute capability by UUID, from `--query-gpu=uuid,compute_cap --format=csv,noheader`."""
    made: dict[str, int] = {}
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 2 and (match := re.fullmatch(r"([0-9]{1,2})\.([0-9])", parts[1])):
            made[parts[0]] = int(match[1]) * 10 + int(match[2])
    return made
