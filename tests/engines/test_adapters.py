from __future__ import annotations

import pytest
from attrs import evolve

from llmgw.engines.checks import refusals
from llmgw.engines.registry import build
from llmgw.engines.weights import weights_of
from llmgw.errors import OperatorError
from llmgw.hardware.inventory import Device, Fault
from llmgw.settings.catalog import EngineKind, Limits, Profile
from llmgw.settings.daemon import EngineInstall
from tests.engines.specs import COMMANDS, device, profile, spec


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
    assert launch.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
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
        (profile(weights="/models/w\0"), (device(0),), "weights: contains a control character"),
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


def test_streams_may_end_before_vllm_does_where_the_version_can_wait() -> None:
    wanted = profile(limits=Limits(stop_s=45.5))
    for version, waits in ((None, False), ("0.16.0", False), ("0.18.0", False), ("0.20.2", True), ("0.32.0+cpu", True)):
        install = EngineInstall(EngineKind.VLLM, COMMANDS[EngineKind.VLLM], version)
        argv = build(spec(wanted, install=install)).argv
        assert build(spec(wanted, install=install)).orderly == waits
        assert argv[-2:] == ("--shutdown-timeout", "45") if waits else "--shutdown-timeout" not in argv


def test_a_quantization_that_the_installed_version_lacks_is_refused_before_the_spawn() -> None:
    made = spec(profile(EngineKind.SGLANG, quantization="mxfp4"))
    install = EngineInstall(EngineKind.SGLANG, ("python", "-m", "sglang.launch_server"), "0.4.6.post5")
    said = "quantization: sglang 0.4.6.post5 does not take 'mxfp4' for --quantization: it came by 0.5.2"
    with pytest.raises(OperatorError, match=said):
        build(evolve(made, install=install))
    vouched = evolve(made.profile, allow_args=("--quantization",))
    assert "mxfp4" in build(evolve(made, profile=vouched, install=install)).argv


def test_an_argument_that_the_installed_version_lacks_is_refused_before_the_spawn() -> None:
    wanted = profile(args=("--swap-space", "4"))
    installed = EngineInstall(EngineKind.VLLM, COMMANDS[EngineKind.VLLM], "0.32.0+cpu")
    assert build(spec(wanted)).argv[-2:] == ("--swap-space", "4")
    with pytest.raises(OperatorError) as caught:
        build(spec(wanted, install=installed))
    assert "vllm 0.32.0+cpu has no --swap-space: its last version is 0.16.0" in caught.value.reason
    assert "another version of the engine" in caught.value.remedy
    assert build(spec(evolve(wanted, args=("--max-num-seqs", "4")), install=installed))
