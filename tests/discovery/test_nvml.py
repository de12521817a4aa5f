from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from attrs import asdict, evolve
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fakes.machines import MACHINES, Card, Machine
from fakes.machines.description import as_json
from fakes.machines.nvml import FakeNvml
from llmgw.discovery import nvml, nvml_process, smi
from llmgw.discovery.command import Ran
from llmgw.discovery.faults import DiscoveryError
from llmgw.discovery.nvml import Library, NvmlError
from llmgw.discovery.nvml_child import NO_BINDING
from llmgw.hardware.devices import devices
from llmgw.hardware.inventory import Relation
from llmgw.hardware.reading import CardReading, GpuReading
from llmgw.hardware.topology import nvlink_domains, nvlink_warnings
from tests.discovery.generated import InProcess, machines

FINE: dict[str, Any] = {"cards": {}, "program": ""}


def state(**cards: Any) -> dict[str, Any]:
    return {"cards": {name[1:]: said for name, said in cards.items()}, "program": ""}


def read(machine: Machine, now: dict[str, Any] = FINE) -> GpuReading:
    return nvml.read(FakeNvml(as_json(machine), now))


def through_smi(machine: Machine, now: dict[str, Any]) -> GpuReading:
    async def main() -> GpuReading:
        return await smi.read(InProcess(machine, now), 1, [])

    return trio.run(main)


def comparable(card: CardReading) -> CardReading:
    """A card without what only one source can say: a lost one has a name in the XML and none in NVML."""
    if card.health.lost:
        return CardReading(card.index, "", "", health=card.health)
    return evolve(card, cpus="", numa_node=None, adapters=())


@given(machines())
@example((MACHINES["dgx-a100"], FINE))
@example((MACHINES["hgx-b200"], FINE))
@example((MACHINES["a100-mig"], FINE))
@example((MACHINES["gb10"], FINE))
@example((MACHINES["t4-vm"], FINE))
@example((MACHINES["hgx-h100"], state(_2={"links_down": 18}, _3={"lost": True}, _5={"needs_reset": True})))
@settings(max_examples=150)
def test_both_sources_agree_field_by_field(given_machine: tuple[Machine, dict[str, Any]]) -> None:
    machine, now = given_machine
    one, other = read(machine, now), through_smi(machine, now)
    assert one.driver == other.driver
    assert [comparable(c) for c in one.cards] == [comparable(c) for c in other.cards]
    # Under MIG the two say different things of pairs that nothing is ever placed across.
    whole = {c.index for c in one.cards if not c.mig}
    assert [p for p in one.pairs if {p.a, p.b} <= whole] == [p for p in other.pairs if {p.a, p.b} <= whole]
    assert nvlink_domains(one.pairs, one.cards) == nvlink_domains(other.pairs, other.cards)
    assert nvlink_warnings(one.cards, one.pairs) == nvlink_warnings(other.cards, other.pairs)
    made = [[d for c in source.cards if not c.health.lost for d in devices(c, 124610)] for source in (one, other)]
    assert made[0] == [evolve(d, cpus="", numa_node=None, adapters=()) for d in made[1]]


def test_one_lost_card_hides_no_other() -> None:
    found = read(MACHINES["hgx-h100"], state(_3={"lost": True}))
    assert [c.health.lost for c in found.cards] == [n == 3 for n in range(8)]
    assert nvlink_domains(found.pairs, found.cards) == ((0, 1, 2, 4, 5, 6, 7),)


def test_instances_come_from_handles_and_a_hole_is_no_error() -> None:
    machine = MACHINES["h100-7x1g"]

    class Holes(FakeNvml):
        def mig(self, handle: Any, index: int) -> Any:
            if index in (0, 3):
                raise NvmlError(6, "Not Found")
            return super().mig(handle, index)

    found = nvml.read(Holes(as_json(machine), FINE))
    assert [i.index for i in found.cards[0].instances] == [1, 2, 4, 5, 6]
    assert {i.profile for i in found.cards[0].instances} == {"1g.10gb"}


