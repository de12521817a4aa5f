"""How much memory a profile needs on each of its devices: weights, KV cache, and what the engine takes besides.

A profile is refused for want of memory only where it cannot fit, so every doubt is in its favour: what is not known
counts as nothing, and of two figures the lower one holds. Where the figures come from: docs/scheduling.md, "Memory".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

from attrs import frozen

from llmgw.settings.catalog import EngineKind, Profile
from llmgw.settings.faults import Path
from llmgw.settings.weight_facts import CacheShape, WeightFacts

MIB = 1024**2
GIB = 1024**3

_SHARE: Mapping[EngineKind, float] = {EngineKind.VLLM: 0.92, EngineKind.SGLANG: 0.88, EngineKind.LLAMACPP: 1.0}
"""The share of a device that an engine plans with unless it is told: vLLM's ``--gpu-memory-utilization`` (0.9 until
0.16), the most that SGLang gives ``--mem-fraction-static`` by itself, and all of it for llama.cpp."""

_CONTEXT = 1 * GIB
"""A CUDA context with its libraries, the lower end of what is seen (1 to 2 GiB with NCCL)."""

_GRAPHS = GIB // 2
_ACTIVATIONS = 1 * GIB
_LLAMACPP = 1 * GIB
"""Context and compute buffers of llama.cpp: our assumption, as it keeps both small."""

_ONLINE: Mapping[str, float] = {"fp8": 0.5, "bitsandbytes": 0.25}
"""What is left of 16-bit weights when the engine quantizes them while it loads."""

_ELSEWHERE: Mapping[EngineKind, frozenset[str]] = {
    EngineKind.VLLM: frozenset({"--cpu-offload-gb", "--offload-backend", "--hf-overrides"}),
    EngineKind.SGLANG: frozenset({"--cpu-offload-gb", "--offload-group-size", "--json-model-override-args"}),
    EngineKind.LLAMACPP: frozenset(
        {
            "--n-gpu-layers", "--gpu-layers", "-ngl", "--cpu-moe", "-cmoe", "--n-cpu-moe", "-ncmoe",
            "--override-tensor", "-ot", "--no-kv-offload", "-nkvo", "--tensor-split", "-ts", "--device", "-dev",
            "--fit", "-fit",
        }
    ),
}  # fmt: skip
"""Arguments after which nobody can say from outside what is on the devices."""

_GGML: Mapping[str, float] = {
    "f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32,
    "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip
"""Bytes of an element of llama.cpp's cache (blocks of 32, in ggml's own sizes)."""

_SUFFIX = {"": 1, "k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}
_CLASS_GIB = re.compile(r".+?-(\d+)g(?:-mig-.*?\.(\d+)gb.*)?")


@frozen
class Amount:
    """A number of bytes on each device, and how it was come by."""

    size: int
    how: str = ""


@frozen(cache_hash=True)
class Estimate:
    """What one device must hold. ``share`` is how much of itself the engine plans with.

    ``measured`` is what was seen to suffice, or to be needed, and stands for the sum; ``proven`` says that this very
    profile has run on devices of this class, so that no arithmetic speaks against it.
    """

    weights: Amount
    cache: Amount
    overhead: Amount
    share: float
    share_is: str
    measured: Amount | None = None
    proven: bool = False

    @property
    def counted(self) -> int:
        """The sum of the three, in bytes."""
        return self.weights.size + self.cache.size + self.overhead.size

    @property
    def needed(self) -> int:
        """Bytes on each device."""
        return self.counted if self.measured is None else self.measured.size

    @property
    def least_mib(self) -> int:
        """The least memory that a device must have for it."""
        return 0 if self.proven else int(-(-self.needed // (self.share * MIB)))

    def fits(self, total_mib: int) -> bool:
        """Whether a device of this size can hold it."""
        return total_mib >= self.least_mib

    @property
    def short(self) -> str:
        """The figures without how they were come by, but for what was learned."""
        parts = (
            f"weights {_gib(self.weights.size)}, KV cache {_gib(self.cache.size)}, overhead {_gib(self.overhead.size)}"
        )
        learned = "" if self.measured is None else f"; {self.measured.how}"
        return f"needs {_gib(self.needed)} GiB on each device ({parts}{learned})"

    def __str__(self) -> str:
        parts = (("weights", self.weights), ("KV cache", self.cache), ("overhead", self.overhead))
        text = " + ".join(f"{name} {_gib(part.size)} ({part.how})" for name, part in parts)
        text = f"needs {_gib(self.needed)} GiB on each device: {text}"
        return text if self.measured is None else f"{text}; {self.measured.how}"


@lru_cache(1024)
def arithmetic_of(estimate: Estimate, total_mib: int) -> str:
    """The whole calculation against a device of this size, in one sentence."""
    of = f"{total_mib / 1024:.1f} GiB x {estimate.share:g} ({estimate.share_is})"
    return f"{estimate}; a device has {of} = {total_mib / 1024 * estimate.share:.1f} usable"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def estimate(profile: Profile, facts: WeightFacts | None) -> Estimate | None:
    """What each of the profile's devices must hold, or ``None`` where its weights are not known.

    Without ``facts`` the profile's own ``parameters`` are counted.
    """
    arguments = _Arguments(profile)
    if arguments.any_of(_ELSEWHERE[profile.engine]):
        return None
    if profile.dp > 1 and profile.expert_parallel:
        return None  # every group has the attention, and all of them share the experts: the files do not say how much
    weights = _weights(profile, facts, arguments)
    if weights is None:
        return None
    share, share_is = _share(profile, arguments)
    if arguments.any_of({"--kv-cache-memory-bytes"}):
        cache, share, share_is = Amount(0, "set by --kv-cache-memory-bytes"), 1.0, "all of it"
    else:
        cache = _cache(profile, facts, arguments)
    return Estimate(weights, cache, _overhead(profile, arguments), share, share_is)


class _Arguments:
    """The profile's extra arguments by name; of one that stands there twice the last counts, as in the engines."""

    def __init__(self, profile: Profile) -> None:
        self._values: dict[str, str] = {}
        for at, argument in enumerate(profile.args):
            if not argument.startswith("-"):
                continue
            name, joined, value = argument.partition("=")
            name = name.replace("_", "-") if profile.engine is EngineKind.VLLM else name
            following = profile.args[at + 1] if at + 1 < len(profile.args) else ""
            self._values[name] = value if joined else following

    def get(self, *names: str) -> str | None:
        return next((self._values[name] for name in names if name in self._values), None)

    def any_of(self, names: frozenset[str] | set[str]) -> bool:
        return not names.isdisjoint(self._values)


