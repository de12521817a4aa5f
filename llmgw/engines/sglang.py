"""SGLang's command line and environment (flags as in SGLang 0.4.6 to 0.5.23, always written in full)."""

from __future__ import annotations

from collections.abc import Iterator

from llmgw.engines.base import Launch, ShardSpec, rank_env
from llmgw.engines.weights import adapter_path
from llmgw.settings.catalog import EngineKind, Profile, Task
from llmgw.settings.engine_flags import surely_has

_PROBE_S = 25.0
"""SGLang's /health generates a token and may take 20 s before it says 503."""

_KEY_FILE = "sglang.yaml"

_PORTS_ABOVE = 233
_PORTS_BESIDE_GROUPS = 8


def inner_ports(profile: Profile, port: int, rendezvous: int | None) -> range:
    """The ports that its processes meet on when the attention runs in groups; they cannot be told otherwise.

    From 233 above its own on one node, from the one behind the rendezvous over several (``PortArgs.init_new``).
    """
    if profile.dp == 1 or not profile.expert_parallel:
        return range(0)
    first = port + _PORTS_ABOVE if rendezvous is None else rendezvous + 1
    return range(first, first + _PORTS_BESIDE_GROUPS + profile.dp)


def launch(spec: ShardSpec) -> Launch:
    """``sglang.launch_server``: rank 0 serves; further ranks answer ``/health`` only, and that always with 200.

    A key goes in by a file of arguments in the shard's folder. Versions without ``--config``, and unknown ones, get
    none: they take it on the command line only, where every user of the node can read it.
    """
    profile = spec.profile
    weights = spec.weights
    by_file = spec.rank == 0 and surely_has(EngineKind.SGLANG, "--config", spec.install.version)
    api_key = spec.api_key if by_file else None
    argv = [
        *spec.install.command,
        "--model-path", weights.name,
        "--served-model-name", spec.model,
        "--host", spec.host,
        "--port", str(spec.port),
        *_groups(spec),
        "--enable-metrics",
    ]  # fmt: skip
    if profile.task is not Task.GENERATE:
        argv += ["--is-embedding"]
    if profile.lora:
        argv += ["--lora-paths"]
        argv += [f"{name}={adapter_path(path, spec.weights_dir)}" for name, path in profile.lora.items()]
    if profile.gpu_memory_utilization is not None:
        argv += ["--mem-fraction-static", f"{profile.gpu_memory_utilization:g}"]
    if profile.context_length is not None:
        argv += ["--context-length", str(profile.context_length)]
    if profile.quantization is not None:
        argv += ["--quantization", profile.quantization]
    if api_key is not None:
        argv += ["--config", _KEY_FILE]
    env = {**rank_env(spec), "SGLANG_HOST_IP": spec.host}
    if weights.local:
        env["HF_HUB_OFFLINE"] = "1"
    return Launch(
        argv=(*argv, *profile.args),
        env={**profile.env, **env},
        host=spec.host,
        port=spec.port,
        ready_name=spec.model,
        files={} if api_key is None else {_KEY_FILE: f'api-key: "{api_key}"\n'},
        api_key=api_key,
        probe_timeout_s=_PROBE_S,
    )


def _groups(spec: ShardSpec) -> Iterator[str]:
    """How the devices of all nodes work together.

    Its ``--dp-size`` alone makes replicas of ``--tp-size`` devices each. With experts spread over all devices the
    groups are of the attention only, and ``--tp-size`` counts the devices of all of them.
    """
    profile = spec.profile
    shared = profile.dp * profile.tp if profile.expert_parallel else profile.tp
    yield from ("--tp-size", str(shared))
    if profile.pp > 1:
        yield from ("--pp-size", str(profile.pp))
    if profile.expert_parallel:
        yield from ("--ep-size", str(shared))
        if surely_has(EngineKind.SGLANG, "--enable-ep-moe", spec.install.version):
            yield "--enable-ep-moe"  # an old version has experts apart only when told so as well
    if profile.dp > 1:
        if not profile.expert_parallel:
            yield from ("--dp-size", str(profile.dp))
        elif surely_has(EngineKind.SGLANG, "--attn-dp-size", spec.install.version):
            yield from ("--attn-dp-size", str(profile.dp))
        else:
            # Deprecated since 0.5.22 and in every version so far.
            yield from ("--dp-size", str(profile.dp), "--enable-dp-attention")
    if profile.nodes > 1:
        yield from ("--nnodes", str(profile.nodes), "--node-rank", str(spec.rank))
        yield from ("--dist-init-addr", str(spec.meeting))
