"""What an engine's own metrics say of its work: how many requests run, and whether anything comes of them. Pure.

Names: vLLM's, SGLang's and llama.cpp's Prometheus metrics. What counts tokens also moves during a long prompt, as
vLLM counts each step and llama.cpp each call of its decoder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from attrs import frozen

from llmgw.settings.catalog import EngineKind

MOST_BYTES = 4 * 1024 * 1024
_LINE = re.compile(
    r"([A-Za-z_:][A-Za-z0-9_:]{0,127})(?:\{[^\n}]{0,4096}\})? ([-+0-9.eE]{1,40}|[-+]?Inf|NaN)(?: \d{1,20})?"
)
_RUNNING: Mapping[EngineKind, str] = {
    EngineKind.VLLM: "vllm:num_requests_running",
    EngineKind.SGLANG: "sglang:num_running_reqs",
    EngineKind.LLAMACPP: "llamacpp:requests_processing",
}
_WAITING: Mapping[EngineKind, str] = {
    EngineKind.VLLM: "vllm:num_requests_waiting",
    EngineKind.SGLANG: "sglang:num_queue_reqs",
    EngineKind.LLAMACPP: "llamacpp:requests_deferred",
}
_KV_USAGE: Mapping[EngineKind, tuple[str, ...]] = {
    EngineKind.VLLM: ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    EngineKind.SGLANG: ("sglang:token_usage",),
    EngineKind.LLAMACPP: (),
}
"""As a share of 1. vLLM's old name beside its new one in the versions that have both; llama.cpp says nothing of it."""

_WORK: Mapping[EngineKind, tuple[str, ...]] = {
    EngineKind.VLLM: ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:iteration_tokens_total_count"),
    EngineKind.SGLANG: ("sglang:generation_tokens_total", "sglang:prompt_tokens_total"),
    EngineKind.LLAMACPP: (
        "llamacpp:tokens_predicted_total", "llamacpp:prompt_tokens_total", "llamacpp:n_decode_total",
    ),
}  # fmt: skip


@frozen
class Activity:
    """``running`` requests, and ``work``: a number that grows with everything that the engine gets done.

    ``waiting`` requests have not begun; ``kv_usage`` is the share of KV cache in use, of the rank that has the least
    left, ``None`` where the engine does not say.
    """

    running: int
    work: float
    waiting: int = 0
    kv_usage: float | None = None


def activity(kind: EngineKind, metrics: str) -> Activity | None:
    """What a page of metrics says, over all ranks; ``None`` where it does not have both."""
    sums: dict[str, float] = {}
    highest: dict[str, float] = {}
    wanted = {_RUNNING[kind], _WAITING[kind], *_KV_USAGE[kind], *_WORK[kind]}
    for line in metrics[:MOST_BYTES].splitlines():
        match = _LINE.fullmatch(line.rstrip())
        if match is None or match[1] not in wanted:
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        if math.isfinite(value):
            sums[match[1]] = sums.get(match[1], 0.0) + value
            highest[match[1]] = max(highest.get(match[1], 0.0), value)
    work = [sums[name] for name in _WORK[kind] if name in sums]
    running = sums.get(_RUNNING[kind])
    if running is None or not work:
        return None
    waiting = max(0, round(sums.get(_WAITING[kind], 0.0)))
    kv_usage = next((min(1.0, highest[name]) for name in _KV_USAGE[kind] if name in highest), None)
    return Activity(max(0, round(running)), sum(work), waiting, kv_usage)
