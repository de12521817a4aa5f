"""The report: causes before consequences, exit codes, replay byte for byte, redaction, differences."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio
import trio.testing
from attrs import evolve

from fakes.machines import MACHINES, render, write_state
from fakes.patient import Patient, certificate
from llmgw.agent.kept import Kept, KeptFile
from llmgw.cli.doctor import document_schema
from llmgw.discovery.command import Ran
from llmgw.discovery.machine import LiveMachine
from llmgw.doctor.checks import CHECKS
from llmgw.doctor.collect import WHOLE_S, collect
from llmgw.doctor.document import Document, as_json, difference, from_json, read_text
from llmgw.doctor.facts import Answer, Facts, PciFunction
from llmgw.doctor.gather import Asker
from llmgw.doctor.network import plans
from llmgw.doctor.node_facts import Reach
from llmgw.doctor.peer_facts import Peer
from llmgw.doctor.redact import key_of, redacted
from llmgw.doctor.report import exit_code, lines, manual
from llmgw.doctor.verdict import Check, Finding, Severity, chosen, judge
from llmgw.errors import OperatorError
from llmgw.hardware.inventory import Host
from llmgw.settings.agent_part import node_settings
from llmgw.settings.catalog import EngineKind
from llmgw.settings.daemon import Discovery, EngineInstall, TlsFiles
from llmgw.settings.key_docs import DOCS
from llmgw.settings.load import load_settings
from llmgw.settings.yaml import read
from tests.doctor.beds import AGENT, Change, examine, facts_of, rendered

TOP = Path(__file__).resolve().parents[2]


def text(facts: Facts, *, unknown: bool = False) -> str:
    return "\n".join(line.text for line in lines(facts, judge(facts, CHECKS), unknown=unknown))


def cli(*args: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(TOP)}
    return subprocess.run(
        [sys.executable, "-m", "llmgw", "doctor", *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=env,
    )


async def test_a_cause_hides_what_follows_from_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    patient = rendered("hgx-h100", tmp_path_factory)
    _, verdicts = await examine(patient, "hgx-h100", Change(more={"program": "no-driver"}))
    hidden = [v.id for v in verdicts if v.hidden_by == "gpu.driver.unreachable"]
    assert {"gpu.lost", "nvlink.down", "nvswitch.fm.not-running", "gpu.ecc.uncorrectable"} <= set(hidden)
    shown = [v.id for v in verdicts if v.severity in (Severity.FAIL, Severity.WARN) and not v.hidden_by]
    assert shown == ["gpu.driver.unreachable"]


def test_causes_are_followed_to_the_first_that_speaks() -> None:
    def check(name: str, because: tuple[str, ...], *, found: bool) -> Check:
        return Check(name, Severity.FAIL, (), lambda _: Finding("x") if found else None, "do", "means", because)

    table = (check("a", (), found=True), check("b", ("a",), found=False), check("c", ("b",), found=True))
    assert {v.id: v.hidden_by for v in judge(Facts(), table)} == {"a": "", "b": "", "c": "a"}


def test_exit_codes() -> None:
    def verdicts(severity: Severity) -> int:
        found = judge(Facts(), (Check("a", severity, (), lambda _: Finding("x"), "do", "m"),))
        return exit_code(found, strict=True) * 10 + exit_code(found, strict=False)

    assert [verdicts(s) for s in (Severity.FAIL, Severity.WARN, Severity.INFO)] == [11, 30, 0]


def test_checks_are_chosen_by_the_parts_of_their_names() -> None:
    assert {c.id for c in chosen(CHECKS, ("gpu.ecc",), ())} == {"gpu.ecc.uncorrectable", "gpu.ecc.mode"}
    assert not chosen(CHECKS, ("gp",), ())
    assert not any(c.id.startswith("gpu.") for c in chosen(CHECKS, (), ("gpu",)))


async def test_the_same_report_comes_of_the_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    patient = rendered("hgx-b200", tmp_path_factory)
    facts = await facts_of(patient, "hgx-b200", Change(cards={2: {"ecc": 4}}, said={"lspci": None}))
    document = Document("1", False, facts)
    written = json.dumps(as_json(document, CHECKS))
    again = from_json(json.loads(written), "file")
    assert again == document
    assert text(again.facts) == text(facts)
    assert json.dumps(as_json(again, CHECKS)) == written


async def test_what_an_older_version_did_not_read_is_unknown(tmp_path_factory: pytest.TempPathFactory) -> None:
    facts = await facts_of(rendered("hgx-h100", tmp_path_factory), "hgx-h100")
    said = as_json(Document("1", False, facts), CHECKS)
    del said["facts"]["acs"]
    old = from_json(said, "file")
    assert [(v.id, v.severity) for v in judge(old.facts, CHECKS) if v.severity is Severity.UNKNOWN] == [
        ("pci.acs", Severity.UNKNOWN)
    ]


@pytest.mark.parametrize(
    "said",
    [
        [],
        {},
        {"facts": {}},
        {"format": 99, "facts": {}},
        {"format": 1, "facts": {"cards": 7}},
        {"format": 1, "facts": {"host_addresses": ["x"]}},
    ],
)
def test_what_is_no_report_is_refused(said: object) -> None:
    with pytest.raises(OperatorError):
        from_json(said, "file")


@pytest.mark.parametrize(
    "data",
    [
        "", "\0", "{", "[" * 100_000, '{"format": 1, "facts": {"cards": ' + "[" * 5000 + "]" * 5000 + "}}",
        '{"format": true, "facts": {}}', '{"format": -1, "facts": {}}', '{"format": 1, "facts": {"now": NaN}}',
        '{"format": 1, "facts": {"shm_mib": ' + "9" * 4000 + "}}",
        '{"format": 1, "facts": {"shm_mib": ' + "9" * 5000 + "}}",
        '{"format": 1, "facts": {"now": 1e300}}', '{"format": 1, "facts": {"now": true}}',
        '{"format": 1, "facts": {"host": {"hostname": "\\ud800", "boot_id": ""}}}',
    ],
)  # fmt: skip
def test_a_file_that_somebody_made_up_is_refused(data: str) -> None:
    with pytest.raises(OperatorError, match=r"^a\.json: "):
        read_text(data, "a.json")


def test_a_file_cannot_write_on_a_terminal() -> None:
    said = '{"format": 1, "facts": {"host": {"hostname": "\\u001b[2J\\nfail", "boot_id": ""}}}'
    assert text(read_text(said, "f").facts).splitlines()[0].startswith("?[2J?fail: ")
    long = '{"format": 1, "facts": {"engines": [{"kind": "vllm", "command": [], "cuda": "%s"}]}}' % ("9" * 5000)
    assert text(read_text(long, "f").facts)


@pytest.mark.parametrize("name", ["hgx-h100", "hgx-b200"])
async def test_redaction_hides_names_and_changes_no_verdict(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    patient = rendered(name, tmp_path_factory)
    changes = Change(
        files={"proc/900/environ": "VLLM_HOST_IP=10.9.9.9\0NCCL_IB_GID_INDEX=1\0"},
        said={"getent": "127.0.1.1 STREAM gpu-node-07\n", "dmesg": "NVRM: Xid (PCI:0000:33:00): 79, gpu-node-07\n"},
    )
    facts = await facts_of(patient, name, changes)
    hidden = redacted(facts, b"key")
    before, after = ([(v.id, v.severity, v.hidden_by) for v in judge(f, CHECKS)] for f in (facts, hidden))
    assert before == after
    written = json.dumps(as_json(Document("1", True, hidden), CHECKS))
    for secret in ("gpu-node-07", "10.1.0.5", "10.30.0.2", "10.20.0.11", facts.cards[0].reading.uuid, "b00t"):
        assert secret not in written
    assert "127.0.1.1" in written
    assert redacted(facts, b"key") == hidden
    assert redacted(facts, b"other") != hidden


def test_redaction_leaves_nothing_of_where_a_machine_is() -> None:
    said = {
        "GPU-NODE-07.lab.example: link lost": "this-host: link lost",
        "/srv/gpu-node-07/x": "/srv/this-host/x",
        "from gpu-node-08 to gpu-node-07": "from other-host to this-host",
        "port fe80:0000:0000:0000:0c42:a1ff:fe5d:e5a6 of 0c42:a103:005d:e5a6": "",
        "mlx5_0 node_guid 0x0c42a103005de5a6": "",
        "peer 2a01:4f8:c17:1234::7 and 2a01:4f8:c17:1234::7/64, [2a01:4f8:c17:1234::7]:443": "",
        "0000:9b:00.0 0c:42:a1:5d:e5:a6": "0000:9b:00.0 00:00:00:00:00:00",
        "HF_TOKEN=hf_abcdefghij AWS_SECRET_ACCESS_KEY='a b' --api-key=sk-12345678": "",
        "curl -H 'Authorization: Bearer abcdefgh' https://user:pa55word@hub.example/x": "",
        "hf_abcdefghijklmnopqrstuvwx": "hidden",
        "Serial Number : 1654922012345": "Serial Number : hidden",
        "gpu_serial: '1654922012345', S/N=1654922012346": "gpu_serial: 'hidden', S/N=hidden",
        "0c-42-a1-5d-e5-a6 0c42.a15d.e5a6": "00:00:00:00:00:00 00:00:00:00:00:00",
        "80:00:02:08:fe:80:00:00:00:00:00:00:0c:42:a1:03:00:5d:e5:a6": "00:00:00:00:00:00",
        "0c42a103005de5a6, 0xc42a103005de5a6": "",
        "c3ca3e9348d249521b697de4e8afd915": "",
        "at 192.0.2.77. ip-192-0-2-77.internal, 2a01:4f8:c17:1234::7.": "",
        "/home/alice/x": "",
        '--api-key abcdefgh, "api_key": "abcdefgh", password: pa55word': "",
        "ghp_abcdefghijklmnopqrstuvwxyz eyJhbGciOi.eyJzdWIi.abcdefgh nvapi-abcdefghi": "hidden hidden hidden",
        "alice@example.com of nas01.lab.example and NAS02.lab.example.": "hidden of a-host and a-host.",
    }
    facts = evolve(
        Facts(), host=Host("gpu-node-07.lab.example", "b"), kernel_log=tuple(said), peer=Peer("gpu-node-08", "10.1.1.8"),
        reach=(Reach("gw.corp.test:7443", "cannot be found: gw.corp.test"),), address="n7",
    )  # fmt: skip
    hidden = redacted(facts, b"k")
    for (before, after), line in zip(said.items(), hidden.kernel_log, strict=True):
        assert not after or line == after, before
    written = json.dumps(as_json(Document("1", True, hidden), CHECKS)).lower()
    for secret in ("gpu-node", "2a01:4f8", "a103", "a1ff", "5de5a6", "5d:e5", "hf_abc", "a b", "12345678", "abcdefgh",
                   "pa55", "1654922", "c3ca3e", "192.0.2.77", "192-0-2", "alice", "nvapi", "eyj", "nas0",
                   "gw.corp"):  # fmt: skip
        assert secret not in written, secret
    assert [r.address for r in hidden.reach] == ["control-plane:7443"]
    assert hidden.address == "this-host"
    assert redacted(hidden, b"k").kernel_log[0] == hidden.kernel_log[0]


async def test_a_host_that_is_called_like_its_cards_does_not_rename_them(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    facts = await facts_of(rendered("hgx-h100", tmp_path_factory), "hgx-h100")
    hidden = redacted(evolve(facts, host=Host("h100.lab.example", "b")), b"k")
    assert (hidden.host.hostname, hidden.cards[0].reading.name) == ("this-host", facts.cards[0].reading.name)


async def test_a_machine_is_hidden_alike_on_two_days(tmp_path_factory: pytest.TempPathFactory) -> None:
    today = await facts_of(rendered("hgx-h100", tmp_path_factory), "hgx-h100")
    tomorrow = evolve(today, now=today.now + 86400, kernel_log=("something else",))
    assert key_of(today) == key_of(tomorrow)
    first, *others = today.cards
    swapped = evolve(first, reading=evolve(first.reading, uuid="GPU-x"))
    assert len({key_of(f) for f in (today, evolve(today, cards=(swapped, *others)), Facts(), Facts(now=1.0))}) == 4


async def test_secrets_in_commands_are_hidden(tmp_path_factory: pytest.TempPathFactory) -> None:
    facts = await facts_of(rendered("hgx-h100", tmp_path_factory), "hgx-h100")
    engine = evolve(facts.engines[0], command=("docker", "-e", "HF_TOKEN=hf_abc", "--api-key", "sk-1", "serve"))
    shown = redacted(evolve(facts, engines=(engine,)), b"k").engines[0].command
    assert shown == ("docker", "-e", "HF_TOKEN=hidden", "--api-key", "hidden", "serve")


async def test_the_agent_of_a_fake_machine_has_its_own_files_where_it_runs(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    patient = rendered("hgx-h100", tmp_path_factory)
    (tmp_path / "vllm").write_text("#!")
    (tmp_path / "hardware.json").write_text('[{"uuid": "GPU-1"}]')
    (tmp_path / "node.pem").write_bytes(certificate())
    pem, install = str(tmp_path / "node.pem"), EngineInstall(EngineKind.VLLM, (str(tmp_path / "vllm"),))
    agent = evolve(AGENT, state_dir=str(tmp_path), tls=TlsFiles(pem, pem, pem), engines=(install,))
    asker = Asker(patient, Discovery(root=str(patient.root)), agent, gap_s=0)
    there = await collect(asker)
    assert (there.engines[0].trouble != "", there.known_cards, there.certificates) == (True, (), ())
    here = await collect(evolve(asker, agent_root=Path("/")))
    assert (here.engines[0].trouble, here.known_cards, len(here.certificates)) == ("", ("GPU-1",), 2)


async def test_difference_names_what_changed(tmp_path_factory: pytest.TempPathFactory) -> None:
    patient = rendered("hgx-h100", tmp_path_factory)
    a = Document("1", False, await facts_of(patient, "hgx-h100"))
    b = Document("1", False, await facts_of(patient, "hgx-h100", Change(said={"timedatectl": "NTPSynchronized=no\n"})))
    assert list(difference(a, a, CHECKS)) == []
    assert list(difference(a, b, CHECKS)) == [
        "+ fail time.sync: Nothing keeps this machine's clock right.",
        "  clock.synchronized: True -> False",
    ]
    # Devices share their model's name, and what is unset on both sides is no difference.
    first, *others = a.facts.devices
    c = Document("1", False, evolve(a.facts, devices=(evolve(first, uuid="GPU-x"), *others), compat=("",)))
    assert list(difference(a, c, ())) == [f"  devices[0].uuid: {first.uuid} -> GPU-x"]


async def test_the_network_of_a_rank_is_what_engines_are_given(tmp_path_factory: pytest.TempPathFactory) -> None:
    patient = rendered("hgx-b200", tmp_path_factory)
    (plan,) = plans(await facts_of(patient, "hgx-b200"))
    assert {v.name: v.value for v in plan.variables} == {
        "NCCL_IB_HCA": "=" + ",".join(f"mlx5_{n}:1" for n in range(4, 12)),
        "NCCL_IB_GID_INDEX": "3",
        "NCCL_SOCKET_IFNAME": "=mgmt0",
        "GLOO_SOCKET_IFNAME": "mgmt0",
        "NCCL_DEBUG": "INFO",
    }
    assert plan.ports == plan.meant
    assert plan.interfaces == ("mgmt0",)
    off = Change(
        files={"root/.nccl.conf": "NCCL_IB_DISABLE=1\nNCCL_IB_HCA=mlx5_0\n", "etc/nccl.conf": "NCCL_IB_DISABLE=0\n"}
    )
    (plan,) = plans(await facts_of(patient, "hgx-b200", off))
    # The agent's own variables do not reach engines, files do.
    alien = Change(
        files={
            "proc/900/environ": "NCCL_IB_DISABLE=1\0NCCL_CONF_FILE=/etc/other.conf\0",
            "etc/other.conf": "NCCL_IB_DISABLE=1\n",
        }
    )
    assert plans(await facts_of(patient, "hgx-b200", alien))[0].ports
    # What llmgw sets wins over files, and the user's file over the system's.
    assert (plan.ports, [(v.name, v.source) for v in plan.overridden]) == (
        (),
        [("NCCL_IB_DISABLE", "/root/.nccl.conf")],
    )


class Silent(Patient):
    async def ask(self, program: str, *args: str) -> Ran:
        await trio.sleep_forever()
        raise AssertionError


async def test_what_does_not_answer_is_left_behind(tmp_path: Path, mock_clock: trio.testing.MockClock) -> None:
    render(MACHINES["l40s-2"], tmp_path)
    mock_clock.rate = 30
    began = trio.current_time()
    facts = await collect(Asker(Silent(tmp_path), Discovery(root=str(tmp_path))))
    # Thirty times as fast, so a busy machine's own delay counts as much more than it is.
    assert WHOLE_S < 20
    assert WHOLE_S <= trio.current_time() - began < WHOLE_S + 60
    unread = {u.fact: u.why for u in facts.unread}
    assert unread["cards"] == unread["kernel_log"] == f"was not read within {WHOLE_S:g} s"
    assert len(facts.pci_gpus) == 2


class Hanging:
    """A machine of which some programs are ended as late as can be: when all else that is asked of it has been asked."""

    def __init__(self, patient: Patient, *programs: str) -> None:
        self.root, self.reader, self.host = patient.root, patient.reader, patient.host
        self.patient, self.programs, self.late = patient, programs, trio.Event()
        self.seen: list[str] = []

    async def ask(self, program: str, *args: str) -> Ran:
        if program == "lspci":
            self.late.set()
        if program not in self.programs:
            return await self.patient.ask(program, *args)
        self.seen.append("asked")
        await self.late.wait()
        await trio.testing.wait_all_tasks_blocked()
        self.seen.append("ended")
        return Ran((program, *args), None, "", "")


@pytest.mark.parametrize(
    ("programs", "shown", "spoken", "severity"),
    [
        (("nvidia-smi",), 8, "gpu.source.smi", Severity.WARN),
        (("nvml",), 8, "gpu.source.nvml", Severity.WARN),
        (("nvidia-smi", "nvml"), 0, "gpu.driver.unreachable", Severity.FAIL),
    ],
)
async def test_a_program_that_hangs_costs_its_own_answer_and_that_once(
    programs: tuple[str, ...], shown: int, spoken: str, severity: Severity, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Adapters are read meanwhile, and each program is waited for once: that is how it ends in time."""
    machine = Hanging(rendered("hgx-h100", tmp_path_factory), *programs)
    facts = await collect(Asker(machine, Discovery(root=str(machine.root), timeout_s=8), gap_s=0), whole_s=5)
    assert machine.seen == sorted(machine.seen)
    assert {"adapters", "counters", "acs", "netdevs", "stuck"} & {u.fact for u in facts.unread} <= {"stuck"}
    assert (len(facts.adapters), len(facts.cards), len(facts.devices)) == (9, shown, shown)
    found = next(v for v in judge(facts, CHECKS) if v.severity in (Severity.FAIL, Severity.WARN))
    assert (found.id, found.severity) == (spoken, severity)
    assert "did not answer within 8 s" in found.text


