"""What `nvidia-smi topo -m` and `nvidia-smi nvlink --status` print, as values. Pure functions of text.

The matrix is taken whole or not at all: a table that was cut or whose cells run together would be read as another
machine. Layouts over driver versions: a header with or without an escape sequence around it, adapters as columns by
name (to R470) or as ``NIC0`` with a legend, one to three columns of affinity after them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from attrs import field, frozen

from llmgw.discovery.faults import DiscoveryError
from llmgw.hardware.inventory import Relation

_ESCAPE = re.compile(r"\x1b\[[0-9;]{0,16}[A-Za-z]")
_GPU = re.compile(r"GPU(0|[1-9][0-9]{0,3})")
_NIC = re.compile(r"NIC[0-9]{1,4}")
_COLUMN = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_NVLINK = re.compile(r"NV([1-9][0-9]{0,2})")
_LEGEND = re.compile(r"\s{0,16}(NIC[0-9]{1,4}): (\S{1,64})\s*")
_CARD = re.compile(r"\s{0,16}GPU ([0-9]{1,4}): .{0,256}\(UUID: ([^)\s]{1,128})\)")
_OTHER_CARD = re.compile(r"\s{0,16}GPU [0-9]{1,4}\b")
_LINK = re.compile(r"\s{0,32}Link ([0-9]{1,3}): (?:([0-9]{1,6}(?:\.[0-9]{1,6})?) GB/s|(<inactive>))\s{0,16}$")
_ANY_LINK = re.compile(r"\s{0,32}Link\b")
_LIST = re.compile(r"[0-9]{1,6}(?:-[0-9]{1,6})?(?:,[0-9]{1,6}(?:-[0-9]{1,6})?)*")
_WORDS: Mapping[str, Relation] = {
    "PIX": Relation.PIX, "PXB": Relation.PXB, "PHB": Relation.PHB, "NODE": Relation.NODE, "SYS": Relation.SYS,
    "SOC": Relation.SYS,
}  # fmt: skip
_TAILS: Mapping[str, int] = {
    "": 0,
    "CPU Affinity": 1,
    "CPU Affinity NUMA Affinity": 2,
    "CPU Affinity NUMA Affinity GPU NUMA ID": 3,
}
"""How many columns of affinity each known end of the header stands for."""
MAX_CHARS = 4 * 1024 * 1024
MAX_COLUMNS = 512
_THING = "nvidia-smi topo -m"
_NVLINK_THING = "nvidia-smi nvlink --status"
_REMEDY = "run it by hand and look at what it prints"


@frozen
class TopoLink:
    """How two cards reach each other; ``nvlinks`` is 0 unless it is over NVLink."""

    relation: Relation
    nvlinks: int = 0


@frozen
class TopoGpu:
    """One card's row: its processors as the kernel lists them and its NUMA node, where they are told."""

    index: int
    cpus: str = ""
    numa_node: int | None = None


@frozen
class Topo:
    """The matrix. ``links`` holds every two cards in both orders, ``adapters`` each card with each adapter by name.

    An adapter that no legend names is left out: ``NIC0`` is the name of a column and of no device.
    """

    gpus: tuple[TopoGpu, ...]
    links: Mapping[tuple[int, int], TopoLink] = field(factory=dict, hash=False)
    adapters: Mapping[tuple[int, str], Relation] = field(factory=dict, hash=False)


@frozen
class NvlinkCard:
    """The NVLinks of one card by number: GB/s a direction, ``None`` for one that is inactive.

    Empty where not every one of them is told; ``note`` then holds the tool's own words.
    """

    index: int
    uuid: str
    links: tuple[float | None, ...] = ()
    note: str = ""


@frozen
class _Row:
    cells: Sequence[str]
    rest: Sequence[str]
    tabs: bool


def _malformed(reason: str, thing: str = _THING) -> DiscoveryError:
    return DiscoveryError("malformed", thing, reason, _REMEDY)


