"""The head of a GGUF file: what it says of layers and heads (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

How large the weights are the file's own size says; the head holds the vocabulary as well, so only its beginning is
read, and what stands behind that counts as not said.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from llmgw.engines.weight_files import LARGEST, Config, WeightsError
from llmgw.settings.weight_facts import CacheShape

HEAD_BYTES = 16 * 1024 * 1024
"""How much of the file is looked at."""

_STRING, _ARRAY = 8, 9
_PLAIN: Mapping[int, str] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_MOST_KEYS = 4096
_LONGEST_KEPT = 1024
_MOST_LAYERS = 100_000

Value = int | float | bool | str | tuple[int | float | bool, ...] | None


class _End(Exception):
    """The bytes are over."""


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, form: str) -> int | float | bool:
        size = struct.calcsize(form)
        if self._at + size > len(self._data):
            raise _End
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += size
        return value  # type: ignore[no-any-return]

    def skip(self, size: int) -> None:
        if self._at + size > len(self._data):
            raise _End
        self._at += size

    def text(self) -> str:
        length = int(self.take("<Q"))
        begin = self._at
        self.skip(length)
        return self._data[begin : min(self._at, begin + _LONGEST_KEPT)].decode(errors="replace")

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.take(_form(kind))
        inner, count = int(self.take("<I")), int(self.take("<Q"))
        if inner == _STRING:
            # Each string says how long it is, so a count that lies ends with the bytes.
            for _ in range(count):
                self.skip(int(self.take("<Q")))
            return None
        form = _form(inner)
        if count <= _LONGEST_KEPT:
            return tuple(self.take(form) for _ in range(count))
        self.skip(count * struct.calcsize(form))
        return None


def _form(kind: int) -> str:
    if (form := _PLAIN.get(kind)) is None:
        raise WeightsError("GGUF", f"has a value of the unknown kind {kind}", "fetch the file again")
    return form


def read_gguf(data: bytes, thing: str = "GGUF") -> Config:
    """What the head says of the cache; ``data`` is the beginning of the file. Raises :class:`WeightsError`."""
    reader = _Reader(data[:HEAD_BYTES])
    said: dict[str, Value] = {}
    try:
        magic, version = reader.take("<I"), reader.take("<I")
        if magic != int.from_bytes(b"GGUF", "little") or version not in (2, 3):
            raise WeightsError(thing, "is no GGUF file of version 2 or 3", "fetch the file again")
        reader.skip(8)  # how many tensors there are
        for _ in range(min(int(reader.take("<Q")), _MOST_KEYS)):
            name = reader.text()
            said[name] = reader.value(int(reader.take("<I")))
    except _End:
        if not said:
            raise WeightsError(thing, "ends before it says anything", "fetch the file again") from None
    return _config(said)


def _config(said: Mapping[str, Value]) -> Config:
    kind = said.get("general.architecture")

    def number(*names: str) -> int | None:
        for name in names:
            value = said.get(f"{kind}.{name}")
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST:
                return value
        return None

    layers, heads = number("block_count"), number("attention.head_count")
    per_layer = said.get(f"{kind}.attention.head_count_kv")
    window = number("attention.sliding_window") or 0
    cache = None
    if layers is not None and layers <= _MOST_LAYERS:
        kv_heads, attention = number("attention.head_count_kv") or heads, layers
        if isinstance(per_layer, tuple):
            some = [int(n) for n in per_layer if isinstance(n, int) and 0 < n <= LARGEST]
            # Layers without a head keep nothing. The fewest heads of the others: what fits must not be refused.
            kv_heads, attention = (min(some), len(some)) if some else (None, layers)
        width = number("embedding_length")
        dim = width // heads if width is not None and heads is not None else None
        latent, rotary = number("attention.kv_lora_rank"), number("rope.dimension_count")
        if latent is not None:
            cache = CacheShape(attention, layers, 1, 0, 0, latent_dim=latent + (rotary or 0))
        elif kv_heads is not None and (key := number("attention.key_length") or dim):
            cache = CacheShape(
                layers=attention,
                all_layers=layers,
                kv_heads=kv_heads,
                key_dim=key,
                value_dim=number("attention.value_length") or dim or key,
                # Which layers have it the file does not say: all, for the same reason.
                window_layers=attention if window else 0,
                window=window,
            )
    return Config(cache, number("context_length"), "", "")
