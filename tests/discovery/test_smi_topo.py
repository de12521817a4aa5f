from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.discovery.faults import DiscoveryError
from llmgw.discovery.smi_topo import Topo, TopoGpu, TopoLink, parse_nvlink_status, parse_topo
from llmgw.hardware.inventory import Relation

CAPTURES = Path(__file__).resolve().parents[3] / "shared" / "fixtures"
R = Relation
WORD = {R.PIX: "PIX", R.PXB: "PXB", R.PHB: "PHB", R.NODE: "NODE", R.SYS: "SYS"}


def render(topo: Topo, *, escape: str, tabs: bool, legend: bool, tail: int) -> str:
    """The text that a driver would print: ``escape`` is none, before or after the first tab; ``tail`` columns follow."""
    adapters = list(dict.fromkeys(name for _, name in topo.adapters))
    heads = [f"NIC{n}" if legend else name for n, name in enumerate(adapters)]
    columns = [f"GPU{g.index}" for g in topo.gpus] + heads
    extra = ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"][:tail]
    glue = "\t" if tabs else "   "
    head = glue.join([*columns, *extra])
    lines = [
        {"": f"{glue}{head}", "before": f"\x1b[4m{glue}{head}\x1b[0m", "after": f"{glue}\x1b[4m{head}\x1b[0m"}[escape]
    ]
    for gpu in topo.gpus:
        cells = [f"GPU{gpu.index}"]
        for other in topo.gpus:
            link = topo.links.get((gpu.index, other.index))
            cells.append("X" if link is None else f"NV{link.nvlinks}" if link.nvlinks else WORD[link.relation])
        cells += [WORD[topo.adapters[gpu.index, name]] for name in adapters]
        after = [gpu.cpus, "N/A" if gpu.numa_node is None else str(gpu.numa_node)][:tail]
        if tail == 3:
            after += ["", "N/A"] if tabs else ["N/A"]
        lines.append(glue.join([*cells, *after]))
    for n, head in enumerate(heads):
        row = [WORD[topo.adapters[g.index, adapters[n]]] for g in topo.gpus]
        lines.append(glue.join([head, *row, *("X" if m == n else "SYS" for m in range(len(heads))), *([""] * tail)]))
    lines += ["", "Legend:", "", "  X    = Self", "  PIX  = one bridge", ""]
    if legend and adapters:
        lines += ["NIC Legend:", "", *(f"  NIC{n}: {name}" for n, name in enumerate(adapters)), ""]
    return "\n".join(lines)


@st.composite
def topos(draw: st.DrawFn, cpus: bool) -> Topo:
    indices = sorted(draw(st.sets(st.integers(0, 17), min_size=1, max_size=6)))
    adapters = draw(
        st.lists(st.sampled_from([f"mlx5_{n}" for n in range(12)] + ["mlx5_bond_0", "efa_0"]), unique=True, max_size=5)
    )
    links: dict[tuple[int, int], TopoLink] = {}
    for a in indices:
        for b in indices:
            if a < b:
                relation = draw(st.sampled_from(Relation))
                link = TopoLink(relation, draw(st.integers(1, 18)) if relation is R.NVLINK else 0)
                links[a, b] = links[b, a] = link
    near = {(a, n): draw(st.sampled_from(sorted(WORD))) for a in indices for n in adapters}
    lists = st.sampled_from(["0-15,32-47", "6,14,22,30", "0-191", "3"])
    gpus = tuple(
        TopoGpu(i, draw(lists) if cpus else "", draw(st.none() | st.integers(0, 31)) if cpus else None) for i in indices
    )
    return Topo(gpus, links, near)


@given(
    topos(cpus=True), st.sampled_from(["", "before", "after"]), st.booleans(), st.booleans(), st.sampled_from([2, 3])
)
def test_every_layout_is_the_same_matrix(topo: Topo, escape: str, tabs: bool, legend: bool, tail: int) -> None:
    assert parse_topo(render(topo, escape=escape, tabs=tabs, legend=legend, tail=tail)) == topo
    text = render(topo, escape=escape, tabs=tabs, legend=legend, tail=tail)
    found = parse_topo(text)
    assert (dict(found.links), dict(found.adapters)) == (dict(topo.links), dict(topo.adapters))


