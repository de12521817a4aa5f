"""The metrics of all workers as one: each writes its samples to a file, and whoever is asked adds them up.

What a dead worker counted goes on counting, so that no counter goes back when a worker is replaced: its file stays
until the next worker adds it to the file of the past. Whoever answers a scrape writes its own file first, so whatever
was ever shown is written down. All of it is blocking, and runs in a thread.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from attrs import define, field
from prometheus_client import generate_latest
from prometheus_client.core import Metric

_GATE = "metrics.lock"
_PAST = "metrics-past"
_DATA, _ALIVE = "metrics-{}.json", "metrics-{}.alive"
_NOT_ADDED: Mapping[str, Callable[[float, float], float]] = {
    "llmgw_router_keys": max,
    "llmgw_router_keys_version": min,
}
"""Of these every worker has the same; where they differ, the number that they know and the version that all have."""

_LASTING = frozenset({"counter", "histogram"})

Labels = tuple[tuple[str, str], ...]


@define
class Family:
    """One metric: its type, help and samples by name and labels."""

    kind: str
    text: str
    samples: dict[tuple[str, Labels], float] = field(factory=dict)


Families = dict[str, Family]


def families_of(metrics: Iterable[Metric]) -> Families:
    """What a collector gives, as values that can be kept."""
    return {
        m.name: Family(m.type, m.documentation, {(s.name, tuple(sorted(s.labels.items()))): s.value for s in m.samples})
        for m in metrics
    }


def add(total: Families, more: Families, *, alive: bool = True) -> None:
    """Add ``more`` to ``total``. Of a worker that is not alive only what it counted holds still."""
    for name, family in more.items():
        if not alive and family.kind not in _LASTING:
            continue
        into = total.setdefault(name, Family(family.kind, family.text))
        both = _NOT_ADDED.get(name)
        for key, value in family.samples.items():
            before = into.samples.get(key)
            into.samples[key] = value if before is None else both(before, value) if both else before + value


def text_of(families: Families) -> bytes:
    """The text exposition."""
    return generate_latest(_Collected(families))


class _Collected:
    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for name, family in self._families.items():
            metric = Metric(name, family.text, family.kind)
            for (sample, labels), value in family.samples.items():
                metric.add_sample(sample, dict(labels), value)
            yield metric


class MetricsFiles:
    """One worker's file, and its sight of the others'. Raises ``OSError``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = secrets.token_hex(8)
        self._turn = threading.Lock()
        self._written = 0
        folder.mkdir(mode=0o700, exist_ok=True)
        self._alive = os.open(folder / _ALIVE.format(self._name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with _held(folder, fcntl.LOCK_EX):
            _bury(folder)

    def write(self, number: int, families: Families) -> None:
        """Let the others see these; what is older than what was written is left out."""
        with self._turn:
            if number <= self._written:
                return
            _replace(self._folder / _DATA.format(self._name), _encoded(families))
            self._written = number

    def sum(self, number: int, families: Families) -> bytes:
        """The exposition of all workers, this one with what is given."""
        self.write(number, families)
        total: Families = {}
        add(total, families)
        with _held(self._folder, fcntl.LOCK_SH):
            merged, past = _past(self._folder)
            add(total, past, alive=False)
            for name in _names(self._folder):
                if name != self._name and name not in merged:
                    alive = _is_alive(self._folder, name)
                    add(total, _read(self._folder / _DATA.format(name)), alive=alive)
        return text_of(total)

    def close(self) -> None:
        """Give the file up; what is in it goes on counting."""
        os.close(self._alive)


def forget(folder: Path) -> None:
    """Begin anew: nothing of dead workers counts any more. Blocking."""
    if not folder.exists():
        return
    with _held(folder, fcntl.LOCK_EX):
        for name in list(_names(folder)):
            if not _is_alive(folder, name):
                _remove(folder, name)
        (folder / _PAST).unlink(missing_ok=True)


def _bury(folder: Path) -> None:
    """Add what dead workers counted to the past."""
    merged, past = _past(folder)
    dead = [name for name in _names(folder) if not _is_alive(folder, name)]
    for name in dead:
        if name not in merged:
            add(past, _read(folder / _DATA.format(name)), alive=False)
    if dead:
        # Names and sums change in one step: cut short anywhere, nothing counts twice and nothing is lost.
        _replace(folder / _PAST, orjson.dumps({"merged": dead, "families": _plain(past)}))
        for name in dead:
            _remove(folder, name)


def _remove(folder: Path, name: str) -> None:
    (folder / _DATA.format(name)).unlink(missing_ok=True)
    (folder / _ALIVE.format(name)).unlink(missing_ok=True)


@contextmanager
def _held(folder: Path, how: int) -> Iterator[None]:
    handle = os.open(folder / _GATE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)


def _names(folder: Path) -> Iterator[str]:
    first, _, last = _DATA.partition("{}")
    for path in folder.glob(_DATA.format("*")):
        yield path.name.removeprefix(first).removesuffix(last)


def _is_alive(folder: Path, name: str) -> bool:
    try:
        handle = os.open(folder / _ALIVE.format(name), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_suffix(".new")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    fresh.replace(path)


def _plain(families: Families) -> list[Any]:
    return [
        [
            name,
            family.kind,
            family.text,
            [[sample, labels, value] for (sample, labels), value in family.samples.items()],
        ]
        for name, family in families.items()
    ]


def _encoded(families: Families) -> bytes:
    return orjson.dumps({"families": _plain(families)})


def _read(path: Path) -> Families:
    return _load(path)[1]


def _past(folder: Path) -> tuple[frozenset[str], Families]:
    return _load(folder / _PAST)


def _load(path: Path) -> tuple[frozenset[str], Families]:
    """Files appear whole, so one that cannot be read is another version's, and counts nothing."""
    try:
        value = orjson.loads(path.read_bytes())
        families = {
            str(name): Family(
                str(kind),
                str(text),
                {(str(s), tuple((str(k), str(v)) for k, v in labels)): float(value) for s, labels, value in samples},
            )
            for name, kind, text, samples in value["families"]
        }
        return frozenset(value.get("merged", ())), families
    except (OSError, ValueError, TypeError, KeyError):
        return frozenset(), {}
