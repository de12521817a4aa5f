"""How the answers of nvidia-smi are put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fakes.machines import MACHINES, Card, Machine
from fakes.machines.description import as_json
from llmgw.discovery import smi
from llmgw.discovery.command import Ran
from llmgw.discovery.faults import DiscoveryError
from llmgw.hardware.devices import devices
from llmgw.hardware.inventory import Relation
from llmgw.hardware.reading import GpuReading
from tests.discovery.generated import InProcess

FINE: dict[str, Any] = {"cards": {}, "program": ""}
FOUR = MACHINES["rtx-4090-4"]


class Changed(InProcess):
    """A machine whose answers are changed on the way."""

    def __init__(self, machine: Machine, change: Callable[[str, str], str], code: int | None = 0) -> None:
        super().__init__(machine, FINE)
        self._change = change
        self._code = code

    async def ask(self, program: str, *args: str) -> Ran:
        ran = await super().ask(program, *args)
        return Ran(ran.argv, self._code, self._change(args[0], ran.stdout), "")


async def read(machine: Machine, change: Callable[[str, str], str], code: int | None = 0) -> GpuReading:
    return await smi.read(Changed(machine, change, code), 1, ["0000:e1:00.0"])


def without_card(text: str, number: int) -> str:
    parts = text.split("<gpu ")
    return "<gpu ".join(part for n, part in enumerate(parts) if n != number + 1)


async def test_a_card_that_is_left_out_is_counted_and_shifts_no_index() -> None:
    def change(what: str, text: str) -> str:
        if what == "-q":
            return without_card(text, 1)
        if what == "-L":
            return "\n".join(line for line in text.splitlines() if not line.startswith("GPU 1:"))
        return text

    found = await read(FOUR, change)
    assert [card.index for card in found.cards] == [0, 2, 3]
    assert [(f.code, f.reason) for f in found.faults] == [("gpu-lost", "nvidia-smi counts 4 GPUs and shows 3")]
    assert [(p.a, p.b) for p in found.pairs] == [(0, 2), (0, 3), (2, 3)]


async def test_indices_that_are_told_twice_stay_apart() -> None:
    found = await read(FOUR, lambda what, text: text.replace("GPU 1:", "GPU 0:") if what == "-L" else text)
    assert len({card.index for card in found.cards}) == 4


async def test_a_matrix_that_is_not_whole_costs_the_topology_and_says_so() -> None:
    found = await read(FOUR, lambda what, text: text[:150] if what == "topo" else text)
    assert found.pairs == ()
    ((code, reason),) = [(f.code, f.reason) for f in found.faults]
    assert code == "topology-unknown"
    assert reason.startswith("nvidia-smi topo -m: ")
    assert reason.endswith("; NVLink is not known")


async def test_a_matrix_without_a_card_is_refused() -> None:
    found = await read(FOUR, lambda what, text: "\tGPU0\nGPU0\tX\n" if what == "topo" else text)
    assert (found.pairs, [f.code for f in found.faults]) == ((), ["topology-unknown"])


async def test_one_card_needs_no_matrix() -> None:
    found = await read(MACHINES["t4-vm"], lambda what, text: "" if what == "topo" else text)
    assert found.faults == ()


async def test_links_and_capabilities_may_fail() -> None:
    machine = MACHINES["hgx-h100"]
    found = await read(machine, lambda what, text: text if what in ("-q", "-L", "topo") else "no")
    assert {card.nvlinks_up for card in found.cards} == {None}
    assert {card.capability for card in found.cards} == {None}
    assert {pair.relation for pair in found.pairs} == {Relation.NVLINK}
    assert found.faults == ()


async def test_an_answer_with_a_bad_exit_code_is_taken_and_said() -> None:
    found = await read(FOUR, lambda _, text: text, code=14)
    assert len(found.cards) == 4
    assert [f.code for f in found.faults] == ["inforom"]


async def test_no_answer_in_time() -> None:
    with pytest.raises(DiscoveryError) as caught:
        await read(FOUR, lambda what, text: "" if what == "-q" else text, code=None)
    assert caught.value.code == "timeout"


async def test_a_matrix_that_hangs() -> None:
    class Hanging(Changed):
        async def ask(self, program: str, *args: str) -> Ran:
            ran = await super().ask(program, *args)
            return Ran(ran.argv, None, "", "") if args[0] == "topo" else ran

    found = await smi.read(Hanging(FOUR, lambda _, text: text), 1, [])
    assert [(f.code, "did not answer" in f.reason) for f in found.faults] == [("topology-unknown", True)]


async def test_the_mig_devices_of_a_card_are_named_by_their_index() -> None:
    machine = Machine("m", (Card("NVIDIA A30", 24576, "8.0"), *MACHINES["a100-mig"].cards))
    found = await read(machine, lambda _, text: text)
    assert [(i.index, i.profile, i.uuid[:4]) for i in found.cards[1].instances] == [
        (0, "4g.40gb", "MIG-"),
        (1, "3g.40gb", "MIG-"),
    ]
    assert found.cards[0].instances == ()
    unnamed = await read(machine, lambda what, text: "" if what == "-L" else text)
    assert [(i.profile, i.uuid) for i in unnamed.cards[1].instances] == [("", ""), ("", "")]


async def test_why_the_mig_devices_have_no_names_is_said() -> None:
    class Refusing(Changed):
        async def ask(self, program: str, *args: str) -> Ran:
            ran = await super().ask(program, *args)
            return Ran(ran.argv, 4, "", "Insufficient Permissions") if args[0] == "-L" else ran

    found = await smi.read(Refusing(MACHINES["a100-mig"], lambda _, text: text), 1, [])
    for device in devices(found.cards[0], 1000):
        (fault,) = device.faults
        assert "nvidia-smi -L: the GPUs may not be read by this user (Insufficient Permissions)" in fault.reason


async def test_mig_devices_are_joined_by_uuid_where_the_xml_has_one() -> None:
    machine = MACHINES["a100-mig"]
    uuids = [m["uuid"] for m in as_json(machine)["cards"][0]["mig"]]

    def change(what: str, text: str) -> str:
        if what != "-q":
            return text
        for index, uuid in enumerate(reversed(uuids)):
            text = text.replace(
                f"<mig_device><index>{index}</index>", f"<mig_device><index>{index}</index><uuid>{uuid}</uuid>"
            )
        return text

    found = await read(machine, change)
    assert [(i.index, i.profile, i.uuid) for i in found.cards[0].instances] == [
        (0, "3g.40gb", uuids[1]), (1, "4g.40gb", uuids[0]),
    ]  # fmt: skip