@given(topos(cpus=False))
def test_a_matrix_without_affinities(topo: Topo) -> None:
    found = parse_topo(render(topo, escape="", tabs=True, legend=True, tail=0))
    assert (found.gpus, dict(found.links)) == (topo.gpus, dict(topo.links))


GOOD = render(
    Topo(
        (TopoGpu(0, "0-3", 0), TopoGpu(1, "0-3", 0), TopoGpu(2, "4-7", 1)),
        {(a, b): TopoLink(R.NVLINK, 4) if {a, b} == {0, 1} else TopoLink(R.SYS) for a in range(3) for b in range(3) if a != b},
        {(g, n): R.PIX if g == 0 else R.SYS for g in range(3) for n in ("mlx5_3", "mlx5_10")},
    ),
    escape="after", tabs=True, legend=True, tail=3,
)  # fmt: skip


def test_adapters_are_named_by_the_legend() -> None:
    found = parse_topo(GOOD)
    assert found.adapters[0, "mlx5_3"] is R.PIX
    assert found.adapters[2, "mlx5_10"] is R.SYS
    assert found.gpus[2] == TopoGpu(2, "4-7", 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.replace("GPU2\tSYS\tSYS\tX", "GPU2\tSYS\tSYSX"), "cell"),
        (
            lambda t: "\n".join(line for line in t.splitlines() if not line.startswith("GPU1")),
            "its row GPU1 is missing",
        ),
        (lambda t: t.replace("GPU0\tX\tNV4", "GPU0\tX\tNV2"), "the other way"),
        (lambda t: t.replace("GPU0\tX\tNV4", "GPU0\tNV4\tX"), "where its own column is"),
        (lambda t: t.replace("NV4", "NV0"), "'NV0'"),
        (lambda t: t.replace("NV4", "WAT"), "'WAT'"),
        (lambda t: t[t.index("GPU0\tX") :], "has no header"),
        (lambda t: t[:120], ""),
        (lambda _: "", "it said nothing"),
        (lambda _: "ERROR: Option -m is missing its value.", "Option -m is missing its value"),
        (lambda _: "\tCPU Affinity\tNUMA Affinity\nGPU0\t0-3\t0\n", "affinities only"),
        (lambda t: t.replace("\tGPU1\t", "\tGPU0\t", 1), "twice"),
        (lambda t: t + "x" * 5_000_000, "longer than it can be"),
    ],
)
def test_what_is_not_a_whole_matrix_is_refused(change, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DiscoveryError) as caught:
        parse_topo(change(GOOD))
    assert caught.value.code == "malformed"
    assert said in caught.value.reason
    assert caught.value.remedy


@given(st.integers(0, 700), st.integers(0, 700), st.binary(max_size=60), st.randoms(use_true_random=False))
def test_damage_gives_our_error_or_a_whole_matrix(at: int, cut: int, noise: bytes, random) -> None:  # type: ignore[no-untyped-def]
    text = GOOD[:at] + noise.decode(errors="replace") + GOOD[at + cut :]
    if random.random() < 0.3:
        lines = text.splitlines()
        random.shuffle(lines)
        text = "\n".join(lines)
    parse_nvlink_status(text)
    try:
        found = parse_topo(text)
    except DiscoveryError:
        return
    indices = [g.index for g in found.gpus]
    assert set(found.links) == {(a, b) for a in indices for b in indices if a != b}


