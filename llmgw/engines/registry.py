"""From a shard to its launch, whichever engine it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmgw.engines import llamacpp, sglang, vllm
from llmgw.engines.base import Launch, ShardSpec
from llmgw.engines.checks import require
from llmgw.errors import OperatorError
from llmgw.settings.catalog import EngineKind, Profile
from llmgw.settings.engine_flags import argument_faults

_ADAPTERS: Mapping[EngineKind, Callable[[ShardSpec], Launch]] = {
    EngineKind.VLLM: vllm.launch,
    EngineKind.SGLANG: sglang.launch,
    EngineKind.LLAMACPP: llamacpp.launch,
}


def build(spec: ShardSpec) -> Launch:
    """The process to start. Raises :class:`llmgw.errors.OperatorError` with every reason not to start it.

    Where the installed version is not known, an argument that any version has will do.
    """
    require(spec.model, spec.profile, spec.devices, spec.install.version)
    launch = _ADAPTERS[spec.profile.engine](spec)
    given = arguments_of(spec, launch)
    faults = list(argument_faults(spec.profile.engine, given, spec.profile.allow_args, spec.install.version))
    if faults:
        remedies = "; ".join(dict.fromkeys(remedy for _, _, remedy in faults))
        what = f"profile {spec.profile.name} of {spec.model}"
        raise OperatorError(what, "; ".join(problem for _, problem, _ in faults), remedies)
    return launch


def ports_of(profile: Profile, port: int, rendezvous: int | None) -> frozenset[int]:
    """Every port that an engine will surely take on its node; ``rendezvous`` where it is rank 0 of several nodes."""
    inner = sglang.inner_ports(profile, port, rendezvous) if profile.engine is EngineKind.SGLANG else ()
    return frozenset((port, *inner, *(() if rendezvous is None else (rendezvous,))))


def arguments_of(spec: ShardSpec, launch: Launch) -> tuple[str, ...]:
    """What follows the installed command, without vLLM's model, which stands there by itself."""
    return launch.argv[len(spec.install.command) + (spec.profile.engine is EngineKind.VLLM) :]