def _ways(profile: Profile) -> tuple[int, int]:
    """Over how many devices layers are split, and into how many stages of layers the model is."""
    # llama.cpp splits by layer whatever its devices are called here.
    return (1, profile.tp) if profile.engine is EngineKind.LLAMACPP else (profile.tp, profile.pp)


def _over(profile: Profile) -> str:
    split = [f"{word} {count}" for word, count in (("tp", profile.tp), ("pp", profile.pp)) if count > 1]
    return f", over {' x '.join(split)}" if split else ""


def _of_stage(size: float, layers: int, stages: int) -> float:
    """What the stage with the most layers has of something that is the same in every layer."""
    return size / stages if layers < stages else size * -(-layers // stages) / layers


def _weights(profile: Profile, facts: WeightFacts | None, arguments: _Arguments) -> Amount | None:
    if facts is not None and facts.weights_bytes is not None:
        size, how = float(facts.weights_bytes), f"{_gib(facts.weights_bytes)} GiB by {facts.source}"
        cast = profile.engine is not EngineKind.LLAMACPP and arguments.get("--dtype") not in ("float", "float32")
        if facts.dtype in ("float32", "f32") and cast:
            size, how = size / 2, f"{how}, 16 of 32 bits are kept"
        online = _ONLINE.get(profile.quantization or "") if not facts.quantization else None
        if online is not None and facts.dtype not in ("float8_e4m3fn", "f8_e4m3"):
            size, how = size * online, f"{how}, {profile.quantization} as it loads"
        layers = facts.cache.all_layers if facts.cache is not None else 0
    elif profile.parameters is not None and (kind := _of_parameters(profile, arguments)) is not None:
        size, layers = profile.parameters * kind[0], 0
        how = f"{profile.parameters / 1e9:.1f}e9 parameters in {kind[1]}"
    else:
        return None
    ways, stages = _ways(profile)
    return Amount(int(_of_stage(size, layers, stages) / ways), f"{how}{_over(profile)}")


def _of_parameters(profile: Profile, arguments: _Arguments) -> tuple[float, str] | None:
    """Bytes of a parameter that the profile says nothing more of, and what it is then."""
    word = (profile.quantization or "").lower()
    if profile.engine is EngineKind.LLAMACPP:
        return None  # from 2 to 32 bits, and the file's name alone says which
    if "8" in word and "4" not in word:  # the weights of w4a8 have 4 bits
        return 1.0, word
    if word:
        return 0.5, word
    return (4.0, "fp32") if arguments.get("--dtype") in ("float", "float32") else (2.0, "16 bits")


def _context(profile: Profile, facts: WeightFacts | None, arguments: _Arguments) -> tuple[int | None, str]:
    """How many tokens one context has, as far as the engine insists on room for it; else why that is not known."""
    said = arguments.get("--max-model-len", "--context-length")
    if said is not None:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmKM]?)", said)
        count = int(float(match[1]) * _SUFFIX[match[2]]) if match else 0
        return (count, "") if count else (None, f"not counted: context {said}")
    if profile.context_length is not None:
        return profile.context_length, ""
    if profile.engine is EngineKind.VLLM and facts is not None and facts.context_length is not None:
        return facts.context_length, " (the model's longest)"
    # The others make do with what is left.
    return None, "not counted: no context_length"