@pytest.mark.parametrize(
    "piece", ["GPU0 ", "\tGPU0", "\x1b[4m", "NIC0: a\n", "   ", "X\t", "GPU 0: (UUID: ", " Link 0: "]
)
def test_megabytes_take_no_time(piece: str) -> None:
    began = time.process_time()
    text = piece * (2_000_000 // len(piece))
    for parse in (parse_topo, parse_nvlink_status):
        try:
            parse(text)
        except DiscoveryError:
            continue
    assert time.process_time() - began < 3


def test_nvlink_status() -> None:
    text = (
        "GPU 0: Fast card (UUID: GPU-a)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n\t Link 2: 25 GB/s\n"
        "GPU 3: Other (card) (UUID: GPU-b)\nUnable to retrieve anything: all links are inActive\n"
        "GPU 4: Cut (UUID: GPU-c)\nNvlink queries make no sense in MIG mode\n"
    )
    found = parse_nvlink_status(text)
    assert [(c.index, c.uuid, c.links) for c in found] == [
        (0, "GPU-a", (26.562, None, 25.0)), (3, "GPU-b", ()), (4, "GPU-c", ()),
    ]  # fmt: skip
    assert parse_nvlink_status("") == ()


HEADER = "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
ROWS = ["GPU0\t X \tNV4\tSYS\t0-3\t0\t\tN/A\n", "GPU1\tNV4\t X \tPIX\t4-7\t1\t\tN/A\n"]
ADAPTER = "NIC0\tSYS\tPIX\t X \t\t\t\t\n"
NAMES = "\nNIC Legend:\n\n  NIC0: mlx5_0\n"
SMALL = HEADER + "".join(ROWS) + ADAPTER + NAMES


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("NV4\tSYS\t0-3", "NV4\tNV4\tSYS\t0-3", "its row GPU0 has more cells"),
        ("NV4\tSYS\t0-3", "NV4\tSYS\tSYS\t0-3", "its row GPU0 has more cells"),
        ("NV4\tSYS\t0-3", "\tNV4\tSYS\t0-3", "its row GPU0 has more cells"),
        ("NV4\tSYS\t0-3", "NV4\t0-3", "its cell GPU0, NIC0 is '0-3'"),
        ("0-3\t0\t\tN/A\n", "0-3\t0N/A\n", "the affinities of its row GPU0"),
        ("0-3\t0\t\tN/A\n", "0-\n", "the affinities of its row GPU0"),
        ("0-3\t0\t\tN/A\n", "0-3\n", "its row GPU0 ends early"),
        ("0-3\t0\t\tN/A\n", "0-3\t0\t\t\n", "its row GPU0 ends early"),
        ("0-3\t0\t\tN/A\n", "0-3\t0\t1\tN/A\n", "its row GPU0 has more cells"),
        ("0-3", "0-99999999", "the affinities of its row GPU0"),
        ("NIC0\tSYS\tPIX", "NIC0\tPIX\tPIX", "GPU0 to NIC0 is SYS, and PIX the other way"),
        ("NIC0\tSYS\tPIX", "NIC0\tSYSPIX", "its cell NIC0, GPU0 is 'SYSPIX'"),
        (ADAPTER, ADAPTER + ADAPTER, "its row NIC0 is there twice"),
        ("NIC0: mlx5_0\n", "NIC0: mlx5_0\n  NIC0: mlx5_1\n", "names NIC0 twice"),
        ("\tNIC0\tCPU", "\tNIC0\tNIC0\tCPU", "its header names a column twice"),
        ("\tNIC0\tCPU", "\tmlx5\x00\tCPU", "its header has a column 'mlx5"),
        ("\tGPU0\t", "".join(f"\tGPU{n}" for n in range(600)) + "\t", "more columns than it can have"),
    ],
)
def test_cells_are_never_shifted(old: str, new: str, said: str) -> None:
    assert parse_topo(SMALL).adapters == {(0, "mlx5_0"): R.SYS, (1, "mlx5_0"): R.PIX}
    with pytest.raises(DiscoveryError) as caught:
        parse_topo(SMALL.replace(old, new, 1))
    assert (caught.value.code, said in caught.value.reason) == ("malformed", True), caught.value.reason


@pytest.mark.parametrize(
    ("old", "new", "gpu"),
    [
        ("0-3\t0\t\tN/A", "0-3\t\t1\t\tN/A", TopoGpu(0, "0-3", 1)),
        ("0-3\t0\t\tN/A", "\t\t\tN/A", TopoGpu(0)),
        ("0-3\t0\t\tN/A", "\t1\t\tN/A", TopoGpu(0, "", 1)),
        ("0-3\t0\t\tN/A", "N/A\tN/A\t\tN/A", TopoGpu(0)),
        ("0-3\t0\t\tN/A", "0-3\t0,2-9\t\t2", TopoGpu(0, "0-3")),
        ("GPU NUMA ID\n", "Something New\n", TopoGpu(0)),
    ],
)
def test_affinities_are_read_from_their_own_cells_or_not_at_all(old: str, new: str, gpu: TopoGpu) -> None:
    found = parse_topo(SMALL.replace(old, new, 1))
    assert found.gpus[0] == gpu
    assert found.links == parse_topo(SMALL).links