def parse_topo(text: str) -> Topo:
    """The matrix. Raises :class:`DiscoveryError` for anything that is not a whole one."""
    if len(text) > MAX_CHARS:
        raise _malformed("its output is longer than it can be")
    lines = [_ESCAPE.sub("", line) for line in text.splitlines()]
    # What no line end follows may have been cut, and mlx5_10 would be read as mlx5_1.
    whole = lines if text.endswith(("\n", "\r")) else lines[:-1]
    start, columns, tail = _header(lines)
    rows = _rows(lines[start + 1 :], columns)
    gpus = {column: int(match[1]) for column in columns if (match := _GPU.fullmatch(column))}
    missing = [column for column in gpus if column not in rows]
    if missing:
        raise _malformed(f"its row {missing[0]} is missing")
    names = _names(whole, columns)
    cells = {(row, column): cell for row in rows for column, cell in zip(columns, rows[row].cells, strict=True)}
    read = {cell: _link(cell) for cell in set(cells.values())}
    links: dict[tuple[int, int], TopoLink] = {}
    adapters: dict[tuple[int, str], Relation] = {}
    for (row, column), cell in cells.items():
        if row == column and cell != "X":
            raise _malformed(f"its row {row} has {cell[:20]!r} where its own column is")
        if row != column and read[cell] is None:
            raise _malformed(f"its cell {row}, {column} is {cell[:20]!r}")
    for (row, column), cell in cells.items():
        link = read[cell]
        if link is None:
            continue
        if link != read[cells.get((column, row), cell)]:
            raise _malformed(f"{row} to {column} is {cell}, and {cells[column, row]} the other way")
        if row in gpus and column in gpus:
            links[gpus[row], gpus[column]] = link
        elif link.nvlinks:
            raise _malformed(f"its cell {row}, {column} is {cell}, and an adapter has no NVLink")
        elif row in gpus and column in names:
            adapters[gpus[row], names[column]] = link.relation
    return Topo(tuple(_affinity(index, name, rows[name], tail) for name, index in gpus.items()), links, adapters)


def _header(lines: Sequence[str]) -> tuple[int, list[str], int | None]:
    """Where the header is, the columns of the matrix, and how many of affinity follow; ``None`` where unknown."""
    for number, line in enumerate(lines):
        if not line[:1].isspace():
            continue
        words = line.split()
        if words[:2] == ["CPU", "Affinity"]:
            raise _malformed("it shows affinities only, without the matrix")
        if words and _GPU.fullmatch(words[0]):
            end = next((i for i, word in enumerate(words) if word in ("CPU", "NUMA", "GPU")), len(words))
            columns = words[:end]
            if end > MAX_COLUMNS:
                raise _malformed("its header has more columns than it can have")
            if len(set(columns)) != end:
                raise _malformed("its header names a column twice")
            strange = next((c for c in columns if not _COLUMN.fullmatch(c)), None)
            if strange is not None:
                raise _malformed(f"its header has a column {strange[:20]!r}")
            return number, columns, _TAILS.get(" ".join(words[end:]))
    said = next((line.strip() for line in lines if line.strip()), "it said nothing")
    raise _malformed(f"it has no header: {said[:200]}")


def _rows(lines: Sequence[str], columns: Sequence[str]) -> dict[str, _Row]:
    """The rows up to the first empty line, by name; what is no row of a column is skipped."""
    known = frozenset(columns)
    rows: dict[str, _Row] = {}
    for line in lines:
        if not line.strip():
            break
        # With an empty cell split() would take the next one in its place: the tabs tell.
        tabs = "\t" in line
        words = [word.strip() for word in line.split("\t")] if tabs else line.split()
        name = "" if line[:1].isspace() else words[0]
        if name not in known and not _GPU.fullmatch(name):
            continue
        if name in rows or name not in known:
            raise _malformed(f"its row {name} is there twice or has no column")
        cells, rest = words[1 : len(columns) + 1], words[len(columns) + 1 :]
        if len(cells) < len(columns):
            raise _malformed(f"its row {name} has {len(cells)} cells, {len(columns)} are needed")
        if any(word == "X" or _link(word) is not None for word in rest):
            raise _malformed(f"its row {name} has more cells than the header has columns")
        rows[name] = _Row(cells, rest, tabs)
    return rows


