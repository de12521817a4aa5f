"""vLLM's command line and environment (flags as in vLLM 0.11 to 0.33)."""

from __future__ import annotations

from llmgw.engines.base import Launch, ShardSpec, cuda_env
from llmgw.engines.weights import weights_of


def launch(spec: ShardSpec) -> Launch:
    """``vllm serve`` on one node; tensor and pipeline parallel over its devices.

    The key goes in by ``VLLM_API_KEY``. It guards ``/v1`` only, so the engine listens where the router reaches it and
    nowhere else.
    """
    profile = spec.profile
    weights = weights_of(profile.weights, profile.engine, spec.weights_dir)
    argv = [
        *spec.install.command, weights.name,
        "--served-model-name", spec.model,
        "--host", spec.host,
        "--port", str(spec.port),
        "--tensor-parallel-size", str(profile.tp),
    ]  # fmt: skip
    if profile.nodes > 1 and spec.rendezvous is not None:
        argv += ["--nnodes", str(profile.nodes), "--node-rank", str(spec.rank)]
        argv += ["--master-addr", spec.rendezvous.host, "--master-port", str(spec.rendezvous.port)]
        if spec.rank > 0:
            argv += ["--headless"]
    if profile.pp > 1:
        argv += ["--pipeline-parallel-size", str(profile.pp)]
    if profile.gpu_memory_utilization is not None:
        argv += ["--gpu-memory-utilization", f"{profile.gpu_memory_utilization:g}"]
    if profile.context_length is not None:
        argv += ["--max-model-len", str(profile.context_length)]
    if profile.quantization is not None:
        argv += ["--quantization", profile.quantization]
    env = {**cuda_env(spec.devices), "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": spec.host}
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
    )
