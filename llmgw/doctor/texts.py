"""What programs and files say that only the doctor asks, as values. Pure functions of text."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any
from xml.etree import ElementTree

import orjson
from attrs import evolve

from llmgw.doctor.facts import Acs, Card, GpuInstance, LoadedModule, Netdev
from llmgw.doctor.node_facts import Disk, Firewall, Variable
from llmgw.hardware.reading import CardReading

DETAILS = "card_details"
"""What of ``cards`` only `nvidia-smi -q -x` tells: unread by this name where NVML had to stand in for it."""

_VARIABLE = re.compile(r"(?:NCCL|GLOO|UCX|NVSHMEM)_[A-Z0-9_]+|(?:VLLM|SGLANG)_HOST_IP")
_KERNEL = re.compile(
    r"NVRM|SXid|nvidia|nvswitch|mlx5|infiniband|libnccl|Link (?:up|down|DOWN|INIT|ACTIVE)|lost carrier", re.I
)
_BLOCK = re.compile(r"^(?=[0-9a-f]{2,4}:[0-9a-f]{2}[:.])", re.MULTILINE)
_STAMP = re.compile(r"\[([A-Z][a-z]{2} \d{2} \d{4} \d{2}:\d{2}:\d{2})\]")
_SLACK_S = 14 * 3600.0
_MOST_LINES = 500
_SLOW = {"hw_slowdown": "hardware slowdown", "hw_thermal_slowdown": "heat", "hw_power_brake_slowdown": "power brake"}


def pairs(text: str) -> dict[str, str]:
    """Lines of ``NAME=value``, as `systemctl show` writes them."""
    return {name: value.strip() for name, mark, value in (line.partition("=") for line in text.splitlines()) if mark}


def netdevs(text: str) -> tuple[Netdev, ...] | None:
    """`ip -j addr show`; ``None`` where it is no such list."""
    try:
        said: Any = orjson.loads(text)
    except ValueError:
        return None
    if not isinstance(said, list):
        return None
    made = []
    for entry in said:
        if not isinstance(entry, dict) or not isinstance(name := entry.get("ifname"), str):
            continue
        infos = entry.get("addr_info")
        mtu = entry.get("mtu")
        made.append(
            Netdev(
                name,
                entry.get("operstate") not in ("DOWN", "LOWERLAYERDOWN", "DORMANT"),
                mtu if isinstance(mtu, int) else None,
                tuple(_addresses(infos if isinstance(infos, list) else [])),
            )
        )
    return tuple(made)


def _addresses(infos: Iterable[Any]) -> Iterator[str]:
    for info in infos:
        try:
            yield str(ipaddress.ip_interface(f"{info['local']}/{info['prefixlen']}"))
        except (TypeError, KeyError, ValueError):
            continue


def modules(text: str) -> tuple[LoadedModule, ...]:
    """``/proc/modules``, or what lsmod prints: name, size, count, users."""
    made = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 3 and words[1].isdigit():
            users = words[3] if len(words) > 3 else ""
            made.append(
                LoadedModule(words[0].replace("-", "_"), tuple(u for u in users.split(",") if u not in ("", "-")))
            )
    return tuple(made)


def limit(text: str, name: str) -> int | None:
    """A soft limit of ``/proc/<pid>/limits``; ``None`` for no limit, also one that is as good as none."""
    found = re.search(rf"^{name}\s+(\S+)", text, re.MULTILINE)
    if found is None or not found[1].isdigit():
        return None
    value = int(found[1])
    return None if value >= 1 << 60 else value


def variables(text: str, source: str) -> tuple[Variable, ...]:
    """Lines of ``NAME=value`` with variables that NCCL, Gloo and engines read; NCCL's files have ``#`` comments."""
    made = []
    for line in text.splitlines():
        name, mark, value = line.partition("#")[0].partition("=") if source != "environment" else line.partition("=")
        if mark and _VARIABLE.fullmatch(name.strip()):
            made.append(Variable(name.strip(), value, source))
    return tuple(made)


def kernel_lines(text: str) -> tuple[str, ...]:
    """The lines of a kernel log that are about GPUs, adapters and links, with those that go on from one."""
    kept: list[str] = []
    for line in text.splitlines():
        if _KERNEL.search(line):
            said = " ".join(line.split())[:500]
            lone = re.match(r"\s{8,}NVRM: ", line)
            if lone and kept:
                kept[-1] = f"{kept[-1]} {said.removeprefix('NVRM: ')}"[:900]
            else:
                kept.append(said)
    return tuple(kept[-_MOST_LINES:])


def manager_lines(text: str, booted: float | None) -> tuple[str, ...]:
    """The lines of the fabric manager's log that are errors, and of this boot as far as their times say."""
    kept = []
    for line in text.splitlines():
        if "error" not in line.lower() and "NV_WARN" not in line:
            continue
        stamp = _STAMP.search(line)
        if stamp and booted is not None and _seconds(stamp[1]) < booted - _SLACK_S:
            continue
        kept.append(line.strip()[:500])
    return tuple(kept[-_MOST_LINES:])


def _seconds(stamp: str) -> float:
    try:
        return datetime.strptime(stamp, "%b %d %Y %H:%M:%S").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return float("inf")


