"""What `nvidia-smi` prints, as values. Pure functions of text; only :class:`DiscoveryError` comes out of them.

Element names and their changes over driver versions: NVIDIA's nvsmi_device DTDs v7 (R352) to v13 (R580). A field is
looked for under every name that it ever had and is ``None`` when it is absent or one of the driver's many ways of
saying so (`N/A`, `[N/A]`, `Not Supported`, `Unknown Error`, …): unknown is never zero.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from attrs import field, frozen

from llmgw.discovery.faults import DiscoveryError
from llmgw.hardware.inventory import Driver, Load, Wear
from llmgw.hardware.reading import CardHealth, CardReading, InstanceReading, ProcessReading

MAX_XML_CHARS = 16 * 1024 * 1024
PID_MAX = 4194304
"""Larger than any pid on Linux (PID_MAX_LIMIT): what is beyond is a mangled structure, not a process."""

_NUMBER = re.compile(r"-?[0-9]{1,18}(?:\.[0-9]{1,18})?")
_MIG_LINE = re.compile(r"\s+MIG (\S{1,64})\s{1,64}Device\s{1,64}(\d{1,4}):\s{1,64}\(UUID: (MIG-[^)\s]{1,128})\)")
_GPU_LINE = re.compile(r"\s{0,64}GPU (\d{1,4}): (.{0,256}?) \(UUID: ([^)\s]{1,128})\)")
_ANY_GPU_LINE = re.compile(r"\s{0,64}GPU \d{1,4}\b")
_NO_VALUE = frozenset(
    {"N/A", "None", "Not Supported", "Unknown", "Unknown Error", "ERR!", "Insufficient Permissions", "Not Found",
     "GPU is lost", "GPU requires reset", "Requested functionality has been deprecated"}
)  # fmt: skip


@frozen
class SmiLog:
    """All of `nvidia-smi -q -x`. A card's index is its position, which is NVML's index unless a card was left out."""

    driver: Driver
    cards: tuple[CardReading, ...]
    attached: int | None


@frozen
class ListedMig:
    """One line of `nvidia-smi -L` about a MIG device: its card's index, its own, its profile and UUID."""

    card: int
    index: int
    profile: str
    uuid: str


@frozen
class Listed:
    """`nvidia-smi -L`: the index of each card by UUID, and the MIG devices. Neither is in the XML."""

    cards: Mapping[str, int] = field(factory=dict, hash=False)
    migs: tuple[ListedMig, ...] = ()


def _raw(parent: Element | None, path: str) -> str:
    """An element's text as it stands, without white space and brackets around it; empty where there is none."""
    found = None if parent is None else parent.find(path)
    return "" if found is None or found.text is None else found.text.strip().strip("[]")


def _text(parent: Element | None, *paths: str) -> str | None:
    """The first of these paths that is there and says something; ``None`` for every spelling of "no value"."""
    return next((text for path in paths if (text := _raw(parent, path)) and text not in _NO_VALUE), None)


def _number(parent: Element | None, *paths: str) -> int | None:
    """A whole number that is not negative, rounded half up."""
    text = _text(parent, *paths)
    match = None if text is None else _NUMBER.match(text)
    if match is None:
        return None
    value = int(float(match[0]) + 0.5)
    return value if not match[0].startswith("-") else None


def _yes(parent: Element | None, *paths: str) -> bool | None:
    """Whether any of these says yes; ``None`` when none of them says yes or no."""
    said = [text.lower() for path in paths if (text := _raw(parent, path))]
    if any(text in ("yes", "true") for text in said):
        return True
    return False if any(text in ("no", "false") for text in said) else None


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
        driver=Driver(_text(root, "driver_version") or "", _text(root, "cuda_version") or ""),
        cards=tuple(_card(index, gpu) for index, gpu in enumerate(root.findall("gpu"))),
        attached=_number(root, "attached_gpus"),
    )


