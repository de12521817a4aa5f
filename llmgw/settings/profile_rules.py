"""What a profile must satisfy whoever looks at it: the catalog's check, the scheduler, and the agent before a launch.

An engine that refuses a profile does so after minutes of loading, so these are asked early and again late.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from llmgw.settings.bounds import is_line
from llmgw.settings.catalog import EngineKind, Profile
from llmgw.settings.engine_flags import argument_faults, arity, value_fault, version_key
from llmgw.settings.faults import Rule
from llmgw.settings.quantization import FP8, least_capability

MODEL_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._:/-]{0,126}[A-Za-z0-9])?")
"""What clients may ask for; it is part of command lines, metrics labels and file names."""

DEVICE_CLASS = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*-[0-9]+g(?:-mig-[0-9a-z.+-]+)?")

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

LORA_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
"""What clients write behind the model's name and a colon; it stands before an ``=`` on command lines."""

_SGLANG_ADAPTERS = "0.5.6"
"""The first release that surely has the pull request named below, which was merged between 0.5.3 and this one."""

_LORA_PATH = re.compile(r"[^-\s,=\x00-\x1f\x7f][^\s,=\x00-\x1f\x7f]{0,1023}")

_OURS: Mapping[EngineKind, tuple[str, ...]] = {
    EngineKind.VLLM: (
        "--host", "--port", "--uds", "--api-key", "--served-model-name", "--model", "--tensor-parallel-size", "-tp",
        "--pipeline-parallel-size", "-pp", "--nnodes", "-n", "--node-rank", "-r", "--master-addr",
        "--master-port", "--headless",
        "--data-parallel-size", "-dp", "--data-parallel-size-local", "-dpl", "--data-parallel-rank", "-dpn",
        "--data-parallel-start-rank", "-dpr", "--data-parallel-address", "-dpa", "--data-parallel-rpc-port", "-dpp",
        "--data-parallel-external-lb", "-dpe", "--data-parallel-hybrid-lb", "-dph", "-dpm",
        "--data-parallel-multi-port-external-lb", "--enable-expert-parallel", "-ep", "--runner", "--convert", "--task",
        "--lora-modules", "--device-ids", "--grpc", "--ssl-keyfile", "--ssl-certfile", "--root-path", "--tool-server",
        "--config", "--middleware", "--grpc-port", "--data-parallel-supervisor-port", "--no-enable-expert-parallel",
        "--disable-expert-parallel", "--hf-token", "--api-server-count", "-asc", "--disable-log-stats",
        "--shutdown-timeout",
    ),
    EngineKind.SGLANG: (
        "--host", "--port", "--api-key", "--admin-api-key", "--served-model-name", "--model-path", "--model",
        "--tensor-parallel-size", "--tp-size", "--tp", "--pipeline-parallel-size", "--pp-size", "--pp", "--nnodes",
        "--node-rank", "--dist-init-addr", "--nccl-init-addr", "--nccl-port", "--base-gpu-id", "--config",
        "--tool-server", "--enable-metrics", "--data-parallel-size", "--dp-size", "--dp", "--attn-dp-size",
        "--enable-dp-attention", "--expert-parallel-size", "--ep-size", "--ep", "--is-embedding", "--lora-paths",
        "--gpu-id-step", "--grpc-mode", "--smg-grpc-mode", "--grpc-port", "--grpc-http-sidecar-port",
        "--smg-http-sidecar-port", "--engine-info-bootstrap-port", "--gated-launch-port", "--fastapi-root-path",
        "--ssl-keyfile", "--ssl-certfile", "--ssl-keyfile-password", "--enable-http-worker-reuseport",
        "--custom-sigquit-handler", "--enable-custom-logit-processor", "--attention-data-parallel-size",
    ),
    EngineKind.LLAMACPP: (
        "--host", "--port", "--api-key", "--api-key-file", "--alias", "-a", "--model", "-m", "--model-url", "-mu",
        "--hf-repo", "-hf", "-hfr", "--hf-file", "-hff", "--rpc", "--path", "--slot-save-path", "--ssl-key-file",
        "--ssl-cert-file", "--split-mode", "-sm", "--metrics", "--props", "--ctx-size", "-c", "--tools",
        "--webui-mcp-proxy", "--ui-mcp-proxy", "--embedding", "--embeddings", "--rerank", "--reranking",
        "--agent", "-ag", "--mcp-servers-config", "--mcp-servers-json", "--tools-runtime", "--api-prefix",
        "--reuse-port",
        "--device", "-dev", "--list-devices", "--hf-token", "-hft", "--docker-repo", "-dr", "--models-dir",
        "--models-preset", "--embd-gemma-default", "--fim-qwen-1.5b-default", "--fim-qwen-3b-default",
        "--fim-qwen-7b-default", "--fim-qwen-7b-spec", "--fim-qwen-14b-spec", "--fim-qwen-30b-default",
        "--gpt-oss-20b-default", "--gpt-oss-120b-default", "--vision-gemma-4b-default", "--vision-gemma-12b-default",
    ),
}  # fmt: skip
"""Flags that are llmgw's own: where the engine listens and for what, under which name, what it loads, on which devices
and in which groups; whether it counts what it does, by which one that hangs is told, and how long its end may take;
what lets its clients reach more than the model (tools, code of theirs); and tokens, which every user of the node could
read there. llama.cpp's presets bring a model and a port of their own."""