def acs(text: str, above: frozenset[str]) -> tuple[Acs, ...] | None:
    """`lspci -D -vvv`: the PCIe switch ports with access control; ``None`` where it may not be read.

    ``above`` are the bridges over GPUs and adapters; where it is empty all count.
    """
    made, hidden = [], False
    for block in _BLOCK.split(text):
        head = block.partition(" ")[0]
        address = head if head.count(":") == 2 else f"0000:{head}"
        if "PCI bridge" not in block.partition("\n")[0] or (above and address not in above):
            continue
        hidden = hidden or "<access denied>" in block
        if not re.search(r"(?:Up|Down)stream Port", block):
            continue
        found = re.search(r"ACSCtl:\s+(.*)", block)
        if found:
            made.append(Acs(address, bool(re.search(r"(?:SrcValid|ReqRedir)\+", found[1]))))
    return None if hidden else tuple(made)


def disks(text: str, inodes: str, purposes: Mapping[str, str]) -> tuple[Disk, ...]:
    """`df -Pk` and `df -Pi` of the same folders, in the order in which they were asked about."""
    made = []
    few = [_row(line) for line in inodes.splitlines()[1:]]
    for number, (line, (path, purpose)) in enumerate(zip(text.splitlines()[1:], purposes.items(), strict=False)):
        row, inode = _row(line), few[number] if number < len(few) else None
        if row is None:
            continue
        left = None if not inode or not inode[0] else 100 * inode[2] / inode[0]
        made.append(Disk(path, purpose, row[2] // 1024, row[0] // 1024, left))
    return tuple(made)


def read_only(mounts: str, path: str) -> bool:
    """Whether a folder is on a file system that is mounted read-only, by ``/proc/mounts``; the last mount counts."""
    best, found = "", False
    for words in (line.split() for line in mounts.splitlines()):
        if len(words) < 4:
            continue
        place = words[1].replace("\\040", " ")
        inside = path == place or path.startswith(f"{place.rstrip('/')}/")
        if inside and len(place) >= len(best):
            best, found = place, "ro" in words[3].split(",")
    return found


def _row(line: str) -> tuple[int, int, int] | None:
    found = re.search(r"\s(\d+)\s+(\d+)\s+(\d+)\s", line)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def nft(text: str) -> Firewall:
    """`nft list ruleset`."""
    chains = re.findall(r"chain \S+ \{(.*?)\n\t?\}", text, re.DOTALL)
    inputs = [chain for chain in chains if re.search(r"hook input\b.*policy drop", chain)]
    allows = [line.strip() for chain in chains for line in chain.splitlines() if "accept" in line and "saddr" in line]
    return Firewall("nftables", bool(inputs), tuple(allows))


def iptables(text: str) -> Firewall:
    """`iptables -S`."""
    allows = [line for line in text.splitlines() if "-s " in line and "-j ACCEPT" in line]
    return Firewall("iptables", "-P INPUT DROP" in text, tuple(allows))


def gpu_instances(text: str) -> tuple[GpuInstance, ...]:
    """`nvidia-smi mig -lgi`: a table with card, profile, profile's number and instance."""
    made = []
    for line in text.splitlines():
        found = re.match(r"\|\s+(\d+)\s+MIG (\S+)\s+\d+\s+(\d+)\s", line)
        if found:
            made.append(GpuInstance(int(found[1]), int(found[3]), found[2]))
    return tuple(made)


def cards(readings: Iterable[CardReading], xml: str) -> tuple[Card, ...]:
    """The readings of `nvidia-smi -q -x`, with what only diagnosis wants to know; plain where that is not XML."""
    start, end = xml.find("<nvidia_smi_log"), xml.rfind("</nvidia_smi_log>")
    more: dict[str, Card] = {}
    try:
        root = ElementTree.fromstring(xml[start : end + 17] if 0 <= start < end else "<none/>")  # noqa: S314 - no DOCTYPE is left in it
    except (ElementTree.ParseError, ValueError):
        root = ElementTree.Element("none")
    for gpu in root.findall("gpu"):
        more[(gpu.findtext("uuid") or "").strip()] = _more(gpu)
    plain = Card(CardReading(0, "", ""))
    return tuple(evolve(more.get(reading.uuid, plain), reading=reading) for reading in readings)


def _more(gpu: ElementTree.Element) -> Card:
    def text(path: str) -> str:
        return (gpu.findtext(path) or "").strip()

    def number(*paths: str) -> int | None:
        found = next((m for path in paths if (m := re.match(r"\d+", text(path)))), None)
        return int(found[0]) if found else None

    def mode(path: str) -> bool | None:
        return {"Enabled": True, "Disabled": False}.get(text(path))

    link = "pci/pci_gpu_link_info"
    slowed = [
        word
        for tag, word in _SLOW.items()
        for group, one in (
            ("clocks_event_reasons", "clocks_event_reason"),
            ("clocks_throttle_reasons", "clocks_throttle_reason"),
        )
        if text(f"{group}/{one}_{tag}") == "Active"
    ]
    vbios = text("vbios_version")
    return Card(
        reading=CardReading(0, "", ""),
        persistence=mode("persistence_mode"),
        width=number(f"{link}/link_widths/current_link_width"),
        width_most=number(f"{link}/link_widths/max_link_width"),
        generation=number(f"{link}/pcie_gen/current_link_gen"),
        generation_most=number(f"{link}/pcie_gen/max_link_gen"),
        busy=text("performance_state") == "P0" and (number("utilization/gpu_util") or 0) > 0,
        slowed=tuple(dict.fromkeys(slowed)),
        ecc=mode("ecc_mode/current_ecc"),
        ecc_pending=mode("ecc_mode/pending_ecc"),
        vbios="" if vbios == "N/A" else vbios,
    )