def pci_address(text: str) -> str:
    """A bus id as sysfs writes it: ``00000000:8F:00.0`` is ``0000:8f:00.0``."""
    domain, _, rest = text.strip().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest.lower()}"
    except ValueError:
        return text.strip().lower()


def _card(index: int, gpu: Element) -> CardReading:
    memory = gpu.find("fb_memory_usage")
    cluster = _text(gpu, "fabric/clusterUuid") or ""
    power = "gpu_power_readings" if gpu.find("gpu_power_readings") is not None else "power_readings"
    total = _number(memory, "total")
    instances = tuple(_instance(position, m) for position, m in enumerate(gpu.findall("mig_devices/mig_device")))
    return CardReading(
        index=index,
        uuid=_text(gpu, "uuid") or "",
        name=_text(gpu, "product_name") or "unknown GPU",
        pci_address=pci_address(_text(gpu, "pci/pci_bus_id") or gpu.get("id") or ""),
        total_mib=total,
        used_mib=_number(memory, "used"),
        memory_hidden=_raw(memory, "total") == "Insufficient Permissions",
        # A card that has instances is in MIG mode, also where the mode may not be read.
        mig=True if instances else _mode(_text(gpu, "mig_mode/current_mig")),
        mig_pending=_mode(_text(gpu, "mig_mode/pending_mig")),
        instances=instances,
        processes=tuple(_processes(gpu, total)),
        health=_health(gpu),
        load=Load(
            temperature_c=_number(gpu, "temperature/gpu_temp"),
            power_w=_number(gpu, *(f"{power}/{w}" for w in ("average_power_draw", "power_draw", "instant_power_draw"))),
            utilization_percent=_number(gpu, "utilization/gpu_util"),
        ),
        wear=Wear(
            _sum(_number(gpu, f"remapped_rows/{row}") for row in ("remapped_row_corr", "remapped_row_unc")),
            _uncorrected(gpu.find("ecc_errors/aggregate")),
        ),
        fabric_cluster=cluster if cluster.strip("0-") else "",
        fabric_clique=_number(gpu, "fabric/cliqueId") if cluster.strip("0-") else None,
    )


def _mode(text: str | None) -> bool | None:
    return {"enabled": True, "disabled": False}.get((text or "").lower())


def _sum(counts: Iterator[int | None]) -> int | None:
    known = [c for c in counts if c is not None]
    return sum(known) if known else None


def _instance(position: int, mig: Element) -> InstanceReading:
    # The text output says "Shared FB Memory Usage" by 590; whether the tag follows is not known, so both are read.
    memory = mig.find("fb_memory_usage")
    if memory is None:
        memory = mig.find("shared_fb_memory_usage")
    index = _number(mig, "index")
    return InstanceReading(
        index=position if index is None else index,
        uuid=_text(mig, "uuid") or "",
        profile="",
        gpu_instance=_number(mig, "gpu_instance_id"),
        compute_instance=_number(mig, "compute_instance_id"),
        total_mib=_number(memory, "total"),
        used_mib=_number(memory, "used"),
        uncorrected=_number(mig, "ecc_error_count/volatile_count/sram_uncorrectable"),
    )


def _processes(gpu: Element, total_mib: int | None) -> Iterator[ProcessReading]:
    """Holders of memory. A pid may stand twice, for compute and graphics."""
    for info in gpu.findall("processes/process_info"):
        pid, used = _number(info, "pid"), _number(info, "used_memory")
        if pid is None or not 0 < pid <= PID_MAX:
            continue
        yield ProcessReading(
            pid=pid,
            name=process_name(_text(info, "process_name")),
            used_mib=None if used is not None and total_mib is not None and used > total_mib else used,
            gpu_instance=_number(info, "gpu_instance_id"),
            compute_instance=_number(info, "compute_instance_id"),
        )


