"""What a profile must satisfy whoever looks at it: the catalog's check, the scheduler, and the agent before a launch.

An engine that refuses a profile does so after minutes of loading, so these are asked early and again late.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from llmgw.settings.catalog import EngineKind, Profile
from llmgw.settings.engine_flags import argument_faults
from llmgw.settings.faults import Path

Rule = tuple[Path, str, str]
"""Path within the profile, what is wrong, and what to do."""

MODEL_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._:/-]{0,126}[A-Za-z0-9])?")
"""What clients may ask for; it is part of command lines, metrics labels and file names."""

DEVICE_CLASS = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*-[0-9]+g(?:-mig-[0-9a-z.+-]+)?")

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

FP8_CAPABILITY = 89
"""Ten times the least compute capability with fp8 units (Ada)."""

_OURS: Mapping[EngineKind, tuple[str, ...]] = {
    EngineKind.VLLM: (
        "--host", "--port", "--uds", "--api-key", "--served-model-name", "--model", "--tensor-parallel-size", "-tp",
        "--pipeline-parallel-size", "-pp", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--headless",
        "--data-parallel-address", "--device-ids", "--grpc", "--ssl-keyfile", "--ssl-certfile", "--root-path",
        "--tool-server", "--config", "--middleware",
    ),
    EngineKind.SGLANG: (
        "--host", "--port", "--api-key", "--admin-api-key", "--served-model-name", "--model-path", "--model",
        "--tensor-parallel-size", "--tp-size", "--tp", "--pipeline-parallel-size", "--pp-size", "--pp", "--nnodes",
        "--node-rank", "--dist-init-addr", "--nccl-port", "--base-gpu-id", "--config", "--tool-server",
        "--enable-metrics",
    ),
    EngineKind.LLAMACPP: (
        "--host", "--port", "--api-key", "--api-key-file", "--alias", "-a", "--model", "-m", "--model-url", "-mu",
        "--hf-repo", "-hf", "-hfr", "--hf-file", "-hff", "--rpc", "--path", "--slot-save-path", "--ssl-key-file",
        "--ssl-cert-file", "--split-mode", "-sm", "--metrics", "--props", "--ctx-size", "-c", "--tools",
        "--webui-mcp-proxy",
    ),
}  # fmt: skip
"""Flags that are llmgw's own: where the engine listens, under which name, what it loads and on which devices."""

_OUR_ENV_PREFIXES = ("LLMGW_", "LLAMA_", "LD_")
_OUR_ENV = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "NVIDIA_VISIBLE_DEVICES",
        "VLLM_API_KEY",
        "VLLM_PORT",
        "VLLM_HOST_IP",
        "VLLM_RPC_BASE_PATH",
        "VLLM_SERVER_DEV_MODE",
        "SGLANG_HOST_IP",
        "SGLANG_PORT",
        "PATH",
        "HOME",
    }
)
"""Variables that decide what llmgw decides, or what is run at all."""


def is_mig(device_class: str) -> bool:
    """Whether this class is of MIG instances."""
    return "-mig-" in device_class


def owned_flag(kind: EngineKind, argument: str) -> str | None:
    """The flag of ours that this argument would set, or ``None``.

    vLLM and SGLang parse with argparse, which takes any unambiguous beginning of a long flag and, in vLLM's case,
    underscores for dashes; so every beginning of a flag of ours counts as that flag.
    """
    if not argument.startswith("-"):
        return None
    flag = argument.split("=", 1)[0]
    if flag.startswith("--"):
        flag = "--" + flag[2:].replace("_", "-").lower()
    for ours in _OURS[kind]:
        if flag == ours:
            return ours
        abbreviates = (
            kind is not EngineKind.LLAMACPP and len(flag) > 3 and flag.startswith("--") and ours.startswith(flag)
        )
        if abbreviates:
            return ours
    return None


def arithmetic(profile: Profile) -> Iterator[Rule]:
    """Devices must be exactly as many as the parallel groups need."""
    have, need = profile.nodes * profile.gpus, profile.tp * profile.pp
    for name in ("gpus", "nodes", "tp", "pp"):
        if getattr(profile, name) < 1:
            yield (name,), f"expected at least 1, found {getattr(profile, name)}", ""
            return
    if have != need:
        nodes = f"{profile.nodes} node{'s' if profile.nodes != 1 else ''}"
        yield (
            ("gpus",),
            f"{nodes} x {profile.gpus} gpus = {have} devices, but tp {profile.tp} x pp {profile.pp} = {need}",
            "make nodes x gpus equal to tp x pp",
        )


def mig(profile: Profile, classes: Sequence[str]) -> Iterator[Rule]:
    """A process opens one MIG device, and instances have no NVLink between them: exactly one a replica."""
    wanted = next((c for c in classes if is_mig(c)), None)
    if wanted is None:
        return
    for name in ("gpus", "nodes", "tp", "pp"):
        if getattr(profile, name) != 1:
            yield (
                (name,),
                f"is {getattr(profile, name)}, but a replica on {wanted} has exactly one MIG instance",
                f"set {name} to 1, or use whole GPUs",
            )


def fp8(quantization: str | None, capabilities: Mapping[str, int | None]) -> Iterator[Rule]:
    """fp8 needs compute capability 8.9; ``capabilities`` are ten times the version, by what to call the device."""
    if quantization is None or "fp8" not in quantization.lower():
        return
    for name, capability in capabilities.items():
        if capability is not None and capability < FP8_CAPABILITY:
            yield (
                ("quantization",),
                f"{quantization} needs compute capability 8.9, {name} has {capability // 10}.{capability % 10}",
                "use a device class from Ada or Hopper on (l4, l40s, h100), or another quantization",
            )


def engine_fit(profile: Profile) -> Iterator[Rule]:
    """What this kind of engine cannot do at all."""
    if profile.engine is EngineKind.LLAMACPP:
        if profile.nodes > 1:
            yield ("nodes",), "llama.cpp runs on one node here", "use vllm or sglang for several nodes"
        if profile.pp > 1:
            yield ("pp",), "llama.cpp has no pipeline parallelism", "set pp to 1 and tp to the number of gpus"


def arguments(profile: Profile, version: str | None = None) -> Iterator[Rule]:
    """Extra arguments and variables may not take over what llmgw decides, and the engine must understand them.

    ``version`` is the installed engine's; without it an argument that any version has will do.
    """
    ours = {i for i, argument in enumerate(profile.args) if owned_flag(profile.engine, argument) is not None}
    for index, problem, hint in argument_faults(profile.engine, profile.args, profile.allow_args, version):
        if index not in ours:
            yield ("args", index), problem, hint
    for index, flag in enumerate(profile.allow_args):
        if (owned := owned_flag(profile.engine, flag)) is not None:
            yield ("allow_args", index), f"{flag} is llmgw's own ({owned})", "remove it; llmgw sets it"
    for index, argument in enumerate(profile.args):
        if "\0" in argument or "\n" in argument:
            yield ("args", index), "contains a line break or NUL", "write one argument an item"
        elif (owned := owned_flag(profile.engine, argument)) is not None:
            yield ("args", index), f"{argument} is llmgw's own ({owned})", "remove it; llmgw sets it"
    for name in profile.env:
        if not _ENV_NAME.fullmatch(name):
            yield ("env", name), "is not a name of a variable", "use letters, digits and _"
        elif name in _OUR_ENV or name.startswith(_OUR_ENV_PREFIXES):
            yield ("env", name), "is llmgw's own", "remove it; llmgw sets it"
        elif "\0" in profile.env[name]:
            yield ("env", name), "contains NUL", ""
