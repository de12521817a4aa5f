"""What `nvidia-smi topo -m` and `nvidia-smi nvlink --status` print, as values. Pure functions of text.

The matrix is taken whole or not at all: a table that was cut or whose cells run together would be read as another
machine. Layouts over driver versions: a header with or without an escape sequence around it, adapters as columns by
name (to R470) or as ``NIC0`` with a legend, one to three columns of affinity after them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from attrs import field, frozen

from llmgw.discovery.faults import DiscoveryError
from llmgw.hardware.inventory import Relation

_ESCAPE = re.compile(r"\x1b\[[0-9;]{0,16}[A-Za-z]")
_GPU = re.compile(r"GPU(\d{1,4})")
_NVLINK = re.compile(r"NV(\d{1,3})")
_LEGEND = re.compile(r"\s{0,16}(NIC\d{1,4}): (\S{1,64})\s*")
_CARD = re.compile(r"\s{0,16}GPU (\d{1,4}): .{0,256}\(UUID: ([^)\s]{1,128})\)")
_LINK = re.compile(r"\s{0,32}Link (\d{1,3}): (?:(\d{1,6}(?:\.\d{1,6})?) GB/s|(<inactive>))")
_CPULIST = re.compile(r"\d{1,6}(?:-\d{1,6})?(?:,\d{1,6}(?:-\d{1,6})?)*")
_WORDS: Mapping[str, Relation] = {
    "PIX": Relation.PIX, "PXB": Relation.PXB, "PHB": Relation.PHB, "NODE": Relation.NODE, "SYS": Relation.SYS,
    "SOC": Relation.SYS,
}  # fmt: skip
MAX_CHARS = 4 * 1024 * 1024
_THING = "nvidia-smi topo -m"
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
    """The matrix. ``links`` holds every two cards in both orders, ``adapters`` each card with each adapter by name."""

    gpus: tuple[TopoGpu, ...]
    links: Mapping[tuple[int, int], TopoLink] = field(factory=dict, hash=False)
    adapters: Mapping[tuple[int, str], Relation] = field(factory=dict, hash=False)


@frozen
class NvlinkCard:
    """The NVLinks of one card by number: GB/s a direction, ``None`` for one that is inactive. Empty where not told."""

    index: int
    uuid: str
    links: tuple[float | None, ...] = ()


def _malformed(reason: str) -> DiscoveryError:
    return DiscoveryError("malformed", _THING, reason, _REMEDY)


def parse_topo(text: str) -> Topo:
    """The matrix. Raises :class:`DiscoveryError` for anything that is not a whole one."""
    if len(text) > MAX_CHARS:
        raise _malformed("its output is longer than it can be")
    lines = [_ESCAPE.sub("", line) for line in text.splitlines()]
    start, columns, tail = _header(lines, text)
    rows: dict[int, tuple[list[str], str]] = {}
    for line in lines[start + 1 :]:
        name, cells, rest = _row(line, len(columns))
        match = _GPU.fullmatch(name)
        if match is None:
            if not line.strip():
                break
            continue
        index = int(match[1])
        if index in rows or name not in columns:
            raise _malformed(f"its row {name} is there twice or has no column")
        if len(cells) < len(columns):
            raise _malformed(f"its row {name} has {len(cells)} cells, {len(columns)} are needed")
        rows[index] = cells, rest
    indices = [int(m[1]) for c in columns if (m := _GPU.fullmatch(c))]
    missing = [index for index in indices if index not in rows]
    if missing:
        raise _malformed(f"its row GPU{missing[0]} is missing")
    legend = {m[1]: m[2] for line in lines if (m := _LEGEND.fullmatch(line))}
    links: dict[tuple[int, int], TopoLink] = {}
    adapters: dict[tuple[int, str], Relation] = {}
    for index in indices:
        for column, cell in zip(columns, rows[index][0], strict=True):
            match = _GPU.fullmatch(column)
            if match is not None and int(match[1]) == index:
                if cell != "X":
                    raise _malformed(f"its row GPU{index} has {cell[:20]!r} where its own column is")
            elif match is not None:
                links[index, int(match[1])] = _link(cell, f"GPU{index}", column)
            else:
                adapters[index, legend.get(column, column)] = _link(cell, f"GPU{index}", column).relation
    for (a, b), link in links.items():
        if links[b, a] != link:
            raise _malformed(
                f"GPU{a} to GPU{b} is {link.relation.value}, and {links[b, a].relation.value} the other way"
            )
    gpus = tuple(_affinity(index, rows[index][1], tail) for index in indices)
    return Topo(gpus, links, adapters)


def _header(lines: Sequence[str], text: str) -> tuple[int, list[str], list[str]]:
    """Where the header is, the columns of the matrix, and what stands after them."""
    for number, line in enumerate(lines):
        words = line.split()
        if not line[:1].isspace() or not words:
            continue
        if words[:2] == ["CPU", "Affinity"]:
            raise _malformed("it shows affinities only, without the matrix")
        if _GPU.fullmatch(words[0]):
            end = next((i for i, word in enumerate(words) if word in ("CPU", "NUMA", "GPU")), len(words))
            if len(set(words[:end])) != end:
                raise _malformed("its header names a column twice")
            return number, words[:end], words[end:]
    said = next((line.strip() for line in text.splitlines() if line.strip()), "it said nothing")
    raise _malformed(f"it has no header: {_ESCAPE.sub('', said)[:200]}")


def _row(line: str, count: int) -> tuple[str, list[str], str]:
    """A row's name, its cells of the matrix, and the rest of the line as it stands."""
    words = line.split(maxsplit=count + 1) if not line[:1].isspace() else []
    if not words:
        return "", [], ""
    rest = words[count + 1] if len(words) > count + 1 else ""
    # With an empty affinity cell split() would take the next one in its place: the tabs tell.
    if "\t" in line:
        parts = line.split("\t")
        if len(parts) > count + 1:
            rest = "\t".join(parts[count + 1 :])
    return words[0], words[1 : count + 1], rest


