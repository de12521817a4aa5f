"""What the weights on this node's disks say of their size. Everything here blocks, and reads no more than it must.

A folder is read by its ``config.json`` and ``model.safetensors.index.json``, else by the one safetensors file's header,
else by how large its files are; a GGUF file by its head and the size of all its parts. A repository is looked for in
Hugging Face's cache (https://huggingface.co/docs/huggingface_hub/guides/manage-cache).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from attrs import evolve, frozen

from llmgw.durable import regular
from llmgw.engines.gguf import HEAD_BYTES, read_gguf
from llmgw.engines.weight_files import (
    CONFIG_BYTES,
    INDEX_BYTES,
    WeightsError,
    header_length,
    read_config,
    read_header,
    read_index,
)
from llmgw.engines.weights import weights_of
from llmgw.errors import OperatorError
from llmgw.settings.catalog import EngineKind
from llmgw.settings.paths import below
from llmgw.settings.weight_facts import WeightFacts

INDEX, CONFIG, ONE_FILE = "model.safetensors.index.json", "config.json", "model.safetensors"
_PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<of>\d{5})\.gguf")
_MOST_FILES = 10_000
_REVISION = re.compile(r"[0-9a-f]{40}")


@frozen
class Seen:
    """The files that the facts come from: path, size and time of each. The same again, and nothing need be read."""

    files: tuple[tuple[str, int, int], ...]


@frozen
class Look:
    """What was found under a name: ``facts`` is ``None`` where there is nothing, ``trouble`` what could not be read."""

    facts: WeightFacts | None
    seen: Seen | None = None
    trouble: str = ""


def hub_cache(env: Mapping[str, str]) -> Path:
    """Where Hugging Face's libraries keep what they fetched, by the variables that engines inherit."""
    if cache := env.get("HF_HUB_CACHE"):
        return Path(cache)
    if home := env.get("HF_HOME"):
        return Path(home) / "hub"
    caches = env.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path(env.get("HOME", "/")) / ".cache") / "huggingface" / "hub"


def look(name: str, weights_dir: str, hub: Path, before: Look | None = None) -> Look:
    """What is known of the weights that profiles call ``name``; ``before`` is what was found last time."""
    try:
        path = _path(name, weights_dir, hub)
        if path is None:
            return Look(None)
        files = _gguf_parts(path) if path.name.endswith(".gguf") else _model_files(path)
    except (OSError, ValueError) as failed:
        return Look(None, trouble=f"{name}: {failed}")
    seen = Seen(tuple((str(file), found.st_size, found.st_mtime_ns) for file, found in files.items()))
    if not files:
        return Look(None)
    if before is not None and before.seen == seen:
        return before
    facts, troubles = _read(name, files)
    return Look(facts, seen, "; ".join(troubles))


def _path(name: str, weights_dir: str, hub: Path) -> Path | None:
    """Where these weights are, if they are here."""
    try:
        found = weights_of(name, EngineKind.VLLM, weights_dir)
    except OperatorError:
        return None
    if found.local:
        return Path(found.name)
    # For llama.cpp the same words are a path.
    inside = below(name, weights_dir)
    return _snapshot(hub / f"models--{name.replace('/', '--')}") or (None if inside is None else Path(inside))


def _snapshot(repository: Path) -> Path | None:
    """The revision that ``main`` stands for."""
    try:
        revision = _bytes(repository / "refs" / "main", 100).decode(errors="replace").strip()
    except OSError:
        return None
    folder = repository / "snapshots" / revision
    return folder if _REVISION.fullmatch(revision) and folder.is_dir() else None


def _regular(paths: Iterable[Path]) -> dict[Path, os.stat_result]:
    made = {}
    for path in paths:
        try:
            found = path.stat()
        except OSError:
            continue  # a link into a cache that has lost it, or gone meanwhile
        if stat.S_ISREG(found.st_mode):
            made[path] = found
    return made


