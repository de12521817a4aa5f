"""The tiny model's files hold together by the formats' own rules; a real llama-server answers from them."""

from __future__ import annotations

import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from fakes import tiny_model
from fakes.tiny_model import SPECIAL, VOCAB, gguf_name, vocabulary, write


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write(folder)
    return folder


def test_the_vocabulary_is_whole() -> None:
    tokens = vocabulary()
    assert len(tokens) == len(set(tokens)) == VOCAB
    assert tuple(tokens[:3]) == SPECIAL


def test_safetensors_tile_their_file(model: Path) -> None:
    raw = (model / "hf/model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    at = 0
    for entry in sorted(header.values(), key=lambda e: e["data_offsets"]):
        first, last = entry["data_offsets"]
        assert first == at
        assert last - first == 2 * math.prod(entry["shape"])
        at = last
    assert 8 + length + at == len(raw)
    assert set(header) == set(tiny_model.tensors())


class Reader:
    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0

    def take(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.raw, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        length = self.take("<Q")
        self.at += length
        return self.raw[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.string()
        if kind == 9:
            inner = self.take("<I")
            return [self.value(inner) for _ in range(self.take("<Q"))]
        return self.take({4: "<I", 5: "<i", 6: "<f", 7: "<?"}[kind])


def test_gguf_reads_back(model: Path) -> None:
    reader = Reader((model / "tiny.gguf").read_bytes())
    assert reader.raw[:4] == b"GGUF"
    reader.at = 4
    version, tensors, entries = reader.take("<I"), reader.take("<Q"), reader.take("<Q")
    assert version == 3
    metadata = {reader.string(): reader.value(reader.take("<I")) for _ in range(entries)}
    assert metadata["general.architecture"] == "llama"
    assert metadata["tokenizer.ggml.tokens"] == vocabulary()
    infos = []
    for _ in range(tensors):
        name = reader.string()
        shape = [reader.take("<Q") for _ in range(reader.take("<I"))]
        infos.append((name, shape, reader.take("<I"), reader.take("<Q")))
    start = reader.at + -reader.at % 32
    end = 0
    for _name, shape, kind, offset in infos:
        assert (kind, offset % 32, offset) == (0, 0, end)
        end = offset + 4 * math.prod(shape) + -(4 * math.prod(shape)) % 32
    assert start + end == len(reader.raw)
    assert {n for n, *_ in infos} == {gguf_name(n) for n in tiny_model.tensors()}


def test_every_making_is_the_same(model: Path, tmp_path: Path) -> None:
    write(tmp_path)
    for path in (p for p in model.rglob("*") if p.is_file()):
        assert path.read_bytes() == (tmp_path / path.relative_to(model)).read_bytes()


def test_more_layers_are_the_first_two_again(tmp_path: Path) -> None:
    write(tmp_path, 5)
    assert json.loads((tmp_path / "hf/config.json").read_text())["num_hidden_layers"] == 5
    weights = tiny_model.tensors(5)
    assert tiny_model.layers_of(weights) == 5
    for name in ("self_attn.q_proj.weight", "input_layernorm.weight"):
        assert weights[f"model.layers.4.{name}"] == weights[f"model.layers.0.{name}"]
    assert weights["model.layers.3.mlp.up_proj.weight"] != weights["model.layers.0.mlp.up_proj.weight"]


@pytest.mark.e2e
@pytest.mark.skipif(shutil.which("llama-server") is None, reason="no llama-server here")
def test_the_demo_with_a_real_llama_server(tmp_path: Path) -> None:
    from tests.e2e.test_demo import run_check

    said = run_check(tmp_path, "llama-server")
    assert "real engine llama-server" in said
