"""vLLM's command line and environment (flags as in vLLM 0.11 to 0.33)."""

from __future__ import annotations

from collections.abc import Iterator

from llmgw.engines.base import Launch, ShardSpec, rank_env
from llmgw.engines.weights import adapter_path
from llmgw.settings.catalog import EngineKind, Task
from llmgw.settings.engine_flags import surely_has


def launch(spec: ShardSpec) -> Launch:
    """``vllm serve``: rank 0 serves, further ranks join it without a port of their own.

    The key goes in by ``VLLM_API_KEY``. It guards ``/v1`` only, so the engine listens where the router reaches it and
    nowhere else.
    """
    profile = spec.profile
    weights = spec.weights
    argv = [*spec.install.command, weights.name, "--served-model-name", spec.model]
    if spec.rank == 0:
        argv += ["--host", spec.host, "--port", str(spec.port)]
    argv += ["--tensor-parallel-size", str(profile.tp)]
    if profile.pp > 1:
        argv += ["--pipeline-parallel-size", str(profile.pp)]
    argv += [*_groups(spec), *_task(profile.task), *_adapters(spec)]
    if profile.gpu_memory_utilization is not None:
        argv += ["--gpu-memory-utilization", f"{profile.gpu_memory_utilization:g}"]
    if profile.context_length is not None:
        argv += ["--max-model-len", str(profile.context_length)]
    if profile.quantization is not None:
        argv += ["--quantization", profile.quantization]
    orderly = spec.rank == 0 and surely_has(EngineKind.VLLM, "--shutdown-timeout", spec.install.version)
    if orderly:
        # Open streams then have as long as the whole engine; without it SIGTERM ends them.
        argv += ["--shutdown-timeout", str(max(1, int(profile.limits.stop_s)))]
    env = {**rank_env(spec), "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": spec.host}
    # Its parts meet on unix sockets, which it leaves behind. Relative to where it runs, the shard's private folder:
    # they go with that, and no path is too long for a socket.
    env["VLLM_RPC_BASE_PATH"] = "."
    if weights.local:
        env["HF_HUB_OFFLINE"] = "1"
    return Launch(
        argv=(*argv, *profile.args),
        env={**profile.env, **env},
        host=spec.host,
        port=spec.port,
        ready_name=spec.model,
        secrets={} if spec.api_key is None else {"VLLM_API_KEY": spec.api_key},
        api_key=spec.api_key,
        orderly=orderly,
    )


def _groups(spec: ShardSpec) -> Iterator[str]:
    """How the devices of all nodes work together.

    Data-parallel groups have one API process in front of them, which a shard's metrics and adapters are asked of.
    Over several nodes each has whole groups (:func:`llmgw.settings.profile_rules.engine_fit`).
    """
    profile = spec.profile
    if profile.dp > 1:
        yield from ("--data-parallel-size", str(profile.dp))
        if spec.rank == 0:
            yield from ("--api-server-count", "1")
        if profile.nodes > 1:
            here = profile.gpus // (profile.tp * profile.pp)
            yield from ("--data-parallel-size-local", str(here))
            yield from ("--data-parallel-address", spec.meeting.host)
            yield from ("--data-parallel-rpc-port", str(spec.meeting.port))
            if spec.rank > 0:
                yield from ("--headless", "--data-parallel-start-rank", str(spec.rank * here))
    elif profile.nodes > 1:
        yield from ("--nnodes", str(profile.nodes), "--node-rank", str(spec.rank))
        yield from ("--master-addr", spec.meeting.host, "--master-port", str(spec.meeting.port))
        if spec.rank > 0:
            yield "--headless"
    if profile.expert_parallel:
        yield "--enable-expert-parallel"


def _task(task: Task) -> Iterator[str]:
    """Pooling is what it calls both. A model that only generates can be made to embed, and not to rank."""
    if task is not Task.GENERATE:
        yield from ("--runner", "pooling")
    if task is Task.EMBED:
        yield from ("--convert", "embed")


def _adapters(spec: ShardSpec) -> Iterator[str]:
    """Every adapter under the name that clients ask for, all of them at work in one batch."""
    lora = spec.profile.lora
    if lora:
        yield from ("--enable-lora", "--max-loras", str(len(lora)), "--lora-modules")
        yield from (f"{spec.model}:{name}={adapter_path(path, spec.weights_dir)}" for name, path in lora.items())
