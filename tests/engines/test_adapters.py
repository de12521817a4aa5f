from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

from llmgw.engines.base import Launch, ShardSpec
from llmgw.engines.checks import refusals
from llmgw.engines.registry import arguments_of, build
from llmgw.engines.weights import weights_of
from llmgw.errors import OperatorError
from llmgw.hardware.inventory import AdapterKind, Device, Fabric, FabricPort, Fault
from llmgw.settings.catalog import EngineKind, Limits, Profile, Task
from llmgw.settings.daemon import Address, EngineInstall
from llmgw.settings.engine_flag_tables import VERSIONS
from llmgw.settings.engine_flags import argument_faults
from llmgw.settings.profile_rules import LORA_NAME, adapters
from llmgw.settings.validate import profile_faults

FLAGS = Path(__file__).resolve().parents[3] / "shared" / "engines" / "flags"
COMMANDS = {
    EngineKind.VLLM: ("vllm", "serve"),
    EngineKind.SGLANG: ("python", "-m", "sglang.launch_server"),
    EngineKind.LLAMACPP: ("llama-server",),
}


def device(number: int, name: str = "h100-80g", **more: Any) -> Device:
    return evolve(Device(number, f"GPU-{number}", "x", name, 81559, 1), **more)


def spec(profile: Profile, **more: Any) -> ShardSpec:
    made = ShardSpec(
        model="org/m",
        profile=profile,
        devices=tuple(device(n) for n in range(profile.gpus)),
        install=EngineInstall(profile.engine, COMMANDS[profile.engine]),
        host="10.0.0.1",
        port=20001,
        weights_dir="/models",
        api_key="sk-secret",
    )
    return evolve(made, **more)


def profile(engine: EngineKind = EngineKind.VLLM, **more: Any) -> Profile:
    return evolve(Profile("p", engine, "/models/w", ("h100-80g",)), **more)


