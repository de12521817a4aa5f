"""What real machines printed, against what the index of the captures says of each."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path

import pytest
import trio

from llmgw.discovery import smi
from llmgw.discovery.command import Ran
from llmgw.discovery.faults import DiscoveryError
from llmgw.discovery.smi_text import parse_list, parse_xml
from llmgw.discovery.sysfs import DiskReader, Reader
from llmgw.hardware.devices import devices
from llmgw.hardware.inventory import Host
from llmgw.hardware.reading import GpuReading

GPU = Path(__file__).resolve().parents[3] / "shared" / "fixtures" / "gpu"
pytestmark = pytest.mark.skipif(not GPU.exists(), reason="no captures here")

CARDS = re.compile(r"(\d+)x ([^;,]+?) (\d+) MiB")
MIG = re.compile(r"MIG \S+ \((\d+) instances\)")
DRIVER = re.compile(r"driver ([0-9]+)")


def rows() -> list[tuple[str, str]]:
    if not GPU.exists():
        return []
    with (GPU / "INDEX.tsv").open() as file:
        return [(row["file"], row["shows"]) for row in csv.DictReader(file, delimiter="\t") if row["kind"] == "-q -x"]


@pytest.mark.parametrize(("file", "shows"), rows())
def test_every_xml_is_what_the_index_says(file: str, shows: str) -> None:
    log = parse_xml((GPU / file).read_text(errors="replace"))
    told = Counter({(name, int(mib)): int(count) for count, name, mib in CARDS.findall(shows)})
    read = Counter((card.name.replace("unknown GPU", "?"), card.total_mib) for card in log.cards)
    assert told <= read, (told, read)
    assert log.cards
    if match := MIG.search(shows):
        assert sum(len(card.instances) for card in log.cards) == int(match[1])
    if match := DRIVER.search(shows):
        assert log.driver.version.startswith(match[1])
    for card in log.cards:
        found = devices(card, 100_000)
        assert found
        assert all(d.faults or d.total_mib is not None for d in found)


CLASSES = {
    "xml/hw-h100.xml": ["h100-80g"] * 8,
    "xml/hw-b200.xml": ["b200-179g"] * 8,
    "xml/hw-gb200.xml": ["gb200-185g"] * 4,
    "xml/hw-gb300.xml": ["gb300-278g"] * 4,
    "xml/hw-l40s.xml": ["l40s-45g"],
    "xml/hw-t4.xml": ["t4-15g"],
    "xml/hw-a100.xml": ["a100-40g"],
    "xml/frag-gb10-memory-na.xml": ["gb10-98g"],
    "xml/telegraf-rtx-4000-sff-ada-v13.xml": ["rtx-4000-sff-ada-20g"],
    "xml/telegraf-pro-6000-maxq-blackwell-v13.xml": ["rtx-pro-6000-96g"],
    "xml/telegraf-dual_a5000-v13.xml": ["rtx-a5000-24g"] * 2,
    "xml/telegraf-a10g.xml": ["a10g-22g"],
    "xml/pai-nvidia_smi_out_of_order.xml": ["k80-11g"] * 4,
    "xml/v100s-460-accounted-processes.xml": ["v100s-32g"],
}
FAULTS = {
    "xml/frag-a800-remap-pending.xml": [["ecc-uncorrected", "needs-reset"]],
    "xml/mocknvml-gb200-lost.xml": [["failed", "ecc-uncorrected"], ["failed"]],
    "xml/mocknvml-gb200-fabric-degraded.xml": [[], ["not-ready"]],
    "xml/mocknvml-gb200-ecc-injected.xml": [["failed", "ecc-uncorrected"], []],
    "xml/hw-h100.xml": [[]] * 8,
    "xml/hw-gb300.xml": [[]] * 4,
    "xml/netdata-rtx-2080-win.xml": [[]],
}


@pytest.mark.parametrize("file", sorted(CLASSES))
def test_classes(file: str) -> None:
    log = parse_xml((GPU / file).read_text(errors="replace"))
    assert [d.device_class for c in log.cards for d in devices(c, 100_000)] == CLASSES[file]


@pytest.mark.parametrize("file", sorted(FAULTS))
def test_faults(file: str) -> None:
    log = parse_xml((GPU / file).read_text(errors="replace"))
    assert [[f.code for f in d.faults] for c in log.cards for d in devices(c, 100_000)] == FAULTS[file]


def test_holders_of_memory() -> None:
    (card,) = parse_xml((GPU / "xml/v100s-460-accounted-processes.xml").read_text()).cards
    assert len(devices(card, None)[0].processes) == 1, "accounted processes are dead"
    (windows,) = parse_xml((GPU / "xml/netdata-rtx-2080-win.xml").read_text()).cards
    assert {p.used_mib for p in windows.processes} == {None}


def test_clusters_of_nvlink() -> None:
    def fabrics(file: str) -> set[str]:
        log = parse_xml((GPU / file).read_text())
        return {d.nvlink_fabric for c in log.cards for d in devices(c, None)}

    assert fabrics("xml/hw-h100.xml") == {""}
    assert fabrics("xml/hw-gb300.xml") == {"00000001-0000-0000-0000-000000000001/32766"}


LISTS = {
    "a30-two-1g-before.txt": ["1g.6gb", "1g.6gb"],
    "a30-renumbered-after.txt": ["2g.12gb", "1g.6gb", "1g.6gb"],
    "guide-h100-1c3g-1g.txt": None,
    "gh200-480gb-7x1g.txt": ["1g.12gb"] * 7,
    "rtxpro6000-4x1g.txt": ["1g.24gb"] * 4,
    "old-mig-gpu-uuid-form.txt": None,
    "guide-8xa100-mixed.txt": None,
    "guide-a100-narrow.txt": None,
}


@pytest.mark.parametrize("file", sorted(p.name for p in (GPU / "list").iterdir()) if GPU.exists() else [])
def test_every_list(file: str) -> None:
    text = (GPU / "list" / file).read_text(errors="replace")
    found = parse_list(text)
    assert len(found.migs) == len(re.findall(r"^\s+MIG .*UUID: MIG-", text, re.MULTILINE))
    assert len(found.cards) == len(set(re.findall(r"UUID: ((?!MIG)[^)]+)\)", text)))
    if (profiles := LISTS.get(file)) is not None:
        assert [m.profile for m in found.migs] == profiles


def test_uuids_stay_where_indices_do_not() -> None:
    before, after = (
        {m.uuid: m.index for m in parse_list((GPU / "list" / f).read_text()).migs}
        for f in ("a30-two-1g-before.txt", "a30-renumbered-after.txt")
    )
    assert set(before) < set(after)
    assert all(after[uuid] == before[uuid] + 1 for uuid in before)


class Said:
    """A machine whose nvidia-smi says the same to everything."""

    root = Path("/nowhere")

    def __init__(self, text: str, code: int) -> None:
        self._text = text
        self._code = code

    @property
    def reader(self) -> Reader:
        return DiskReader()

    def host(self) -> Host:
        return Host("h", "b")

    async def ask(self, program: str, *args: str) -> Ran:
        return Ran((program, *args), self._code, self._text, "")


async def answer(text: str, code: int) -> GpuReading:
    return await smi.read(Said(text, code), 1, ["0000:01:00.0"])


@pytest.mark.parametrize(
    ("file", "exit_code", "code"),
    [
        ("driver-not-loaded.txt", 9, "driver-missing"),
        ("library-mismatch-new.txt", 18, "driver-mismatch"),
        ("library-mismatch-old.txt", 255, "driver-mismatch"),
        ("handle-lost.txt", 255, "gpu-lost"),
        ("handle-not-found.txt", 255, "gpu-lost"),
        ("handle-unknown-glued.txt", 255, "gpu-lost"),
        ("handle-unknown-index.txt", 0, "gpu-lost"),
        ("handle-unknown-noaddr.txt", 255, "gpu-lost"),
        ("no-devices.txt", 6, "no-gpu"),
        ("nvml-unknown-error.txt", 255, "driver-failed"),
        ("wsl-blocked.txt", 255, "blocked"),
    ],
)
def test_every_failure_has_its_reason(file: str, exit_code: int, code: str) -> None:
    text = (GPU / "failures" / file).read_text()
    with pytest.raises(DiscoveryError) as caught:
        trio.run(answer, text, exit_code)
    assert caught.value.code == code
    assert text.strip().splitlines()[0].split(".")[0] in caught.value.reason
    assert caught.value.remedy
