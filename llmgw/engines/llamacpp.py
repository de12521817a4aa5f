"""llama.cpp's server: command line and environment (flags as in b11434)."""

from __future__ import annotations

from llmgw.engines.base import Launch, ShardSpec, cuda_env
from llmgw.settings.catalog import Task

_TASK = {Task.GENERATE: (), Task.EMBED: ("--embeddings",), Task.RERANK: ("--rerank",)}


def launch(spec: ShardSpec) -> Launch:
    """``llama-server`` on one node.

    Several devices split the model by layer, which is what llama.cpp does best over PCIe. A ping every second makes
    it notice within a second that a client has gone, and end streams promptly when it is stopped.
    """
    profile = spec.profile
    weights = spec.weights
    argv = [
        *spec.install.command,
        "--model", weights.name,
        "--alias", spec.model,
        "--host", spec.host,
        "--port", str(spec.port),
        "--n-gpu-layers", "99",
        "--metrics",
        "--sse-ping-interval", "1",
        *_TASK[profile.task],
    ]  # fmt: skip
    if profile.tp > 1:
        argv += ["--split-mode", "layer"]
    if profile.context_length is not None:
        argv += ["--ctx-size", str(profile.context_length)]
    return Launch(
        argv=(*argv, *profile.args),
        env={**profile.env, **cuda_env(spec.devices)},
        host=spec.host,
        port=spec.port,
        ready_name=spec.model,
        secrets={} if spec.api_key is None else {"LLAMA_API_KEY": spec.api_key},
        api_key=spec.api_key,
    )
