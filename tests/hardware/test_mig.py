from __future__ import annotations

import re
from collections import Counter
from itertools import combinations_with_replacement, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.hardware.mig import (
    _CARDS,
    MigCard,
    Placed,
    ProfileName,
    arrange,
    free_starts,
    gpu_instance_profile,
    maximal,
    mig_card,
    parent_class,
    parse_profile,
    room,
    suggestion,
)

CAPTURES = Path(__file__).resolve().parents[3] / "shared" / "fixtures" / "gpu" / "mig"

classes = st.sampled_from(sorted(_CARDS))


def the(name: str) -> MigCard:
    card = mig_card(name)
    assert card is not None
    return card


A100, H100, A30, PRO = the("a100-80g"), the("h100-80g"), the("a30-24g"), the("rtx-pro-6000-96g")


def check(card: MigCard, placed: tuple[Placed, ...]) -> None:
    """What no set of instances may do."""
    taken: Counter[int] = Counter()
    slices = memory = 0
    for item in placed:
        profile = card.profile(item.profile)
        assert profile is not None
        assert item.start in profile.starts
        taken.update(range(item.start, item.start + profile.size))
        slices += profile.slices
        memory += profile.memory_mib or 0
    assert max(taken.values(), default=0) <= 1
    assert all(0 <= unit < card.grid for unit in taken)
    assert slices <= card.slices
    assert memory <= card.memory_mib
    for name, count in Counter(p.profile for p in placed).items():
        profile = card.profile(name)
        assert profile is not None
        assert count <= profile.limit
    names = [item.profile for item in placed]
    assert sum("+me" in name for name in names) <= 1
    if any(name.endswith("+me.all") for name in names):
        assert all("+me.all" in name or name.endswith("-me") for name in names)


@given(classes, st.data())
def test_nothing_that_the_table_allows_exceeds_the_card(name: str, data: st.DataObject) -> None:
    card = the(name)
    placed: tuple[Placed, ...] = ()
    while True:
        options = [Placed(p.name, s) for p in card.profiles for s in free_starts(card, placed, p.name)]
        check(card, placed)
        before = room(card, placed)
        assert set(before) == {o.profile for o in options}
        if not options:
            break
        placed = (*placed, data.draw(st.sampled_from(options)))
    assert len(placed) <= 7


@given(classes, st.data())
def test_what_is_arranged_is_valid_and_so_is_every_part_of_it(name: str, data: st.DataObject) -> None:
    card = the(name)
    names = data.draw(st.lists(st.sampled_from([p.name for p in card.profiles]), max_size=8))
    found = arrange(card, names)
    if found is None:
        return
    check(card, found)
    assert sorted(p.profile for p in found) == sorted(names)
    for left_out in range(len(names)):
        assert arrange(card, names[:left_out] + names[left_out + 1 :]) is not None


@pytest.mark.parametrize("card", [A30, A100, PRO], ids=["a30", "a100", "pro"])
def test_arranging_agrees_with_trying_everything(card: MigCard) -> None:
    names = [p.name for p in card.profiles]
    for count in (1, 2, 3):
        for wanted in combinations_with_replacement(names, count):
            assert (arrange(card, wanted) is not None) == by_force(card, wanted), wanted


def by_force(card: MigCard, names: tuple[str, ...]) -> bool:
    profiles = [card.profile(name) for name in names]
    for starts in product(*(p.starts for p in profiles if p is not None)):
        placed = tuple(Placed(n, s) for n, s in zip(names, starts, strict=True))
        try:
            check(card, placed)
        except AssertionError:
            continue
        return True
    return False


@given(classes, st.data())
def test_room_is_what_can_be_added_one_by_one(name: str, data: st.DataObject) -> None:
    card = the(name)
    placed: tuple[Placed, ...] = ()
    for _ in range(data.draw(st.integers(0, 4))):
        options = [Placed(p.name, s) for p in card.profiles for s in free_starts(card, placed, p.name)]
        if options:
            placed = (*placed, data.draw(st.sampled_from(options)))
    offered = room(card, placed)
    for profile in card.profiles:
        now, count = placed, 0
        while starts := free_starts(card, now, profile.name):
            # In any order: the count must not depend on which place is taken first.
            now, count = (*now, Placed(profile.name, data.draw(st.sampled_from(starts)))), count + 1
        assert offered.get(profile.name, 0) == count


@given(classes)
def test_room_is_what_can_be_added_of_one_profile(name: str) -> None:
    card = the(name)
    for profile, count in room(card, ()).items():
        assert arrange(card, [profile] * count) is not None
        assert arrange(card, [profile] * (count + 1)) is None