def _link(cell: str) -> TopoLink | None:
    if match := _NVLINK.fullmatch(cell):
        return TopoLink(Relation.NVLINK, int(match[1]))
    relation = _WORDS.get(cell)
    return None if relation is None else TopoLink(relation)


def _names(lines: Sequence[str], columns: Sequence[str]) -> dict[str, str]:
    """The adapter that each column is about, where it is known."""
    legend: dict[str, str] = {}
    for match in filter(None, map(_LEGEND.fullmatch, lines)):
        if legend.setdefault(match[1], match[2]) != match[2]:
            raise _malformed(f"its legend names {match[1]} twice")
    names = {
        column: legend.get(column, column)
        for column in columns
        if not _GPU.fullmatch(column) and (column in legend or not _NIC.fullmatch(column))
    }
    if len(set(names.values())) != len(names):
        raise _malformed("two of its columns are the same adapter")
    return names


def _affinity(index: int, name: str, row: _Row, tail: int | None) -> TopoGpu:
    """Processors and NUMA node, where each stands in a cell of its own; a list of nodes is no node."""
    rest = list(row.rest)
    if tail is None:
        return TopoGpu(index)
    if any(word and word != "N/A" and not _LIST.fullmatch(word) for word in rest):
        raise _malformed(f"the affinities of its row {name} are {' '.join(filter(None, rest))[:40]!r}")
    if not row.tabs:
        # Which of the cells is empty cannot be told from blanks.
        values = rest if len(rest) >= tail else [""] * tail
    elif tail < 3:
        values = [*rest[:1], *filter(None, rest[1:])]
    elif len(rest) < tail or not rest[-1]:
        raise _malformed(f"its row {name} ends early")
    else:
        values = [rest[0], *(list(filter(None, rest[1:-1])) or [""]), rest[-1]]
    if len([value for value in values if value]) > tail:
        raise _malformed(f"its row {name} has more cells than the header has columns")
    cpus, numa = [*values, "", ""][:2]
    return TopoGpu(index, cpus if cpus != "N/A" else "", int(numa) if numa.isdecimal() else None)


def parse_nvlink_status(text: str) -> tuple[NvlinkCard, ...]:
    """Every card that is mentioned. A card in MIG mode, or without NVLink, has a note and no links here."""
    if len(text) > MAX_CHARS:
        raise _malformed("its output is longer than it can be", _NVLINK_THING)
    told: dict[int, tuple[str, list[str]]] = {}
    said: list[str] | None = None
    for line in text.splitlines():
        if match := _CARD.match(line):
            if int(match[1]) in told:
                raise _malformed(f"it shows GPU {int(match[1])} twice", _NVLINK_THING)
            said = []
            told[int(match[1])] = match[2], said
        elif _OTHER_CARD.match(line):
            # What follows is about a card that cannot be told, and not about the one before.
            said = None
        elif said is not None and line.strip():
            said.append(line)
    return tuple(_card(index, uuid, said) for index, (uuid, said) in told.items())


def _card(index: int, uuid: str, said: Sequence[str]) -> NvlinkCard:
    links: dict[int, float | None] = {}
    for line in said:
        match = _LINK.match(line)
        if match is not None and int(match[1]) not in links:
            links[int(match[1])] = float(match[2]) if match[2] else None
        elif match is not None or not links or _ANY_LINK.match(line):
            return NvlinkCard(index, uuid, note=" ".join(line[:200].split()))
    if set(links) != set(range(len(links))):
        return NvlinkCard(index, uuid, note="some of its links are missing")
    return NvlinkCard(index, uuid, tuple(links[n] for n in range(len(links))))
