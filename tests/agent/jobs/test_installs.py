"""Engines that jobs install: made beside those that run, verified, switched, listed, and kept while they are used."""

from __future__ import annotations

import base64
import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pip
import pytest
from attrs import evolve

from llmgw.agent import records
from llmgw.agent.jobs.install_child import InstallTask, commands, install, why
from llmgw.agent.jobs.installs import Installs
from llmgw.agent.jobs.works import NodeWorks
from llmgw.errors import OperatorError
from llmgw.scheduler.jobs import Install, JobSpec, JobState
from llmgw.settings.catalog import EngineKind
from llmgw.settings.daemon import EngineInstall
from tests.agent.jobs.test_runner import config, end, running

VLLM = EngineKind.VLLM
CODE = "import sys\ndef main():\n    print('INFO starting')\n    print('{version}')\n    sys.exit({code})\n"


def wheel(folder: Path, version: str, code: int = 0) -> Path:
    """A wheel (PEP 427) of a program ``vllm`` that says its version."""
    info = f"vllm-{version}.dist-info"
    files = {
        "fake_vllm.py": CODE.format(version=version, code=code),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nvllm = fake_vllm:main\n",
    }
    lines = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(text)}\n")
    files[f"{info}/RECORD"] = "".join(lines) + f"{info}/RECORD,,\n"
    folder.mkdir(exist_ok=True)
    path = folder / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as made:
        for name, text in files.items():
            made.writestr(name, text)
    return path


@pytest.fixture
def quick(tmp_path: Path) -> str:
    """A Python whose ``-m venv`` takes this one's pip over: to put a fresh one in takes seconds (tests.e2e.test_jobs does)."""
    place = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages/pip.pth"
    program = tmp_path / "quick"
    program.write_text(
        f'#!/bin/sh\n{sys.executable} -m venv --without-pip "$3" && echo {Path(pip.__file__).parents[1]} > "$3/{place}"\n'
    )
    program.chmod(0o700)
    return str(program)


def from_wheels(folder: Path, version: str, python: str = "") -> Install:
    return Install(VLLM, "vllm", version, wheels=str(folder), packages=(f"vllm=={version}",), python=python)


async def test_installed_verified_switched_and_listed(tmp_path: Path, quick: str) -> None:
    wheel(tmp_path / "w", "1.0")
    wheel(tmp_path / "w", "2.0", code=3)
    settings = evolve(config(tmp_path), engines=(EngineInstall(VLLM, ("/usr/bin/vllm", "serve")),))
    installs = Installs(settings)
    assert installs.engine(VLLM) == settings.engines[0]
    changed: list[None] = []
    works = NodeWorks(settings, installs, lambda: changed.append(None))
    async with running(tmp_path, works) as jobs:
        await jobs.start(JobSpec("j1", install=from_wheels(tmp_path / "w", "1.0", quick)))
        report = await end(jobs)
        assert (report.state, report.reason) == (JobState.DONE, "done"), (tmp_path / "jobs/j1/log.txt").read_text()
        assert report.result == {"path": str(tmp_path / "installs/vllm/vllm-1.0"), "version": "1.0"}
        await jobs.start(JobSpec("j2", install=from_wheels(tmp_path / "w", "2.0", quick)))
        assert "ended with exit code 3" in (await end(jobs, "j2")).reason, "what does not say its version is not used"
    engine = EngineInstall(VLLM, (f"{report.result['path']}/bin/vllm", "serve"), "1.0")
    assert installs.engine(VLLM) == engine
    assert Installs(settings).engine(VLLM) == engine, "and after a restart"
    assert len(changed) == 1
    assert [(i.name, i.version, i.says, i.current) for i in installs.listed()] == [
        ("vllm", "1.0", "1.0", True), ("", "", "", False),
    ]  # fmt: skip


