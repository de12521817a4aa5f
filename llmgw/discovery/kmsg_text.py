"""Lines of the kernel log that are about a GPU, an NVSwitch or an RDMA port. Pure.

Formats: /dev/kmsg (the kernel's ``Documentation/ABI/testing/dev-kmsg``); Xid and SXid messages of the NVIDIA driver
(https://docs.nvidia.com/deploy/xid-errors/); link messages of mlx5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

from attrs import frozen

from llmgw.discovery.smi_text import pci_address

_LONGEST = 300
_READ = 4096
_PCI = r"(?:PCI:)?([0-9A-Fa-f]{4,16}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(?:\.[0-9A-Fa-f])?)"
_XID = re.compile(rf"NVRM: Xid \({_PCI}\): (\d{{1,4}})\b")
_SXID = re.compile(rf"SXid \({_PCI}\): (\d{{1,6}})\b")
_LOST = re.compile(r"NVRM: .{0,300}fallen off the bus")
_ANY_PCI = re.compile(_PCI)
_PORT = re.compile(rf"mlx5_core {_PCI} \S{{1,64}} Port: \d{{1,3}} Link (?:DOWN|INIT|ACTIVE)")
_PREFIX = re.compile(r"\d{1,10},\d{1,20},\d{1,20},[^;]{0,64};")


class EventKind(StrEnum):
    """What a line is about."""

    XID = "xid"
    SXID = "sxid"
    GPU_LOST = "gpu-lost"
    PORT = "port"


@frozen
class KernelEvent:
    """Something that happened to the hardware. ``pci_address`` is as sysfs writes it, empty where it is not told."""

    kind: EventKind
    pci_address: str
    code: int | None
    text: str

    @property
    def meaning(self) -> str:
        """What an Xid says of the card, for people; empty for what is not in the catalogue."""
        return XID.get(self.code or 0, "") if self.kind is EventKind.XID else ""


XID: Mapping[int, str] = {
    13: "an engine's program went wrong (illegal access); restart it",
    31: "an engine's program used a wrong address; restart it",
    43: "an engine's program was stopped by the driver; restart it",
    45: "an engine's program was taken off the GPU, often after another Xid",
    48: "double-bit ECC error; reset the GPU",
    61: "the GPU's microcontroller stopped; reset the GPU",
    62: "the GPU's microcontroller halted; reset the GPU",
    63: "a memory row or page was retired; nothing to do until the next reset",
    64: "a memory row or page could not be retired; reset the GPU",
    74: "NVLink error; check the links, reset the GPU",
    79: "the GPU has fallen off the bus; reboot, check power and slot",
    92: "many corrected memory errors; watch it",
    94: "contained memory error; restart what ran on it",
    95: "uncontained memory error; reset the GPU",
    119: "the GPU's system processor does not answer; reset the GPU",
    120: "the GPU's system processor failed; reset the GPU",
    **dict.fromkeys(range(144, 151), "NVLink error; check the links, reset the GPU"),
    154: "the driver names what the GPU needs to recover",
}
"""What to make of an Xid, for those that come up (NVIDIA's Xid catalogue)."""


def message_of(record: str) -> str:
    """The message of a record of /dev/kmsg, or of a line of dmesg or syslog, in one printable line."""
    text = record[:_READ]
    prefix = _PREFIX.match(text)
    text = text[prefix.end() :] if prefix else text
    return "".join(c if c.isprintable() else " " for c in text).strip()


def event_of(message: str) -> KernelEvent | None:
    """What a message says happened, or ``None`` when it is about something else."""
    message = message[:_READ]
    for kind, pattern in ((EventKind.XID, _XID), (EventKind.SXID, _SXID), (EventKind.PORT, _PORT)):
        if match := pattern.search(message):
            code = int(match[2]) if kind is not EventKind.PORT else None
            return KernelEvent(kind, _address(match[1]), code, message[:_LONGEST])
    if match := _LOST.search(message):
        where = _ANY_PCI.search(match[0])
        return KernelEvent(EventKind.GPU_LOST, _address(where[1] if where else ""), None, message[:_LONGEST])
    return None


def _address(text: str) -> str:
    """As sysfs writes it; the driver leaves the function out."""
    return pci_address(text if not text or "." in text else f"{text}.0")
