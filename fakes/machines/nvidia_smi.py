#!/usr/bin/env python3
"""A fake nvidia-smi: speaks for the machine described in its root (see fakes/machines). Standard library only.

Element names follow NVIDIA's nvsmi_device DTDs: the layout is the one of the machine's driver version.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

N_A = "N/A"


def leaf(name: str, value: object) -> str:
    return f"<{name}>{escape(str(value))}</{name}>"


def element(name: str, *content: str) -> str:
    return f"<{name}>{''.join(content)}</{name}>"


def yes(value: object) -> str:
    return "Yes" if value else "No"


class Smi:
    """What the program prints, for one machine in one state."""

    def __init__(self, machine: dict[str, Any], state: dict[str, Any]) -> None:
        self.machine = machine
        self.program = state["program"]
        self.cards: list[dict[str, Any]] = machine["cards"]
        self.now = [{**card["state"], **state["cards"].get(str(i), {})} for i, card in enumerate(self.cards)]
        self.major = int(machine["driver"].split(".")[0])

    def run(self, args: list[str]) -> tuple[int, str]:
        """Exit code and output."""
        match self.program:
            case "mismatch":
                return 18, "Failed to initialize NVML: Driver/library version mismatch\n"
            case "no-driver":
                return 9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
            case "lost" if "-i" not in args or args[-1] == self.cards[0]["address"]:
                bus = self.bus_id(0)
                return 15, f"Unable to determine the device handle for GPU{bus[4:]}: GPU is lost.  Reboot the system\n"
        if args == ["-L"]:
            return 0, self.listing()
        if args == ["-q", "-x"]:
            return 0, self.xml(range(len(self.cards)))
        if args[:3] == ["-q", "-x", "-i"]:
            return 0, self.xml(i for i, card in enumerate(self.cards) if card["address"] == args[3])
        if args and args[0] == "--query-gpu=uuid,compute_cap" and set(args[1:]) == {"--format=csv,noheader"}:
            rows = [(c["uuid"], c["capability"]) for i, c in enumerate(self.cards) if not self.now[i].get("lost")]
            return 0, "".join(f"{uuid}, {capability}\n" for uuid, capability in rows)
        if args == ["topo", "-m"]:
            return 0, self.topo()
        if args == ["nvlink", "--status"]:
            return 0, self.nvlink()
        return 2, f"Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n{args}\n"

    def bus_id(self, index: int) -> str:
        return f"0000{self.cards[index]['address'].upper()}"

    def listing(self) -> str:
        lines = []
        for index, card in enumerate(self.cards):
            if self.now[index].get("lost"):
                lines.append(f"Unable to determine the device handle for gpu {self.bus_id(index)}: GPU is lost.")
                continue
            lines.append(f"GPU {index}: {card['name']} (UUID: {card['uuid']})")
            for instance, mig in enumerate(card["mig"] or ()):
                lines.append(f"  MIG {mig['profile']:<12} Device {instance:>2}: (UUID: {mig['uuid']})")
        return "\n".join(lines) + "\n"

    def links(self, index: int) -> list[tuple[str, int | None]]:
        """Each NVLink of a card: to the switch, or to a card by index; the ones that are down lead nowhere."""
        card, now = self.cards[index], self.now[index]
        if card["mig"] is not None or now.get("lost"):
            return []
        ends: list[tuple[str, int | None]] = [("switch", None)] * self.machine["nvswitch"]
        for a, b, count in self.machine["bridges"]:
            if index in (a, b):
                ends += [("card", b if index == a else a)] * count
        down = min(now.get("links_down", 0), len(ends))
        return ends[: len(ends) - down] + [("down", None)] * down

    def nvlinks(self, a: int, b: int) -> int:
        """Active NVLinks between two cards."""
        direct = sum(end == ("card", b) for end in self.links(a))
        back = sum(end == ("card", a) for end in self.links(b))
        switched = min(sum(end[0] == "switch" for end in self.links(i)) for i in (a, b))
        return min(direct, back) or switched

    def topo(self) -> str:
        there = [i for i in range(len(self.cards)) if not self.now[i].get("lost")]
        adapters = self.machine["adapters"]
        head = [f"GPU{i}" for i in there] + [f"NIC{n}" for n in range(len(adapters))]
        lines = ["\t\x1b[4m" + "\t".join([*head, "CPU Affinity", "NUMA Affinity"]) + "\tGPU NUMA ID\x1b[0m"]
        for a in there:
            cells = []
            for b in there:
                count = 0 if a == b else self.nvlinks(a, b)
                cells.append(" X " if a == b else f"NV{count}" if count else self.cards[a]["near"][b])
            cells += self.cards[a]["near_adapters"]
            numa = self.cards[a]["numa"]
            lines.append("\t".join([f"GPU{a}", *cells, f"{numa * 32}-{numa * 32 + 31}", str(numa), "", N_A]))
        for n in range(len(adapters)):
            row = [self.cards[a]["near_adapters"][n] for a in there]
            row += [" X " if n == m else "SYS" for m in range(len(adapters))]
            lines.append("\t".join([f"NIC{n}", *row, "", "", "", ""]))
        lines += ["", "Legend:", "", "  X    = Self", "  NV#  = Connection over # NVLinks", ""]
        if adapters:
            lines += ["NIC Legend:", "", *(f"  NIC{n}: {a['name']}" for n, a in enumerate(adapters)), ""]
        return "\n".join(lines) + "\n"

    def nvlink(self) -> str:
        lines = []
        for index, card in enumerate(self.cards):
            if self.now[index].get("lost"):
                continue
            ends = self.links(index)
            if card["mig"] is None and not ends:
                continue
            lines.append(f"GPU {index}: {card['name']} (UUID: {card['uuid']})")
            if card["mig"] is not None:
                lines.append("\tNvlink queries are not supported for Devices in MIG mode")
            elif all(kind == "down" for kind, _ in ends):
                lines.append("\tUnable to retrieve NVLink information as all links are inActive")
            for link, (kind, _) in enumerate(ends):
                lines.append(f"\t Link {link}: {'<inactive>' if kind == 'down' else '26.562 GB/s'}")
        return "\n".join(lines) + "\n"

    def memory(self, total: int | None, used: int) -> str:
        if total is None:
            return element("fb_memory_usage", *(leaf(name, N_A) for name in ("total", "reserved", "used", "free")))
        return element(
            "fb_memory_usage",
            leaf("total", f"{total} MiB"),
            leaf("reserved", "551 MiB"),
            leaf("used", f"{used} MiB"),
            leaf("free", f"{max(0, total - used - 551)} MiB"),
        )

    def mig_device(self, index: int, instance: int, mig: dict[str, Any]) -> str:
        ids = (mig["gpu_instance"], mig["compute_instance"])
        holders = [p[2] for p in self.now[index].get("processes", []) if tuple(p[3:4]) == ids[:1]]
        return element(
            "mig_device",
            leaf("index", instance),
            leaf("gpu_instance_id", mig["gpu_instance"]),
            leaf("compute_instance_id", mig["compute_instance"]),
            element("ecc_error_count", element("volatile_count", leaf("sram_uncorrectable", 0))),
            self.memory(mig["total_mib"], sum(holders) or 12),
        )

    def ecc(self, volatile: int, aggregate: int, *, off: bool, repair: bool) -> str:
        def counts(name: str, dram: int, *more: str) -> str:
            sram: tuple[str, ...] = ("sram_uncorrectable",)
            if self.major >= 555:
                sram = ("sram_uncorrectable_parity", "sram_uncorrectable_secded")
            zero = N_A if off else 0
            return element(
                name,
                leaf("sram_correctable", zero),
                *(leaf(tag, zero) for tag in sram),
                leaf("dram_correctable", zero),
                leaf("dram_uncorrectable", N_A if off else dram),
                *more,
            )

        threshold = leaf("sram_threshold_exceeded", N_A if off else "No")
        return element(
            "ecc_errors",
            counts("volatile", volatile),
            counts("aggregate", aggregate, *([threshold] if self.major >= 555 else [])),
            *(
                [leaf("channel_repair_pending", yes(repair)), leaf("tpc_repair_pending", "No")]
                if self.major >= 580
                else []
            ),
        )

    def gpu(self, index: int) -> str:
        card, now = self.cards[index], self.now[index]
        bus = self.bus_id(index)
        if now.get("lost"):
            return f'<gpu id="{bus}">' + leaf("product_name", card["name"]) + leaf("uuid", "GPU is lost") + "</gpu>"
        in_mig = card["mig"] is not None
        mode = "Enabled" if in_mig else "Disabled" if card["mig_capable"] else N_A
        asked = now.get("pending_mig") if mode != N_A else None
        pending = {"True": "Enabled", "False": "Disabled"}.get(str(asked), mode)
        processes = now.get("processes", [])
        used = now.get("used_mib", sum(p[2] for p in processes) or 1)
        # A card that requires a reset reports no memory in use at all, as the real driver does.
        reset = bool(now.get("needs_reset"))
        power = "gpu_power_readings" if self.major >= 535 else "power_readings"
        draw = "average_power_draw" if self.major >= 570 else "power_draw"
        gone = [leaf("gpu_recovery_action", "Reset" if reset else "None")] if self.major >= 570 else []
        if 535 <= self.major <= 575:
            gone.append(element("gpu_reset_status", leaf("reset_required", yes(reset))))
        return (
            f'<gpu id="{bus}">'
            + leaf("product_name", card["name"])
            + leaf("uuid", card["uuid"])
            + leaf("minor_number", index)
            + self.diagnosis(index)
            + leaf("compute_mode", "Prohibited" if now.get("prohibited") else "Default")
            + element("mig_mode", leaf("current_mig", mode), leaf("pending_mig", pending))
            + element(
                "mig_devices", *([self.mig_device(index, i, m) for i, m in enumerate(card["mig"] or ())] or ["None"])
            )
            + self.memory(card["total_mib"], 0 if reset else used)
            + element("bar1_memory_usage", leaf("total", "131072 MiB"), leaf("used", "1 MiB"))
            + element("utilization", leaf("gpu_util", self.utilization(in_mig, reset, now)))
            + self.ecc(
                now.get("ecc", 0),
                now.get("ecc", 0),
                off=in_mig or card["total_mib"] is None,
                repair=bool(now.get("repair_pending")),
            )
            + self.remapped(now, in_mig)
            + "".join(gone)
            + element("temperature", leaf("gpu_temp", f"{now.get('temperature', 31)} C"))
            + element(power, leaf(draw, f"{now.get('power', 71.4):.2f} W"))
            + self.fabric(now)
            + element("processes", *(self.process(in_mig, p) for p in processes))
            + "</gpu>"
        )

    def diagnosis(self, index: int) -> str:
        """What only the doctor asks for."""
        now = self.now[index]
        reasons = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
        slowed = now.get("slowed", "")
        prefix = "clocks_event_reason"
        pcie = (("max_link_gen", 5), ("current_link_gen", now.get("pcie_gen", 5)))
        width = (("max_link_width", "16x"), ("current_link_width", f"{now.get('lanes', 16)}x"))
        return (
            leaf("persistence_mode", "Disabled" if now.get("no_persistence") else "Enabled")
            + leaf("vbios_version", now.get("vbios", "96.00.A5.00.01"))
            + leaf("performance_state", "P0")
            + element(
                f"{prefix}s", *(leaf(f"{prefix}_{r}", "Active" if r == slowed else "Not Active") for r in reasons)
            )
            + element(
                "ecc_mode",
                leaf("current_ecc", "Enabled"),
                leaf("pending_ecc", "Disabled" if now.get("ecc_off") else "Enabled"),
            )
            + element(
                "pci",
                leaf("pci_bus_id", self.bus_id(index)),
                element(
                    "pci_gpu_link_info",
                    element("pcie_gen", *(leaf(*pair) for pair in pcie)),
                    element("link_widths", *(leaf(*pair) for pair in width)),
                ),
            )
        )

    def utilization(self, in_mig: bool, reset: bool, now: dict[str, Any]) -> str:
        return "[GPU requires reset]" if reset else N_A if in_mig else f"{now.get('utilization', 0)} %"

    def remapped(self, now: dict[str, Any], in_mig: bool) -> str:
        if in_mig:
            return leaf("remapped_rows", N_A)
        return element(
            "remapped_rows",
            leaf("remapped_row_corr", 0),
            leaf("remapped_row_unc", now.get("remapped", 0)),
            leaf("remapped_row_pending", yes(now.get("remap_pending"))),
            leaf("remapped_row_failure", yes(now.get("remap_failed"))),
        )

    def fabric(self, now: dict[str, Any]) -> str:
        if not self.machine["nvswitch"] and not self.machine["cluster"]:
            return element("fabric", leaf("state", N_A), leaf("status", N_A))
        state = now.get("fabric", "Completed")
        cluster = self.machine["cluster"] or "00000000-0000-0000-0000-000000000000"
        more = [element("health", leaf("summary", "Healthy"))] if self.major >= 580 else []
        return element(
            "fabric",
            leaf("state", state),
            leaf("status", "Success" if state == "Completed" else N_A),
            leaf("cliqueId", 0),
            leaf("clusterUuid", cluster),
            *more,
        )

    def process(self, in_mig: bool, said: list[Any]) -> str:
        pid, name, mib, *ids = said
        gpu_instance, compute_instance = (*ids, N_A, N_A)[:2] if in_mig else (N_A, N_A)
        return element(
            "process_info",
            leaf("gpu_instance_id", gpu_instance),
            leaf("compute_instance_id", compute_instance),
            leaf("pid", pid),
            leaf("type", "C"),
            leaf("process_name", name),
            leaf("used_memory", f"{mib} MiB"),
        )

    def xml(self, indices: Any) -> str:
        return (
            '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'
            + element(
                "nvidia_smi_log",
                leaf("driver_version", self.machine["driver"]),
                leaf("cuda_version", self.machine["cuda"]),
                leaf("attached_gpus", len(self.cards)),
                *(self.gpu(i) for i in indices),
            )
            + "\n"
        )


def main(args: list[str]) -> int:
    root = Path(__file__).resolve().parents[2]
    smi = Smi(json.loads((root / "machine.json").read_text()), json.loads((root / "state.json").read_text()))
    if smi.program == "hang":
        time.sleep(3600)
    code, text = smi.run(args)
    print(text, end="")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