async def test_a_lock_file_takes_only_what_has_the_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: str
) -> None:
    path = wheel(tmp_path / "w", "1.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "w"))
    good = hashlib.sha256(path.read_bytes()).hexdigest()
    async with running(tmp_path, NodeWorks(config(tmp_path))) as jobs:
        for job, digest in (("bad", "0" * 64), ("good", good)):
            lock = f"vllm==1.0 --hash=sha256:{digest}\n"
            await jobs.start(JobSpec(job, install=Install(VLLM, "vllm", "1.0", lock=lock, python=quick)))
            await end(jobs, job)
        reports = {r.id: r for r in jobs.reports()}
    said = reports["bad"].reason
    assert said.startswith("installing the packages ended with exit code"), said
    assert "hash" in said.lower(), "what pip said of it"
    assert reports["good"].state is JobState.DONE, "what was half made is made anew"


def test_what_another_job_has_verified_is_not_made_anew_before_the_agent_switches_to_it(tmp_path: Path) -> None:
    made = """#!/bin/sh
mkdir -p "$3/bin"
printf '#!/bin/sh\nprintf "#!/bin/sh\\\\necho 1.0\\\\n" > %s/bin/vllm; chmod 700 %s/bin/vllm' "$3" "$3" > "$3/bin/python"
chmod 700 "$3/bin/python"
"""
    python = tmp_path / "python"
    python.write_text(made)
    python.chmod(0o700)
    target = tmp_path / "vllm-1.0"
    task = InstallTask(str(target), ("bin/vllm", "--version"), wheels="w", packages=("vllm",), python=str(python))
    assert install(task, lambda _: None, None) == {"path": str(target), "version": "1.0"}
    (target / "of the first").touch()
    assert install(task, lambda _: None, None) == {"path": str(target), "version": "1.0"}
    assert (target / "of the first").exists(), "the first one's job is not done yet: its agent has not written so"


def test_old_ones_stay_while_something_runs_from_them(tmp_path: Path) -> None:
    installs = Installs(config(tmp_path))
    folder = tmp_path / "installs" / "vllm"
    for version in ("1", "2", "3", "4"):
        (folder / f"vllm-{version}").mkdir(parents=True)
        if version == "2":
            make_record(tmp_path, f"{folder}/vllm-1/bin/vllm")
        installs.switch(Install(VLLM, "vllm", version), version)
        assert os.readlink(folder / "current") == f"vllm-{version}"
    assert {p.name for p in folder.iterdir()} == {"vllm-1", "vllm-3", "vllm-4", "current"}
    assert [i.version for i in installs.listed() if i.current] == ["4"]


def make_record(folder: Path, program: str) -> None:
    from llmgw.agent.records import Record
    from llmgw.settings.catalog import Profile

    profile = Profile("p", VLLM, "/w", ("h100-80g",))
    record = Record(
        "c", "m-1", "m-1.0", 1, 0, "m", profile, "d", (0,), (program, "serve"), "h", 1, "m", "/", "/", 1.0, "", 0.0
    )
    records.write(records.folder_of(folder / "shards", "m-1.0", 1), record)


@pytest.mark.parametrize(
    "install",
    [
        Install(VLLM, "..", "1", wheels="/w"),
        Install(VLLM, "a/b", "1", wheels="/w"),
        Install(VLLM, "v", "1"),
        Install(VLLM, "v", "1", lock="x", wheels="/w"),
        Install(VLLM, "v", "1", wheels="/w", packages=("--index-url=http://evil",)),
        Install(VLLM, "v", "1", wheels="/w", packages=("vllm @ https://evil/vllm.whl",)),
        Install(VLLM, "v", "1", wheels="/w", packages=("git+https://evil/vllm",)),
        Install(VLLM, "v", "1", wheels="/w", packages=("./vllm",)),
        Install(VLLM, "v", "1", wheels="/w", command=("/bin/sh",)),
        Install(VLLM, "v", "1", wheels="/w", command=("../../sh",)),
    ],
)
def test_what_is_no_install_is_refused(tmp_path: Path, install: Install) -> None:
    with pytest.raises(OperatorError):
        Installs(config(tmp_path)).task(install)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], ""),
        (["Looking in links: w", "ERROR: one", "ERROR: No matching distribution found for vllm==9", ""],
         "ERROR: No matching distribution found for vllm==9"),
        (["error: Querying Python failed", "  Caused by: something"], "error: Querying Python failed"),
        (["x No solution found", "because vllm was not found", ""], "because vllm was not found"),
        (["y" * 1000], "y" * 200),
    ],
)  # fmt: skip
def test_why_an_install_failed(lines: list[str], said: str) -> None:
    assert why(lines) == said


def test_uv_is_used_where_there_is_one() -> None:
    task = InstallTask("/t", ("bin/vllm",), lock="x", python="/py")
    make, fill = commands(task, "/bin/uv")
    assert make == ["/bin/uv", "venv", "--python", "/py", "/t"]
    assert fill == [
        "/bin/uv",
        "pip",
        "install",
        "--python",
        "/t/bin/python",
        "--require-hashes",
        "-r",
        "/t/requirements.lock",
    ]
    assert commands(task, None)[0] == ["/py", "-m", "venv", "/t"]
