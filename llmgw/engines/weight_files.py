"""What the files of a model say of its size: bytes in, values out.

Formats: ``config.json`` and ``model.safetensors.index.json`` as Hugging Face writes them
(https://huggingface.co/docs/transformers/main_classes/configuration), the header of a safetensors file
(https://github.com/huggingface/safetensors#format), and GGUF in :mod:`llmgw.engines.gguf`. Whoever reads the files
bounds what it reads; everything else in them may be hostile.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from llmgw.errors import OperatorError
from llmgw.settings.weight_facts import CacheShape

CONFIG_BYTES = 4 * 1024 * 1024
INDEX_BYTES = 64 * 1024 * 1024
HEADER_BYTES = 32 * 1024 * 1024
"""The most that is read of each: the largest public ones are far below."""

LARGEST = 2**52
"""No number in these files means anything beyond this: four petabytes."""

_MOST_LAYERS = 100_000

# Where multimodal models keep the language model's own configuration.
_INNER = ("text_config", "llm_config", "language_config", "thinker_config")

# Elements of these kinds by their size in bits; kinds that are not listed here are not counted as parameters.
_BITS: Mapping[str, int] = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip


class WeightsError(OperatorError):
    """A file of a model is not what its name says."""


@frozen
class Tensors:
    """What a safetensors header adds up to: bytes, elements, and the dtype that most of them have."""

    size: int
    parameters: int
    dtype: str


@frozen
class Config:
    """What ``config.json`` says; what it does not say is ``None`` or empty."""

    cache: CacheShape | None
    context_length: int | None
    dtype: str
    quantization: str


def _object(data: bytes, thing: str, most: int) -> dict[str, Any]:
    if len(data) > most:
        raise WeightsError(thing, f"has more than {most} bytes", "")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as wrong:
        raise WeightsError(thing, f"is no JSON: {type(wrong).__name__}", "fetch the weights again") from wrong
    if not isinstance(found, dict):
        raise WeightsError(thing, "is no JSON object", "fetch the weights again")
    return found


def _count(value: Any, most: int = LARGEST) -> int | None:
    """A number of something: whole, positive and believable, else ``None``."""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most else None


def _first(found: Mapping[str, Any], *names: str, most: int = LARGEST) -> int | None:
    return next((n for name in names if (n := _count(found.get(name), most)) is not None), None)


def read_index(data: bytes, thing: str = "model.safetensors.index.json") -> tuple[int, frozenset[str]]:
    """The size of all tensors by ``metadata.total_size``, and the names of the files that hold them.

    Raises :class:`WeightsError`.
    """
    found = _object(data, thing, INDEX_BYTES)
    metadata, files = found.get("metadata"), found.get("weight_map")
    size = _count(metadata.get("total_size")) if isinstance(metadata, dict) else None
    if size is None:
        raise WeightsError(thing, "has no believable metadata.total_size", "fetch the weights again")
    names = files.values() if isinstance(files, dict) else ()
    return size, frozenset(name for name in names if isinstance(name, str))


def header_length(data: bytes, thing: str = "model.safetensors") -> int:
    """How long a safetensors header is, by the first eight bytes of the file. Raises :class:`WeightsError`."""
    if len(data) < 8:
        raise WeightsError(thing, "is shorter than its own length", "fetch the weights again")
    (length,) = struct.unpack_from("<Q", data)
    if not 2 <= length <= HEADER_BYTES:
        raise WeightsError(thing, f"has a header of {length} bytes, up to {HEADER_BYTES} are read", "")
    return int(length)


def read_header(data: bytes, thing: str = "model.safetensors") -> Tensors:
    """A safetensors header, without its length. Raises :class:`WeightsError`."""
    found = _object(data, thing, HEADER_BYTES)
    size = parameters = 0
    of_kind: dict[str, int] = {}
    for name, tensor in found.items():
        if name == "__metadata__":
            continue
        kind, shape = (tensor.get("dtype"), tensor.get("shape")) if isinstance(tensor, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(shape, list):
            raise WeightsError(thing, f"tensor {name[:60]!r} has no dtype and shape", "fetch the weights again")
        elements = 1
        for side in shape:
            if not isinstance(side, int) or isinstance(side, bool) or not 0 <= side <= LARGEST:
                raise WeightsError(thing, f"tensor {name[:60]!r} has no believable shape", "fetch the weights again")
            elements = min(elements * side, LARGEST)
        if (bits := _BITS.get(kind)) is None:
            raise WeightsError(thing, f"tensor {name[:60]!r} is of the unknown kind {kind[:20]!r}", "")
        size += (elements * bits + 7) // 8
        parameters += elements
        of_kind[kind] = of_kind.get(kind, 0) + elements
    if not of_kind or not 0 < size <= LARGEST:
        raise WeightsError(thing, "has no believable size", "fetch the weights again")
    return Tensors(size, parameters, max(of_kind, key=lambda kind: of_kind[kind]).lower())


def read_config(data: bytes, thing: str = "config.json") -> Config:
    """What a Hugging Face configuration says of memory. Raises :class:`WeightsError` where it is no such file.

    Values that make no sense count as not said.
    """
    outer = _object(data, thing, CONFIG_BYTES)
    inner = outer
    for name in (*_INNER, *_INNER):  # some have one within another
        if isinstance(inner.get(name), dict):
            inner = inner[name]
    found = {**outer, **inner}
    quantization = found.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    dtype = found.get("dtype", found.get("torch_dtype"))
    return Config(
        cache=_cache(found, quantization if isinstance(quantization, dict) else {}),
        context_length=_first(found, "max_position_embeddings", "n_positions", "seq_length", "max_sequence_length"),
        dtype=dtype.removeprefix("torch.")[:20] if isinstance(dtype, str) else "",
        quantization=method[:30] if isinstance(method, str) else "",
    )


def _cache(found: Mapping[str, Any], quantization: Mapping[str, Any]) -> CacheShape | None:
    layers = _first(found, "num_hidden_layers", "n_layer", "n_layers", "num_layers", most=_MOST_LAYERS)
    if layers is None:
        return None
    heads = _first(found, "num_attention_heads", "n_head", "n_heads")
    latent, rotary = _first(found, "kv_lora_rank"), _first(found, "qk_rope_head_dim")
    attention, windowed = _attention(found, layers)
    window = _first(found, "sliding_window", "attention_chunk_size", "sliding_window_size") or 0
    asked = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
    shared: dict[str, Any] = {
        "layers": attention,
        "all_layers": layers,
        "window_layers": windowed if window else 0,
        "window": window if windowed else 0,
        "dtype": "fp8" if asked else "",
    }
    if latent is not None:
        return CacheShape(kv_heads=1, key_dim=0, value_dim=0, latent_dim=latent + (rotary or 0), **shared)
    kv_heads = _first(found, "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num") or heads
    if found.get("multi_query") is True and "num_kv_heads" not in found and "multi_query_group_num" not in found:
        kv_heads = 1
    dim = _first(found, "head_dim", "kv_channels")
    hidden = _first(found, "hidden_size", "n_embd", "d_model")
    if dim is None and hidden is not None and heads is not None:
        dim = hidden // heads
    if not dim or not kv_heads:
        return None
    return CacheShape(kv_heads=kv_heads, key_dim=dim, value_dim=_first(found, "v_head_dim") or dim, **shared)


def _attention(found: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """How many layers have attention, and how many of these keep a window only."""
    for name in ("layer_types", "layers_block_type"):
        kinds = found.get(name)
        if isinstance(kinds, list) and len(kinds) == layers:
            return _of_kinds(kinds)
    kinds = found.get("hybrid_override_pattern")
    if isinstance(kinds, str) and len(kinds) == layers:
        return kinds.count("*"), 0
    if isinstance(found.get("attn_layer_indices"), list):
        return min(len(found["attn_layer_indices"]), layers), 0
    every = _first(found, "attn_layer_period", "full_attention_interval")
    if every is not None:
        return max(1, layers // every), 0
    if found.get("sliding_window") is None or found.get("use_sliding_window") is False:
        return layers, 0
    # One in so many layers sees everything (Gemma 3); every second one (Gemma 2); else none does (Mistral 0.1).
    every = _first(found, "sliding_window_pattern")
    if every is None and str(found.get("model_type", "")).startswith("gemma2"):
        every = 2
    return layers, layers if every is None else layers - layers // every


def _of_kinds(kinds: Sequence[Any]) -> tuple[int, int]:
    words = [kind if isinstance(kind, str) else "" for kind in kinds]
    window = sum("sliding" in w or "chunked" in w for w in words)
    whole = sum(w in ("full_attention", "attention", "hybrid") for w in words)
    return whole + window, window
