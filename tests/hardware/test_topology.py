from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given

from llmgw.hardware.inventory import AdapterPath, Relation
from llmgw.hardware.reading import CardHealth, CardReading, GpuReading, PairReading
from llmgw.hardware.topology import PciPlace, near, nvlink_domains, nvlink_warnings, relation, route_of
from tests.hardware.machines import readings

R = Relation


def cards(count: int, up: int | None = None) -> list[CardReading]:
    return [CardReading(n, f"GPU-{n}", "NVIDIA H100", nvlinks=18 if up else None, nvlinks_up=up) for n in range(count)]


def mesh(members: range | list[int], links: int = 18, count: int | None = None) -> list[PairReading]:
    """NVLink among the members, NODE for all others."""
    total = count if count is not None else max(members) + 1
    return [
        PairReading(a, b, R.NVLINK, links) if a in members and b in members else PairReading(a, b, R.NODE)
        for a in range(total)
        for b in range(a + 1, total)
    ]


def test_switches_make_one_domain() -> None:
    assert nvlink_domains(mesh(range(8)), cards(8)) == (tuple(range(8)),)
    assert nvlink_warnings(cards(8, 18), mesh(range(8))) == ()


def test_bridges_in_pairs_make_domains_of_two_and_no_warning() -> None:
    pairs = [p if p.b // 2 == p.a // 2 else evolve(p, relation=R.PHB, nvlinks=0) for p in mesh(range(6), 4)]
    assert nvlink_domains(pairs, cards(6)) == ((0, 1), (2, 3), (4, 5))
    three = [p for p in pairs if p.b < 3]
    assert nvlink_domains(three, cards(3)) == ((0, 1),)
    assert nvlink_warnings(cards(3, 4), three) == ()


def test_uneven_links_join_what_reaches_each_other() -> None:
    pairs = [PairReading(0, 1, R.NVLINK, 1), PairReading(1, 2, R.NVLINK, 2), PairReading(2, 3, R.NVLINK, 1)]
    assert nvlink_domains(pairs, cards(4)) == ((0, 1, 2, 3),)


def test_one_card_beside_a_mesh_has_lost_its_links() -> None:
    members = [n for n in range(8) if n != 2]
    (fault,) = nvlink_warnings(cards(8, 18), mesh(members, count=8))
    assert fault.code == "nvlink-down"
    assert fault.reason == "gpu-2 reaches its peers over NODE while 7 others are joined by NVLink: its links are down"
    assert nvlink_domains(mesh(members, count=8), cards(8)) == (tuple(members),)


def test_some_links_down() -> None:
    some = cards(4, 18)
    some[1] = evolve(some[1], nvlinks_up=16)
    (fault,) = nvlink_warnings(some, mesh(range(4)))
    assert (fault.code, fault.reason) == ("nvlink-degraded", "gpu-1 has 16 of 18 NVLinks active, its peers have 18")


def test_a_card_in_mig_mode_or_lost_is_in_no_domain_and_no_warning() -> None:
    some = cards(4, 18)
    some[0] = evolve(some[0], mig=True)
    some[3] = evolve(some[3], health=CardHealth(lost=True))
    assert nvlink_domains(mesh(range(4)), some) == ((1, 2),)
    assert nvlink_warnings(some, mesh(range(4))) == ()


@given(readings(8))
def test_domains_are_what_is_connected(reading: GpuReading) -> None:
    domains = nvlink_domains(reading.pairs, reading.cards)
    flat = [n for domain in domains for n in domain]
    assert len(flat) == len(set(flat))
    assert all(len(domain) > 1 and list(domain) == sorted(domain) for domain in domains)
    of = {n: domain for domain in domains for n in domain}
    usable = {c.index for c in reading.cards if not c.mig and not c.health.lost}
    for pair in reading.pairs:
        if pair.relation is R.NVLINK and {pair.a, pair.b} <= usable:
            assert of[pair.a] == of[pair.b]
    assert set(flat) <= usable
    nvlink_warnings(reading.cards, reading.pairs)


UNDER = "/sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/"


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (UNDER + "0000:12:00.0/0000:13:00.0", UNDER + "0000:12:01.0/0000:14:00.0", R.PIX),
        (UNDER + "0000:12:00.0/0000:13:00.0/0000:14:00.0/0000:15:00.0", UNDER + "0000:12:01.0/0000:16:00.0", R.PXB),
        (UNDER + "0000:12:00.0/0000:13:00.0", "/sys/devices/pci0000:10/0000:10:03.0/0000:18:00.0", R.PHB),
        (UNDER + "0000:12:00.0/0000:13:00.0", "/sys/devices/pci0000:40/0000:40:01.0/0000:41:00.0", R.NODE),
    ],
)
def test_nearness_from_real_paths(a: str, b: str, expected: Relation) -> None:
    one, other = PciPlace(route_of(a), 0), PciPlace(route_of(b), 0)
    assert relation(one, other) is expected
    assert relation(other, one) is expected


def test_nearness_without_paths_is_by_numa_node() -> None:
    assert relation(PciPlace((), 0), PciPlace((), 1)) is R.SYS
    assert relation(PciPlace((), 1), PciPlace((), 1)) is R.NODE
    assert relation(PciPlace((), None), PciPlace((), 1)) is None


def test_a_route_ends_at_the_function() -> None:
    path = "/sys/devices/pci0000:80/0000:80:02.2/0000:82:00.0/infiniband/mlx4_0"
    assert route_of(path) == ("pci0000:80", "0000:80:02.2", "0000:82:00.0")
    assert route_of("/sys/devices/virtual/net/lo") == ()


def test_near_lists_the_nearest_first_and_leaves_out_the_far_side() -> None:
    here = PciPlace(route_of(UNDER + "0000:12:00.0/0000:13:00.0"), 0)
    adapters = {
        "mlx5_0": PciPlace((), 1),
        "mlx5_1": PciPlace((), 0),
        "mlx5_2": PciPlace(route_of(UNDER + "0000:12:01.0/0000:14:00.0"), 0),
        "mlx5_10": PciPlace(route_of(UNDER + "0000:12:02.0/0000:15:00.0"), 0),
    }
    assert near(here, adapters) == (
        AdapterPath("mlx5_2", R.PIX), AdapterPath("mlx5_10", R.PIX), AdapterPath("mlx5_1", R.NODE),
    )  # fmt: skip
