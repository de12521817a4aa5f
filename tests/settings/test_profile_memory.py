from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.settings.catalog import EngineKind, Profile
from llmgw.settings.faults import ConfigError
from llmgw.settings.load import load_settings
from llmgw.settings.memory import GIB, Amount, Estimate, arithmetic_of, class_mib, estimate, memory_faults, remedy_of
from llmgw.settings.weight_facts import CacheShape, WeightFacts

INDEX = "model.safetensors.index.json"
# From the models' public config.json and index files.
LLAMA_70B = WeightFacts("l", 141_107_412_992, INDEX, None, "bfloat16", "", CacheShape(80, 80, 8, 128, 128), 131_072)
LLAMA_8B = WeightFacts("s", 16_060_522_496, INDEX, None, "bfloat16", "", CacheShape(32, 32, 8, 128, 128), 131_072)
DEEPSEEK_V3 = WeightFacts(
    "d", 688_586_727_753, INDEX, None, "bfloat16", "fp8", CacheShape(61, 61, 1, 0, 0, 576), 163_840
)
H100_MIB = 81_559
KIB = 1024


def profile(tp: int = 1, engine: EngineKind = EngineKind.VLLM, **more: object) -> Profile:
    return evolve(Profile("p", engine, "l", ("h100-80g",), gpus=tp, tp=tp), **more)


def of(facts: WeightFacts | None, tp: int = 1, engine: EngineKind = EngineKind.VLLM, **more: object) -> Estimate:
    found = estimate(profile(tp, engine, **more), facts)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("facts", "tp", "per_token"),
    [
        (LLAMA_70B, 1, 320 * KIB),  # 2 x 80 layers x 8 heads x 128 x 2 bytes
        (LLAMA_70B, 4, 80 * KIB),
        (LLAMA_70B, 8, 40 * KIB),
        (LLAMA_70B, 16, 40 * KIB),  # beyond the 8 heads they are copied
        (LLAMA_8B, 1, 128 * KIB),
        (DEEPSEEK_V3, 1, 61 * 576 * 2),  # compressed, and whole on each device
        (DEEPSEEK_V3, 8, 61 * 576 * 2),
    ],
)
def test_a_token_of_known_models(facts: WeightFacts, tp: int, per_token: int) -> None:
    assert of(facts, tp, context_length=1000).cache.size == 1000 * per_token


def test_one_gib_of_cache_of_a_tiny_model_is_two_million_tokens() -> None:
    """As vLLM said of a model with 2 layers, 2 heads of 32: ``GPU KV cache size: 2,097,152 tokens``."""
    tiny = WeightFacts("t", 853_248, "model.safetensors", cache=CacheShape(2, 2, 2, 32, 32))
    assert of(tiny, context_length=2_097_152).cache.size == GIB


def test_the_sentence_has_the_whole_arithmetic() -> None:
    found = of(LLAMA_70B, context_length=8192)
    assert not found.fits(H100_MIB)
    assert arithmetic_of(found, H100_MIB) == (
        "needs 136.4 GiB on each device: weights 131.4 (131.4 GiB by model.safetensors.index.json)"
        " + KV cache 2.5 (8192 tokens x 320 KiB in 16 bits) + overhead 2.5 (vllm: context, graphs, activations);"
        " a device has 79.6 GiB x 0.92 (vllm's own share) = 73.3 usable"
    )
    assert of(LLAMA_70B, 2, context_length=8192).fits(H100_MIB)
    assert not of(LLAMA_70B, 2, context_length=131_072).fits(H100_MIB)
    assert of(LLAMA_70B, 4).cache.how == "131072 tokens (the model's longest) x 80 KiB in 16 bits, over tp 4"


def test_the_remedy_names_what_would_help() -> None:
    def remedy(**more: object) -> str:
        return remedy_of(profile(**more), of(LLAMA_8B, **more)).partition(";")[0]

    others = "raise tp, use quantized weights, use a device class with more memory"
    assert remedy(context_length=100) == others
    assert remedy() == f"set context_length, {others}"
    assert remedy(context_length=32_768) == f"lower context_length, {others}"
    assert remedy(context_length=8192, concurrency=9) == f"lower context_length or lower concurrency, {others}"
    mig = remedy_of(profile(device_class=("h100-80g-mig-1g.10gb",), quantization="fp8"), of(LLAMA_8B, context_length=1))
    assert mig.partition(";")[0] == "use a device class with more memory"


