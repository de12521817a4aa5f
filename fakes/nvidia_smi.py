#!/usr/bin/env python3
"""A fake nvidia-smi: speaks for the machine described beside it (see fakes/machine.py). Standard library only."""

import json
import sys
import time
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
MACHINE = json.loads((ROOT / "machine.json").read_text())
STATE = json.loads((ROOT / "state.json").read_text())
CARDS: list[dict[str, Any]] = MACHINE["cards"]
N_A = "N/A"


def state(index: int) -> dict[str, Any]:
    found: dict[str, Any] = STATE["cards"].get(str(index), {})
    return found


def bus_id(index: int) -> str:
    return f"00000000:{0x18 + 8 * index:02X}:00.0"


def listing() -> str:
    lines = []
    for index, card in enumerate(CARDS):
        lines.append(f"GPU {index}: {card['name']} (UUID: {card['uuid']})")
        for instance, mig in enumerate(card["mig"] or ()):
            lines.append(f"  MIG {mig['profile']:<12} Device {instance:>2}: (UUID: {mig['uuid']})")
    return "\n".join(lines) + "\n"


def element(name: str, *content: str) -> str:
    return f"<{name}>{''.join(content)}</{name}>"


def leaf(name: str, value: object) -> str:
    return element(name, escape(str(value)))


def memory(total: int, used: int) -> str:
    return element(
        "fb_memory_usage",
        leaf("total", f"{total} MiB"),
        leaf("reserved", "551 MiB"),
        leaf("used", f"{used} MiB"),
        leaf("free", f"{max(0, total - used - 551)} MiB"),
    )


def mig_device(instance: int, mig: dict[str, Any]) -> str:
    return element(
        "mig_device",
        leaf("index", instance),
        leaf("gpu_instance_id", mig["gpu_instance"]),
        leaf("compute_instance_id", mig["compute_instance"]),
        element("ecc_error_count", element("volatile_count", leaf("sram_uncorrectable", 0))),
        memory(mig["total_mib"], 12),
    )


def gpu(index: int, card: dict[str, Any]) -> str:
    now = state(index)
    if now.get("lost"):
        return (
            f'<gpu id="{bus_id(index)}">' + leaf("product_name", card["name"]) + leaf("uuid", "GPU is lost") + "</gpu>"
        )
    mode = "Enabled" if card["mig"] is not None else "Disabled" if card["mig_capable"] else N_A
    processes = now.get("processes", [])
    used = now.get("used_mib", sum(p[2] for p in processes) or 1)
    ecc = now.get("ecc", 0)
    # A card that requires a reset reports no memory in use at all, as the real driver does.
    reset = bool(now.get("needs_reset"))
    return (
        f'<gpu id="{bus_id(index)}">'
        + leaf("product_name", card["name"])
        + leaf("uuid", card["uuid"])
        + leaf("minor_number", index)
        + element("mig_mode", leaf("current_mig", mode), leaf("pending_mig", now.get("pending_mig", mode)))
        + element("mig_devices", *([mig_device(i, m) for i, m in enumerate(card["mig"] or ())] or ["None"]))
        + element("pci", leaf("pci_bus_id", bus_id(index)))
        + memory(card["total_mib"], 0 if reset else used)
        + element("utilization", leaf("gpu_util", "[GPU requires reset]" if reset else "0 %"))
        + element(
            "ecc_errors",
            element(
                "volatile",
                leaf("sram_correctable", 0),
                leaf("sram_uncorrectable_parity", 0),
                leaf("sram_uncorrectable_secded", 0),
                leaf("dram_correctable", 0),
                leaf("dram_uncorrectable", ecc),
            ),
        )
        + element("remapped_rows", leaf("remapped_row_pending", "No"), leaf("remapped_row_failure", "No"))
        + leaf("gpu_recovery_action", "Reset" if reset else "None")
        + element("temperature", leaf("gpu_temp", "31 C"))
        + element(
            "processes",
            *(
                element(
                    "process_info",
                    leaf("gpu_instance_id", N_A),
                    leaf("compute_instance_id", N_A),
                    leaf("pid", pid),
                    leaf("type", "C"),
                    leaf("process_name", name),
                    leaf("used_memory", f"{mib} MiB"),
                )
                for pid, name, mib in processes
            ),
        )
        + "</gpu>"
    )


def xml() -> str:
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'
        + element(
            "nvidia_smi_log",
            leaf("driver_version", MACHINE["driver"]),
            leaf("cuda_version", MACHINE["cuda"]),
            leaf("attached_gpus", len(CARDS)),
            *(gpu(i, c) for i, c in enumerate(CARDS)),
        )
        + "\n"
    )


def main(args: list[str]) -> int:
    match STATE["program"]:
        case "hang":
            time.sleep(3600)
        case "mismatch":
            print("Failed to initialize NVML: Driver/library version mismatch")
            return 18
        case "no-driver":
            print("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
            return 9
        case "lost":
            print("Unable to determine the device handle for GPU0000:18:00.0: GPU is lost.  Reboot the system")
            return 15
    if args == ["-L"]:
        print(listing(), end="")
    elif args == ["-q", "-x"]:
        print(xml(), end="")
    elif args and args[0] == "--query-gpu=uuid,compute_cap" and set(args[1:]) == {"--format=csv,noheader"}:
        for card in CARDS:
            print(f"{card['uuid']}, {card['capability']}")
    else:
        print(f"Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n{args}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