@pytest.mark.parametrize(("code", "text"), [(999, "Unknown Error"), (4, "Insufficient Permissions")])
def test_instances_that_cannot_be_opened_are_no_empty_card(code: int, text: str) -> None:
    class Shut(FakeNvml):
        def mig(self, handle: Any, index: int) -> Any:
            raise NvmlError(code, text)

    (card, *_) = nvml.read(Shut(as_json(MACHINES["h100-7x1g"]), FINE)).cards
    (device,) = devices(card, None)
    assert [f.code for f in device.faults] == ["unreadable"]
    assert device.faults[0].reason == f"its MIG instances cannot be read: {text} (NVML error {code})"


def test_a_card_with_instances_is_in_mig_mode_though_the_mode_may_not_be_read() -> None:
    class NoMode(FakeNvml):
        def mig_mode(self, handle: Any) -> tuple[int, int]:
            raise NvmlError(999, "Unknown Error")

    (card, *_) = nvml.read(NoMode(as_json(MACHINES["h100-7x1g"]), FINE)).cards
    assert (card.mig, len(devices(card, None))) == (True, 7)
    (whole, *_) = nvml.read(NoMode(as_json(MACHINES["l40s-2"]), FINE)).cards
    assert (whole.mig, len(devices(whole, None))) == (None, 1)


def test_every_call_about_a_card_may_fail_by_itself() -> None:
    class Deaf(FakeNvml):
        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if (
                name.startswith("_")
                or not callable(found)
                or name in ("count", "card", "driver_version", "cuda_version")
            ):
                return found

            def refuse(*_args: object, **_kwargs: object) -> None:
                raise NvmlError(3, "Not Supported")

            return refuse

    found = nvml.read(Deaf(as_json(MACHINES["l40s-2"]), FINE))
    assert [c.name for c in found.cards] == ["unknown GPU"] * 2
    assert [c.total_mib for c in found.cards] == [None, None]
    assert found.pairs == ()


FIELDS = sorted(name for name in vars(Library) if not name.startswith("_") and name not in (
    "driver_version", "cuda_version", "count", "card", "mig_slots", "mig"
))  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_any_one_field_may_fail_and_costs_only_itself(name: str) -> None:
    """Of a card or of an instance, whichever call it is; and a card that is lost meanwhile hides no other."""

    class Failing(FakeNvml):
        def __init__(self, machine: str, code: int, of: int | None) -> None:
            super().__init__(as_json(MACHINES[machine]), FINE)

            def fail(handle: Any, *_args: object, **_kwargs: object) -> Any:
                if of in (None, handle):
                    raise NvmlError(code, "no")
                return whole(handle, *_args, **_kwargs)

            whole = getattr(self, name)
            setattr(self, name, fail)

    for code in (3, 999):
        card, whole = nvml.read(Failing("a100-mig", code, None)).cards
        named = [i for i in card.instances if i.uuid and i.profile and i.total_mib]
        assert (len(card.instances), len(named)) == (2, 0 if name in ("uuid", "name", "memory") else 2)
        assert whole.index == 1
    lost = nvml.read(Failing("l40s-2", 15, 1)).cards
    assert lost[0].total_mib == 46068
    assert [c.health.lost for c in lost] == [False, name not in AFTERWARDS]


AFTERWARDS = frozenset({
    "gpu_instance", "compute_instance", "sram_uncorrected",  # of instances
    "nvlink_active", "nvlink_remote", "p2p_nvlink", "ancestor", "processes", "process_name",
})  # fmt: skip
"""What is asked of other things than the card itself; of a card that is lost all the others fail as well."""


def test_memory_that_a_container_may_not_see_is_hidden_not_zero() -> None:
    class Container(FakeNvml):
        def memory(self, handle: Any) -> tuple[int, int]:
            if handle == 0:
                raise NvmlError(4, "Insufficient Permissions")
            return super().memory(handle)

    (card, _) = nvml.read(Container(as_json(MACHINES["a100-mig"]), FINE)).cards
    assert (card.total_mib, card.memory_hidden) == (None, True)
    first, second = devices(card, 1000)
    assert (first.device_class, first.faults, second.total_mib) == ("a100-80g-mig-4g.40gb", (), 40192)


