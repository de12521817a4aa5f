"""The machine that this process runs on; the real one also when the hardware is read from a fake machine's folder."""

from __future__ import annotations

import os
import platform
import re
import socket
from pathlib import Path

from llmgw.discovery.sysfs import Reader
from llmgw.hardware.inventory import Host

_PROC = Path("/proc")
_CPUINFO = 4 * 1024 * 1024
_OS_RELEASE = re.compile(r"""^(\w+)=["']?([^"'\n]*)""", re.MULTILINE)


def boot_id() -> str:
    """The kernel's id of this boot; empty where it does not say."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def read_host(root: Path, reader: Reader) -> Host:
    """Name, boot, kernel, system, processors and memory; the latter of the root, where it has a ``proc/meminfo``."""
    return Host(
        hostname=socket.gethostname(),
        boot_id=boot_id(),
        kernel=platform.release(),
        system=_system(),
        cpus=len(os.sched_getaffinity(0)),
        memory_mib=_memory_mib(reader.text(root / "proc/meminfo")) or _memory_mib(_own_meminfo()),
    )


def read_host_of_tree(root: Path, reader: Reader) -> Host:
    """The same of a folder with another machine's files: what they do not say is empty, and not this machine's."""

    def said(path: str) -> str:
        return reader.text(root / path) or ""

    cpus = len(
        re.findall(r"^processor\s*:", reader.raw(root / "proc/cpuinfo", _CPUINFO).decode(errors="replace"), re.M)
    )
    names: dict[str, str] = dict(_OS_RELEASE.findall(said("etc/os-release")))
    return Host(
        hostname=said("proc/sys/kernel/hostname") or said("etc/hostname").partition("\n")[0],
        boot_id=said("proc/sys/kernel/random/boot_id"),
        kernel=said("proc/sys/kernel/osrelease"),
        system=names.get("PRETTY_NAME") or names.get("NAME") or "",
        cpus=cpus or None,
        memory_mib=_memory_mib(said("proc/meminfo")),
    )


def _system() -> str:
    try:
        found = platform.freedesktop_os_release()
    except OSError:
        return platform.system()
    return found.get("PRETTY_NAME", found.get("NAME", "Linux"))


def _own_meminfo() -> str | None:
    try:
        return (_PROC / "meminfo").read_text()
    except OSError:
        return None


def _memory_mib(meminfo: str | None) -> int | None:
    match = re.search(r"^MemTotal:\s+(\d{1,15}) kB", meminfo or "", re.MULTILINE)
    return int(match[1]) // 1024 if match else None
