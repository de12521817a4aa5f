"""Diffs as ``difflib`` makes them, but never for minutes."""

from __future__ import annotations

import difflib
import time

from hypothesis import given
from hypothesis import strategies as st

from llmgw.settings.text_diff import text_diff

LINES = st.lists(st.sampled_from("abc"), max_size=12)


def patched(before: list[str], diff: list[str]) -> list[str]:
    """What a diff makes of a text."""
    made, at = [], 0
    for line in diff[2:]:
        if line.startswith("@@"):
            start, _, length = line.split()[1][1:].partition(",")
            first = int(start) - (length != "0")
            made += before[at:first]
            at = first
        elif line[0] == "+":
            made.append(line[1:])
        else:
            assert before[at] == line[1:]
            at += 1
            if line[0] == " ":
                made.append(line[1:])
    return made + before[at:]


@given(LINES, LINES)
def test_it_makes_the_one_of_the_other(a: list[str], b: list[str]) -> None:
    before, after = "\n".join(a), "\n".join(b)
    found = text_diff(before, after, "x", "y")
    assert patched(before.splitlines(), found) == after.splitlines()
    usual = list(difflib.unified_diff(before.splitlines(), after.splitlines(), "x", "y", lineterm=""))
    assert bool(found) is bool(usual)
    assert found[:2] == usual[:2]


def test_a_change_in_a_large_document_is_shown_alone_and_an_attack_takes_no_minutes() -> None:
    lines = [f"# {n % 150}" for n in range(200_000)]
    edited = [*lines[:100_000], "models: {}", *lines[100_001:]]
    began = time.process_time()
    assert text_diff("\n".join(lines), "\n".join(edited), "x", "y") == [
        "--- x", "+++ y", "@@ -99998,7 +99998,7 @@", *(f" {line}" for line in lines[99_997:100_000]),
        f"-{lines[100_000]}", "+models: {}", *(f" {line}" for line in lines[100_001:100_004]),
    ]  # fmt: skip
    other = "\n".join(f"# {n * 7 % 151}" for n in range(200_000))
    assert len(text_diff("\n".join(lines), other, "x", "y")) > 399_000
    short = "\n".join(lines[:1500])
    assert text_diff(short, "\n".join(other.splitlines()[:1500]), "x", "y")
    assert time.process_time() - began < 5
