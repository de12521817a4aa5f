"""What real machines printed, laid over a fake one: a report comes of each, whatever it says."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.machines import MACHINES, render
from fakes.patient import Laid, Patient, Said, healthy
from llmgw.discovery.machine import FilesOnly
from llmgw.doctor.checks import CHECKS
from llmgw.doctor.collect import collect
from llmgw.doctor.document import Document, as_json, from_json
from llmgw.doctor.gather import Asker
from llmgw.doctor.report import lines
from llmgw.doctor.verdict import Severity, judge
from llmgw.hardware.fabric import FabricRule, LinkLayer
from llmgw.settings.daemon import Discovery

FIXTURES = Path(__file__).resolve().parents[3] / "shared" / "fixtures"
pytestmark = pytest.mark.skipif(not FIXTURES.exists(), reason="no captures here")
CODES = {"driver-not-loaded": 9, "no-driver": 9, "library-mismatch": 18, "no-devices": 6}
PLACES: dict[str, tuple[str, str]] = {
    # folder: the program that said it, or the file that it is
    "gpu/xml": ("nvidia-smi -q -x", ""),
    "gpu/list": ("nvidia-smi -L", ""),
    "gpu/topo": ("nvidia-smi topo -m", ""),
    "gpu/nvlink": ("nvidia-smi nvlink --status", ""),
    "gpu/mig": ("nvidia-smi mig -lgi", ""),
    "gpu/failures": ("nvidia-smi", ""),
    "gpu/table": ("nvidia-smi -q -x", ""),
    "fabric/nvidia-smi": ("nvidia-smi -q -x", ""),
    "fabric/topo": ("nvidia-smi topo -m", ""),
    "fabric/kmsg": ("dmesg", ""),
    "fabric/lspci": ("lspci", ""),
    "fabric/ip": ("ip", ""),
    "fabric/fabricmanager": ("", "var/log/fabricmanager.log"),
    "fabric/proc": ("", "proc/modules"),
    "fabric/nccl_logs": ("", "etc/nccl.conf"),
    # What the doctor does not ask for is something else than it expects, and no more than that.
    "gpu/csv": ("nvidia-smi -q -x", ""),
    "gpu/csv-apps": ("nvidia-smi -q -x", ""),
    "gpu/csv-full": ("nvidia-smi mig -lgi", ""),
    "gpu/q-text": ("nvidia-smi", ""),
    "gpu/nvml-json": ("nvml", ""),
    "fabric/ibstat": ("lspci", ""),
    "fabric/ibdev2netdev": ("ip", ""),
    "fabric/ibv_devinfo": ("nft", ""),
    "fabric/rdma_link": ("df", ""),
    "fabric/show_gids": ("getent", ""),
    "fabric/node_reports": ("systemctl", ""),
}


def captures() -> Iterator[tuple[str, Path]]:
    for folder in PLACES:
        for path in sorted((FIXTURES / folder).glob("*")) if FIXTURES.exists() else ():
            if path.is_file():
                yield folder, path


def base(folders: pytest.TempPathFactory, made: dict[str, Patient] = {}) -> Patient:  # noqa: B006 - one for all
    if not made:
        root = folders.mktemp("t4")
        render(MACHINES["t4-vm"], root)
        made["t4"] = healthy(root)
    return made["t4"]


@pytest.mark.parametrize("folder", list(PLACES))
async def test_every_capture_gives_a_report(folder: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    program, file = PLACES[folder]
    patient = base(tmp_path_factory)
    seen = 0
    for where, path in captures():
        if where != folder:
            continue
        seen += 1
        text = path.read_text(errors="replace")
        said: dict[str, Said] = (
            {program: (next((c for n, c in CODES.items() if n in path.name), 0), text)} if program else {}
        )
        if program == "nvml":
            said["nvidia-smi"] = None
        files: dict[str, Laid] = {file: text} if file else {}
        laid = patient.with_(files, said)
        facts = await collect(Asker(laid, Discovery(root=str(laid.root)), gap_s=0))
        verdicts = judge(facts, CHECKS)
        assert len(verdicts) == len(CHECKS)
        assert len(list(lines(facts, verdicts, unknown=True))) > 1
        if seen % 8 != 1:
            continue
        document = Document("1", False, facts)
        assert from_json(as_json(document, CHECKS), path.name) == document, path.name
    assert seen


TREES = ("h100_gpud", "procfs_fixture", "node_exporter_fixture", "gcm_dgx_a100")
WHOLE_TREES = ("hwloc_mlx4_fdr", "hwloc_qib_qdr")
MAPS = ("DGX_A100", "learn_good", "learn_ib_intf_bad_rate", "learn_ib_intf_bad_version",
        "learn_ib_intf_operstate_down", "learn_ib_misbound_if", "learn_stuck_ib_intf")  # fmt: skip
ALONE = ("hw_counters.nccl394.txt", "azure_endure")
"""Played by a test of its own, here or beside sysfs."""


def test_every_row_of_the_index_is_played() -> None:
    """A capture that is added to the index and that no test reads is told here."""
    seen = 0
    for kind in ("gpu", "fabric"):
        with (FIXTURES / kind / "INDEX.tsv").open() as file:
            for row in csv.DictReader(file, delimiter="\t"):
                seen += 1
                folder, _, name = f"{kind}/{row['file'].rstrip('/')}".rpartition("/")
                assert (FIXTURES / folder / name).exists(), row["file"]
                of_trees = {*TREES, *WHOLE_TREES, *ALONE} & {name, *folder.split("/")}
                assert folder in PLACES or of_trees or name.removesuffix(".json") in MAPS, row["file"]
    assert seen > 300


@pytest.mark.parametrize("tree", TREES)
async def test_every_tree_gives_a_report(tree: str, tmp_path: Path) -> None:
    """Adapters of real machines: the folder stands where the kernel shows it."""
    source = FIXTURES / "fabric/sysfs" / tree
    (tmp_path / "sys/class").mkdir(parents=True)
    (tmp_path / "sys/bus").mkdir()
    shutil.copytree(source, tmp_path / "sys/class/infiniband", symlinks=True)
    config = Discovery(root=str(tmp_path))
    facts = await collect(Asker(FilesOnly(config), config, gap_s=0))
    assert list(lines(facts, judge(facts, CHECKS)))
    assert len(facts.adapters) == sum(1 for p in source.iterdir() if (p / "ports").is_dir())


@pytest.mark.parametrize("tree", WHOLE_TREES)
async def test_every_whole_tree_gives_a_report(tree: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "fabric/sysfs" / tree, tmp_path / "sys", symlinks=True)
    config = Discovery(root=str(tmp_path))
    facts = await collect(Asker(FilesOnly(config), config, gap_s=0))
    assert list(lines(facts, judge(facts, CHECKS), unknown=True))


@pytest.mark.parametrize("name", MAPS)
async def test_every_map_of_a_tree_gives_a_report(name: str, tmp_path: Path) -> None:
    said = json.loads((FIXTURES / "fabric/sysfs/gcm_dgx_a100" / f"{name}.json").read_text())
    # The maps have the files below the PCI functions; the kernel shows the adapters in a folder of links as well.
    files: dict[str, Laid] = {}
    for path, text in said.items():
        files[path.lstrip("/")] = str(text)
        if "/infiniband/" in path:
            files["sys/class/infiniband/" + path.partition("/infiniband/")[2]] = str(text)
    rules = (FabricRule("ib", link_layer=LinkLayer.INFINIBAND),)
    patient = Patient(tmp_path, files)
    facts = await collect(Asker(patient, Discovery(root=str(tmp_path)), rules=rules, gap_s=0))
    assert len(facts.adapters) == len({p.split("/infiniband/")[1].split("/")[0] for p in said if "/infiniband/" in p})
    assert list(lines(facts, judge(facts, CHECKS), unknown=True))


XML = {
    "fabric/nvidia-smi/qx-gb200-fabric-degraded.xml": {"nvswitch.fabric.state"},
    "fabric/nvidia-smi/qx-gb200-ecc-injected.xml": {"gpu.ecc.uncorrectable"},
    "fabric/nvidia-smi/qx-gb200-lost.xml": {"gpu.lost", "gpu.remap.failed"},
    "fabric/nvidia-smi/qx-l40s.xml": {"pci.width"},
    "fabric/nvidia-smi/qx-b200.xml": {"gpu.persistence"},
    "fabric/kmsg/dmesg.xid-119.log": {"gpu.xid.reset"},
    "fabric/kmsg/fallen-off-bus-without-xid.log": {"gpu.lost"},
    "fabric/kmsg/kmsg.peermem-invalid-context.log": {"gdr.peermem.errors"},
    "fabric/kmsg/syslog.ib-flap.log": {"port.flap"},
    "fabric/fabricmanager/fatal-sxid.log": set(),
}


@pytest.mark.parametrize("name", list(XML))
async def test_captures_of_broken_machines_are_told(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    program, file = PLACES[name.rpartition("/")[0]]
    text = (FIXTURES / name).read_text(errors="replace")
    laid = base(tmp_path_factory).with_({file: text} if file else {}, {program: text} if program else {})
    facts = await collect(Asker(laid, Discovery(root=str(laid.root)), gap_s=0))
    spoken = {v.id for v in judge(facts, CHECKS) if v.severity in (Severity.FAIL, Severity.WARN)}
    assert XML[name] <= spoken, spoken


async def test_captured_counters_of_a_port_that_loses_packets(tmp_path: Path) -> None:
    """Names and values of a real port, twice: what stands still is no error, however high."""
    render(MACHINES["hgx-h100"], tmp_path)
    captured = [
        line.strip().lstrip("/").rpartition(":")
        for line in (FIXTURES / "fabric/sysfs/hw_counters.nccl394.txt").read_text().splitlines()
        if "/hw_counters/" in line
    ]
    files: dict[str, Laid] = {path: value for path, _, value in captured}
    laid = healthy(tmp_path).with_(files, {})
    facts = await collect(Asker(laid, Discovery(root=str(laid.root)), gap_s=0))
    read = {c.name: c.after for c in facts.counters if c.adapter == "mlx5_0" and not c.trouble}
    assert {name: read.get(name) for name in ("local_ack_timeout_err", "out_of_sequence", "packet_seq_err")} == {
        "local_ack_timeout_err": 91316, "out_of_sequence": 6140236, "packet_seq_err": 929974,
    }  # fmt: skip
    assert not any(v.severity is Severity.FAIL for v in judge(facts, CHECKS))
