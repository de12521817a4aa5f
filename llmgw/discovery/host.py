"""The machine that this process runs on; always the real one, also when the hardware is read from a folder."""

from __future__ import annotations

import os
import platform
import re
import socket
from pathlib import Path

from llmgw.hardware.inventory import Host

_PROC = Path("/proc")


def boot_id() -> str:
    """The kernel's id of this boot; empty where it does not say."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def read_host() -> Host:
    """Name, boot, kernel, system, processors and memory. Blocking."""
    return Host(
        hostname=socket.gethostname(),
        boot_id=boot_id(),
        kernel=platform.release(),
        system=_system(),
        cpus=len(os.sched_getaffinity(0)),
        memory_mib=_memory_mib(),
    )


def _system() -> str:
    try:
        found = platform.freedesktop_os_release()
    except OSError:
        return platform.system()
    return found.get("PRETTY_NAME", found.get("NAME", "Linux"))


def _memory_mib() -> int | None:
    try:
        match = re.search(r"^MemTotal:\s+(\d+) kB", (_PROC / "meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) // 1024 if match else None
