"""Launches over several nodes and groups, and in other uses than one GPU that generates."""

from __future__ import annotations

from typing import Any

import pytest

from llmgw.engines.base import Launch
from llmgw.engines.registry import build
from llmgw.errors import OperatorError
from llmgw.settings.catalog import EngineKind, Task
from llmgw.settings.daemon import Address, EngineInstall
from tests.engines.specs import COMMANDS, FABRIC, profile, spec


def vllm(**more: Any) -> Launch:
    wanted = profile(gpus=more.pop("gpus", 2), **more.pop("wanted"))
    meets = {"rendezvous": Address("10.0.0.9", 20002), "interface": "eth0", "fabric": FABRIC}
    return build(spec(wanted, **meets, **more))


def test_vllm_over_two_nodes() -> None:
    wanted: dict[str, Any] = {"nodes": 2, "tp": 2, "pp": 2}
    head, other = (vllm(wanted=wanted, rank=rank).argv for rank in (0, 1))
    joined = "--nnodes 2 --node-rank {} --master-addr 10.0.0.9 --master-port 20002"
    assert joined.format(0) in " ".join(head)
    assert f"{joined.format(1)} --headless" in " ".join(other)
    assert not {"--host", "--port"} & set(other)
    env = vllm(wanted=wanted).env
    assert env["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_3:1"
    assert (env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"], env["VLLM_HOST_IP"]) == ("=eth0", "eth0", "10.0.0.1")
    assert env["NCCL_DEBUG"] == "INFO", "or nobody hears that it fell back to TCP"
    assert vllm(wanted={**wanted, "env": {"NCCL_DEBUG": "WARN"}}).env["NCCL_DEBUG"] == "WARN"


def test_vllm_in_groups_on_one_node_and_on_two() -> None:
    one = " ".join(vllm(wanted={"dp": 2, "expert_parallel": True}).argv)
    assert "--data-parallel-size 2 --api-server-count 1 --enable-expert-parallel" in one
    head, other = (" ".join(vllm(wanted={"dp": 4, "nodes": 2}, rank=rank).argv) for rank in (0, 1))
    meets = "--data-parallel-size-local 2 --data-parallel-address 10.0.0.9 --data-parallel-rpc-port 20002"
    assert f"--data-parallel-size 4 --api-server-count 1 {meets}" in head
    assert f"--data-parallel-size 4 {meets} --headless --data-parallel-start-rank 2" in other
    assert "--nnodes" not in head + other


def test_a_rank_that_was_not_told_where_to_meet_is_refused() -> None:
    for kind in (EngineKind.VLLM, EngineKind.SGLANG):
        with pytest.raises(OperatorError, match="was not told where rank 0 waits"):
            build(spec(profile(kind, nodes=2, tp=2), rank=1))


def sglang(version: str | None, rank: int = 0, **wanted: Any) -> str:
    install = EngineInstall(EngineKind.SGLANG, COMMANDS[EngineKind.SGLANG], version)
    meets = {"rendezvous": Address("10.0.0.9", 20002), "interface": "eth0", "fabric": FABRIC}
    return " ".join(build(spec(profile(EngineKind.SGLANG, **wanted), install=install, rank=rank, **meets)).argv)


def test_sglang_s_groups() -> None:
    assert "--tp-size 2 --dp-size 2 --enable-metrics" in sglang(None, gpus=4, tp=2, dp=2)
    experts: dict[str, Any] = {"gpus": 4, "tp": 2, "dp": 2, "expert_parallel": True}
    old, new = "--dp-size 2 --enable-dp-attention", "--attn-dp-size 2"
    for version, groups in ((None, old), ("0.5.21", old), ("0.5.22", new), ("0.6.0", new)):
        assert f"--tp-size 4 --ep-size 4 {groups} --enable-metrics" in sglang(version, **experts)
    assert f"--ep-size 4 --enable-ep-moe {old}" in sglang("0.4.6.post5", **experts)
    assert "--tp-size 2 --nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.9:20002" in sglang(None, 1, nodes=2, tp=2)


def test_sglang_s_key_goes_in_by_a_file_where_the_version_reads_one() -> None:
    def launch(version: str | None, rank: int = 0) -> Launch:
        meets = {"rendezvous": Address("10.0.0.9", 20002), "interface": "eth0", "fabric": FABRIC}
        install = EngineInstall(EngineKind.SGLANG, COMMANDS[EngineKind.SGLANG], version)
        return build(spec(profile(EngineKind.SGLANG, nodes=2, tp=2), install=install, rank=rank, **meets))

    keyed = launch("0.5.23")
    assert (keyed.api_key, keyed.files) == ("sk-secret", {"sglang.yaml": 'api-key: "sk-secret"\n'})
    assert keyed.argv[-2:] == ("--config", "sglang.yaml")
    assert "sk-secret" not in repr(keyed)
    for none in (launch(None), launch("0.5.2"), launch("0.5.4"), launch("0.5.23", 1)):
        assert (none.api_key, none.files) == (None, {})


@pytest.mark.parametrize(
    ("kind", "task", "flags"),
    [
        (EngineKind.VLLM, Task.EMBED, "--runner pooling --convert embed"),
        (EngineKind.VLLM, Task.RERANK, "--runner pooling"),
        (EngineKind.SGLANG, Task.EMBED, "--is-embedding"),
        (EngineKind.SGLANG, Task.RERANK, "--is-embedding"),
        (EngineKind.LLAMACPP, Task.EMBED, "--embeddings"),
        (EngineKind.LLAMACPP, Task.RERANK, "--rerank"),
    ],
)
def test_what_a_model_is_asked_for(kind: EngineKind, task: Task, flags: str) -> None:
    plain = build(spec(profile(kind))).argv
    told = build(spec(profile(kind, task=task))).argv
    assert " ".join(a for a in told if a not in plain) == flags


def test_adapters_are_served_under_the_model_s_name() -> None:
    lora = {"sql": "/models/sql", "law": "lora/law"}
    argv = build(spec(profile(lora=lora))).argv
    assert argv[-6:] == (
        "--enable-lora", "--max-loras", "2", "--lora-modules", "org/m:sql=/models/sql", "org/m:law=/models/lora/law"
    )  # fmt: skip
    assert profile(lora=lora).served("org/m") == ("org/m", "org/m:sql", "org/m:law")
    assert "--lora-paths sql=/models/sql law=/models/lora/law" in sglang(None, lora=lora)
    with pytest.raises(OperatorError, match=r"sglang 0\.5\.2 does not take <model>:<adapter> for a model"):
        sglang("0.5.2", lora=lora)
    with pytest.raises(OperatorError, match="adapter /etc: leads out of /models"):
        build(spec(profile(lora={"x": "/etc"})))
    with pytest.raises(OperatorError, match="has a space, comma or = in its path"):
        build(spec(profile(weights="/a=b/w", lora={"x": "x"}), weights_dir="/a=b"))