def process_name(path: str | None) -> str:
    """What a process is called: the last part of its program's path, without its arguments."""
    words = (path or "").split()
    return (words[0].rsplit("/", 1)[-1] if words else "")[:80] or "unknown"


def _uncorrected(counts: Element | None) -> int | None:
    """Uncorrected ECC errors in any of three layouts: up to Volta, Turing to R535, Ampere from R555 on."""
    return _sum(
        _number(counts, path)
        for path in (
            "double_bit/total",
            "sram_uncorrectable",
            "dram_uncorrectable",
            "sram_uncorrectable_parity",
            "sram_uncorrectable_secded",
        )
    )


def _health(gpu: Element) -> CardHealth:
    everything = " ".join(
        _raw(gpu, p)
        for p in ("fb_memory_usage/total", "fb_memory_usage/used", "uuid", "product_name", "utilization/gpu_util",
                  "temperature/gpu_temp", "performance_state")
    )  # fmt: skip
    fabric = gpu.find("fabric")
    return CardHealth(
        lost="GPU is lost" in everything,
        wants_reset="requires reset" in everything or bool(_yes(gpu, "gpu_reset_status/reset_required")),
        memory_error=_raw(gpu, "fb_memory_usage/total") in ("Unknown Error", "ERR!"),
        uncorrected=_uncorrected(gpu.find("ecc_errors/volatile")),
        remap_pending=_yes(gpu, "remapped_rows/remapped_row_pending"),
        remap_failed=_yes(gpu, "remapped_rows/remapped_row_failure"),
        retirement_pending=_yes(gpu, "retired_pages/pending_retirement", "retired_pages/pending_blacklist"),
        repair_pending=_yes(gpu, "ecc_errors/channel_repair_pending", "ecc_errors/tpc_repair_pending"),
        sram_threshold=_yes(gpu, "ecc_errors/aggregate/sram_threshold_exceeded"),
        unrepairable=_yes(gpu, "ecc_errors/unrepairable_memory"),
        prohibited={"Prohibited": True, "Default": False, "Exclusive_Process": False}.get(_raw(gpu, "compute_mode")),
        recovery=_word(_raw(gpu, "gpu_recovery_action"), none=True),
        fabric_state=_word(_raw(fabric, "state")),
        fabric_status=_word(_raw(fabric, "status")),
        fabric_health=_fabric_health(fabric),
    )


def _word(text: str, *, none: bool = False) -> str:
    if none and text == "None":
        return "none"
    return "" if text in _NO_VALUE else text.lower()


def _fabric_health(fabric: Element | None) -> str:
    """The summary where the driver gives one (R580 on), else what its parts amount to."""
    if summary := _word(_raw(fabric, "health/summary")):
        return summary
    bad = _yes(fabric, "health/route_unhealthy", "health/access_timeout_recovery")
    return "unhealthy" if bad or _raw(fabric, "health/bandwidth") == "Degraded" else ""


def parse_list(text: str) -> Listed:
    """`nvidia-smi -L`: which index each card has, and what its MIG devices are. Other lines are skipped."""
    card: int | None = None
    cards: dict[str, int] = {}
    migs = []
    for line in text.splitlines():
        if match := _GPU_LINE.match(line):
            card = int(match[1])
            cards[match[3]] = card
        elif (match := _MIG_LINE.match(line)) and card is not None:
            migs.append(ListedMig(card, int(match[2]), match[1], match[3]))
        elif _ANY_GPU_LINE.match(line):
            card = None  # what follows is about a card that cannot be told
    return Listed(cards, tuple(migs))


def parse_capabilities(text: str) -> dict[str, int]:
    """Ten times the compute capability by UUID, from `--query-gpu=uuid,compute_cap --format=csv,noheader`."""
    made: dict[str, int] = {}
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 2 and (match := re.fullmatch(r"([0-9]{1,2})\.([0-9])", parts[1])):
            made[parts[0]] = int(match[1]) * 10 + int(match[2])
    return made
