"""From a shard to its launch, whichever engine it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmgw.engines import llamacpp, sglang, vllm
from llmgw.engines.base import Launch, ShardSpec
from llmgw.engines.checks import require
from llmgw.settings.catalog import EngineKind

_ADAPTERS: Mapping[EngineKind, Callable[[ShardSpec], Launch]] = {
    EngineKind.VLLM: vllm.launch,
    EngineKind.SGLANG: sglang.launch,
    EngineKind.LLAMACPP: llamacpp.launch,
}


def build(spec: ShardSpec) -> Launch:
    """The process to start. Raises :class:`llmgw.errors.OperatorError` with every reason not to start it."""
    require(spec.model, spec.profile, spec.devices, spec.install.version)
    return _ADAPTERS[spec.profile.engine](spec)