def test_vllm() -> None:
    launch = build(
        spec(profile(gpus=4, tp=2, pp=2, context_length=8192, quantization="fp8", gpu_memory_utilization=0.9,
                     args=("--max-num-seqs", "64"), env={"OMP_NUM_THREADS": "1"}))
    )  # fmt: skip
    assert launch.argv == (
        "vllm", "serve", "/models/w", "--served-model-name", "org/m", "--host", "10.0.0.1", "--port", "20001",
        "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2", "--gpu-memory-utilization", "0.9",
        "--max-model-len", "8192", "--quantization", "fp8", "--max-num-seqs", "64",
    )  # fmt: skip
    assert launch.env["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1,GPU-2,GPU-3"
    assert (launch.env["HF_HUB_OFFLINE"], launch.env["OMP_NUM_THREADS"]) == ("1", "1")
    assert launch.env["VLLM_RPC_BASE_PATH"] == ".", "its sockets go with the shard's folder"
    assert launch.secrets == {"VLLM_API_KEY": "sk-secret"}
    assert (launch.ready_name, launch.endpoint) == ("org/m", "http://10.0.0.1:20001")


def test_sglang_gets_no_key_and_a_longer_probe() -> None:
    launch = build(spec(profile(EngineKind.SGLANG, gpus=2, tp=2, weights="org/repo")))
    assert launch.argv[3:7] == ("--model-path", "org/repo", "--served-model-name", "org/m")
    assert "--tp-size" in launch.argv
    assert (launch.secrets, launch.api_key) == ({}, None)
    assert launch.probe_timeout_s > 20
    assert "HF_HUB_OFFLINE" not in launch.env


def test_llamacpp() -> None:
    launch = build(spec(profile(EngineKind.LLAMACPP, gpus=2, tp=2, weights="llama.gguf", context_length=4096)))
    assert launch.argv[:5] == ("llama-server", "--model", "/models/llama.gguf", "--alias", "org/m")
    assert launch.argv[-4:-2] == ("--split-mode", "layer")
    assert launch.argv[-2:] == ("--ctx-size", "4096")
    assert launch.secrets == {"LLAMA_API_KEY": "sk-secret"}


def test_a_mig_device_is_named_by_its_uuid() -> None:
    mig = device(1000, "a100-80g-mig-3g.40gb", uuid="MIG-1-2")
    launch = build(spec(profile(device_class=("a100-80g-mig-3g.40gb",)), devices=(mig,)))
    assert launch.env["CUDA_VISIBLE_DEVICES"] == "MIG-1-2"


def test_no_secret_is_in_argv_env_or_repr() -> None:
    for kind in EngineKind:
        launch = build(spec(profile(kind)))
        assert "sk-secret" not in " ".join(launch.argv)
        assert "sk-secret" not in str(launch.env)
        assert "sk-secret" not in repr(launch)
        assert "sk-secret" not in repr(spec(profile(kind)))


@pytest.mark.parametrize(
    ("text", "kind", "name", "local"),
    [
        ("/models/b", EngineKind.VLLM, "/models/b", True),
        ("./a", EngineKind.VLLM, "/models/a", True),
        ("a", EngineKind.VLLM, "/models/a", True),
        ("org/name", EngineKind.VLLM, "org/name", False),
        ("org/name", EngineKind.LLAMACPP, "/models/org/name", True),
        ("a/b.gguf", EngineKind.LLAMACPP, "/models/a/b.gguf", True),
    ],
)
def test_weights(text: str, kind: EngineKind, name: str, local: bool) -> None:
    found = weights_of(text, kind, "/models")
    assert (found.name, found.local) == (name, local)


@pytest.mark.parametrize("text", ["../x", "a/../../x", "./../x", "/a/b", "/models/../x", "/modelsx"])
def test_weights_may_not_lead_out(text: str) -> None:
    with pytest.raises(OperatorError, match="leads out of /models"):
        weights_of(text, EngineKind.VLLM, "/models")


@pytest.mark.parametrize(
    ("profile", "devices", "said"),
    [
        (profile(gpus=2, tp=2), (device(0), device(1, "l40s-45g")), "different classes in one group: gpu-0 is h100-80g, gpu-1 is l40s-45g"),
        (profile(device_class=("a100-80g",)), (device(0),), "gpu-0 is h100-80g, the profile wants a100-80g"),
        (profile(gpus=2, tp=2), (device(0),), "needs 2 devices on a node, it was given 1"),
        (profile(gpus=2, tp=1), (device(0), device(1)), "1 node x 2 gpus = 2 devices, but tp 1 x pp 1 = 1"),
        (profile(quantization="fp8"), (device(0, compute_capability=80),), "fp8 needs compute capability 8.9, gpu-0 has 8.0"),
        (profile(), (device(0, faults=(Fault("failed", "GPU is lost"),)),), "gpu-0 GPU is lost"),
        (profile(args=("--host=::",)), (device(0),), "--host=:: is llmgw's own"),
        (profile(env={"LD_PRELOAD": "x"}), (device(0),), "env.LD_PRELOAD: is llmgw's own"),
        (profile(EngineKind.LLAMACPP, gpus=2, pp=2), (device(0), device(1)), "llama.cpp has no pipeline parallelism"),
        (
            profile(device_class=("a100-80g-mig-3g.40gb",), gpus=2, tp=2),
            (device(1000, "a100-80g-mig-3g.40gb"), device(1001, "a100-80g-mig-3g.40gb")),
            "has exactly one MIG instance",
        ),
    ],
)  # fmt: skip
def test_refused_before_anything_is_started(profile: Profile, devices: tuple[Device, ...], said: str) -> None:
    assert any(said in f.reason for f in refusals("m", profile, devices)), refusals("m", profile, devices)
    with pytest.raises(OperatorError):
        build(spec(profile, devices=devices))


profiles = st.builds(
    lambda kind, group, nodes, context, quantization, utilization, weights, task, experts, lora: profile(
        kind,
        dp=group[0],
        tp=group[1],
        pp=group[2],
        nodes=nodes,
        gpus=group[0] * group[1] * group[2] // nodes,
        context_length=context,
        quantization=quantization,
        gpu_memory_utilization=utilization,
        weights=weights,
        task=task,
        expert_parallel=experts,
        lora=lora,
    ),
    st.sampled_from(EngineKind),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 2)),
    st.integers(1, 3),
    st.none() | st.integers(1, 1_000_000),
    st.none() | st.sampled_from(["fp8", "awq"]),
    st.none() | st.floats(0.01, 1.0),
    st.sampled_from(["/models/w", "w", "org/name", "w.gguf"]),
    st.sampled_from(Task),
    st.booleans(),
    st.dictionaries(st.from_regex(LORA_NAME, fullmatch=True), st.sampled_from(["/models/a", "b/c"]), max_size=2),
).filter(lambda p: not list(profile_faults(p)))


