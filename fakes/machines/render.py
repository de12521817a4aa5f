"""A machine as a folder that discovery reads as if it were a machine's root.

The folder gets the programs ``usr/bin/nvidia-smi``, ``usr/libexec/llmgw-nvml`` and ``usr/sbin/ip``, the parts of
``/sys``, ``/proc`` and ``/dev`` that discovery reads, and the file ``llmgw-fake-machine`` with the label that
everybody sees. The programs read ``state.json`` at each run, so a test can change counters, processes or the driver's
behaviour while an agent runs.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .description import Card, Hca, Machine, Place, as_json, gpu_uuid, places

_HERE = Path(__file__).parent
_VPD = b"\x82\x0d\x00Fake bridge\x90\x0b\x00V0\x0bSMDL=SW_MNG"


def render(machine: Machine, folder: Path) -> None:
    """Write the machine into ``folder``, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "llmgw-fake-machine").write_text(f"{machine.label}\n")
    cards, adapters = places(machine)
    for index, (card, place) in enumerate(zip(machine.cards, cards, strict=True)):
        _card(machine, index, card, place, folder)
    for index, (adapter, place) in enumerate(zip(machine.adapters, adapters, strict=True)):
        _adapter(adapter, place, folder, index)
    if machine.memory_mib is not None:
        _write(folder / "proc/meminfo", f"MemTotal:       {machine.memory_mib * 1024} kB\n")
    _ip(machine, folder)
    if machine.driver is None:
        return
    (folder / "machine.json").write_text(json.dumps(as_json(machine)))
    write_state(folder)
    _program(folder / "usr/bin/nvidia-smi", (_HERE / "nvidia_smi.py").read_text())
    _write(folder / "usr/libexec/nvml.py", (_HERE / "nvml.py").read_text())
    python = shlex.quote(sys.executable)
    _program(folder / "usr/libexec/llmgw-nvml", f'#!/bin/sh\nexec {python} -I "$(dirname "$0")/nvml.py"\n')


def write_state(folder: Path, cards: Mapping[int, Mapping[str, Any]] | None = None, program: str = "") -> None:
    """Change what the driver says from the next run on.

    ``cards`` maps an index to any of ``ecc`` (uncorrected errors), ``used_mib``, ``processes`` (lists of pid, name,
    MiB and, under MIG, the GPU and compute instance), ``lost``, ``needs_reset``, ``pending_mig`` (bool),
    ``remap_pending``, ``remap_failed``, ``repair_pending``, ``remapped`` (rows), ``links_down``, ``prohibited``,
    ``temperature``, ``power``, ``utilization``, ``fabric`` (its state), ``slowed`` (the hardware's reason), ``lanes``,
    ``pcie_gen``, ``vbios``, ``ecc_off`` (pending), ``no_persistence``. ``program`` makes all of it ``hang``, report
    ``mismatch``, ``no-driver`` or a ``lost`` GPU; ``nvml-broken`` breaks NVML alone.
    """
    fresh = folder / ".state.json.new"
    fresh.write_text(json.dumps({"cards": {str(k): dict(v) for k, v in (cards or {}).items()}, "program": program}))
    fresh.replace(folder / "state.json")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _program(path: Path, text: str) -> None:
    _write(path, text)
    path.chmod(0o755)


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_symlink():
        path.symlink_to(os.path.relpath(target, path.parent))


def _function(place: Place, folder: Path, files: Mapping[str, str], numa: int) -> Path:
    function = folder / "sys/devices" / place.path
    for name, text in {**files, "numa_node": str(numa), "local_cpulist": f"{numa * 32}-{numa * 32 + 31}"}.items():
        _write(function / name, f"{text}\n")
    _link(folder / "sys/bus/pci/devices" / place.address, function)
    return function