@pytest.mark.parametrize(
    ("name", "wanted", "fits"),
    [
        ("a100-80g", "4g.40gb 3g.40gb", True),
        ("a100-80g", "4g.40gb 4g.40gb", False),
        ("a100-80g", "3g.40gb 3g.40gb", True),
        ("a100-80g", "3g.40gb 3g.40gb 1g.10gb", False),
        ("a100-80g", "7g.80gb", True),
        ("a100-80g", "7g.80gb 1g.10gb", False),
        ("h100-80g", " ".join(["1g.10gb"] * 7), True),
        ("h100-80g", " ".join(["1g.10gb"] * 8), False),
        ("h100-80g", "3g.40gb 2g.20gb 1g.10gb 1g.10gb", True),
        ("h100-80g", "2g.20gb 1g.10gb 1g.10gb 1g.10gb 1g.10gb 1g.10gb", True),
        ("h100-80g", "1g.10gb+me 1g.10gb+me", False),
        ("h200-140g", " ".join(["1g.35gb"] * 4), True),
        ("h200-140g", " ".join(["1g.35gb"] * 5), False),
        ("a30-24g", "2g.12gb 1g.6gb 1g.6gb", True),
        ("a30-24g", "4g.24gb 1g.6gb", False),
        ("a30-24g", "1g.6gb+me 2g.12gb+me", False),
        ("rtx-pro-6000-96g", " ".join(["1g.24gb"] * 4), True),
        ("rtx-pro-6000-96g", "2g.48gb 1g.24gb 1g.24gb", True),
        ("rtx-pro-6000-96g", "2g.48gb 2g.48gb 1g.24gb", False),
        ("rtx-pro-6000-96g", "1g.24gb+me.all 1g.24gb-me 2g.48gb-me", True),
        ("rtx-pro-6000-96g", "1g.24gb+me.all 1g.24gb-me 2g.48gb+gfx", False),
        ("rtx-pro-6000-96g", "1g.24gb+me.all 1g.24gb", False),
        ("rtx-pro-6000-96g", "1g.24gb+me 1g.24gb+gfx 2g.48gb", True),
        ("gb200-185g", "3g.95gb 4g.93gb", True),
        ("a100-80g", "9g.90gb", False),
    ],
)
def test_known_carvings(name: str, wanted: str, fits: bool) -> None:
    assert (arrange(the(name), wanted.split()) is not None) == fits


def test_an_impossible_request_is_turned_down_at_once() -> None:
    assert arrange(PRO, ["1g.24gb"] * 4000) is None


@given(classes)
def test_maximal_sets_are_maximal(name: str) -> None:
    card = the(name)
    sets = maximal(card)
    assert sets
    assert len(set(sets)) == len(sets)
    for names in sets:
        assert arrange(card, names) is not None
        assert all(arrange(card, (*names, p.name)) is None for p in card.profiles)


def test_maximal_sets_of_a_small_card() -> None:
    plain = [names for names in maximal(A30) if not any("+" in n for n in names)]
    assert plain == [("1g.6gb",) * 4, ("1g.6gb", "1g.6gb", "2g.12gb"), ("2g.12gb", "2g.12gb"), ("4g.24gb",)]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("3g.40gb", ProfileName(None, 3, 40, ())),
        ("1c.3g.71gb", ProfileName(1, 3, 71, ())),
        ("1g.24gb+me.all", ProfileName(None, 1, 24, ("+me.all",))),
        ("1g.24gb-me", ProfileName(None, 1, 24, ("-me",))),
        ("2g.48gb+gfx", ProfileName(None, 2, 48, ("+gfx",))),
        ("3g", None),
        ("MIG 3g.40gb", None),
        ("", None),
    ],
)
def test_names(name: str, parts: ProfileName | None) -> None:
    assert parse_profile(name) == parts


@given(st.text(max_size=40))
def test_any_text_may_be_asked_for(text: str) -> None:
    parse_profile(text)
    gpu_instance_profile(text)
    mig_card(text)
    assert arrange(A100, [text]) is None or A100.profile(text) is not None
    assert suggestion(text) == "" or mig_card(text) is not None


@pytest.mark.parametrize(
    ("old", "new"),
    [("1g.24gb", "1g.23gb"), ("1g.24gb+me", "1g.23gb+me"), ("1c.3g.95gb", "3g.93gb"), ("7g.189gb", "7g.186gb")],
)
def test_what_a_driver_called_otherwise_is_the_same_profile(old: str, new: str) -> None:
    card = the("gb200-185g")
    assert card.profile(old) is card.profile(new) is not None
    assert arrange(card, [old, "1g.23gb"]) == arrange(card, [new, "1g.23gb"])
    assert the("b200-179g").profile("1g.24gb") is None


def test_what_is_not_in_the_table_is_not_refused_anywhere() -> None:
    assert mig_card("rtx-9999-999g") is None
    assert suggestion("rtx-9999-999g") == ""
    assert free_starts(A100, (Placed("new", 0),), "1g.10gb") == ()


def test_suggestions() -> None:
    assert (suggestion("h100-80g"), suggestion("a30-24g"), suggestion("rtx-pro-6000-96g")) == ("9,9", "5,5", "5,5")