_VOUCHED: Mapping[EngineKind, tuple[str, ...]] = {
    EngineKind.VLLM: (
        "--worker-cls", "--worker-extension-cls", "--scheduler-cls", "--logits-processors",
        "--logits-processor-pattern", "--io-processor-plugin", "--reasoning-parser-plugin", "--tool-parser-plugin",
        "--model-class-overrides",
        "--log-config-file", "--logging-config", "--kv-transfer-config", "--ec-transfer-config", "--profiler-config",
        "--allowed-local-media-path", "--mm-encoder-fp8-scale-save-path", "--download-dir",
    ),
    EngineKind.SGLANG: (
        "--custom-weight-loader", "--forward-hooks", "--sidecar", "--sidecar-args", "--msprobe-dump-config",
        "--delete-ckpt-after-loading", "--debug-tensor-dump-output-folder", "--debug-tensor-dump-inject",
        "--crash-dump-folder", "--export-metrics-to-file-dir", "--file-storage-path", "--log-requests-target",
        "--spec-trace-dir", "--modelopt-checkpoint-save-path", "--modelopt-export-path", "--ple-offload-dir",
        "--download-dir",
    ),
    EngineKind.LLAMACPP: (
        "--log-file", "--log-prompts-dir", "--media-path", "--lookup-cache-dynamic", "-lcd", "--video-ffmpeg-dir",
        "--hf-repo-draft", "-hfrd", "--spec-draft-hf", "-hfd", "--mmproj-url", "-mmu",
    ),
}  # fmt: skip
"""Flags that run code which is not the engine's, write or delete files, open files to clients, or fetch what
``weights.sources`` does not know of. They do what they say once the operator vouches for them in ``allow_args``."""

_OUR_ENV_PREFIXES = ("LLMGW_", "LLAMA_", "LD_")
_OUR_ENV = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "NVIDIA_VISIBLE_DEVICES",
        "GGML_VK_VISIBLE_DEVICES",
        "NCCL_IB_HCA",
        "NCCL_IB_DISABLE",
        "NCCL_IB_GID_INDEX",
        "NCCL_IB_ADDR_RANGE",
        "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
        "VLLM_API_KEY",
        "VLLM_PORT",
        "VLLM_HOST_IP",
        "VLLM_RPC_BASE_PATH",
        "VLLM_SERVER_DEV_MODE",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
        "SGLANG_HOST_IP",
        "SGLANG_PORT",
        "PATH",
        "HOME",
        "PYTHONPATH",
        "PYTHONHOME",
    }
)
"""Variables that decide what llmgw decides, or what is run at all."""


def is_mig(device_class: str) -> bool:
    """Whether this class is of MIG instances."""
    return "-mig-" in device_class


