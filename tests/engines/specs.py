"""Shards to build launches of: one by one, and any that validates."""

from __future__ import annotations

from typing import Any

from attrs import evolve
from hypothesis import assume
from hypothesis import strategies as st

from llmgw.engines.base import ShardSpec
from llmgw.hardware.inventory import AdapterKind, Device, Fabric, FabricPort
from llmgw.settings.catalog import EngineKind, Profile, Task
from llmgw.settings.daemon import Address, EngineInstall
from llmgw.settings.engine_flag_tables import VERSIONS
from llmgw.settings.profile_rules import LORA_NAME, adapters
from llmgw.settings.validate import profile_faults

FABRIC = Fabric("rack-1", AdapterKind.INFINIBAND, (FabricPort("mlx5_0", 1), FabricPort("mlx5_3", 1)))
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
