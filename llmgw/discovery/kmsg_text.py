"""Lines of the kernel log that are about a GPU, an NVSwitch or an RDMA port. Pure.

Formats: /dev/kmsg (the kernel's ``Documentation/ABI/testing/dev-kmsg``); Xid and SXid messages of the NVIDIA driver
(https://docs.nvidia.com/deploy/xid-errors/); port states of ib_core, and links of mlx5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

from attrs import frozen

from llmgw.discovery.smi_text import pci_address

_LONGEST = 300
_READ = 4096
_PCI = r"\b[0-9A-Fa-f]{4,16}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(?:\.[0-7])?\b"
_ADDRESS = re.compile(_PCI)
_XID = re.compile(r"NVRM: Xid \(([^)]{1,80})\): ([0-9]{1,6})\b")
"""With MIG the parentheses also hold ``GPU-I:05 GPU-CI:02``; old drivers wrote less than an address."""
_SXID = re.compile(r"(?:nvidia-nvswitch[0-9]{1,3}:? )?\bSXid \(([^)]{1,80})\): ([0-9]{1,6})\b")
_LOST = re.compile(r"NVRM: .{0,300}fallen off the bus")
_PORT = re.compile(rf"[\w-]{{2,32}} ({_PCI}) \S{{1,64}} Port: [0-9]{{1,3}} Link (?:DOWN|INIT|ARMED|ACTIVE)")
_LINK = re.compile(rf"mlx5_core ({_PCI}) \S{{1,64}} Link (?:up|down)\b")
_PREFIX = re.compile(r"[0-9]{1,10},[0-9]{1,20},[0-9]{1,20},[^;]{0,64};")
_KEY = re.compile(r"\s[A-Z][A-Z0-9_]{0,64}=")
_ESCAPE = re.compile(rb"\\x([0-9A-Fa-f]{2})")


class EventKind(StrEnum):
    """What a line is about."""

    XID = "xid"
    SXID = "sxid"
    GPU_LOST = "gpu-lost"
    PORT = "port"


@frozen
class Meaning:
    """What an Xid says of the card, and what to do."""

    reason: str
    remedy: str


@frozen
class KernelEvent:
    """Something that happened to the hardware. ``pci_address`` is as sysfs writes it, empty where it is not told."""

    kind: EventKind
    pci_address: str
    code: int | None
    text: str

    @property
    def sense(self) -> Meaning | None:
        """What it means for a GPU; ``None`` for switches and ports, whose lines say it themselves."""
        if self.kind is EventKind.XID:
            return XID.get(self.code or 0, UNKNOWN_XID)
        return XID[79] if self.kind is EventKind.GPU_LOST else None

    @property
    def meaning(self) -> str:
        """The same in one line, for people; empty where there is none."""
        return f"{self.sense.reason}; {self.sense.remedy}" if self.sense else ""


_NVLINK = Meaning("an NVLink failed", "reset the GPU; if it comes again check the links and the fabric manager")

XID: Mapping[int, Meaning] = {
    13: Meaning("an engine's program went wrong on the GPU", "restart the engine"),
    31: Meaning("an engine's program used a wrong address", "restart the engine"),
    43: Meaning("an engine's program was stopped by the driver", "look at the Xid before it; restart the engine"),
    45: Meaning("an engine's program was taken off the GPU", "look at the other Xid with it; restart the engine"),
    48: Meaning("uncorrectable memory error (double-bit ECC)", "reset the GPU; replace it if it comes again"),
    61: Meaning("the GPU's microcontroller stopped", "reset the GPU"),
    62: Meaning("the GPU's microcontroller halted", "reset the GPU; replace it if it comes again"),
    63: Meaning("a bad memory row or page was set aside", "nothing now; it takes effect at the next reset"),
    64: Meaning("a bad memory row or page could not be set aside", "reset the GPU; replace it if it comes again"),
    74: _NVLINK,
    79: Meaning("the GPU has fallen off the bus", "reboot the node; check power, cooling and slot if it comes again"),
    92: Meaning("many corrected memory errors", "nothing now; watch for Xid 48 and 64"),
    94: Meaning("memory error that hit one program only", "restart the engine"),
    95: Meaning("memory error that may have hit every program on the GPU", "reset the GPU"),
    119: Meaning("the GPU's system processor (GSP) does not answer", "reset the GPU; reboot if that fails"),
    120: Meaning("the GPU's system processor (GSP) failed", "reset the GPU; reboot if that fails"),
    **dict.fromkeys(range(144, 151), _NVLINK),
    154: Meaning("the driver names what the GPU needs to recover", "do what the line says"),
}
"""Those that come up, after NVIDIA's catalogue: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"""

UNKNOWN_XID = Meaning(
    "the driver reports an error of the GPU",
    "look its number up: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html",
)


def parse_record(record: str) -> tuple[str, ...]:
    """The messages of a record of /dev/kmsg, or of lines of it, dmesg or syslog: each in one printable line.

    A line that begins with a blank goes on with the message before it; ``KEY=value`` lines are left out.
    """
    messages: list[str] = []
    for line in filter(None, record.split("\n")):
        text = line[:_READ]
        if not text[:1].isspace():
            if message := _message(text):
                messages.append(message)
        elif _KEY.match(text):
            continue
        elif not messages:
            messages.extend(filter(None, [_printable(text)]))
        else:
            messages[-1] = f"{messages[-1]} {_printable(text)}"[:_READ].rstrip()
    return tuple(messages)


def event_of(message: str) -> KernelEvent | None:
    """What a message says happened, or ``None`` when it is about something else. What stands before it is dropped."""
    message = _printable(message[:_READ])
    for kind, pattern in ((EventKind.XID, _XID), (EventKind.SXID, _SXID)):
        if match := pattern.search(message):
            return KernelEvent(kind, _address(match[1]), int(match[2]), _from(message, match))
    if match := _LOST.search(message):
        return KernelEvent(EventKind.GPU_LOST, _address(match[0]), None, _from(message, match))
    if match := _PORT.search(message) or _LINK.search(message):
        return KernelEvent(EventKind.PORT, _address(match[1]), None, _from(message, match))
    return None


def _message(line: str) -> str:
    """Without the prefix of /dev/kmsg, which comes with escapes for what is not printable."""
    prefix = _PREFIX.match(line)
    if prefix is None:
        return _printable(line)
    raw = line[prefix.end() :].encode(errors="replace")
    return _printable(_ESCAPE.sub(lambda found: bytes((int(found[1], 16),)), raw).decode(errors="replace"))


def _printable(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _from(message: str, match: re.Match[str]) -> str:
    return message[match.start() :][:_LONGEST]


def _address(text: str) -> str:
    """The last address in it, as sysfs writes it. The driver leaves the function out."""
    found = _ADDRESS.findall(text)
    if not found:
        return ""
    return pci_address(found[-1] if "." in found[-1] else f"{found[-1]}.0")
