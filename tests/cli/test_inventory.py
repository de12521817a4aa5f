"""``llmgw agent inventory`` as people and programs use it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from fakes.machines import MACHINES, render, write_state
from fakes.machines.description import gpu_uuid
from llmgw.agent.records import Record, write
from llmgw.hardware.inventory import Inventory
from llmgw.settings.catalog import EngineKind, Profile
from llmgw.web.schema import json_schema

DOCS = Path(__file__).resolve().parents[2] / "docs"


def llmgw(*args: str | Path, config: Path | None = None) -> subprocess.CompletedProcess[str]:
    where = ("--config", str(config or "/nonexistent/agent.yaml"))
    argv = [sys.executable, "-m", "llmgw", "agent", *where, "inventory", *map(str, args)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def agent_yaml(folder: Path, more: str = "") -> Path:
    path = folder / "agent.yaml"
    (folder / "state").mkdir(exist_ok=True)
    path.write_text(
        f"id: n1\ncontrol_planes: ['127.0.0.1:1']\ntls: {{certificate: c, key: k, ca: a}}\nstate_dir: state\n{more}"
    )
    return path


def test_people_see_what_the_scheduler_would(tmp_path: Path) -> None:
    render(MACHINES["hgx-h100"], tmp_path / "m")
    write_state(tmp_path / "m", {3: {"needs_reset": True}, 5: {"links_down": 18}})
    fabrics = "fabrics:\n  ib: {link_layer: infiniband}\n  eth: {subnets: 10.20.0.0/16}\n  gone: {adapters: mlx5_77}\n"
    config = agent_yaml(tmp_path, f"discovery: {{root: m}}\n{fabrics}")
    done = llmgw(config=config)
    assert done.returncode == 0, done.stderr
    for text in (
        "SIMULATED MACHINE: HGX H100",
        "read through nvml",
        "gpu-2   h100-80g",
        "mlx5_2 (pix)",
        "31 C, 71 W, 0 %",
        "gpu-3 the driver recommends: reset\n    run nvidia-smi --gpu-reset on it, or reboot",
        "gpu-0, gpu-1, gpu-2, gpu-3, gpu-4, gpu-6, gpu-7, 18 links between two",
        "3 10.20.0.11",
        "ib (infiniband): mlx5_0:1, mlx5_1:1",
        "eth (roce): mlx5_8:1 (GID 3, 10.20.0.11)",
        "adapter-missing: mlx5_77 is not on this node",
        "nvlink-down: gpu-5 reaches its peers over SYS",
    ):
        assert text in done.stdout, f"{text!r} is not in\n{done.stdout}"


def test_instances_are_shown_in_place_of_their_card(tmp_path: Path) -> None:
    render(MACHINES["a100-mig"], tmp_path / "m")
    done = llmgw("--root", tmp_path / "m", "--run-programs")
    assert "gpu-0/mig1  a100-80g-mig-3g.40gb  0.0 of 39.2 GiB" in done.stdout
    assert "31 C, 71 W\n" in done.stdout.replace("  healthy", "") or "31 C, 71 W " in done.stdout


def check(value: Any, schema: dict[str, Any], defs: dict[str, Any], path: str = "$") -> None:
    """As much of JSON Schema as ours uses."""
    if "$ref" in schema:
        schema = defs[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        faults = []
        for option in schema["anyOf"]:
            try:
                check(value, option, defs, path)
            except AssertionError as fault:
                faults.append(str(fault))
            else:
                return
        raise AssertionError(f"{path}: {faults}")
    types = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "object": dict,
        "array": list,
        "null": type(None),
    }
    assert isinstance(value, types[schema["type"]]), f"{path} is {value!r}, no {schema['type']}"
    assert "enum" not in schema or value in schema["enum"], f"{path} is {value!r}"
    if schema["type"] == "array":
        for index, item in enumerate(value):
            check(item, schema["items"], defs, f"{path}[{index}]")
    if schema["type"] == "object":
        assert set(value) == set(schema["required"]), path
        for name, item in value.items():
            check(item, schema["properties"][name], defs, f"{path}.{name}")


@pytest.mark.parametrize("name", ["hgx-b200", "a100-mig", "gb10", "none"])
def test_programs_get_json_of_the_schema(name: str, tmp_path: Path) -> None:
    render(MACHINES[name], tmp_path / "m")
    done = llmgw("--root", tmp_path / "m", "--run-programs", "--json")
    assert done.returncode == 0, done.stderr
    schema = json_schema(Inventory)
    check(json.loads(done.stdout), schema, schema["$defs"])


def test_the_schema_in_the_documentation_is_the_one_that_is_printed() -> None:
    done = llmgw("--schema")
    assert done.returncode == 0
    assert (DOCS / "inventory.schema.json").read_text() == done.stdout, "run: llmgw agent inventory --schema"


def test_saved_and_read_elsewhere(tmp_path: Path) -> None:
    render(MACHINES["hgx-h100"], tmp_path / "m")
    config = agent_yaml(tmp_path, "discovery: {root: m}\nfabrics:\n  ib: {link_layer: infiniband}\n")
    saved = llmgw("--save", tmp_path / "c", "--json", config=config)
    assert saved.returncode == 0, saved.stderr
    again = llmgw("--root", tmp_path / "c", "--json")
    assert (again.returncode, json.loads(again.stdout)) == (0, json.loads(saved.stdout))
    assert json.loads(again.stdout)["host"]["hostname"] == "hidden"
    assert json.loads(again.stdout)["fabrics"][0]["label"] == "ib"
    through_smi = llmgw("--root", tmp_path / "c", "--json", "--source", "nvidia-smi")
    assert (json.loads(again.stdout)["source"], json.loads(through_smi.stdout)["source"]) == ("nvml", "nvidia-smi")
    assert len(json.loads(through_smi.stdout)["devices"]) == 8
    assert any(path.read_text().startswith("<?xml") for path in (tmp_path / "c/commands").glob("*.out"))
    twice = llmgw("--save", tmp_path / "c", config=config)
    assert twice.returncode == 2
    assert "exists already" in twice.stderr


def test_a_folder_with_programs_is_not_run_unless_asked(tmp_path: Path) -> None:
    render(MACHINES["l40s-2"], tmp_path / "m")
    done = llmgw("--root", tmp_path / "m")
    assert done.returncode == 2
    assert "holds programs" in done.stderr
    assert "--run-programs" in done.stderr


@pytest.mark.parametrize("program", ["usr/libexec/llmgw-nvml", "usr/sbin/ip", "usr/bin/nvidia-smi"])
def test_no_program_of_a_folder_is_run_unasked(program: str, tmp_path: Path) -> None:
    path = tmp_path / "m" / program
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    path.chmod(0o755)
    done = llmgw("--root", tmp_path / "m")
    assert (done.returncode, program in done.stderr) == (2, True)
    path.chmod(0o644)
    assert llmgw("--root", tmp_path / "m").returncode == 0
    assert not (tmp_path / "ran").exists()


def test_an_error_where_gpus_could_not_be_read(tmp_path: Path) -> None:
    render(MACHINES["l40s-2"], tmp_path / "m")
    write_state(tmp_path / "m", program="mismatch")
    done = llmgw("--root", tmp_path / "m", "--run-programs")
    assert done.returncode == 1
    assert "driver-mismatch: nvidia-smi: the driver was upgraded under the loaded module" in done.stdout
    write_state(tmp_path / "m", program="nvml-broken")
    assert llmgw("--root", tmp_path / "m", "--run-programs").returncode == 0
    done = llmgw("--root", tmp_path / "m", "--run-programs", "--source", "nvml")
    assert (done.returncode, "nvml-failed" in done.stdout) == (1, True)


def test_a_missing_card_until_it_is_accepted(tmp_path: Path) -> None:
    render(MACHINES["l40s-2"], tmp_path / "m")
    config = agent_yaml(tmp_path, "discovery: {root: m, source: nvidia-smi}\n")
    assert llmgw("--accept", config=config).returncode == 0
    for path in (tmp_path / "m/sys/bus/pci/devices").iterdir():
        path.unlink()
    render(evolve(MACHINES["l40s-2"], cards=MACHINES["l40s-2"].cards[:1]), tmp_path / "m")
    assert "gpu-missing: NVIDIA L40S at 0000:f1:00.0 was here and is missing" in llmgw(config=config).stdout
    assert "gpu-missing" not in llmgw("--accept", config=config).stdout
    assert "gpu-missing" not in llmgw(config=config).stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--accept",), "needs this node's agent.yaml"),
        (("--source", "magic"), "magic"),
        (("--root", "/nonexistent"), "does not exist"),
    ],
)
def test_wrong_use(args: tuple[str, ...], said: str) -> None:
    done = llmgw(*args)
    assert done.returncode == 2
    assert said in done.stderr


def test_what_takes_long_is_said(tmp_path: Path) -> None:
    render(MACHINES["l40s-2"], tmp_path / "m")
    write_state(tmp_path / "m", program="hang")
    done = llmgw(config=agent_yaml(tmp_path, "discovery: {root: m, source: nvml, timeout_s: 3}\n"))
    assert done.returncode == 1
    assert "still reading" in done.stderr
    assert "did not answer within 3 s" in done.stdout


def test_memory_of_a_stranger_and_of_a_shard_of_this_node(tmp_path: Path) -> None:
    render(MACHINES["l40s-2"], tmp_path / "m")
    write_state(tmp_path / "m", {n: {"processes": [[4711 + n, "/usr/bin/python3", 20000]]} for n in range(2)})
    config = agent_yaml(tmp_path, "discovery: {root: m}\n")
    shown = llmgw(config=config).stdout
    assert "gpu-0 holds 20 GiB by pid 4711 python3" in shown
    profile = Profile("p", EngineKind.VLLM, "/w", ("l40s-45g",))
    uuid = gpu_uuid(MACHINES["l40s-2"], 0)
    record = Record(
        "c", "m-1", "m-1.0", 1, 0, "m", profile, "d", (0,), ("x",), "h", 1, "m", "/h", "/m", 1.0, "b", 0.0, uuids=(uuid,)
    )  # fmt: skip
    write(tmp_path / "state/shards/m-1.0-g1", record)
    shown = llmgw(config=config).stdout
    assert "runs m-1.0" in shown
    assert "gpu-0 holds" not in shown
    assert "gpu-1 holds 20 GiB by pid 4712 python3" in shown
