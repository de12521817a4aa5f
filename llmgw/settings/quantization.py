"""Which card a quantization needs at the least, by engine: engines say so as well, after minutes of loading. Pure.

Compute capabilities: what the quantization methods of vLLM 0.33 and SGLang 0.5.23 ask for (``get_min_capability``).
A method that is not here is left to the engine.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmgw.settings.catalog import EngineKind

FP8 = 89
"""Ten times the least compute capability with fp8 units (Ada). Some engines emulate them below it, for weights only:
slower than the card's own formats, so not what a profile that says fp8 wants."""

_BOTH = {
    "gptq": 60,
    "awq": 75,
    "w8a8_int8": 75,
    "w8a8_fp8": FP8,
    "mxfp4": 80,
    "w4afp8": 90,
    "moe_wna16": 70,
}
_LEAST: Mapping[EngineKind, Mapping[str, int]] = {
    EngineKind.VLLM: {
        **_BOTH,
        "gptq_marlin": 75,
        "modelopt": 80,
        "modelopt_fp4": 75,
    },
    EngineKind.SGLANG: {
        **_BOTH,
        "gptq_marlin": 80,
        "awq_marlin": 80,
        "modelopt": FP8,
        "modelopt_fp4": 80,
        "mxfp8": 100,
        "bitsandbytes": 70,
        "gguf": 60,
    },
    EngineKind.LLAMACPP: {},
}


def least_capability(engine: EngineKind, quantization: str) -> int | None:
    """Ten times the least compute capability for this quantization, or ``None`` where it is not known."""
    name = quantization.lower().replace("-", "_")
    return _LEAST[engine].get(name, FP8 if "fp8" in name else None)