def _link(cell: str, row: str, column: str) -> TopoLink:
    if match := _NVLINK.fullmatch(cell):
        if int(match[1]) > 0:
            return TopoLink(Relation.NVLINK, int(match[1]))
    elif (relation := _WORDS.get(cell)) is not None:
        return TopoLink(relation)
    raise _malformed(f"its cell {row}, {column} is {cell[:20]!r}")


def _affinity(index: int, rest: str, tail: Sequence[str]) -> TopoGpu:
    """Processors and NUMA node, where each stands in a cell of its own; a list of nodes is no node."""
    cells = rest.split("\t") if "\t" in rest else rest.split()
    cells = [cell.strip() for cell in cells]
    cpus = cells[0] if cells and _CPULIST.fullmatch(cells[0]) else ""
    numa = cells[1] if len(cells) > 1 and "NUMA" in tail and (cpus or "\t" in rest) else ""
    return TopoGpu(index, cpus, int(numa) if re.fullmatch(r"[0-9]{1,4}", numa) else None)


def parse_nvlink_status(text: str) -> tuple[NvlinkCard, ...]:
    """Every card that is mentioned. A card in MIG mode, or without NVLink, has no links here."""
    if len(text) > MAX_CHARS:
        raise DiscoveryError("malformed", "nvidia-smi nvlink --status", "its output is longer than it can be", _REMEDY)
    return tuple(_cards(text))


def _cards(text: str) -> Iterator[NvlinkCard]:
    card: tuple[int, str] | None = None
    links: dict[int, float | None] = {}
    for line in text.splitlines():
        if match := _CARD.match(line):
            if card is not None:
                yield NvlinkCard(*card, tuple(links[n] for n in sorted(links)))
            card, links = (int(match[1]), match[2]), {}
        elif (match := _LINK.match(line)) and card is not None:
            links[int(match[1])] = float(match[2]) if match[2] else None
    if card is not None:
        yield NvlinkCard(*card, tuple(links[n] for n in sorted(links)))
