"""How far an engine has come, from the lines that it logs while it loads. Pure."""

from __future__ import annotations

import re

from attrs import frozen

from llmgw.settings.catalog import EngineKind


@frozen
class Progress:
    """A phase in words, how much of it is done (0 to 1) where the engine says.

    ``loaded`` says that the weights are there by then. Every rank logs that for itself, and none before all have met;
    of most else only rank 0 speaks (vLLM 0.32).
    """

    phase: str
    fraction: float | None = None
    loaded: bool = False


# vLLM and SGLang print one tqdm bar for checkpoint files.
_SHARDS = re.compile(
    r"Loading (?:safetensors|pt|multi-thread)[^:]*checkpoint shards:\s+(\d{1,3})% Completed \| (\d+)/(\d+)"
)
_GRAPHS = re.compile(r"[Cc]aptur(?:ing|e) (?:CUDA|cuda) graph[^:]*:?\s*(\d{1,3})%")

_PHASES: tuple[tuple[re.Pattern[str], str, bool], ...] = (
    (re.compile(r"Launching vLLM \(\S{1,40}\) headless"), "waiting for rank 0", False),
    (re.compile(r"rank \d{1,5} in world size (?!1 )\d{1,5} is assigned"), "all ranks have met", False),
    (re.compile(r"Starting to load model|Load weight begin"), "loading weights", False),
    (re.compile(r"Loading weights took|Load weight end|Model loading took"), "weights loaded", True),
    # Not any line with "torch.compile": that it is disabled is said as well, before anything is loaded.
    (
        re.compile(
            r"Starting torch\.compile|for vLLM's torch\.compile|torch\.compile t(?:akes|ook)|Compiling a graph"
            r"|Dynamo bytecode"
        ),
        "compiling",
        False,
    ),
    (
        re.compile(
            r"[GC]PU KV cache size|KV Cache is allocated|# GPU blocks|Available KV cache memory"
            r"|Explicitly set \([0-9./]{1,40}\) GiB for KV cache|GiB for KV cache on node"
        ),
        "KV cache allocated",
        True,
    ),
    (re.compile(r"[Cc]apturing (?:CUDA|cuda) graph|Capture cuda graph begin"), "capturing CUDA graphs", True),
    (re.compile(r"Graph capturing finished|Capture cuda graph end"), "CUDA graphs captured", True),
    (re.compile(r"init engine \("), "engine initialised", True),
    (re.compile(r"load_tensors: loading model tensors|load_model: loading model"), "loading weights", False),
    (re.compile(r"llama_context: constructing|llama_kv_cache|load_model: initializing"), "KV cache allocated", True),
    (re.compile(r"listening on http|model loaded|Application startup complete"), "serving", True),
)


def progress(_kind: EngineKind, line: str) -> Progress | None:
    """What a line of the log says about loading, or ``None``."""
    if match := _SHARDS.search(line):
        return Progress(f"loading weights, file {match[2]} of {match[3]}", min(int(match[1]), 100) / 100)
    if match := _GRAPHS.search(line):
        return Progress("capturing CUDA graphs", min(int(match[1]), 100) / 100, loaded=True)
    for pattern, phase, loaded in _PHASES:
        if pattern.search(line):
            return Progress(phase, loaded=loaded)
    return None
