"""SGLang's command line and environment (flags as in SGLang 0.4.6 to 0.5.23, always written in full)."""

from __future__ import annotations

from llmgw.engines.base import Launch, ShardSpec, cuda_env
from llmgw.engines.weights import weights_of

_PROBE_S = 25.0
"""SGLang's /health generates a token and may take 20 s before it says 503."""


def launch(spec: ShardSpec) -> Launch:
    """``sglang.launch_server`` on one node.

    It gets no key: SGLang takes one on the command line only, where every user of the node can read it.
    """
    profile = spec.profile
    weights = weights_of(profile.weights, profile.engine, spec.weights_dir)
    argv = [
        *spec.install.command,
        "--model-path", weights.name,
        "--served-model-name", spec.model,
        "--host", spec.host,
        "--port", str(spec.port),
        "--tp-size", str(profile.tp),
        "--enable-metrics",
    ]  # fmt: skip
    if profile.pp > 1:
        argv += ["--pp-size", str(profile.pp)]
    if profile.gpu_memory_utilization is not None:
        argv += ["--mem-fraction-static", f"{profile.gpu_memory_utilization:g}"]
    if profile.context_length is not None:
        argv += ["--context-length", str(profile.context_length)]
    if profile.quantization is not None:
        argv += ["--quantization", profile.quantization]
    env = {**cuda_env(spec.devices), "SGLANG_HOST_IP": spec.host}
    if weights.local:
        env["HF_HUB_OFFLINE"] = "1"
    return Launch(
        argv=(*argv, *profile.args),
        env={**profile.env, **env},
        host=spec.host,
        port=spec.port,
        ready_name=spec.model,
        probe_timeout_s=_PROBE_S,
    )