@st.composite
def specs(draw: st.DrawFn) -> ShardSpec:
    """Any rank of any profile that validates, for a known or an unknown version of its engine."""
    wanted = draw(profiles)
    version = draw(st.none() | st.sampled_from(VERSIONS[wanted.engine.value]))
    assume(not list(adapters("org/m", wanted, version)))
    several = wanted.nodes > 1
    return spec(
        wanted,
        install=EngineInstall(wanted.engine, COMMANDS[wanted.engine], version),
        rank=draw(st.integers(0, wanted.nodes - 1)),
        rendezvous=Address("10.0.0.9", 20002) if several else None,
        interface="eth0" if several else "",
        fabric=draw(st.sampled_from([FABRIC, evolve(FABRIC, ports=())])) if several else None,
    )


FABRIC = Fabric("rack-1", AdapterKind.INFINIBAND, (FabricPort("mlx5_0", 1), FabricPort("mlx5_3", 1)))


def checker() -> Callable[[str, Sequence[str]], list[str]]:
    """The check of a command line against a table of flags, values and choices that comes with the tables."""
    found = importlib.util.spec_from_file_location("check_argv", FLAGS.parent / "check_argv.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return lambda table, argv: list(module.check_table(table, argv))


@pytest.mark.skipif(not FLAGS.exists(), reason="no tables of flags here")
def test_every_version_takes_what_is_built_for_it() -> None:
    check = checker()

    @given(specs())
    def built(made: ShardSpec) -> None:
        launch = build(made)
        name = {EngineKind.VLLM: "vllm", EngineKind.SGLANG: "sglang", EngineKind.LLAMACPP: "llama"}[made.profile.engine]
        version = made.install.version
        tables = sorted(FLAGS.glob(f"flags-{name}-{version or '*'}.tsv"))
        assert tables
        for table in tables:  # of a version that is not known it may be any
            assert check(str(table), arguments_of(made, launch)) == [], table.name

    built()


@given(specs())
def test_every_version_in_our_own_tables_takes_what_is_built(made: ShardSpec) -> None:
    launch = build(made)
    kind, version = made.profile.engine, made.install.version
    for installed in VERSIONS[kind.value] if version is None else [version]:
        assert list(argument_faults(kind, arguments_of(made, launch), (), installed)) == []


@given(specs())
def test_whatever_is_built_names_the_model_and_listens_where_it_was_told(made: ShardSpec) -> None:
    launch = build(made)
    line = " ".join(launch.argv)
    serves = made.rank == 0 or made.profile.engine is not EngineKind.VLLM
    assert ("--host 10.0.0.1 --port 20001" in line) == serves
    assert ("--headless" in launch.argv) == (not serves)
    assert "org/m" in launch.argv
    assert set(launch.env["CUDA_VISIBLE_DEVICES"].split(",")) == {f"GPU-{n}" for n in range(made.profile.gpus)}
    assert ("NCCL_SOCKET_IFNAME" in launch.env) == (made.profile.nodes > 1)
    assert launch.env.get("NCCL_IB_HCA") == ("=mlx5_0:1,mlx5_3:1" if made.fabric and made.fabric.ports else None)
    assert "sk-secret" not in line
    assert "sk-secret" not in str(launch.env)
    for path in made.profile.lora.values():
        assert f"={'' if path.startswith('/') else '/models/'}{path}" in line


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


def test_streams_may_end_before_vllm_does_where_the_version_can_wait() -> None:
    wanted = profile(limits=Limits(stop_s=45.5))
    for version, waits in ((None, False), ("0.16.0", False), ("0.18.0", False), ("0.20.2", True), ("0.32.0+cpu", True)):
        install = EngineInstall(EngineKind.VLLM, COMMANDS[EngineKind.VLLM], version)
        argv = build(spec(wanted, install=install)).argv
        assert argv[-2:] == ("--shutdown-timeout", "45") if waits else "--shutdown-timeout" not in argv


def test_an_argument_that_the_installed_version_lacks_is_refused_before_the_spawn() -> None:
    wanted = profile(args=("--swap-space", "4"))
    installed = EngineInstall(EngineKind.VLLM, COMMANDS[EngineKind.VLLM], "0.32.0+cpu")
    assert build(spec(wanted)).argv[-2:] == ("--swap-space", "4")
    with pytest.raises(OperatorError) as caught:
        build(spec(wanted, install=installed))
    assert "vllm 0.32.0+cpu has no --swap-space: its last version is 0.16.0" in caught.value.reason
    assert "another version of the engine" in caught.value.remedy
    assert build(spec(evolve(wanted, args=("--max-num-seqs", "4")), install=installed))