def test_concurrency_and_the_kind_of_cache() -> None:
    assert of(LLAMA_8B, context_length=4096, concurrency=8).cache.size == 4 * GIB
    assert of(LLAMA_8B, context_length=4096, args=("--kv-cache-dtype", "fp8_e4m3")).cache.size == GIB // 4
    assert of(LLAMA_8B, context_length=4096, args=("--kv_cache_dtype=fp8",)).cache.size == GIB // 4
    asked = evolve(LLAMA_8B, cache=evolve(LLAMA_8B.cache, dtype="fp8"))
    assert of(asked, context_length=4096).cache.size == GIB // 4
    llama = of(LLAMA_8B, engine=EngineKind.LLAMACPP, context_length=4096, concurrency=8)
    assert llama.cache.size == GIB // 2, "its slots share the context that it is given"
    quantized = of(LLAMA_8B, engine=EngineKind.LLAMACPP, context_length=4096, args=("-ctk", "q8_0", "-ctv", "q8_0"))
    assert quantized.cache.size == GIB // 2 * 34 // 64
    assert quantized.cache.how == "4096 tokens x 68 KiB in q8_0"


def test_only_vllm_insists_on_the_models_longest_context() -> None:
    assert of(LLAMA_8B).cache.size == 16 * GIB
    for engine in (EngineKind.SGLANG, EngineKind.LLAMACPP):
        assert of(LLAMA_8B, engine=engine).cache == Amount(0, "not counted: no context_length")
    assert of(LLAMA_8B, args=("--max-model-len", "auto")).cache.how == "not counted: context auto"
    assert of(LLAMA_8B, args=("--max-model-len", "4k")).cache.how.startswith("4000 tokens ")
    assert of(LLAMA_8B, args=("--max-model-len", "4K")).cache.how.startswith("4096 tokens ")


def test_windows_and_layers_without_attention() -> None:
    gemma = WeightFacts("g", 1, "f", cache=CacheShape(62, 62, 16, 128, 128, window_layers=52, window=1024))
    found = of(gemma, context_length=131_072).cache
    assert found.size == (52 * 1024 + 10 * 131_072) * 2 * 16 * 128 * 2
    assert "52 layers keep 1024" in found.how
    short = of(gemma, context_length=512).cache
    assert short.size == 62 * 512 * 2 * 16 * 128 * 2
    hybrid = WeightFacts("h", 1, "f", cache=CacheShape(12, 48, 2, 256, 256))
    assert of(hybrid, context_length=1000).cache.size == 1000 * 12 * 2 * 2 * 256 * 2


def test_stages_have_whole_layers() -> None:
    seven = WeightFacts("w", 7 * GIB, "f", cache=CacheShape(7, 7, 1, 64, 64))
    found = of(seven, gpus=4, tp=2, pp=2, context_length=1)
    assert found.weights.size == 2 * GIB  # 4 of 7 layers, over two
    assert found.weights.how == "7.0 GiB by f, over tp 2 x pp 2"
    assert found.cache.size == 4 * 2 * 64 * 2
    by_layer = of(seven, 2, EngineKind.LLAMACPP, context_length=1)
    assert (by_layer.weights.size, by_layer.cache.size) == (4 * GIB, 4 * 2 * 64 * 2)


def test_parameters_stand_in_until_somebody_has_the_weights() -> None:
    found = of(None, parameters=70_600_000_000, context_length=8192)
    assert found.weights.size == 141_200_000_000
    assert found.weights.how == "70.6e9 parameters in 16 bits"
    assert found.cache.how == "not counted: the model's layers are not known"
    for word, size in (("fp8", 1.0), ("awq", 0.5), ("w4a8", 0.5), ("int8", 1.0)):
        assert of(None, parameters=10**9, quantization=word).weights.size == size * 10**9
    assert of(LLAMA_8B, parameters=1).weights.size == LLAMA_8B.weights_bytes, "files know better"
    assert estimate(profile(), None) is None
    assert estimate(profile(engine=EngineKind.LLAMACPP, parameters=10**9), None) is None


def test_what_is_done_to_weights_while_they_load() -> None:
    assert of(LLAMA_8B, quantization="fp8").weights.size == 8_030_261_248
    assert of(DEEPSEEK_V3, 8, quantization="fp8").weights.size == 688_586_727_753 // 8, "they are fp8 already"
    wide = evolve(LLAMA_8B, dtype="float32")
    assert of(wide).weights.size == 8_030_261_248
    assert of(wide, args=("--dtype", "float32")).weights.size == 16_060_522_496


def test_arguments_after_which_nobody_can_tell() -> None:
    assert estimate(profile(args=("--cpu-offload-gb", "20")), LLAMA_70B) is None
    assert estimate(profile(8, dp=2, gpus=16, expert_parallel=True), DEEPSEEK_V3) is None
    assert estimate(profile(8, dp=2, gpus=16), DEEPSEEK_V3) == estimate(profile(8), DEEPSEEK_V3)
    assert estimate(profile(engine=EngineKind.LLAMACPP, args=("-ngl", "10")), LLAMA_70B) is None
    assert estimate(profile(args=("-ngl", "10")), LLAMA_70B) is not None