def test_an_empty_cell_between_blanks_leaves_the_affinities_unknown() -> None:
    text = "     GPU0  CPU Affinity  NUMA Affinity  GPU NUMA ID\nGPU0  X    1  N/A\n"
    assert parse_topo(text).gpus == (TopoGpu(0),)


def test_a_column_without_a_name_is_no_adapter() -> None:
    assert parse_topo(SMALL.removesuffix(NAMES)).adapters == {}
    assert parse_topo(SMALL.removesuffix("0\n")).adapters == {}, "a name that was cut is another adapter's"
    twice = "\tGPU0\tNIC0\tNIC1\nGPU0\tX\tPIX\tSYS\n\n  NIC0: a\n  NIC1: a\n"
    with pytest.raises(DiscoveryError, match="same adapter"):
        parse_topo(twice)


def test_an_adapter_has_no_nvlink() -> None:
    with pytest.raises(DiscoveryError, match="its cell GPU0, NIC0 is NV4, and an adapter has no NVLink"):
        parse_topo(SMALL.replace(ADAPTER, "").replace("NV4\tSYS", "NV4\tNV4"))


@given(topos(cpus=True), st.sampled_from([True, False]), st.data())
def test_a_cut_matrix_is_refused_or_has_every_link(topo: Topo, tabs: bool, data: st.DataObject) -> None:
    text = render(topo, escape="after", tabs=tabs, legend=True, tail=3)
    try:
        found = parse_topo(text[: data.draw(st.integers(0, len(text)))])
    except DiscoveryError:
        return
    assert found.links == topo.links
    assert found.adapters.items() <= topo.adapters.items()
    assert all(a == b or a == TopoGpu(b.index) for a, b in zip(found.gpus, topo.gpus, strict=True))


def test_the_links_of_a_card_are_all_told_or_none() -> None:
    text = (
        "GPU 0: A (UUID: GPU-a)\n\t Link 0: 25 GB/s\n\t Link 1: N/A\n\t Link 2: 25 GB/s\n"
        "GPU 1: B (UUID: GPU-b)\n\t Link 0: 25 GB/s\n"
        "GPU 2: cut (UUI\n\t Link 0: <inactive>\n\t Link 1: 25 GB/s\n"
        "GPU 3: D (UUID: GPU-d)\n\t Link 0: 25 GB/s\n\t Link 2: 25 GB/s\n"
        "GPU 4: E (UUID: GPU-e)\nThis kind of card has none\n"
    )
    assert [(c.index, c.links, c.note) for c in parse_nvlink_status(text)] == [
        (0, (), "Link 1: N/A"), (1, (25.0,), ""), (3, (), "some of its links are missing"),
        (4, (), "This kind of card has none"),
    ]  # fmt: skip
    with pytest.raises(DiscoveryError, match="shows GPU 1 twice"):
        parse_nvlink_status(text + "GPU 1: B (UUID: GPU-b)\n")
    with pytest.raises(DiscoveryError, match="longer than it can be"):
        parse_nvlink_status("x" * 5_000_000)


@given(st.text(max_size=80), st.integers(0, 200), st.integers(0, 200))
def test_any_noise_in_a_list_of_links_gives_our_error_or_cards(noise: str, at: int, cut: int) -> None:
    text = "GPU 0: A (UUID: GPU-a)\n" + "".join(f"\t Link {n}: 25 GB/s\n" for n in range(9))
    try:
        found = parse_nvlink_status(text[:at] + noise + text[at + cut :])
    except DiscoveryError:
        return
    assert all(c.links == () or c.note == "" for c in found)


def test_a_matrix_of_megabytes_takes_no_time() -> None:
    many = range(500)
    began = time.process_time()
    parse_topo(
        "".join(f"\tGPU{n}" for n in many)
        + "".join(f"\nGPU{n}" + "".join("\tX" if n == m else "\tSYS" for m in many) for n in many)
    )
    assert time.process_time() - began < 3