def _model_files(folder: Path) -> dict[Path, os.stat_result]:
    """The files of a model's folder that say how large it is; none where it is no such folder."""
    if not folder.is_dir():
        return {}
    kept: list[Path] = []
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            if count >= _MOST_FILES:
                raise ValueError(f"{folder} has more than {_MOST_FILES} files")
            if entry.name in (CONFIG, INDEX) or entry.name.endswith((".safetensors", ".bin", ".pt")):
                kept.append(Path(entry.path))
    return _regular(sorted(kept))


def _gguf_parts(path: Path) -> dict[Path, os.stat_result]:
    """The file, or all the files that it is split into."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return _regular((path,))
    count = min(int(match["of"]), _MOST_FILES)
    found = _regular(path.with_name(f"{match['stem']}-{n:05}-of-{match['of']}.gguf") for n in range(1, count + 1))
    return found if path in found else {}


def _bytes(path: Path, most: int) -> bytes:
    """The beginning of a regular file; whatever else has that name by now is not waited for."""
    with regular(path) as file:
        return file.read(most)


def _read(name: str, files: Mapping[Path, os.stat_result]) -> tuple[WeightFacts | None, list[str]]:
    facts, troubles = WeightFacts(name), []
    by_name = {path.name: path for path in files}
    readers = (_read_gguf,) if name.endswith(".gguf") else (_read_config, _read_size)
    for reader in readers:
        try:
            facts = reader(facts, by_name, files)
        except (OperatorError, OSError) as wrong:
            troubles.append(str(wrong))
    if facts.weights_bytes is None:
        size, source = _by_files(files)
        facts = evolve(facts, weights_bytes=size or None, source=source if size else "")
    return (None if facts.weights_bytes is None and facts.cache is None else facts), troubles


def _read_gguf(facts: WeightFacts, by_name: Mapping[str, Path], _files: Mapping[Path, os.stat_result]) -> WeightFacts:
    first = by_name[min(by_name)]
    said = read_gguf(_bytes(first, HEAD_BYTES), str(first))
    return evolve(facts, cache=said.cache, context_length=said.context_length)


def _read_config(facts: WeightFacts, by_name: Mapping[str, Path], _files: Mapping[Path, os.stat_result]) -> WeightFacts:
    if (path := by_name.get(CONFIG)) is None:
        return facts
    said = read_config(_bytes(path, CONFIG_BYTES + 1), str(path))
    return evolve(
        facts,
        cache=said.cache,
        context_length=said.context_length,
        dtype=said.dtype,
        quantization=said.quantization,
    )


def _read_size(facts: WeightFacts, by_name: Mapping[str, Path], files: Mapping[Path, os.stat_result]) -> WeightFacts:
    if (path := by_name.get(INDEX)) is not None:
        size, _names = read_index(_bytes(path, INDEX_BYTES + 1), str(path))
        return evolve(facts, weights_bytes=size, source=INDEX)
    if (path := by_name.get(ONE_FILE)) is None:
        return facts
    length = header_length(_bytes(path, 8), str(path))
    said = read_header(_bytes(path, 8 + length)[8:], str(path))
    if said.size > files[path].st_size:
        raise WeightsError(str(path), f"has {files[path].st_size} bytes of {said.size}", "fetch the weights again")
    return evolve(
        facts,
        weights_bytes=said.size,
        source=ONE_FILE,
        parameters=said.parameters,
        dtype=facts.dtype or said.dtype,
    )


def _by_files(files: Mapping[Path, os.stat_result]) -> tuple[int, str]:
    """How large the weights' files are together: of one kind, as some models come in several."""
    for ending in (".gguf", ".safetensors", ".bin", ".pt"):
        some = [(path.name, found.st_size) for path, found in files.items() if path.name.endswith(ending)]
        # Mistral's models have the same weights once more for its own programs.
        some = [item for item in some if not item[0].startswith("consolidated")] or some
        if some:
            return sum(size for _, size in some), f"{len(some)} file{'s' if len(some) > 1 else ''}"
    return 0, ""