def test_shares_and_overheads() -> None:
    assert (of(LLAMA_8B).share, of(LLAMA_8B, gpu_memory_utilization=0.5).share) == (0.92, 0.5)
    assert of(LLAMA_8B, args=("--gpu-memory-utilization=0.8",), gpu_memory_utilization=0.5).share == 0.8
    assert of(LLAMA_8B, args=("--gpu-memory-utilization", "0")).share == 0.92, "that is not for us to judge"
    assert of(LLAMA_8B, engine=EngineKind.SGLANG).overhead.size == 0, "its share is of weights and cache alone"
    assert of(LLAMA_8B, engine=EngineKind.LLAMACPP, gpu_memory_utilization=0.5).share == 1.0, "it has no such thing"
    assert of(LLAMA_8B, args=("--enforce-eager",)).overhead.size == 2 * GIB
    own = of(LLAMA_8B, args=("--kv-cache-memory-bytes", "1000"))
    assert (own.cache.size, own.share) == (0, 1.0)


shapes = st.builds(
    CacheShape,
    layers=st.integers(1, 40), all_layers=st.just(40), kv_heads=st.integers(1, 64), key_dim=st.integers(1, 256),
    value_dim=st.integers(1, 256), latent_dim=st.sampled_from((0, 0, 576)), window_layers=st.just(1),
    window=st.integers(0, 4096),
)  # fmt: skip
facts = st.builds(
    WeightFacts, name=st.just("w"), weights_bytes=st.integers(1, 2**50), source=st.just("f"),
    dtype=st.sampled_from(("", "bfloat16", "float32")), cache=st.none() | shapes,
    context_length=st.none() | st.integers(1, 2**21),
)  # fmt: skip
engines = st.sampled_from(EngineKind)


@given(facts, engines, st.integers(1, 2**20), st.integers(1, 2**20), st.integers(1, 64))
def test_a_longer_context_never_needs_less(
    facts: WeightFacts, engine: EngineKind, short: int, more: int, concurrency: int
) -> None:
    one = of(facts, engine=engine, context_length=short)
    other = of(facts, engine=engine, context_length=short + more, concurrency=concurrency)
    assert other.needed >= one.needed
    assert other.least_mib >= one.least_mib


@given(facts, engines, st.integers(1, 16), st.integers(1, 2**20), st.integers(1, 2**20))
def test_more_devices_never_need_more_on_each(
    facts: WeightFacts, engine: EngineKind, tp: int, context: int, total: int
) -> None:
    # By doubling: seven ways of eight heads need as much on the fullest device as eight of them.
    one = of(facts, tp, engine, context_length=context)
    other = of(facts, 2 * tp, engine, context_length=context)
    assert other.needed <= one.needed
    assert one.fits(total) == (one.needed <= total * 1024**2 * one.share + 1e-3) or abs(total - one.least_mib) <= 1


@given(facts, st.integers(1, 2**50))
def test_larger_weights_never_need_less(facts: WeightFacts, more: int) -> None:
    assert facts.weights_bytes is not None
    assert of(evolve(facts, weights_bytes=facts.weights_bytes + more)).needed >= of(facts).needed


def test_settings_that_cannot_fit_are_refused_with_the_arithmetic() -> None:
    text = """
models:
  m:
    profiles:
      - {name: p, engine: vllm, weights: /w, device_class: [b200-179g, h100-80g], parameters: 70600000000}
"""
    with pytest.raises(ConfigError) as refused:
        load_settings(text)
    (fault,) = refused.value.faults
    assert "h100-80g is too small: needs 134.0 GiB on each device: weights 131.5 (70.6e9 parameters" in str(fault)
    assert load_settings(text.replace("}\n", ", memory_gib: 70}\n")), "who says how much it needs is believed"
    assert load_settings(text.replace("}\n", ", gpus: 2, tp: 2}\n"))
    with pytest.raises(ConfigError, match=r"70\.6e9 parameters"):
        load_settings(text.replace("70600000000", "70.6e9"))
    for key in ("parameters", "concurrency"):
        with pytest.raises(ConfigError, match=f"{key}: expected at least 1, found 0"):
            load_settings(text.replace("parameters: 70600000000", f"{key}: 0"))


def test_the_size_in_a_class_name_is_rounded_up_to_what_it_may_be() -> None:
    assert class_mib("h100-80g") == 80 * 1024 + 512
    assert class_mib("a100-80g-mig-3g.40gb") == 40 * 1024 + 512
    assert class_mib("h100-80g-mig-1g.10gb.me") == 10 * 1024 + 512
    assert class_mib("h100") is None
    assert not list(memory_faults(profile(parameters=10**12, device_class=("h100",))))