TOPOS: dict[str, tuple[int, set[tuple[str, int]]] | str] = {
    "gpu/topo/mleng-8xh100-nv18.txt": (8, {("nvlink", 18)}),
    "gpu/topo/mleng-8xa100-nv12.txt": (8, {("nvlink", 12)}),
    "gpu/topo/4xh100-nv6-comma-affinity.txt": (4, {("nvlink", 6)}),
    "gpu/topo/4gpu-nv1-nv2-mix.txt": (4, {("nvlink", 1), ("nvlink", 2)}),
    "gpu/topo/6gpu-pix-pairs-ansi-first.txt": (6, {("pix", 0), ("node", 0), ("sys", 0)}),
    "gpu/topo/8gpu-pix-pxb-phb-2018-mlx.txt": (8, {("pix", 0), ("pxb", 0), ("sys", 0)}),
    "gpu/topo/xst-8xa100-17nic.txt": (8, {("nvlink", 12)}),
    "gpu/topo/p4-numa-na.txt": (1, set()),
    "gpu/topo/win-rtx-2080-super__610.62.txt": (1, set()),
    "gpu/topo/win-rtx-2080-super__591.86.txt": "has no header",
    "gpu/topo/te-topo-mp-affinity-only.txt": "affinities only",
    "gpu/topo/vllm-glued-cells-head.txt": "has no header",
    "gpu/topo/dgx2-16gpu-nv6-head.txt": "its row GPU2 is missing",
    "gpu/topo/b200-gpu2-off-fabric-head.txt": "its row GPU6 is missing",
    "fabric/topo/gpu2-lost-nvlink.txt": (4, {("nvlink", 18), ("node", 0)}),
    "fabric/topo/v100-old-header-names-nics.txt": (4, {("nvlink", 4)}),
    "fabric/topo/h100-12nic-eth-behind-same-switch.txt": (8, {("nvlink", 18)}),
}


@pytest.mark.skipif(not CAPTURES.exists(), reason="no captures here")
@pytest.mark.parametrize("file", sorted(TOPOS))
def test_captured_matrices(file: str) -> None:
    text, expected = (CAPTURES / file).read_text(errors="replace"), TOPOS[file]
    if isinstance(expected, str):
        with pytest.raises(DiscoveryError, match=expected):
            parse_topo(text)
        return
    found = parse_topo(text)
    assert (len(found.gpus), {(link.relation.value, link.nvlinks) for link in found.links.values()}) == expected


@pytest.mark.skipif(not CAPTURES.exists(), reason="no captures here")
def test_captured_details() -> None:
    def read(file: str) -> Topo:
        return parse_topo((CAPTURES / file).read_text())

    assert read("fabric/topo/h100-8gpu-8nic-rail.ansi.txt") == read("fabric/topo/h100-8gpu-8nic-rail.txt")
    near = read("fabric/topo/h100-12nic-eth-behind-same-switch.txt")
    assert sum(how is R.PIX for (gpu, _), how in near.adapters.items() if gpu == 0) == 3
    comma = read("gpu/topo/4xh100-nv6-comma-affinity.txt")
    assert [(g.cpus, g.numa_node) for g in comma.gpus][:2] == [("6,14,22,30", 3), (comma.gpus[1].cpus, 1)]
    down = read("fabric/topo/gpu2-lost-nvlink.txt")
    assert all(down.links[2, other].relation is R.NODE for other in (0, 1, 3))
    assert {name for _, name in read("fabric/topo/v100-old-header-names-nics.txt").adapters} == {
        f"mlx5_{n}" for n in range(4)
    }


@pytest.mark.skipif(not CAPTURES.exists(), reason="no captures here")
@pytest.mark.parametrize(
    ("file", "links"),
    [
        ("gpu/nvlink/gpud-8xa100.txt", [(12, 12)] * 8),
        ("gpu/nvlink/h100-80gb-hbm3__590.48.01.txt", [(18, 18)]),
        ("gpu/nvlink/h100-mig__590.48.01.txt", [(0, 0)]),
        ("gpu/nvlink/rtx-2080-super__610.57.04.txt", [(0, 0)]),
        ("gpu/nvlink/rtx-4080-super__595.71.05.txt", [(0, 0)]),
        ("gpu/nvlink/azhpc-v100-one-link-down.txt", [(6, 6), (6, 6), (6, 6), (6, 4), (6, 5), (6, 4), (6, 5)]),
    ],
)
def test_captured_links(file: str, links: list[tuple[int, int]]) -> None:
    found = parse_nvlink_status((CAPTURES / file).read_text())
    assert [(len(c.links), sum(speed is not None for speed in c.links)) for c in found] == links
