"""A tiny random language model, made on the spot, so that a real engine has something to run on a CPU.

    python fakes/tiny_model.py DIR [LAYERS]

writes ``DIR/tiny.gguf`` for llama-server and ``DIR/hf`` for vLLM: the same Llama architecture with less than half a
million weights, drawn from a fixed seed. Its answers are made-up words; the rows of the ending token are zero, so that
an answer practically always goes on to ``max_tokens``. More layers than two are these two over and over: for answers
that take their time.

Formats: GGUF version 3 (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), safetensors
(https://github.com/huggingface/safetensors#format). Standard library only.
"""

from __future__ import annotations

import itertools
import json
import random
import struct
import sys
from array import array
from pathlib import Path
from typing import Any

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, CONTEXT = 2, 128, 4, 2, 32, 256, 512, 4096
SPECIAL = ("<unk>", "<s>", "</s>")
SPACE = "\u2581"  # how SentencePiece spells a space

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

Tensor = tuple[tuple[int, ...], "array[float]"]


def vocabulary() -> list[str]:
    """Special tokens, every byte, the printable characters, and words of two syllables."""
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, *(chr(c) for c in range(33, 127))]
    syllables = [a + b for a, b in itertools.product("bdfgklmnprstvz", "aeiou")]
    words = (f"{SPACE}{first}{second}" for first, second in itertools.product(syllables, syllables[::-1]))
    tokens += itertools.islice(words, VOCAB - len(tokens))
    return tokens


def tensors(layers: int = LAYERS) -> dict[str, Tensor]:
    """Weights by their Hugging Face names, row by row."""
    source = random.Random(20261201)

    def normal(rows: int, columns: int, scale: float = 1.0, zero_rows: int = 0) -> Tensor:
        spread = scale / columns**0.5
        values = array("f", (source.gauss(0.0, spread) for _ in range(rows * columns)))
        values[: zero_rows * columns] = array("f", bytes(4 * zero_rows * columns))
        return (rows, columns), values

    def ones(count: int) -> Tensor:
        return (count,), array("f", [1.0] * count)

    made = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN, 8.0),
        "model.norm.weight": ones(HIDDEN),
        # Words only: the rows of special tokens and bytes are zero, and lose against any other.
        "lm_head.weight": normal(VOCAB, HIDDEN, 4.0, zero_rows=len(SPECIAL) + 256),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        made[prefix + "self_attn.q_proj.weight"] = normal(HEADS * HEAD_DIM, HIDDEN)
        made[prefix + "self_attn.k_proj.weight"] = normal(KV_HEADS * HEAD_DIM, HIDDEN)
        made[prefix + "self_attn.v_proj.weight"] = normal(KV_HEADS * HEAD_DIM, HIDDEN)
        made[prefix + "self_attn.o_proj.weight"] = normal(HIDDEN, HEADS * HEAD_DIM)
        made[prefix + "mlp.gate_proj.weight"] = normal(FFN, HIDDEN)
        made[prefix + "mlp.up_proj.weight"] = normal(FFN, HIDDEN)
        made[prefix + "mlp.down_proj.weight"] = normal(HIDDEN, FFN)
        made[prefix + "input_layernorm.weight"] = ones(HIDDEN)
        made[prefix + "post_attention_layernorm.weight"] = ones(HIDDEN)
    for name in list(made):
        for layer in range(LAYERS, layers):
            own = f"model.layers.{layer % LAYERS}."
            if name.startswith(own):
                made[name.replace(own, f"model.layers.{layer}.")] = made[name]
    return made


# Hugging Face


def bf16(values: array[float]) -> bytes:
    """float32 as bfloat16: its upper half."""
    return array("H", values.tobytes())[1::2].tobytes()


def safetensors(weights: dict[str, Tensor]) -> bytes:
    """One file: length of the header, header, and the tensors without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, offset = [], 0
    for name, (shape, values) in sorted(weights.items()):
        raw = bf16(values)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + len(raw)]}
        blobs.append(raw)
        offset += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(blobs)


def layers_of(weights: dict[str, Tensor]) -> int:
    """How many layers these weights have."""
    return sum(name.endswith("input_layernorm.weight") for name in weights)


def hugging_face(tokens: list[str], weights: dict[str, Tensor]) -> dict[str, bytes]:
    """The files of a model's folder."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": layers_of(weights),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    added = [
        {"id": at, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for at, text in enumerate(SPECIAL)
    ]  # fmt: skip
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, spaces]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: at for at, token in enumerate(tokens)},
            "merges": [],
        },
    }
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {**names, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT,
                "chat_template": CHAT_TEMPLATE}  # fmt: skip
    return {
        "config.json": json.dumps(config, indent=1).encode(),
        "generation_config.json": json.dumps({"bos_token_id": 1, "eos_token_id": 2}).encode(),
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
        "special_tokens_map.json": json.dumps(names).encode(),
        "model.safetensors": safetensors(weights),
    }