def _cache(profile: Profile, facts: WeightFacts | None, arguments: _Arguments) -> Amount:
    shape = facts.cache if facts is not None else None
    if shape is None:
        return Amount(0, "not counted: the model's layers are not known")
    tokens, note = _context(profile, facts, arguments)
    if tokens is None:
        return Amount(0, note)
    # llama.cpp's slots share the one context that it is given.
    contexts = 1 if profile.engine is EngineKind.LLAMACPP else profile.concurrency or 1
    per_layer, kind = _per_token(profile, shape, arguments)
    ways, stages = _ways(profile)
    windowed = shape.window_layers * min(tokens, shape.window)
    whole = (shape.layers - shape.window_layers) * tokens
    size = _of_stage((windowed + whole) * per_layer, shape.all_layers, stages) * contexts
    times = f"{contexts} x " if contexts > 1 else ""
    window = f", {shape.window_layers} layers keep {shape.window}" if windowed else ""
    per_token = _of_stage(shape.layers * per_layer, shape.all_layers, stages) / 1024
    split = "" if shape.latent_dim and ways > 1 else _over(profile)
    return Amount(int(size), f"{times}{tokens} tokens{note} x {per_token:g} KiB in {kind}{window}{split}")


def _per_token(profile: Profile, shape: CacheShape, arguments: _Arguments) -> tuple[float, str]:
    """Bytes that one token takes in one layer of one device, and of what kind its elements are."""
    ways, _ = _ways(profile)
    if profile.engine is EngineKind.LLAMACPP:
        keys = arguments.get("--cache-type-k", "-ctk") or "f16"
        values = arguments.get("--cache-type-v", "-ctv") or "f16"
        kind = keys if keys == values else f"{keys}/{values}"
        least = min(_GGML.values())
        if shape.latent_dim:
            return shape.latent_dim * _GGML.get(keys, least), keys
        sides = shape.key_dim * _GGML.get(keys, least) + shape.value_dim * _GGML.get(values, least)
        return shape.kv_heads * sides, kind
    word = arguments.get("--kv-cache-dtype") or "auto"
    kind = shape.dtype or "16 bits" if word == "auto" else word
    size = 2.0 if "16" in kind else 1.0 if "8" in kind else 0.5
    if shape.latent_dim:
        return shape.latent_dim * size, f"{kind}, compressed and whole on each device"
    return -(-shape.kv_heads // ways) * (shape.key_dim + shape.value_dim) * size, kind


def _share(profile: Profile, arguments: _Arguments) -> tuple[float, str]:
    names = ("--gpu-memory-utilization", "--device-memory-utilization", "--mem-fraction-static")
    said = arguments.get(*names)
    if said is not None and re.fullmatch(r"0?\.\d+|1(\.0*)?", said) and float(said) > 0:
        return float(said), "args"
    if profile.engine is not EngineKind.LLAMACPP and profile.gpu_memory_utilization is not None:
        return profile.gpu_memory_utilization, "gpu_memory_utilization"
    kind = profile.engine
    return _SHARE[kind], "all of it" if kind is EngineKind.LLAMACPP else f"{kind.value}'s own share"


def _overhead(profile: Profile, arguments: _Arguments) -> Amount:
    if profile.engine is EngineKind.LLAMACPP:
        return Amount(_LLAMACPP, "llamacpp: context and buffers")
    if profile.engine is EngineKind.SGLANG:
        return Amount(0, "sglang: outside of its share")
    if arguments.any_of({"--enforce-eager"}):
        return Amount(_CONTEXT + _ACTIVATIONS, "vllm: context, activations")
    return Amount(_CONTEXT + _GRAPHS + _ACTIVATIONS, "vllm: context, graphs, activations")


def remedy_of(profile: Profile, estimate: Estimate) -> str:
    """What would help, the most likely first."""
    found = []
    if estimate.cache.size > estimate.counted // 10:
        word = "set" if profile.context_length is None else "lower"
        found.append(f"{word} context_length" + (" or lower concurrency" if (profile.concurrency or 1) > 1 else ""))
    if "-mig-" not in "".join(profile.device_class):
        found.append("raise tp")
    if not profile.quantization and profile.engine is not EngineKind.LLAMACPP:
        found.append("use quantized weights")
    found.append("use a device class with more memory")
    return f"{', '.join(found)}; if you know better, say how much a device must have with memory_gib"


def class_mib(device_class: str) -> int | None:
    """The most memory that a device of this class can have by its name: the class is rounded to whole GiB."""
    match = _CLASS_GIB.fullmatch(device_class)
    return None if match is None else int((int(match[2] or match[1]) + 0.5) * 1024)


def memory_faults(profile: Profile) -> Iterator[tuple[Path, str, str]]:
    """Classes on which the profile cannot fit by what it declares itself."""
    if profile.memory_gib is not None or profile.parameters is None or min(profile.tp, profile.pp) < 1:
        return
    found = estimate(profile, None)
    for index, name in enumerate(profile.device_class):
        total = class_mib(name)
        if found is not None and total is not None and not found.fits(total):
            yield (
                ("device_class", index),
                f"{name} is too small: {arithmetic_of(found, total)}",
                remedy_of(profile, found),
            )