BLIND = {"gpu.persistence", "gpu.throttle", "gpu.ecc.mode", "pci.width", "pci.speed", "fw.mixed"}


@pytest.mark.parametrize(
    ("smi", "severity"),
    [
        (None, Severity.INFO),
        ((0, "no XML at all"), Severity.WARN),
        ((127, "error while loading shared libraries"), Severity.WARN),
        ((6, "No devices were found"), Severity.WARN),
        ((0, "<nvidia_smi_log><gpu>"), Severity.WARN),
    ],
)
async def test_nvml_answers_where_nvidia_smi_does_not(
    smi: object, severity: Severity, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever nvidia-smi does, and the report says which of both was read and what that does not tell."""
    patient = rendered("hgx-h100", tmp_path_factory)
    seen = await facts_of(patient, "hgx-h100")
    facts, verdicts = await examine(patient, "hgx-h100", Change(said={"nvidia-smi": smi}))
    assert [(c.reading.uuid, c.reading.total_mib) for c in facts.cards] == [
        (c.reading.uuid, c.reading.total_mib) for c in seen.cards
    ]
    assert [d.uuid for d in facts.devices] == [d.uuid for d in seen.devices]
    assert facts.nvlink_domains == seen.nvlink_domains
    (spoken,) = [v for v in verdicts if v.severity in (Severity.FAIL, Severity.WARN, Severity.INFO)]
    assert (spoken.id, spoken.severity) == ("gpu.source.smi", severity)
    assert "read through NVML" in spoken.text
    assert {v.id for v in verdicts if v.severity is Severity.UNKNOWN} == BLIND


async def test_two_sources_that_fail_are_a_failure(tmp_path_factory: pytest.TempPathFactory) -> None:
    patient = rendered("hgx-h100", tmp_path_factory)
    garbage = Change(said={"nvidia-smi": (0, "no XML at all")}, more={"program": "nvml-broken"})
    facts, verdicts = await examine(patient, "hgx-h100", garbage)
    (spoken,) = [v for v in verdicts if v.severity is Severity.FAIL and not v.hidden_by]
    assert spoken.id == "gpu.driver.unreachable"
    assert ("no XML at all" in spoken.text, "Unknown Error" in spoken.text) == (True, True)
    assert exit_code(verdicts, strict=False) == 1
    # One card that is gone makes both fail as a whole, where it is the only one.
    lost = evolve(facts, smi=Answer("gpu-lost", "nvidia-smi: a GPU fell off the bus", "reboot the node"))
    (spoken,) = [v for v in judge(lost, CHECKS) if v.severity is Severity.FAIL and not v.hidden_by]
    assert spoken.remedy == "reboot the node"
    # A guest of WSL has its GPUs on no bus, and no driver that answers is not the same as none.
    wsl = evolve(facts, pci_gpus=(), smi=Answer("blocked", "nvidia-smi: GPU access blocked by the operating system"))
    assert [v.id for v in judge(wsl, CHECKS) if v.severity is Severity.FAIL and not v.hidden_by] == [spoken.id]


async def test_a_driver_that_hangs_is_the_finding(tmp_path: Path) -> None:
    render(MACHINES["l40s-2"], tmp_path)
    write_state(tmp_path, program="hang")
    config = Discovery(root=str(tmp_path), timeout_s=0.4)
    began = time.monotonic()
    facts = await collect(Asker(LiveMachine(config), config, gap_s=0))
    assert time.monotonic() - began < 6
    verdicts = judge(facts, CHECKS)
    assert (verdicts[0].id, verdicts[0].severity) == ("gpu.driver.unreachable", Severity.FAIL)
    assert "did not answer within 0.4 s" in verdicts[0].text


@pytest.mark.long
def test_the_command_ends_in_time_though_its_programs_hang(tmp_path: Path) -> None:
    render(MACHINES["hgx-h100"], tmp_path)
    write_state(tmp_path, program="hang")
    began = time.monotonic()
    done = cli("--root", str(tmp_path), "--run-programs")
    assert time.monotonic() - began < 20
    assert done.returncode == 1
    assert "did not answer within" in done.stdout


def test_a_machine_without_gpu_says_so_in_three_lines(tmp_path: Path) -> None:
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    done = cli("--root", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 3
    assert "no NVIDIA GPU" in done.stdout


def test_a_folder_from_elsewhere_is_named_by_its_own_files_and_read_nowhere_else(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "sys/bus/pci").mkdir(parents=True)
    (root / "etc/hostname").write_text("gpu-node-07\n")
    (root / "etc/os-release").symlink_to("/etc/os-release")
    (tmp_path / "outside").write_text("MemTotal: 8 kB\nMemAvailable: 4 kB\n")
    (root / "proc").mkdir()
    (root / "proc/meminfo").symlink_to(tmp_path / "outside")
    os.mkfifo(root / "proc/modules")
    assert cli("--root", str(root)).stdout.startswith("gpu-node-07: no NVIDIA GPU")
    facts = json.loads(cli("--root", str(root), "--json", "--no-redact").stdout)["facts"]
    assert facts["host"] == {
        "hostname": "gpu-node-07", "boot_id": "", "kernel": "", "system": "", "cpus": None, "memory_mib": None
    }  # fmt: skip
    assert {"memory", "modules"} <= {unread["fact"] for unread in facts["unread"]}


def test_a_folder_that_shows_no_bus_is_not_said_to_have_no_gpu(tmp_path: Path) -> None:
    done = cli("--root", str(tmp_path))
    assert "no NVIDIA GPU" not in done.stdout
    assert "whether there is an NVIDIA GPU could not be told; RDMA adapters could not be read" in done.stdout


def test_the_command_replays_its_own_json(tmp_path: Path) -> None:
    render(MACHINES["hgx-h100"], tmp_path / "m")
    write_state(tmp_path / "m", {1: {"ecc": 3}})
    assert "SIMULATED MACHINE: HGX H100" in cli("--root", str(tmp_path / "m"), "--run-programs").stdout
    kept = cli("--root", str(tmp_path / "m"), "--run-programs", "--json", "--no-redact")
    assert kept.returncode == 1
    (tmp_path / "a.json").write_text(kept.stdout)
    again = cli("--from", str(tmp_path / "a.json"), "--json", "--no-redact")
    assert again.stdout == kept.stdout
    short = cli("--from", str(tmp_path / "a.json"), "--only", "gpu.ecc")
    assert "fail    gpu.ecc.uncorrectable" in short.stdout
    assert "docs/doctor.md#gpueccuncorrectable" in short.stdout
    (tmp_path / "b.json").write_text(cli("--from", str(tmp_path / "a.json"), "--json").stdout)
    blanked = cli("--from", str(tmp_path / "b.json"), "--json")
    assert blanked.stdout == (tmp_path / "b.json").read_text()


def test_a_reader_that_leaves_does_not_change_how_it_ends(tmp_path: Path) -> None:
    facts = Facts(
        pci_gpus=(PciFunction("0000:33:00.0"),), smi=Answer("timeout", "it hangs"), nvml=Answer("timeout", "so")
    )
    for name, said, code in (("well", Facts(), 0), ("ill", facts, 1)):
        (tmp_path / name).write_text(json.dumps(as_json(Document("1", False, said), CHECKS)))
        for words in (["--from", str(tmp_path / name)], ["--from", str(tmp_path / name), "--json"]):
            reader, writer = os.pipe()
            os.close(reader)
            with os.fdopen(writer, "w") as shut:
                done = subprocess.run(
                    [sys.executable, "-m", "llmgw", "doctor", *words], stdout=shut, stderr=subprocess.PIPE, check=False
                )
            assert (done.returncode, done.stderr) == (code, b"")


def test_what_the_command_refuses() -> None:
    assert cli("--only", "gpu.nothing").returncode == 2
    assert "give one of them" in cli("--from", __file__, "--root", "/").stderr
    assert cli("--explain", "pci.acs").stdout.startswith("pci.acs (warn)")


def test_the_documentation_has_every_check() -> None:
    page = (TOP / "docs/doctor.md").read_text()
    assert page.partition("## The checks\n\n")[2] == manual(CHECKS), (
        "write it anew: python -m llmgw.doctor docs/doctor.md"
    )


def test_the_schema_is_in_the_documentation() -> None:
    assert json.loads((TOP / "docs/doctor.schema.json").read_text()) == document_schema()


@pytest.mark.long
def test_what_the_settings_leave_out_is_left_out(tmp_path: Path) -> None:
    root, state = tmp_path / "root", tmp_path / "state"
    (root / "proc").mkdir(parents=True)
    state.mkdir(mode=0o700)
    text = (
        f"id: n\ncontrol_planes: [h:1]\nstate_dir: {state}\ntls: {{certificate: c, key: k, ca: a}}\n"
        f"discovery: {{root: {root}, source: none}}\n"
    )
    (tmp_path / "agent.yaml").write_text(text)
    settings = load_settings("doctor: {skip: [mem, port]}\nagents: {nodes: {other: {doctor: {skip: [gpu]}}}}\n")

    def found(*words: str) -> set[str]:
        line = [sys.executable, "-m", "llmgw", "doctor", "--config", str(tmp_path / "agent.yaml"), "--root", str(root)]
        done = subprocess.run([*line, *words, "--json"], capture_output=True, check=False)
        return {finding["id"].partition(".")[0] for finding in json.loads(done.stdout)["findings"]}

    everything = found()
    assert {"mem", "port", "gpu"} <= everything
    KeptFile(state).write(Kept(used=node_settings(settings, "n", 3)))
    assert found() == everything - {"mem", "port"}
    assert found("--only", "mem") == {"mem"}, "what is asked for by name is checked"
    KeptFile(state).write(Kept(used=node_settings(settings, "other", 3)))
    assert found() == everything - {"gpu"}, "what is said to one node is instead of what is said to all"
    (tmp_path / "agent.yaml").write_text(f"{text}doctor: {{skip: [pci]}}\n")
    KeptFile(state).write(Kept())
    assert "pci" not in found()


def test_examples_of_the_settings_name_checks() -> None:
    for path in ("doctor.skip", "agents.default.doctor.skip"):
        for name in read(DOCS[path].example, "e").value:
            assert chosen(CHECKS, (name,), ())
