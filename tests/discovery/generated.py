"""Machines out of thin air, and the fake nvidia-smi and NVML of one in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fakes.machines import Card, Machine, Mig
from fakes.machines.description import as_json
from fakes.machines.nvidia_smi import Smi
from llmgw.discovery.command import Ran
from llmgw.discovery.sysfs import DiskReader, Reader
from llmgw.hardware.inventory import Host

CARDS = (
    Card("NVIDIA H100 80GB HBM3", 81559, "9.0"),
    Card("NVIDIA A100-SXM4-40GB", 40960, "8.0"),
    Card("NVIDIA L40S", 46068, "8.9", mig_capable=False),
    Card("NVIDIA GeForce RTX 4090", 24564, "8.9", mig_capable=False),
    Card("NVIDIA GB10", None, "12.1", mig_capable=False),
)
INSTANCES = (
    Mig("1g.10gb", 9984, 9),
    Mig("1c.3g.40gb", 40448, 1, 0),
    Mig("2c.3g.40gb", 40448, 1, 1),
    Mig("4g.40gb", 40448, 2),
)

PROGRAMS = ("/usr/bin/python3 -m x", "VLLM::Worker", "Xorg")

states = st.fixed_dictionaries(
    {},
    optional={
        "ecc": st.integers(0, 3),
        "used_mib": st.integers(0, 9000),
        "processes": st.lists(
            st.tuples(st.integers(1, 99), st.integers(1, 5000), st.sampled_from([1, 2, 9]), st.integers(0, 1)).map(
                lambda p: [p[0], PROGRAMS[p[0] % len(PROGRAMS)], *p[1:]]
            ),
            max_size=3,
            unique_by=lambda p: p[0],
        ),
        "lost": st.booleans(),
        "needs_reset": st.booleans(),
        "pending_mig": st.booleans(),
        "remap_pending": st.booleans(),
        "remap_failed": st.booleans(),
        "repair_pending": st.booleans(),
        "prohibited": st.booleans(),
        "remapped": st.integers(0, 5),
        "links_down": st.integers(0, 20),
        "temperature": st.integers(20, 99),
        "power": st.integers(0, 70000).map(lambda centi: centi / 100),
        "utilization": st.integers(0, 100),
        "fabric": st.sampled_from(["Completed", "In Progress", "Not Started"]),
    },
)  # fmt: skip


@st.composite
def machines(draw: st.DrawFn) -> tuple[Machine, dict[str, Any]]:
    """A machine and a state of it."""
    count = draw(st.integers(1, 5))
    kind = draw(st.sampled_from(CARDS))
    cards = []
    for n in range(count):
        card = kind if draw(st.integers(0, 3)) else draw(st.sampled_from(CARDS))
        mig = None
        if card.mig_capable and draw(st.integers(0, 2)) == 0:
            mig = tuple(draw(st.lists(st.sampled_from(INSTANCES), unique=True, max_size=4)))
        cards.append(
            Card(
                card.name,
                card.total_mib,
                card.capability,
                mig,
                card.mig_capable,
                switch=n if n < 4 else None,
                numa=n // 4,
            )
        )
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    bridges = draw(st.lists(st.sampled_from(pairs), max_size=4, unique=True)) if pairs else []
    nvswitch = draw(st.sampled_from([0, 0, 6, 18]))
    driver = draw(st.sampled_from(["535.183.01", "550.127.08", "560.35.03", "570.148.08", "580.105.08"]))
    machine = Machine(
        "generated", tuple(cards), driver=driver, nvswitch=nvswitch,
        bridges=() if nvswitch else tuple((a, b, draw(st.integers(1, 4))) for a, b in bridges),
        cluster=draw(st.sampled_from(["", "00000001-0000-0000-0000-000000000001"])),
    )  # fmt: skip
    state = {str(n): draw(states) for n in range(count)}
    return machine, {"cards": state, "program": ""}


class InProcess:
    """A machine that answers from this process."""

    def __init__(self, machine: Machine, state: dict[str, Any], root: Path = Path("/nowhere")) -> None:
        self.smi = Smi(as_json(machine), state)
        self._root = root

    @property
    def root(self) -> Path:
        return self._root

    @property
    def reader(self) -> Reader:
        return DiskReader()

    def host(self) -> Host:
        return Host("h", "b", memory_mib=124610)

    async def ask(self, program: str, *args: str) -> Ran:
        code, text = self.smi.run(list(args))
        return Ran((program, *args), code, text, "")