@pytest.mark.parametrize(
    ("product", "instances", "name"),
    [
        ("NVIDIA H100 80GB HBM3", [("1g.10gb", 9984)], "h100-80g"),
        ("NVIDIA A100-SXM4-40GB", [("3g.20gb", 19968)], "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", [("1c.3g.40gb", 40192)], "a100-80g"),
        ("NVIDIA GB200", [("1g.24gb", 20480)], "gb200-185g"),
        ("NVIDIA GB200", [("1g.23gb", 22528)], "gb200-185g"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", [("1g.24gb", 24192)], "rtx-pro-6000-96g"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", [("1g.24gb", 23680)], "rtx-pro-6000-96g"),
        ("NVIDIA A100", [("1g.10gb", None)], None),
        ("NVIDIA H100 80GB HBM3", [("1g.10gb", 5)], None),
        ("NVIDIA H100 80GB HBM3", [("", 9984)], None),
        ("NVIDIA H100 80GB HBM3", [], None),
        ("NVIDIA L40S", [("1g.10gb", 9984)], None),
    ],
)
def test_the_parent_told_by_its_instances(
    product: str, instances: list[tuple[str, int | None]], name: str | None
) -> None:
    assert parent_class(product, instances) == name


ROW = re.compile(r"\|\s+\d+\s+MIG (\S+)\s+(\d+)\s+\d+/(\d+)\s+([0-9.]+)\s")
PLACES = re.compile(r"Profile ID\s+(\d+)\s+Placements?\s*:\s+\{([0-9,]+)\}:(\d+)")
TABLES = {
    "a30-lgip.txt": "a30-24g",
    "harvester-a100-lgip.txt": "a100-40g",
    "harvester-h100nvl-lgip-used.txt": "h100-nvl-94g",
    "h200-lgip-part.txt": "h200-140g",
    "b200-lgip-head-new.txt": "b200-179g",
    "b200-lgip-head-old.txt": "b200-179g",
    "gb200-lgip-head.txt": "gb200-185g",
    "gh200-lgip-head.txt": "gh200-96g",
    "gh200-144g-lgip-head.txt": "gh200-143g",
    "rtxpro6000-lgip.txt": "rtx-pro-6000-96g",
}
GRIDS = {"a30-lgipp.txt": "a30-24g", "guide-a100-lgipp.txt": "a100-40g", "rtxpro6000-lgipp.txt": "rtx-pro-6000-96g"}


@pytest.mark.skipif(not CAPTURES.exists(), reason="no captures here")
@pytest.mark.parametrize("file", sorted(TABLES))
def test_captured_profiles(file: str) -> None:
    card = the(TABLES[file])
    rows = ROW.findall((CAPTURES / file).read_text())
    assert rows
    for name, number, most, gib in rows:
        profile = card.profile(name)
        assert profile is not None, name
        assert (profile.id, profile.limit) == (int(number), int(most))
        assert profile.memory_mib is None or abs(profile.memory_mib / 1024 - float(gib)) < 0.011


@pytest.mark.skipif(not CAPTURES.exists(), reason="no captures here")
@pytest.mark.parametrize("file", sorted(GRIDS))
def test_captured_placements(file: str) -> None:
    by_id = {p.id: p for p in the(GRIDS[file]).profiles}
    rows = PLACES.findall((CAPTURES / file).read_text())
    assert {int(number) for number, _, _ in rows} == set(by_id)
    for number, starts, size in rows:
        profile = by_id[int(number)]
        assert (profile.starts, profile.size) == (tuple(int(s) for s in starts.split(",")), int(size))


INSTANCE = re.compile(r"\|\s+\d+\s+MIG (\S+)\s+(\d+)\s+\d+\s+(\d+):(\d+)\s")
MADE = {
    "a100-lgi-1-2-4.txt": "a100-40g",
    "guide-a100-lgi-2-1-1-1-1-1.txt": "a100-40g",
    "guide-a100-lgi-2x3g.txt": "a100-40g",
    "guide-a100-lgi-3-2-1-1.txt": "a100-40g",
    "gh200-lgi-7x.txt": "gh200-96g",
    "harvester-h100nvl-lgi.txt": "h100-nvl-94g",
    "rtxpro6000-lgi-4x1g.txt": "rtx-pro-6000-96g",
    "rtxpro6000-lgi-mixed.txt": "rtx-pro-6000-96g",
}


@pytest.mark.skipif(not CAPTURES.exists(), reason="no captures here")
@pytest.mark.parametrize("file", sorted(MADE))
def test_captured_instances_are_ones_that_the_table_allows(file: str) -> None:
    card = the(MADE[file])
    placed: tuple[Placed, ...] = ()
    rows = INSTANCE.findall((CAPTURES / file).read_text())
    assert rows
    for name, number, start, size in rows:
        profile = card.profile(name)
        assert profile is not None, name
        assert (profile.id, profile.size) == (int(number), int(size))
        assert int(start) in free_starts(card, placed, name)
        placed = (*placed, Placed(name, int(start)))
    assert arrange(card, [p.profile for p in placed]) is not None