def owned_flag(kind: EngineKind, argument: str) -> str | None:
    """The flag of ours that this argument would set, or ``None``.

    vLLM and SGLang parse with argparse, which takes any unambiguous beginning of a flag, of one with a single dash too,
    a short one's value without a space, and, in vLLM's case, underscores for dashes and ``--flag.key`` for a key of its
    value; so every beginning of a flag of ours counts as it. What stands behind ``--`` is the model.
    """
    if argument == "--":
        return "--model"
    return _one_of(kind, argument, _OURS[kind])


def vouched_flag(kind: EngineKind, argument: str) -> str | None:
    """The flag that this argument would set and that an operator has to vouch for, or ``None``."""
    return _one_of(kind, argument, _VOUCHED[kind])


def _one_of(kind: EngineKind, argument: str, names: Sequence[str]) -> str | None:
    if not argument.startswith("-"):
        return None
    flag = argument.split("=", 1)[0]
    if flag.startswith("--"):
        flag = "--" + flag[2:].replace("_", "-").lower()
        if kind is EngineKind.VLLM:
            flag = flag.partition(".")[0]
    return _named(kind, flag, names)


def _named(kind: EngineKind, flag: str, names: Sequence[str]) -> str | None:
    """Which of these flags the engine would take this for: a whole flag of its own is no other one's beginning."""
    if flag in names:
        return flag
    if kind is EngineKind.LLAMACPP or not flag.strip("-") or arity(kind, flag, None) is not None:
        return None
    # A short one's value may stand right behind it: -n8.
    return next((name for name in names if name.startswith(flag) or (len(name) == 2 and flag.startswith(name))), None)


def arithmetic(profile: Profile) -> Iterator[Rule]:
    """Devices must be exactly as many as the parallel groups need."""
    have, need = profile.nodes * profile.gpus, profile.dp * profile.tp * profile.pp
    for name in ("gpus", "nodes", "dp", "tp", "pp"):
        if getattr(profile, name) < 1:
            yield (name,), f"expected at least 1, found {getattr(profile, name)}", ""
            return
    if have != need:
        nodes = f"{profile.nodes} node{'s' if profile.nodes != 1 else ''}"
        dp = "" if profile.dp == 1 else f"dp {profile.dp} x "
        yield (
            ("gpus",),
            f"{nodes} x {profile.gpus} gpus = {have} devices, but {dp}tp {profile.tp} x pp {profile.pp} = {need}",
            "make nodes x gpus equal to dp x tp x pp" if dp else "make nodes x gpus equal to tp x pp",
        )


def mig(profile: Profile, classes: Sequence[str]) -> Iterator[Rule]:
    """A process opens one MIG device, and instances have no NVLink between them: exactly one a replica."""
    wanted = next((c for c in classes if is_mig(c)), None)
    if wanted is None:
        return
    for name in ("gpus", "nodes", "dp", "tp", "pp"):
        if getattr(profile, name) != 1:
            yield (
                (name,),
                f"is {getattr(profile, name)}, but a replica on {wanted} has exactly one MIG instance",
                f"set {name} to 1, or use whole GPUs",
            )


def quantized(engine: EngineKind, quantization: str | None, capabilities: Mapping[str, int | None]) -> Iterator[Rule]:
    """The cards must be new enough; ``capabilities`` are ten times the version, by what to call the device."""
    least = None if quantization is None else least_capability(engine, quantization)
    if least is None:
        return
    for name, capability in capabilities.items():
        if capability is not None and capability < least:
            newer = "use a device class from Ada or Hopper on (l4, l40s, h100)" if least == FP8 else "use newer cards"
            yield (
                ("quantization",),
                f"{quantization} needs compute capability {_version(least)}, {name} has {_version(capability)}",
                f"{newer}, or another quantization",
            )


def texts(profile: Profile) -> Iterator[Rule]:
    """What goes to the engine as it is written must be one line: a NUL is in no command line and no path."""
    for name, text in (("weights", profile.weights), ("quantization", profile.quantization or "")):
        if not is_line(text, len(text)):
            yield (name,), "contains a control character", "write it in one line"


