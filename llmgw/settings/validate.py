"""The rules on values of the settings. Every rule names the path at fault, what is wrong and what to do.

The daemons' own files have theirs in :mod:`llmgw.settings.daemon_rules`. One set of rules serves the router and the
scheduler: both read :class:`llmgw.settings.catalog.Model`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

import attrs

from llmgw.hardware.gpu import compute_capability
from llmgw.settings.catalog import EngineKind, Model, Profile, Routing, Scaling
from llmgw.settings.daemon_rules import NODE_ID, doctor_faults
from llmgw.settings.document import KeyPolicy, Liveness, RouterSettings, Settings, Tracing, WeightsRules
from llmgw.settings.faults import Path, Rule, at
from llmgw.settings.memory import memory_faults
from llmgw.settings.profile_rules import (
    DEVICE_CLASS,
    MODEL_NAME,
    adapters,
    arguments,
    arithmetic,
    engine_fit,
    mig,
    offered,
    quantized,
    texts,
)
from llmgw.settings.sources import PREFIX, allowed, hub_source, is_rule

_LARGEST_BODY = 1024 * 1024 * 1024
_LARGEST_LIMIT = 2**53
_LARGEST_DAYS = 36_500
_MEDIA_HOST = re.compile(r"\.?[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*|[0-9A-Fa-f:]+")


def settings_faults(settings: Settings) -> Iterator[Rule]:
    """Everything wrong with a settings document whose shape is right."""
    names = {model.name for model in settings.models}
    usual = list(_scaling(settings.scaling))
    yield from at(("scaling",), iter(usual))
    for model in settings.models:
        # What a model takes over from a wrong default is said once, where the default stands.
        yield from (rule for rule in at(("models", model.name), _model(model)) if not _inherited(rule, usual))
        for index, profile in enumerate(model.profiles):
            for lora in profile.lora:
                if (name := f"{model.name}:{lora}") in names:
                    path: Path = ("models", model.name, "profiles", index, "lora", lora)
                    yield path, f"{name} is also a model", "rename one of the two"
    yield from _aliases(settings)
    yield from at(("router",), _router(settings.router))
    served = {name for model in settings.models for name in model.names}
    for name in settings.router.prices:
        if name not in served:
            yield ("router", "prices", name), "is no model of the catalog", ""
    yield from at(("liveness",), _liveness(settings.liveness))
    for name, rules in settings.nodes.items():
        if not NODE_ID.fullmatch(name):
            yield ("nodes", name), "is not a node id", "use the id in the node's certificate"
        for index, taint in enumerate(rules.taints):
            if not NODE_ID.fullmatch(taint):
                yield ("nodes", name, "taints", index), f"{taint!r} is not a taint", "use letters, digits and . _ -"
    yield from at(("weights",), _weights(settings.weights))
    yield from at(("keys",), _keys(settings.keys))
    yield from at(("doctor",), doctor_faults(settings.doctor))
    if settings.tracing is not None:
        yield from at(("tracing",), _tracing(settings.tracing))
    for model in settings.models:
        for index, profile in enumerate(model.profiles):
            source = hub_source(profile.weights)
            if source is not None and not allowed(source, settings.weights.sources):
                where: Path = ("models", model.name, "profiles", index, "weights")
                yield where, f"{source} is not in weights.sources", f"add {PREFIX}{source.repository} there"
    groups = {m.group for m in settings.models if m.group}
    for group, classes in settings.quotas.items():
        if group not in groups:
            hint = f"groups are {', '.join(sorted(groups))}" if groups else "set `group` of a model"
            yield ("quotas", group), "is the group of no model", hint
        for name, most in classes.items():
            if not DEVICE_CLASS.fullmatch(name):
                yield ("quotas", group, name), "is not a device class", "see llmgw agent inventory; such as h100-80g"
            if most < 0:
                yield ("quotas", group, name), f"expected at least 0, found {most}", ""


def _inherited(rule: Rule, usual: list[Rule]) -> bool:
    path, problem, _hint = rule
    return len(path) == 4 and path[2] == "scaling" and any(path[3:] == p and problem == q for p, q, _ in usual)


def _keys(policy: KeyPolicy) -> Iterator[Rule]:
    for limit in attrs.fields(type(policy.limits)):
        value = getattr(policy.limits, limit.name)
        if isinstance(value, int | float) and not 0 <= value <= _LARGEST_LIMIT:
            yield ("limits", limit.name), f"expected 0 to {_LARGEST_LIMIT}, found {value:g}", "leave it out for none"
    if policy.longest_days is not None and not 0 < policy.longest_days <= _LARGEST_DAYS:
        problem = f"expected more than 0 and at most {_LARGEST_DAYS} days, found {policy.longest_days:g}"
        yield ("longest_days",), problem, "leave it out for keys without an end"


def _tracing(tracing: Tracing) -> Iterator[Rule]:
    if not tracing.endpoint.startswith(("http://", "https://")):
        yield ("endpoint",), f"{tracing.endpoint!r} is no http address", "http://localhost:4318/v1/traces"
    if not 0 <= tracing.share <= 1:
        yield ("share",), f"expected 0 to 1, found {tracing.share:g}", ""


def _weights(rules: WeightsRules) -> Iterator[Rule]:
    for index, rule in enumerate(rules.sources):
        if not is_rule(rule):
            yield ("sources", index), f"{rule!r} is not a source", "write hf:org/name, or hf:org/* for all of it"
    if rules.mirror:
        parts = urlsplit(rules.mirror)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            yield ("mirror",), f"{rules.mirror} is not the address of a mirror", "such as https://hf-mirror.example"


def _aliases(settings: Settings) -> Iterator[Rule]:
    """An alias is a name like any other: it has one meaning."""
    taken = {name: "a name" for model in settings.models for name in model.names}
    for model in settings.models:
        for index, alias in enumerate(model.aliases):
            path: Path = ("models", model.name, "aliases", index)
            if not is_model_name(alias):
                yield path, f"{alias!r} is not a model name", "use letters, digits and . _ - / :"
            elif alias in taken:
                yield path, f"{alias} is {taken[alias]} already", "give each name to one model"
            taken[alias] = f"an alias of {model.name}"


def is_model_name(name: str) -> bool:
    """Whether clients may ask for this."""
    return MODEL_NAME.fullmatch(name) is not None and ".." not in name and "//" not in name


def _model(model: Model) -> Iterator[Rule]:
    if not is_model_name(model.name):
        yield (
            (),
            "is not a model name",
            "use up to 128 letters, digits and . _ - / :, beginning and ending with a letter or digit",
        )
    if model.profiles and model.endpoints:
        yield (
            ("endpoints",),
            "stand beside profiles",
            "a model is either placed (profiles) or served elsewhere (endpoints)",
        )
    if not model.profiles and not model.endpoints:
        yield (), "has neither profiles nor endpoints", "add profiles to have it placed, or endpoints that serve it"
    if model.replicas < 0:
        yield ("replicas",), f"expected at least 0, found {model.replicas}", ""
    if model.placement.per_node is not None and model.placement.per_node < 1:
        yield ("placement", "per_node"), f"expected at least 1, found {model.placement.per_node}", ""
    if model.min_run_s < 0:
        yield ("min_run_s",), f"expected at least 0 seconds, found {model.min_run_s:g}", ""
    if model.scaling is not None:
        if not model.profiles:
            yield ("scaling",), "is of a model that is not placed", "remove it; engines of others are not scaled"
        if model.replicas != 1:
            hint = "the load decides their number: remove replicas, or set min and max"
            yield ("scaling",), "stands beside replicas", hint
        yield from at(("scaling",), _scaling(model.scaling))
    yield from at(("routing",), _routing(model.routing))
    seen: set[str] = set()
    for index, profile in enumerate(model.profiles):
        path: Path = ("profiles", index)
        if profile.name in seen:
            yield (
                (*path, "name"),
                f"the profile {profile.name} stands here twice",
                "give each profile a name of its own",
            )
        seen.add(profile.name)
        yield from at(path, profile_faults(profile))
        yield from at(path, adapters(model.name, profile))
    for index, url in enumerate(model.endpoints):
        yield from at(("endpoints", index), _endpoint(url))
        if url in model.endpoints[:index]:
            yield ("endpoints", index), f"{url} stands here twice", "remove one"


def _routing(routing: Routing) -> Iterator[Rule]:
    if routing.concurrency is not None and routing.concurrency < 1:
        yield ("concurrency",), f"expected at least 1, found {routing.concurrency}", "leave it out for no bound"
    if routing.queue < 0:
        yield ("queue",), f"expected at least 0, found {routing.queue}", ""
    for name in ("queue_s", "connect_timeout_s", "first_byte_timeout_s", "idle_timeout_s", "total_timeout_s"):
        value = getattr(routing, name)
        if value is not None and value <= 0:
            yield (name,), f"expected more than 0 seconds, found {value:g}", ""


def _scaling(scaling: Scaling) -> Iterator[Rule]:
    if scaling.min < 0:
        yield ("min",), f"expected at least 0, found {scaling.min}", ""
    if scaling.max < max(1, scaling.min):
        yield ("max",), f"is {scaling.max}, expected at least 1 and at least min ({scaling.min})", ""
    for name in ("target", "up_s", "down_s", "idle_s", "hold_s"):
        if getattr(scaling, name) <= 0:
            yield (name,), f"expected more than 0, found {getattr(scaling, name):g}", ""
    if scaling.cooldown_s < 0:
        yield ("cooldown_s",), f"expected at least 0 seconds, found {scaling.cooldown_s:g}", ""


def profile_faults(profile: Profile) -> Iterator[Rule]:
    """Everything wrong with one profile, as far as the catalog alone can tell."""
    if not NODE_ID.fullmatch(profile.name):
        yield ("name",), "is not a profile name", "use up to 64 letters, digits and . _ -"
    if not profile.weights.strip() or profile.weights.startswith("-"):
        yield ("weights",), "is not a path or repository", "name a folder, a file, or org/repository"
    yield from texts(profile)
    yield from _hub(profile)
    if not profile.device_class:
        yield ("device_class",), "is empty", "name at least one class, such as h100-80g; see llmgw agent inventory"
    for index, name in enumerate(profile.device_class):
        if not DEVICE_CLASS.fullmatch(name):
            yield (
                ("device_class", index),
                f"{name} is not a device class",
                "see llmgw agent inventory; such as h100-80g",
            )
        if name in profile.device_class[:index]:
            yield ("device_class", index), f"{name} stands here twice", "remove one"
    yield from arithmetic(profile)
    yield from mig(profile, profile.device_class)
    capabilities = {name: compute_capability(name) for name in profile.device_class}
    yield from quantized(profile.engine, profile.quantization, capabilities)
    yield from offered(profile)
    yield from engine_fit(profile)
    yield from arguments(profile)
    utilization = profile.gpu_memory_utilization
    if utilization is not None and not 0 < utilization <= 1:
        yield ("gpu_memory_utilization",), f"expected more than 0 and at most 1, found {utilization:g}", ""
    if profile.memory_gib is not None and profile.memory_gib <= 0:
        yield ("memory_gib",), f"expected more than 0, found {profile.memory_gib:g}", ""
    for name in ("context_length", "parameters", "concurrency"):
        value = getattr(profile, name)
        if value is not None and value < 1:
            yield (name,), f"expected at least 1, found {value:g}", ""
    yield from memory_faults(profile)
    for limit in attrs.fields(type(profile.limits)):
        value = getattr(profile.limits, limit.name)
        if value <= 0:
            yield ("limits", limit.name), f"expected more than 0 seconds, found {value:g}", ""


def _hub(profile: Profile) -> Iterator[Rule]:
    if not profile.weights.startswith(PREFIX):
        return
    source = hub_source(profile.weights)
    if source is None:
        hint = "write hf:org/name, hf:org/name@revision or hf:org/name@revision:file.gguf"
        yield ("weights",), f"{profile.weights} names nothing on a hub", hint
    elif profile.engine is EngineKind.LLAMACPP and not source.file.endswith(".gguf"):
        yield ("weights",), "names no file, and llama.cpp takes files only", f"such as {source}:model-q4.gguf"


def _endpoint(url: str) -> Iterator[Rule]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        yield (), f"{url} is not a URL", "write http://host:port"
        return
    if parts.scheme == "https":
        yield (), "https endpoints are not supported by this version", "put a local TLS proxy in between"
    elif parts.scheme != "http" or not parts.hostname:
        yield (), f"{url} is not a URL of an engine", "write http://host:port"
    elif parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        yield (
            (),
            "has more than host and port",
            f"write http://{parts.hostname}:{port or 80}; requests keep their own path",
        )


def _router(router: RouterSettings) -> Iterator[Rule]:
    for name in ("max_body_bytes", "max_media_bytes"):
        if not 1024 <= getattr(router, name) <= _LARGEST_BODY:
            yield (name,), f"expected 1024 to {_LARGEST_BODY}, found {getattr(router, name)}", ""
    for index, host in enumerate(router.media_hosts):
        if not _MEDIA_HOST.fullmatch(host):
            yield ("media_hosts", index), f"{host!r} is no host name", "write cdn.example.org, or .example.org for all"
    for name in ("connect_timeout_s", "first_byte_timeout_s", "idle_timeout_s", "total_timeout_s"):
        if getattr(router, name) <= 0:
            yield (name,), f"expected more than 0 seconds, found {getattr(router, name):g}", ""
    for name, price in router.prices.items():
        for kind in ("prompt", "completion"):
            if getattr(price, kind) < 0:
                yield ("prices", name, kind), f"expected at least 0, found {getattr(price, kind):g}", ""


def _liveness(liveness: Liveness) -> Iterator[Rule]:
    if liveness.heartbeat_s < 0.1:
        yield ("heartbeat_s",), f"expected at least 0.1 seconds, found {liveness.heartbeat_s:g}", ""
    if liveness.unreachable_s < 2 * liveness.heartbeat_s:
        yield (
            ("unreachable_s",),
            f"is {liveness.unreachable_s:g}, less than two heartbeats of {liveness.heartbeat_s:g} s",
            "one late heartbeat must not make a node unreachable",
        )
    if not 0 < liveness.brake_share <= 1:
        yield ("brake_share",), f"expected more than 0 and at most 1, found {liveness.brake_share:g}", "1 never brakes"
    if liveness.brake_nodes < 1:
        yield ("brake_nodes",), f"expected at least 1, found {liveness.brake_nodes}", ""
    if liveness.brake_window_s <= 0:
        yield ("brake_window_s",), f"expected more than 0 seconds, found {liveness.brake_window_s:g}", ""
    if liveness.lost_s <= liveness.unreachable_s:
        yield ("lost_s",), f"is {liveness.lost_s:g}, not more than unreachable_s ({liveness.unreachable_s:g})", ""
