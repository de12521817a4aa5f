"""Asking the process that reads NVML (:mod:`llmgw.discovery.nvml_child`), and taking its word apart."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import cattrs
import orjson

from llmgw.discovery.command import Ran
from llmgw.discovery.faults import DiscoveryError
from llmgw.discovery.machine import Machine
from llmgw.discovery.nvml_child import NO_BINDING
from llmgw.hardware.reading import GpuReading
from llmgw.settings.convert import strict_converter

_CODES: Mapping[int, tuple[str, str, str]] = {
    NO_BINDING: ("no-binding", "nvidia-ml-py cannot be loaded", "install llmgw with its dependencies"),
    3: ("not-supported", "this machine has no NVML", "set discovery: nvidia-smi"),
    4: ("no-permission", "the GPUs may not be read by this user", "let the agent's user open /dev/nvidia*"),
    9: ("driver-missing", "the NVIDIA driver is not loaded", "install it, or run: modprobe nvidia"),
    12: ("driver-missing", "the NVML library is missing", "install the driver's user-space packages"),
    15: ("gpu-lost", "a GPU fell off the bus", "reboot the node"),
    17: (
        "blocked",
        "the operating system blocks access to the GPU",
        "on WSL2 update the Windows driver and run wsl --shutdown",
    ),
    18: (
        "driver-mismatch",
        "the driver was upgraded under the loaded module",
        "reboot, or unload the nvidia modules and load them again",
    ),
}
_OTHER = (
    "driver-failed",
    "NVML cannot be used",
    "in a container: start it anew, its devices were taken away; else look for Xid lines in the kernel log",
)


@cache
def _converter() -> cattrs.Converter:
    return strict_converter(forbid_unknown=False)


async def read(machine: Machine, timeout_s: float) -> GpuReading:
    """Ask; the machine bounds it. Raises :class:`DiscoveryError` with the reason when NVML does not work."""
    return parse(await machine.ask("nvml"), timeout_s)


def parse(ran: Ran, timeout_s: float) -> GpuReading:
    """What the process said. Raises :class:`DiscoveryError` for anything but a reading."""
    if ran.code is None:
        raise DiscoveryError(
            "timeout",
            "NVML",
            f"did not answer within {timeout_s:g} s",
            "the driver hangs, often in a GPU's GSP; look for Xid lines in the kernel log, then reboot",
        )
    try:
        said: Any = orjson.loads(ran.stdout)
        if "error" in said:
            number = said["error"]["code"]
            code, reason, remedy = _CODES.get(number, _OTHER)
            raise DiscoveryError(code, "NVML", f"{reason} ({said['error']['said']})", remedy)
        return _converter().structure(said["reading"], GpuReading)
    except (ValueError, KeyError, TypeError, cattrs.BaseValidationError) as wrong:
        how = f"was killed by signal {-ran.code}" if ran.code < 0 else f"ended with exit code {ran.code}"
        raise DiscoveryError("driver-failed", "NVML", f"its reader {how} ({ran.said})", _OTHER[2]) from wrong
