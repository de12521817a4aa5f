from __future__ import annotations

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.hardware.delta import InventoryDelta, apply, diff, without_load
from llmgw.hardware.devices import devices
from llmgw.hardware.inventory import Adapter, AdapterKind, Driver, Fault, Host, Inventory, Load
from llmgw.hardware.reading import GpuReading
from llmgw.hardware.topology import links, nvlink_domains
from llmgw.link.codec import converter
from tests.hardware.machines import readings

HOST = Host("h", "b")


def inventory(reading: GpuReading, adapters: tuple[Adapter, ...], warnings: tuple[Fault, ...]) -> Inventory:
    return Inventory(
        HOST,
        "nvml",
        devices=tuple(d for card in reading.cards for d in devices(card, None)),
        adapters=adapters,
        links=links(reading.pairs),
        nvlink_domains=nvlink_domains(reading.pairs, reading.cards),
        driver=reading.driver,
        warnings=warnings,
    )


adapters = st.lists(
    st.builds(Adapter, st.sampled_from(["mlx5_0", "mlx5_1", "mlx5_2"]), st.sampled_from(AdapterKind), st.just(())),
    unique_by=lambda a: a.name,
).map(tuple)
warnings = st.lists(st.builds(Fault, st.sampled_from(["a", "b"]), st.just("r")), max_size=2).map(tuple)
inventories = st.builds(inventory, readings(), adapters, warnings)


@given(inventories, inventories)
def test_a_delta_makes_the_one_of_the_other_also_over_the_wire(old: Inventory, new: Inventory) -> None:
    delta = diff(old, new)
    if delta is None:
        assert old == new
        return
    carried = converter().structure(converter().unstructure(delta), InventoryDelta)
    assert apply(old, carried) == new


@given(inventories)
def test_nothing_changed_is_no_delta(same: Inventory) -> None:
    assert diff(same, same) is None


def test_only_what_changed_travels() -> None:
    old = Inventory(HOST, "nvml", driver=Driver("1"))
    cards = tuple(d for n in range(8) for d in devices(_card(n), None))
    old = evolve(old, devices=cards)
    new = evolve(old, devices=(*cards[:3], evolve(cards[3], used_mib=9), *cards[4:]))
    delta = diff(old, new)
    assert delta is not None
    assert delta.changed == ("devices",)
    assert [d.number for d in delta.values.devices] == [3]
    assert delta.numbers == tuple(range(8))


def _card(n: int):  # type: ignore[no-untyped-def]
    from llmgw.hardware.reading import CardReading

    return CardReading(n, f"GPU-{n}", "NVIDIA L40S", f"0000:{n:02x}:00.0", 46068, 1)


def test_a_driver_that_went_away_is_said() -> None:
    old = Inventory(HOST, "nvml", driver=Driver("1"))
    new = evolve(old, driver=None, source="none")
    delta = diff(old, new)
    assert delta is not None
    assert apply(old, delta) == new


def test_fields_of_another_version_are_left_out() -> None:
    old = Inventory(HOST, "nvml")
    assert apply(old, InventoryDelta(("future", "source"), evolve(old, source="x"))).source == "x"


def test_what_changes_every_moment_is_no_change_of_the_hardware() -> None:
    (card,) = devices(_card(0), None)
    one = Inventory(HOST, "nvml", (card,))
    other = evolve(one, devices=(evolve(card, load=Load(80, 300, 99), used_mib=40000),))
    assert one != other
    assert without_load(one) == without_load(other)
