"""What was used: rows by key, model and day. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

DAY_S = 86400


@frozen
class UsageRow:
    """Sums of one key (empty: requests without one), one model and one day (UTC, in days since 1970).

    ``failed`` of the ``requests`` got an error from the engine or were cut; of ``estimated`` the engine never said how
    many tokens they took. ``cost`` is in millionths of the unit that prices are in.
    """

    key: str
    model: str
    day: int
    requests: int = 0
    failed: int = 0
    estimated: int = 0
    prompt: int = 0
    completion: int = 0
    cost: int = 0


class UsageBook:
    """Sums that grow request by request until they are taken."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, int], list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._sums)

    def add(
        self, key: str, model: str, day: int, prompt: int, completion: int, cost: int, *, failed: bool, estimated: bool
    ) -> None:
        """Count one request."""
        sums = self._sums.get((key, model, day))
        if sums is None:
            sums = self._sums[key, model, day] = [0, 0, 0, 0, 0, 0]
        sums[0] += 1
        sums[1] += failed
        sums[2] += estimated
        sums[3] += prompt
        sums[4] += completion
        sums[5] += cost

    def take(self) -> tuple[UsageRow, ...]:
        """Everything since the last time."""
        taken, self._sums = self._sums, {}
        return tuple(UsageRow(*where, *sums) for where, sums in taken.items())


def merged(rows: Iterable[UsageRow]) -> tuple[UsageRow, ...]:
    """Rows of the same key, model and day as one."""
    sums: dict[tuple[str, str, int], list[int]] = {}
    for row in rows:
        new = (row.requests, row.failed, row.estimated, row.prompt, row.completion, row.cost)
        have = sums.setdefault((row.key, row.model, row.day), [0] * 6)
        for at, value in enumerate(new):
            have[at] += value
    return tuple(UsageRow(*where, *values) for where, values in sums.items())
