from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fakes import tiny_model
from llmgw.discovery.weights import _bytes, hub_cache, look
from llmgw.settings.weight_facts import CacheShape, WeightFacts

SHAPE = CacheShape(2, 2, 2, 32, 32)
CONFIG = json.dumps(
    {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "head_dim": 32}
).encode()
NOWHERE = Path("/nowhere")


def folder(at: Path, **files: bytes | int) -> Path:
    """Files by name, ``__`` for a dot; a number makes an empty file of that size."""
    at.mkdir(parents=True)
    for name, content in files.items():
        path = at / name.replace("__", ".")
        path.write_bytes(content if isinstance(content, bytes) else b"")
        if isinstance(content, int):
            os.truncate(path, content)
    return at


def facts(name: str, weights_dir: Path, hub: Path = NOWHERE) -> WeightFacts | None:
    found = look(name, str(weights_dir), hub)
    assert found.trouble == ""
    return found.facts


def test_a_folder_with_an_index(tmp_path: Path) -> None:
    index = json.dumps({"metadata": {"total_size": 1000}, "weight_map": {"a": "model-1.safetensors"}}).encode()
    folder(tmp_path / "m", config__json=CONFIG, model__safetensors__index__json=index)
    wanted = WeightFacts("m", 1000, "model.safetensors.index.json", cache=SHAPE)
    assert facts("m", tmp_path) == wanted
    assert facts(f"{tmp_path}/m", NOWHERE) is None, "it is not below the node's weights_dir"
    assert facts(f"{tmp_path}/m", Path("/")) == WeightFacts(**{**wanted_fields(wanted), "name": f"{tmp_path}/m"})


def wanted_fields(of: WeightFacts) -> dict[str, object]:
    return {name: getattr(of, name) for name in ("name", "weights_bytes", "source", "cache")}


def test_files_that_an_engine_can_load(tmp_path: Path) -> None:
    tiny_model.write(tmp_path)
    found = facts("hf", tmp_path)
    assert found == WeightFacts("hf", 853_248, "model.safetensors", 426_624, "bfloat16", "", SHAPE, 4096)
    size = (tmp_path / "tiny.gguf").stat().st_size
    assert facts("tiny.gguf", tmp_path) == WeightFacts("tiny.gguf", size, "1 file", cache=SHAPE, context_length=4096)


def test_all_parts_of_a_gguf(tmp_path: Path) -> None:
    tiny_model.write(tmp_path)
    (tmp_path / "tiny.gguf").rename(tmp_path / "m-00001-of-00002.gguf")
    size = (tmp_path / "m-00001-of-00002.gguf").stat().st_size
    folder(tmp_path / "x")
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"x" * 100)
    found = facts("m-00001-of-00002.gguf", tmp_path)
    assert found is not None
    assert (found.weights_bytes, found.source, found.cache) == (size + 100, "2 files", SHAPE)
    assert facts("n-00001-of-99999.gguf", tmp_path) is None


def test_files_alone_when_there_is_no_index(tmp_path: Path) -> None:
    folder(tmp_path / "a", config__json=CONFIG, x1__safetensors=100, x2__safetensors=50, consolidated__safetensors=150,
           training__bin=7)  # fmt: skip
    found = facts("a", tmp_path)
    assert found is not None
    assert (found.weights_bytes, found.source) == (150, "2 files")
    folder(tmp_path / "b", pytorch_model__bin=70)
    assert facts("b", tmp_path) == WeightFacts("b", 70, "1 file")
    folder(tmp_path / "c", config__json=CONFIG)
    assert facts("c", tmp_path) == WeightFacts("c", cache=SHAPE), "what is still fetched says its layers already"


def test_a_repository_is_looked_for_in_the_cache(tmp_path: Path) -> None:
    revision = "a" * 40
    at = tmp_path / "hub/models--org--name"
    folder(at / "snapshots" / revision, config__json=CONFIG, pytorch_model__bin=70)
    assert facts("org/name", tmp_path, tmp_path / "hub") is None, "no revision is the main one yet"
    folder(at / "refs", main=b"../../elsewhere")
    assert facts("org/name", tmp_path, tmp_path / "hub") is None
    (at / "refs/main").write_text(f"{revision}\n")
    assert facts("org/name", tmp_path, tmp_path / "hub") == WeightFacts("org/name", 70, "1 file", cache=SHAPE)
    folder(tmp_path / "dir/org/name", pytorch_model__bin=9)
    assert facts("org/name", tmp_path / "dir", NOWHERE) == WeightFacts("org/name", 9, "1 file"), "or below weights_dir"


def test_what_is_not_there(tmp_path: Path) -> None:
    folder(tmp_path / "empty")
    folder(tmp_path / "other", readme__md=b"x")
    for name in ("nothing", "empty", "other", "../up", f"{tmp_path}/none.gguf", "a\0b"):
        assert look(name, str(tmp_path), NOWHERE).facts is None


def test_what_is_broken_is_named_and_the_rest_counts(tmp_path: Path) -> None:
    folder(tmp_path / "m", config__json=b"{", model__safetensors__index__json=b"{}", x__safetensors=100)
    found = look("m", str(tmp_path), NOWHERE)
    assert found.facts == WeightFacts("m", 100, "1 file")
    assert f"{tmp_path}/m/config.json: is no JSON" in found.trouble
    assert f"{tmp_path}/m/model.safetensors.index.json: has no believable" in found.trouble
    tiny_model.write(tmp_path)
    os.truncate(tmp_path / "hf/model.safetensors", 500_000)
    assert "has 500000 bytes of 853248" in look("hf", str(tmp_path), NOWHERE).trouble


def test_something_else_of_that_name_is_not_waited_for(tmp_path: Path) -> None:
    folder(tmp_path / "m", x__safetensors=100)
    os.mkfifo(tmp_path / "m/config.json")
    os.symlink("/nowhere", tmp_path / "m/model.safetensors.index.json")
    assert look("m", str(tmp_path), NOWHERE).facts == WeightFacts("m", 100, "1 file")
    with pytest.raises(OSError, match="is not a regular file"):  # put there after it was looked at
        _bytes(tmp_path / "m/config.json", 10)


def test_what_did_not_change_is_not_read_again(tmp_path: Path) -> None:
    at = folder(tmp_path / "m", config__json=CONFIG, x__safetensors=100)
    first = look("m", str(tmp_path), NOWHERE)
    assert look("m", str(tmp_path), NOWHERE, first) is first
    os.truncate(at / "x.safetensors", 101)
    second = look("m", str(tmp_path), NOWHERE, first)
    assert second.facts is not None
    assert second.facts.weights_bytes == 101
    (at / "x.safetensors").unlink()
    assert look("m", str(tmp_path), NOWHERE, second).facts == WeightFacts("m", cache=SHAPE)


@pytest.mark.parametrize(
    ("env", "path"),
    [
        ({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}, "/c"),
        ({"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/h/hub"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/root"}, "/x/huggingface/hub"),
        ({"HOME": "/root"}, "/root/.cache/huggingface/hub"),
        ({}, "/.cache/huggingface/hub"),
    ],
)
def test_where_the_cache_is(env: dict[str, str], path: str) -> None:
    assert hub_cache(env) == Path(path)