# GGUF

_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_ALIGNMENT = 32
_UNKNOWN, _CONTROL, _BYTE, _NORMAL = 2, 3, 6, 1
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return _string(value)
    return struct.pack({_U32: "<I", _I32: "<i", _F32: "<f", _BOOL: "<?"}[kind], value)


def _entry(key: str, kind: int, value: Any) -> bytes:
    return _string(key) + struct.pack("<I", kind) + _value(kind, value)


def _list(key: str, kind: int, values: list[Any]) -> bytes:
    head = _string(key) + struct.pack("<IIQ", _ARRAY, kind, len(values))
    return head + b"".join(_value(kind, v) for v in values)


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor."""
    base = name.removesuffix(".weight")
    if base.startswith("model.layers."):
        _, _, layer, rest = base.split(".", 3)
        return f"blk.{layer}.{_NAMES[rest]}.weight"
    return f"{_NAMES[base]}.weight"


def gguf(tokens: list[str], weights: dict[str, Tensor]) -> bytes:
    """One file: header, metadata, tensor infos, and the tensors, each aligned."""
    kinds = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256]
    kinds += [_NORMAL] * (len(tokens) - len(kinds))
    scores = [0.0 if at < 259 else -float(at) for at in range(len(tokens))]
    metadata = [
        _entry("general.architecture", _STRING, "llama"),
        _entry("general.name", _STRING, "tiny-random"),
        _entry("general.file_type", _U32, 0),
        _entry("llama.context_length", _U32, CONTEXT),
        _entry("llama.embedding_length", _U32, HIDDEN),
        _entry("llama.block_count", _U32, layers_of(weights)),
        _entry("llama.feed_forward_length", _U32, FFN),
        _entry("llama.attention.head_count", _U32, HEADS),
        _entry("llama.attention.head_count_kv", _U32, KV_HEADS),
        _entry("llama.attention.key_length", _U32, HEAD_DIM),
        _entry("llama.attention.value_length", _U32, HEAD_DIM),
        _entry("llama.attention.layer_norm_rms_epsilon", _F32, 1e-5),
        _entry("llama.rope.dimension_count", _U32, HEAD_DIM),
        _entry("llama.rope.freq_base", _F32, 10000.0),
        _entry("llama.vocab_size", _U32, VOCAB),
        _entry("tokenizer.ggml.model", _STRING, "llama"),
        _list("tokenizer.ggml.tokens", _STRING, tokens),
        _list("tokenizer.ggml.scores", _F32, scores),
        _list("tokenizer.ggml.token_type", _I32, kinds),
        _entry("tokenizer.ggml.bos_token_id", _U32, 1),
        _entry("tokenizer.ggml.eos_token_id", _U32, 2),
        _entry("tokenizer.ggml.unknown_token_id", _U32, 0),
        _entry("tokenizer.ggml.add_bos_token", _BOOL, True),
        _entry("tokenizer.chat_template", _STRING, CHAT_TEMPLATE),
    ]
    infos, blobs, offset = [], [], 0
    for name, (shape, values) in weights.items():
        raw = values.tobytes()
        raw += bytes(-len(raw) % _ALIGNMENT)
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos.append(_string(gguf_name(name)) + dimensions + struct.pack("<IQ", 0, offset))
        blobs.append(raw)
        offset += len(raw)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(metadata)) + b"".join(metadata) + b"".join(infos)
    return head + bytes(-len(head) % _ALIGNMENT) + b"".join(blobs)


def write(folder: Path, layers: int = LAYERS) -> None:
    """Write both forms of the model below ``folder``."""
    tokens, weights = vocabulary(), tensors(layers)
    (folder / "hf").mkdir(parents=True, exist_ok=True)
    for name, content in hugging_face(tokens, weights).items():
        (folder / "hf" / name).write_bytes(content)
    (folder / "tiny.gguf").write_bytes(gguf(tokens, weights))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: tiny_model.py DIR [LAYERS]")
    write(Path(sys.argv[1]), *map(int, sys.argv[2:]))
