from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import tiny_model
from llmgw.engines.gguf import read_gguf
from llmgw.engines.weight_files import (
    HEADER_BYTES,
    LARGEST,
    Config,
    Tensors,
    WeightsError,
    header_length,
    read_config,
    read_header,
    read_index,
)
from llmgw.settings.weight_facts import CacheShape


def config(**fields: Any) -> Config:
    return read_config(json.dumps(fields).encode())


def shape(**fields: Any) -> CacheShape:
    found = config(**fields).cache
    assert found is not None
    return found


LLAMA_70B = {
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip


# config.json of public models, by the fields that matter.


def test_a_dense_model_with_grouped_heads() -> None:
    assert config(**LLAMA_70B) == Config(CacheShape(80, 80, 8, 128, 128), 131072, "bfloat16", "")


def test_a_model_whose_heads_are_not_the_hidden_size_over_their_number() -> None:
    qwen3 = shape(hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    assert (qwen3.kv_heads, qwen3.key_dim, qwen3.value_dim) == (8, 128, 128)
    wide = shape(num_hidden_layers=48, num_attention_heads=64, num_key_value_heads=4, head_dim=192, v_head_dim=128)
    assert (wide.key_dim, wide.value_dim) == (192, 128)


def test_a_compressed_cache() -> None:
    found = config(
        hidden_size=7168, num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128, kv_lora_rank=512,
        qk_rope_head_dim=64, v_head_dim=128, max_position_embeddings=163840, torch_dtype="bfloat16",
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    )  # fmt: skip
    assert found == Config(CacheShape(61, 61, 1, 0, 0, 576), 163840, "bfloat16", "fp8")


def test_models_that_name_things_otherwise() -> None:
    gpt2 = config(n_layer=12, n_head=12, n_embd=768, n_positions=1024)
    assert gpt2 == Config(CacheShape(12, 12, 12, 64, 64), 1024, "", "")
    falcon = shape(num_hidden_layers=32, num_attention_heads=71, hidden_size=4544, multi_query=True)
    assert (falcon.kv_heads, falcon.key_dim) == (1, 64)
    glm = shape(num_layers=40, num_attention_heads=32, hidden_size=4096, kv_channels=128, multi_query_group_num=2,
                multi_query_attention=True)  # fmt: skip
    assert (glm.layers, glm.kv_heads, glm.key_dim) == (40, 2, 128)
    assert config(dtype="torch.float16", num_hidden_layers=1).dtype == "float16"


def test_the_language_model_within_another() -> None:
    assert config(text_config=LLAMA_70B, vision_config={"num_hidden_layers": 24}).cache == CacheShape(
        80, 80, 8, 128, 128
    )
    omni = config(thinker_config={"text_config": LLAMA_70B}, quantization_config={"quant_method": "awq"})
    assert (omni.cache, omni.quantization) == (CacheShape(80, 80, 8, 128, 128), "awq")


@pytest.mark.parametrize(
    ("fields", "attention", "windowed", "window"),
    [
        ({"sliding_window": 4096}, 32, 32, 4096),  # Mistral 0.1
        ({"sliding_window": None}, 32, 0, 0),
        ({"sliding_window": 32768, "use_sliding_window": False}, 32, 0, 0),  # Qwen 2
        ({"sliding_window": 4096, "model_type": "gemma2"}, 32, 16, 4096),
        ({"sliding_window": 1024, "sliding_window_pattern": 6}, 32, 27, 1024),  # Gemma 3
        ({"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 16}, 32, 16, 128),  # gpt-oss
        ({"attention_chunk_size": 8192, "layer_types": (["chunked_attention"] * 3 + ["full_attention"]) * 8}, 32, 24, 8192),
        ({"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8}, 8, 0, 0),  # Qwen 3 Next
        ({"full_attention_interval": 4}, 8, 0, 0),
        ({"attn_layer_period": 8, "attn_layer_offset": 4}, 4, 0, 0),  # Jamba
        ({"attn_layer_indices": [9, 18, 27]}, 3, 0, 0),  # Bamba
        ({"layers_block_type": ["mamba"] * 30 + ["hybrid"] * 2}, 2, 0, 0),  # Zamba 2
        ({"hybrid_override_pattern": "M-M*" * 8}, 8, 0, 0),  # Nemotron-H
        ({"layer_types": ["sliding_attention"] * 32}, 32, 0, 0),  # without a window's size nothing is saved
        ({"layer_types": ["full_attention"]}, 32, 0, 0),  # of another number of layers
    ],
)  # fmt: skip
def test_which_layers_keep_what(fields: dict[str, Any], attention: int, windowed: int, window: int) -> None:
    found = shape(num_hidden_layers=32, num_attention_heads=8, hidden_size=1024, **fields)
    assert (found.layers, found.all_layers, found.window_layers, found.window) == (attention, 32, windowed, window)


def test_a_cache_that_the_files_ask_to_be_small() -> None:
    for asked in ({"kv_cache_scheme": {"num_bits": 8}}, {"kv_cache_quant_algo": "FP8"}):
        assert shape(**LLAMA_70B, quantization_config={"quant_method": "x", **asked}).dtype == "fp8"
    assert shape(**LLAMA_70B, quantization_config={"kv_cache_scheme": None}).dtype == ""


def test_what_makes_no_sense_is_not_said() -> None:
    for nonsense in (0, -1, True, "80", None, [80], 1e300, float(LARGEST) * 2, 10**30):
        assert config(**{**LLAMA_70B, "num_hidden_layers": nonsense}).cache is None
        assert config(max_position_embeddings=nonsense).context_length is None
    assert config(**{**LLAMA_70B, "num_hidden_layers": 10**9}).cache is None, "nobody counts through that many layers"
    assert config(num_hidden_layers=2, num_attention_heads=8, hidden_size=4).cache is None, "heads of no size"
    assert config(num_hidden_layers=80.0, num_attention_heads=64, hidden_size=8192).cache is not None


# Index and header.


def test_an_index() -> None:
    text = {"metadata": {"total_size": 141107412992}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    assert read_index(json.dumps(text).encode()) == (141107412992, {"1.safetensors", "2.safetensors"})
    text["metadata"]["total_size"] = 141107412992.0  # some tools write it so
    assert read_index(json.dumps(text).encode())[0] == 141107412992


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b"\xff", b"{}", b'{"metadata": 3}', b'{"metadata": {"total_size": -5}}', b"[" * 100_000]
)
def test_a_broken_index_is_named(text: bytes) -> None:
    with pytest.raises(WeightsError, match=r"^/w/index: "):
        read_index(text, "/w/index")


def test_a_header() -> None:
    tensors = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [10, 20], "data_offsets": [0, 400]},
        "b": {"dtype": "F32", "shape": [], "data_offsets": [400, 404]},
        "c": {"dtype": "F4", "shape": [3], "data_offsets": [404, 406]},
    }
    assert read_header(json.dumps(tensors).encode()) == Tensors(406, 204, "bf16")


def test_files_that_we_wrote_ourselves(tmp_path: Path) -> None:
    tiny_model.write(tmp_path)
    data = (tmp_path / "hf/model.safetensors").read_bytes()
    length = header_length(data[:8])
    assert read_header(data[8 : 8 + length]).size == len(data) - 8 - length
    said = read_config((tmp_path / "hf/config.json").read_bytes())
    assert (said.cache, said.context_length) == (CacheShape(2, 2, 2, 32, 32), 4096)
    data = (tmp_path / "tiny.gguf").read_bytes()
    assert read_gguf(data) == Config(CacheShape(2, 2, 2, 32, 32), 4096, "", "")
    assert read_gguf(data[:1000]) == read_gguf(data), "what is needed stands before the vocabulary"


@pytest.mark.parametrize(
    "tensor",
    [3, {}, {"dtype": "BF16"}, {"dtype": "BF16", "shape": 3}, {"dtype": "BF16", "shape": [-1]},
     {"dtype": "BF16", "shape": [True]}, {"dtype": "Q7", "shape": [1]}, {"dtype": "F64", "shape": [10**9, 10**9]},
     {"dtype": 5, "shape": [1]}],
)  # fmt: skip
def test_a_broken_header_is_named(tensor: object) -> None:
    with pytest.raises(WeightsError, match=r"^/w/file: "):
        read_header(json.dumps({"t": tensor}).encode(), "/w/file")


@pytest.mark.parametrize(
    "data", [b"", b"1234567", struct.pack("<Q", 0), struct.pack("<Q", HEADER_BYTES + 1), b"\xff" * 8]
)
def test_a_header_of_no_believable_length(data: bytes) -> None:
    with pytest.raises(WeightsError):
        header_length(data)


# GGUF.


def gguf(*pairs: tuple[str, Any], version: int = 3, count: int | None = None) -> bytes:
    kinds = {bool: tiny_model._BOOL, int: tiny_model._U32, str: tiny_model._STRING}
    body = b"".join(
        tiny_model._list(key, tiny_model._I32, value)
        if isinstance(value, list)
        else tiny_model._entry(key, kinds[type(value)], value)
        for key, value in pairs
    )
    return b"GGUF" + struct.pack("<IQQ", version, 1, len(pairs) if count is None else count) + body


def test_a_gguf_with_heads_by_layer_and_a_window() -> None:
    found = read_gguf(
        gguf(
            ("general.architecture", "x"), ("x.block_count", 4), ("x.attention.head_count", 8),
            ("x.embedding_length", 1024), ("x.attention.head_count_kv", [0, 4, 2, 0]),
            ("x.attention.sliding_window", 512), ("x.context_length", 8192),
        )
    )  # fmt: skip
    assert found == Config(CacheShape(2, 4, 2, 128, 128, window_layers=2, window=512), 8192, "", "")


def test_a_gguf_with_a_compressed_cache() -> None:
    found = read_gguf(
        gguf(
            ("general.architecture", "deepseek2"), ("deepseek2.block_count", 61),
            ("deepseek2.attention.kv_lora_rank", 512), ("deepseek2.rope.dimension_count", 64),
        )
    )  # fmt: skip
    assert found.cache == CacheShape(61, 61, 1, 0, 0, 576)


@pytest.mark.parametrize("data", [b"", b"GGUF", b"GGML" + bytes(60), gguf(version=9), gguf(("a", 1))[:30]])
def test_what_is_no_gguf_is_named(data: bytes) -> None:
    with pytest.raises(WeightsError, match=r"^/w/m.gguf: "):
        read_gguf(data, "/w/m.gguf")


def test_a_gguf_without_anything_of_use() -> None:
    assert read_gguf(gguf(("general.architecture", "x"), ("x.block_count", 4))).cache is None
    assert (
        read_gguf(gguf(("general.architecture", "x"), ("x.block_count", 10**6), ("x.attention.head_count", 1))).cache
        is None
    )
    assert read_gguf(gguf(count=2**60)[:24] + gguf(("general.architecture", "x"))[24:]).cache is None


# Anything at all.

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYS = (
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "kv_lora_rank",
    "qk_rope_head_dim", "sliding_window", "layer_types", "layers_block_type", "attn_layer_period", "text_config",
    "quantization_config", "sliding_window_pattern", "attn_layer_indices", "hybrid_override_pattern", "dtype",
    "torch_dtype", "max_position_embeddings", "multi_query", "model_type", "thinker_config", "v_head_dim",
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(KEYS), json_values | st.integers(1, 200)))
def test_any_config_is_read_or_named(fields: dict[str, Any]) -> None:
    found = read_config(json.dumps(fields).encode()).cache
    if found is not None:
        assert 0 <= found.window_layers <= found.layers <= found.all_layers
        assert found.latent_dim > 0 or min(found.kv_heads, found.key_dim, found.value_dim) > 0


@given(st.binary(max_size=200) | json_values.map(lambda v: json.dumps(v).encode()))
def test_any_bytes_are_read_or_named(data: bytes) -> None:
    for reader in (read_config, read_index, read_header, header_length):
        try:
            reader(data, "/w")  # type: ignore[operator]
        except WeightsError as wrong:
            assert wrong.thing == "/w"


@given(st.binary(max_size=300), st.booleans())
def test_any_gguf_is_read_or_named(data: bytes, begun: bool) -> None:
    try:
        read_gguf(b"GGUF" + struct.pack("<IQQ", 3, 1, 9) + data if begun else data)
    except WeightsError:
        return


@given(st.data())
def test_a_gguf_that_was_damaged_is_read_or_named(data: st.DataObject) -> None:
    whole = bytearray(
        gguf(
            ("general.architecture", "x"), ("x.block_count", 4), ("x.attention.head_count", 8),
            ("x.embedding_length", 1024), ("x.attention.head_count_kv", [4, 2]),
        )
    )  # fmt: skip
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_gguf(bytes(whole))
    except WeightsError:
        return
