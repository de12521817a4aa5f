"""A unified diff of two texts, in time that their size bounds. Pure.

``difflib`` alone takes minutes for two documents of many lines that are alike. What both begin and end with is left to
nobody, and where what remains is still long it is one hunk: all of the one text, all of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

_MOST = 3000
"""So many lines of both texts together are compared one by one."""
_CONTEXT = 3

_Step = tuple[str, int, int, int, int]


def text_diff(before: str, after: str, old: str, new: str) -> list[str]:
    """The lines of the diff of two texts with these names; none where nothing differs."""
    a, b = before.splitlines(), after.splitlines()
    if a == b:
        return []
    matcher = SequenceMatcher[str]()
    matcher.a, matcher.b, matcher.opcodes = a, b, _steps(a, b)  # type: ignore[attr-defined]
    lines = [f"--- {old}", f"+++ {new}"]
    for group in matcher.get_grouped_opcodes(_CONTEXT):
        (_, a1, _, b1, _), (_, _, a2, _, b2) = group[0], group[-1]
        lines.append(f"@@ -{_range(a1, a2)} +{_range(b1, b2)} @@")
        for what, a1, a2, b1, b2 in group:
            if what == "equal":
                lines += [f" {line}" for line in a[a1:a2]]
                continue
            lines += [f"-{line}" for line in a[a1:a2]]
            lines += [f"+{line}" for line in b[b1:b2]]
    return lines


def _steps(a: Sequence[str], b: Sequence[str]) -> list[_Step]:
    most = min(len(a), len(b))
    head = next((n for n in range(most) if a[n] != b[n]), most)
    tail = next((n for n in range(most - head) if a[-1 - n] != b[-1 - n]), most - head)
    x, y = a[head : len(a) - tail], b[head : len(b) - tail]
    inner = _inner(x, y)
    steps: list[_Step] = [("equal", 0, head, 0, head)] if head else []
    steps += [(what, i1 + head, i2 + head, j1 + head, j2 + head) for what, i1, i2, j1, j2 in inner]
    if tail:
        steps.append(("equal", len(a) - tail, len(a), len(b) - tail, len(b)))
    return steps


def _inner(x: Sequence[str], y: Sequence[str]) -> Iterator[_Step]:
    if len(x) + len(y) > _MOST:
        yield "replace", 0, len(x), 0, len(y)
        return
    yield from SequenceMatcher(None, x, y).get_opcodes()


def _range(start: int, stop: int) -> str:
    """As ``diff -u`` writes it: an empty range begins one line earlier, and a length of one is left out."""
    length = stop - start
    if length == 1:
        return str(start + 1)
    return f"{start + 1 if length else start},{length}"