def test_cards_that_may_not_be_opened_are_said() -> None:
    class Partial(FakeNvml):
        def card(self, index: int) -> Any:
            if index > 1:
                raise NvmlError(4, "Insufficient Permissions")
            return super().card(index)

    found = nvml.read(Partial(as_json(MACHINES["rtx-4090-4"]), FINE))
    assert [c.index for c in found.cards] == [0, 1]
    assert [(f.code, f.reason) for f in found.faults] == [("hidden", "GPU 2, 3 may not be opened here")]


def test_a_guest_that_hides_the_switches_has_its_domain_from_p2p() -> None:
    guest = evolve(MACHINES["hgx-h100"], guest=True)
    found = read(guest)
    assert {p.nvlinks for p in found.pairs} == {18}
    assert nvlink_domains(found.pairs, found.cards) == (tuple(range(8)),)

    class Silent(FakeNvml):
        def p2p_nvlink(self, a: Any, b: Any) -> bool:
            raise NvmlError(3, "Not Supported")

    untold = nvml.read(Silent(as_json(guest), FINE))
    assert not nvlink_domains(untold.pairs, untold.cards)
    assert [f.code for f in untold.faults] == ["nvlink-unknown"]


def test_bridges() -> None:
    pair = Machine("m", (Card("NVIDIA GeForce RTX 3090", 24576, "8.6", mig_capable=False),) * 3, bridges=((0, 1, 4),))
    found = read(pair)
    assert [(p.a, p.b, p.relation, p.nvlinks) for p in found.pairs] == [
        (0, 1, Relation.NVLINK, 4), (0, 2, Relation.PHB, 0), (1, 2, Relation.PHB, 0),
    ]  # fmt: skip
    assert nvlink_warnings(found.cards, found.pairs) == ()


def test_mangled_processes_are_dropped() -> None:
    class Mangled(FakeNvml):
        def processes(self, handle: Any) -> list[tuple[int, int | None, int | None, int | None]]:
            return [(0, 1, None, None), (2**31, 1, None, None), (7, 2**60, None, None), (8, None, None, None)]

    (card, _) = nvml.read(Mangled(as_json(MACHINES["l40s-2"]), FINE)).cards
    assert [(p.pid, p.used_mib, p.name) for p in card.processes] == [(7, None, "unknown"), (8, None, "unknown")]


def ran(said: object, code: int | None = 0, stderr: str = "") -> Ran:
    return Ran(("nvml",), code, said if isinstance(said, str) else json.dumps(said), stderr)


def test_the_process_hands_over_what_was_read() -> None:
    reading = read(MACHINES["a100-mig"])
    assert nvml_process.parse(ran({"reading": asdict(reading)}), 1) == reading


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (ran("", None), "timeout"),
        (ran("", -11, "Segmentation fault"), "driver-failed"),
        (ran("{}"), "driver-failed"),
        (ran("[]"), "driver-failed"),
        (ran('{"reading": {"driver": 5}}'), "driver-failed"),
        (ran("not json", 1, "Traceback"), "driver-failed"),
        (ran({"error": {"code": 18, "said": "x"}}), "driver-mismatch"),
        (ran({"error": {"code": 9, "said": "x"}}), "driver-missing"),
        (ran({"error": {"code": 12, "said": "x"}}), "driver-missing"),
        (ran({"error": {"code": 17, "said": "x"}}), "blocked"),
        (ran({"error": {"code": 999, "said": "x"}}), "driver-failed"),
        (ran({"error": {"code": NO_BINDING, "said": "x"}}), "no-binding"),
    ],
)
def test_a_process_that_did_not_read_says_why(answer: Ran, code: str) -> None:
    with pytest.raises(DiscoveryError) as caught:
        nvml_process.parse(answer, 1)
    assert caught.value.code == code
    assert caught.value.reason


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["reading", "error", "code", "said", "driver", "cards", "pairs", "version", "index", "health"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(plain | st.binary(max_size=40).map(lambda b: b.decode(errors="replace")), st.none() | st.integers(-20, 20))
def test_whatever_the_process_prints_is_a_reading_or_our_error(said: object, code: int | None) -> None:
    try:
        nvml_process.parse(ran(said, code), 1)
    except DiscoveryError as failed:
        assert failed.code
        assert failed.reason
