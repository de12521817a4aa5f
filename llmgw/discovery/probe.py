"""Discovery of one node: every source is asked, and what one of them cannot say is a warning in the inventory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import trio

from llmgw.discovery import smi
from llmgw.discovery.faults import DiscoveryError
from llmgw.discovery.host import read_host
from llmgw.discovery.sysfs import adapter_warnings, read_adapters
from llmgw.hardware.inventory import Fault, Inventory
from llmgw.settings.daemon import Discovery

MARK = "llmgw-fake-machine"
"""A file of this name in a root says in its first line which machine is simulated there."""


async def discover(config: Discovery) -> Inventory:
    """Read the node as ``config`` says. Never fails: what is wrong is in the inventory's warnings."""
    root = Path(config.root)
    host = await trio.to_thread.run_sync(read_host)
    adapters = await trio.to_thread.run_sync(read_adapters, root)
    simulated = await trio.to_thread.run_sync(_simulated, root)
    warnings: list[Fault] = []
    gpus: smi.Gpus | None = None
    source = "none"
    program = _program(config, root)
    if program is None:
        warnings.append(
            Fault(
                "no-nvidia-smi",
                "nvidia-smi was not found, so no GPU is reported",
                "install the NVIDIA driver if this node has GPUs, or name the program in discovery.nvidia_smi",
            )
        )
    else:
        try:
            gpus = await smi.read(program, config.timeout_s)
            source = "nvidia-smi"
        except DiscoveryError as failed:
            warnings.append(failed.as_fault())
    return Inventory(
        host=host,
        source=source,
        devices=gpus.devices if gpus else (),
        adapters=adapters,
        driver=gpus.driver if gpus else None,
        warnings=(*warnings, *(gpus.warnings if gpus else ()), *adapter_warnings(adapters)),
        simulated=simulated,
    )


def _program(config: Discovery, root: Path) -> str | None:
    if config.nvidia_smi is not None:
        return config.nvidia_smi
    if root != Path("/"):
        found = root / "usr/bin/nvidia-smi"
        return str(found) if os.access(found, os.X_OK) else None
    return shutil.which("nvidia-smi")


def _simulated(root: Path) -> str | None:
    try:
        with (root / MARK).open(encoding="utf-8", errors="replace") as file:
            return file.readline(200).strip() or "unnamed machine"
    except OSError:
        return None