def offered(profile: Profile, version: str | None = None) -> Iterator[Rule]:
    """The engine must know the quantization: ``version`` is the installed one, without it any that has it will do."""
    if profile.quantization is not None and "--quantization" not in profile.allow_args:
        wrong = value_fault(profile.engine, "--quantization", profile.quantization, version)
        if wrong is not None:
            yield ("quantization",), *wrong


def _version(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


def engine_fit(profile: Profile) -> Iterator[Rule]:
    """What this kind of engine cannot do at all."""
    match profile.engine:
        case EngineKind.LLAMACPP:
            if profile.nodes > 1:
                yield ("nodes",), "llama.cpp runs on one node here", "use vllm or sglang for several nodes"
            if profile.pp > 1:
                yield ("pp",), "llama.cpp has no pipeline parallelism", "set pp to 1 and tp to the number of gpus"
            if profile.dp > 1:
                yield ("dp",), "llama.cpp has no data parallelism", "set dp to 1 and raise replicas"
            if profile.expert_parallel:
                yield ("expert_parallel",), "llama.cpp has no expert parallelism", "remove it"
            if profile.lora:
                yield ("lora",), "llama.cpp gives an adapter no name to ask for", "use vllm or sglang, or merge it"
        case EngineKind.VLLM:
            group = profile.tp * profile.pp
            if profile.dp > 1 and profile.nodes > 1 and profile.gpus % group:
                yield (
                    ("dp",),
                    f"a group of tp {profile.tp} x pp {profile.pp} would reach over nodes of {profile.gpus} gpus",
                    "with dp, make gpus a multiple of tp x pp",
                )
        case EngineKind.SGLANG:
            if profile.dp > 1 and profile.nodes > 1 and not profile.expert_parallel:
                yield (
                    ("dp",),
                    "SGLang has dp on several nodes only for the attention of expert-parallel models",
                    "set expert_parallel, or nodes to 1 and raise replicas",
                )


def adapters(model: str, profile: Profile, version: str | None = None) -> Iterator[Rule]:
    """Adapters are asked for as ``<model>:<name>``; SGLang reads any model's name in this way.

    An older SGLang would answer without the adapter and not say so (https://github.com/sgl-project/sglang/pull/11570).
    """
    old = version is not None and version_key(version) < version_key(_SGLANG_ADAPTERS)
    if profile.engine is EngineKind.SGLANG and profile.lora and old:
        reason = f"sglang {version} does not take <model>:<adapter> for a model"
        yield ("lora",), reason, f"use {_SGLANG_ADAPTERS} or newer, or vllm"
    if profile.engine is EngineKind.SGLANG and ":" in model:
        reason = f"SGLang reads what follows the colon in {model} as the name of an adapter"
        yield ("engine",), reason, "give the model a name without a colon"
    for name, path in profile.lora.items():
        if not LORA_NAME.fullmatch(name):
            yield ("lora", name), "is not an adapter's name", "use up to 64 letters, digits and . _ -"
        elif not MODEL_NAME.fullmatch(f"{model}:{name}"):
            yield ("lora", name), f"{model}:{name} is longer than a model's name may be", "shorten one of the two"
        if not _LORA_PATH.fullmatch(path):
            yield ("lora", name), f"{path!r} is not a path", "name its folder, without spaces, commas and ="


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
        elif (named := vouched_flag(profile.engine, argument)) is not None and named not in profile.allow_args:
            reason = f"{named} runs other code, reaches other files or fetches more than this model needs"
            yield ("args", index), reason, f"remove it, or list {named} in allow_args if you vouch for what it does"
    for name in profile.env:
        if not _ENV_NAME.fullmatch(name):
            yield ("env", name), "is not a name of a variable", "use letters, digits and _"
        elif name in _OUR_ENV or name.startswith(_OUR_ENV_PREFIXES):
            yield ("env", name), "is llmgw's own", "remove it; llmgw sets it"
        elif "\0" in profile.env[name]:
            yield ("env", name), "contains NUL", ""
