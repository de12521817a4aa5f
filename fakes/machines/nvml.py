"""A fake NVML: speaks for the machine described in its root (see fakes/machines), through the process that reads NVML.

Error codes are nvml.h's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmgw.discovery.nvml import NvmlError
from llmgw.discovery.nvml_child import main

NOT_SUPPORTED, NOT_FOUND, LOST, RESET_REQUIRED = 3, 6, 15, 16
MIB = 1024 * 1024
MIG_SLOTS = 7
ANCESTOR = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}
NO_INSTANCE = 0xFFFFFFFF


class FakeNvml:
    """One machine in one state. A handle is a card's index, or the pair of it and a MIG index."""

    def __init__(self, machine: dict[str, Any], state: dict[str, Any]) -> None:
        self.machine = machine
        self.cards: list[dict[str, Any]] = machine["cards"]
        self.now = [{**card["state"], **state["cards"].get(str(i), {})} for i, card in enumerate(self.cards)]
        self.major = int(machine["driver"].split(".")[0])
        program = state["program"]
        if program in ("mismatch", "no-driver", "nvml-broken"):
            code, said = {
                "mismatch": (18, "Driver/library version mismatch"),
                "no-driver": (9, "Driver Not Loaded"),
                "nvml-broken": (999, "Unknown Error"),
            }[program]
            raise NvmlError(code, said)
        if program == "lost" and self.cards:
            self.now[0]["lost"] = True

    def driver_version(self) -> str:
        return str(self.machine["driver"])

    def cuda_version(self) -> str:
        return str(self.machine["cuda"])

    def count(self) -> int:
        return len(self.cards)

    def card(self, index: int) -> Any:
        if self.now[index].get("lost"):
            raise NvmlError(LOST, "GPU is lost")
        return index

    def _mig(self, handle: Any) -> dict[str, Any] | None:
        if not isinstance(handle, tuple):
            return None
        found: dict[str, Any] = self.cards[handle[0]]["mig"][handle[1]]
        return found

    def _supported(self, condition: object) -> None:
        if not condition:
            raise NvmlError(NOT_SUPPORTED, "Not Supported")

    def uuid(self, handle: Any) -> str:
        mig = self._mig(handle)
        return str(mig["uuid"] if mig is not None else self.cards[handle]["uuid"])

    def name(self, handle: Any) -> str:
        mig = self._mig(handle)
        return str(
            self.cards[handle]["name"] if mig is None else f"{self.cards[handle[0]]['name']} MIG {mig['profile']}"
        )

    def pci_bus_id(self, handle: Any) -> str:
        return f"0000{self.cards[handle]['address'].upper()}"

    def memory(self, handle: Any) -> tuple[int, int]:
        mig = self._mig(handle)
        if mig is not None:
            held = [p[2] for p in self.now[handle[0]].get("processes", []) if p[3:4] == [mig["gpu_instance"]]]
            return int(mig["total_mib"]) * MIB, (sum(held) or 12) * MIB
        card, now = self.cards[handle], self.now[handle]
        self._supported(card["total_mib"] is not None)
        used = now.get("used_mib", sum(p[2] for p in now.get("processes", [])) or 1)
        return card["total_mib"] * MIB, (0 if now.get("needs_reset") else used) * MIB

    def capability(self, handle: Any) -> tuple[int, int]:
        major, _, minor = self.cards[handle]["capability"].partition(".")
        return int(major), int(minor)

    def mig_mode(self, handle: Any) -> tuple[int, int]:
        card = self.cards[handle]
        self._supported(card["mig"] is not None or card["mig_capable"])
        current = int(card["mig"] is not None)
        return current, int(self.now[handle].get("pending_mig", current))

    def mig_slots(self, handle: Any) -> int:
        return MIG_SLOTS if self.cards[handle]["mig"] is not None else 0

    def mig(self, handle: Any, index: int) -> Any:
        if index >= len(self.cards[handle]["mig"]):
            raise NvmlError(NOT_FOUND, "Not Found")
        return handle, index

    def gpu_instance(self, mig: Any) -> int:
        return int((self._mig(mig) or {})["gpu_instance"])

    def compute_instance(self, mig: Any) -> int:
        return int((self._mig(mig) or {})["compute_instance"])

    def uncorrected(self, handle: Any, *, lifetime: bool) -> int:
        card = self.cards[handle]
        self._supported(card["mig"] is None and card["total_mib"] is not None)
        return int(self.now[handle].get("ecc", 0))

    def sram_uncorrected(self, mig: Any) -> int:
        return 0

    def remapped_rows(self, handle: Any) -> tuple[int, int, bool, bool]:
        self._supported(self.cards[handle]["mig"] is None)
        now = self.now[handle]
        return 0, now.get("remapped", 0), bool(now.get("remap_pending")), bool(now.get("remap_failed"))

    def retirement_pending(self, handle: Any) -> bool:
        raise NvmlError(NOT_SUPPORTED, "Not Supported")

    def sram_threshold(self, handle: Any) -> bool:
        card = self.cards[handle]
        self._supported(self.major >= 555 and card["mig"] is None and card["total_mib"] is not None)
        return False

    def repair_pending(self, handle: Any) -> bool:
        self._supported(self.major >= 580)
        return bool(self.now[handle].get("repair_pending"))

    def unrepairable(self, handle: Any) -> bool:
        raise NvmlError(NOT_SUPPORTED, "Not Supported")

    def compute_mode(self, handle: Any) -> int:
        return 2 if self.now[handle].get("prohibited") else 0

    def recovery(self, handle: Any) -> int:
        self._supported(self.major >= 570)
        return int(bool(self.now[handle].get("needs_reset")))

    def reset_required(self, handle: Any) -> bool:
        self._supported(535 <= self.major <= 575)
        return bool(self.now[handle].get("needs_reset"))

    def fabric(self, handle: Any) -> tuple[int, int, int, int, str]:
        self._supported(self.machine["nvswitch"] or self.machine["cluster"])
        state = {"Not Started": 1, "In Progress": 2, "Completed": 3}[self.now[handle].get("fabric", "Completed")]
        cluster = self.machine["cluster"] or "00000000-0000-0000-0000-000000000000"
        return state, 0, int(self.major >= 580), 0, cluster

    def temperature_c(self, handle: Any) -> int:
        return int(self.now[handle].get("temperature", 31))

    def power_mw(self, handle: Any) -> int:
        return int(self.now[handle].get("power", 71.4) * 1000 + 0.5)

    def utilization(self, handle: Any) -> int:
        if self.now[handle].get("needs_reset"):
            raise NvmlError(RESET_REQUIRED, "GPU requires reset")
        self._supported(self.cards[handle]["mig"] is None)
        return int(self.now[handle].get("utilization", 0))

    def processes(self, handle: Any) -> Sequence[tuple[int, int | None, int | None, int | None]]:
        made = []
        for pid, _name, mib, *ids in self.now[handle].get("processes", []):
            in_mig = self.cards[handle]["mig"] is not None
            gpu_instance, compute_instance = (*ids, NO_INSTANCE, NO_INSTANCE)[:2] if in_mig else (NO_INSTANCE,) * 2
            made.append((pid, mib * MIB, gpu_instance, compute_instance))
        return made

    def process_name(self, pid: int) -> str:
        for now in self.now:
            for known, name, *_ in now.get("processes", []):
                if known == pid:
                    return str(name)
        raise NvmlError(NOT_FOUND, "Not Found")

    def _links(self, index: int) -> list[tuple[str, int | None]]:
        if self.cards[index]["mig"] is not None:
            return []
        ends: list[tuple[str, int | None]] = [("switch", None)] * self.machine["nvswitch"]
        for a, b, count in self.machine["bridges"]:
            if index in (a, b):
                ends += [("card", b if index == a else a)] * count
        down = min(self.now[index].get("links_down", 0), len(ends))
        return ends[: len(ends) - down] + [("down", None)] * down

    def nvlink_active(self, handle: Any, link: int) -> bool:
        ends = self._links(handle)
        self._supported(link < len(ends))
        return ends[link][0] != "down"

    def nvlink_remote(self, handle: Any, link: int) -> tuple[int, str]:
        kind, other = self._links(handle)[link]
        if self.machine["guest"]:
            return 255, "00000000:00:00.0"
        if kind == "card" and other is not None:
            return 0, self.pci_bus_id(other)
        return 2, f"00000000:C{link % 4}:00.0"

    def p2p_nvlink(self, a: Any, b: Any) -> bool:
        return bool(self.machine["nvswitch"]) or any({a, b} == {x, y} for x, y, _ in self.machine["bridges"])

    def ancestor(self, a: Any, b: Any) -> int:
        return ANCESTOR[self.cards[a]["near"][b]]


@contextmanager
def _loaded() -> Iterator[FakeNvml]:
    root = Path(__file__).resolve().parents[2]
    state = json.loads((root / "state.json").read_text())
    if state["program"] == "hang":
        time.sleep(3600)
    yield FakeNvml(json.loads((root / "machine.json").read_text()), state)


if __name__ == "__main__":
    sys.exit(main(_loaded))