def _card(machine: Machine, index: int, card: Card, place: Place, folder: Path) -> None:
    function = _function(place, folder, {"class": "0x030200", "vendor": "0x10de"}, card.numa)
    if machine.driver is None:
        return
    driver = folder / "sys/bus/pci/drivers/nvidia"
    driver.mkdir(parents=True, exist_ok=True)
    _link(function / "driver", driver)
    said = f"Model: \t\t {card.name}\nGPU UUID: \t {gpu_uuid(machine, index)}\nGPU Excluded:\t No\n"
    _write(folder / "proc/driver/nvidia/gpus" / place.address / "information", said)


def _adapter(adapter: Hca, place: Place, folder: Path, index: int) -> None:
    function = _function(place, folder, {"class": "0x020700", "vendor": "0x15b3", "device": "0x1021"}, adapter.numa)
    base = folder / "sys/class/infiniband" / adapter.name
    port = base / "ports/1"
    ethernet = adapter.link_layer == "Ethernet"
    for name, text in (
        ("state", adapter.state), ("phys_state", adapter.physical), ("rate", adapter.rate),
        ("link_layer", adapter.link_layer), ("lid", "0x0" if ethernet else f"0x{index + 1:x}"),
    ):  # fmt: skip
        _write(port / name, f"{text}\n")
    for name, text in (("node_type", "1: CA"), ("fw_ver", "28.43.2026"), ("hca_type", "MT4129")):
        _write(base / name, f"{text}\n")
    if adapter.netdev is not None:
        _netdev(adapter, function, folder)
    if adapter.switch_management:
        (function / "vpd").write_bytes(_VPD)
    if adapter.virtual:
        _link(function / "physfn", function)
    if ethernet and not adapter.switch_management:
        _gids(adapter, port, index)
    _link(base / "device", function)
    _write(folder / f"dev/infiniband/uverbs{index}", "")
    _write(folder / f"sys/class/infiniband_verbs/uverbs{index}/ibdev", f"{adapter.name}\n")


def _netdev(adapter: Hca, function: Path, folder: Path) -> None:
    assert adapter.netdev is not None
    net = function / "net" / adapter.netdev
    _write(net / "operstate", "up\n" if "ACTIVE" in adapter.state else "down\n")
    _link(folder / "sys/class/net" / adapter.netdev, net)
    if adapter.bond is not None:
        bond = folder / "sys/devices/virtual/net" / adapter.bond
        _write(bond / "bonding/mode", "802.3ad 4\n")
        _link(folder / "sys/class/net" / adapter.bond, bond)
        _link(net / "master", bond)


def _gids(adapter: Hca, port: Path, index: int) -> None:
    """The usual table: link-local for v1 and v2, then the address for v1 and v2, then nothing."""
    zero = "0000:0000:0000:0000:0000:0000:0000:0000"
    local = f"fe80:0000:0000:0000:0ac0:ebff:fe00:{index:04x}"
    table = [local, local]
    if adapter.address is not None:
        a, b, c, d = (int(part) for part in adapter.address.partition("/")[0].split("."))
        table += [f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"] * 2
    for number in range(16):
        known = number < len(table)
        _write(port / "gids" / str(number), f"{table[number] if known else zero}\n")
        if known and adapter.netdev is not None:
            _write(port / "gid_attrs/types" / str(number), "RoCE v2\n" if number % 2 else "IB/RoCE v1\n")
            _write(port / "gid_attrs/ndevs" / str(number), f"{adapter.netdev}\n")


def _ip(machine: Machine, folder: Path) -> None:
    said = []
    for adapter in machine.adapters:
        if adapter.netdev is not None:
            address, _, prefix = (adapter.address or "").partition("/")
            infos = [{"family": "inet", "local": address, "prefixlen": int(prefix)}] if address else []
            said.append({"ifname": adapter.netdev, "addr_info": infos})
    text = shlex.quote(json.dumps(said))
    _program(folder / "usr/sbin/ip", f"#!/bin/sh\nprintf '%s\\n' {text}\n")
