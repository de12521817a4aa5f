"""The rules on values, for each kind of file. Every rule names the path at fault, what is wrong and what to do.

One set of rules serves the router and the scheduler: both read :class:`llmgw.settings.catalog.Model`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

import attrs

from llmgw.hardware.fabric import FabricRule
from llmgw.hardware.gpu import compute_capability
from llmgw.settings.catalog import EngineKind, Model, Profile, Routing, Scaling
from llmgw.settings.daemon import (
    MOST_WORKERS,
    Address,
    AgentConfig,
    DoctorRules,
    LinkListener,
    RouterListener,
    ServerConfig,
)
from llmgw.settings.document import KeyPolicy, Liveness, RouterSettings, Settings, Tracing, WeightsRules
from llmgw.settings.faults import Path
from llmgw.settings.memory import memory_faults
from llmgw.settings.profile_rules import (
    DEVICE_CLASS,
    MODEL_NAME,
    Rule,
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

_ADAPTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}(?::[0-9]{1,3})?")
NODE_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
_TRUST_DOMAIN = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,253}[a-z0-9])?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9.\[\]:_-]+")
_CHECK = re.compile(r"[a-z][a-z0-9-]*(?:\.[a-z0-9-]+)*")
_LARGEST_BODY = 1024 * 1024 * 1024
_LARGEST_LIMIT = 2**53
_LARGEST_DAYS = 36_500
_MEDIA_HOST = re.compile(r"\.?[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*|[0-9A-Fa-f:]+")


def _at(path: Path, rules: Iterator[Rule]) -> Iterator[Rule]:
    for inner, problem, hint in rules:
        yield (*path, *inner), problem, hint


def settings_faults(settings: Settings) -> Iterator[Rule]:
    """Everything wrong with a settings document whose shape is right."""
    names = {model.name for model in settings.models}
    usual = list(_scaling(settings.scaling))
    yield from _at(("scaling",), iter(usual))
    for model in settings.models:
        # What a model takes over from a wrong default is said once, where the default stands.
        yield from (rule for rule in _at(("models", model.name), _model(model)) if not _inherited(rule, usual))
        for index, profile in enumerate(model.profiles):
            for lora in profile.lora:
                if (name := f"{model.name}:{lora}") in names:
                    path: Path = ("models", model.name, "profiles", index, "lora", lora)
                    yield path, f"{name} is also a model", "rename one of the two"
    yield from _aliases(settings)
    yield from _at(("router",), _router(settings.router))
    served = {name for model in settings.models for name in model.names}
    for name in settings.router.prices:
        if name not in served:
            yield ("router", "prices", name), "is no model of the catalog", ""
    yield from _at(("liveness",), _liveness(settings.liveness))
    for name, rules in settings.nodes.items():
        if not NODE_ID.fullmatch(name):
            yield ("nodes", name), "is not a node id", "use the id in the node's certificate"
        for index, taint in enumerate(rules.taints):
            if not NODE_ID.fullmatch(taint):
                yield ("nodes", name, "taints", index), f"{taint!r} is not a taint", "use letters, digits and . _ -"
    yield from _at(("weights",), _weights(settings.weights))
    yield from _at(("keys",), _keys(settings.keys))
    yield from _at(("doctor",), _doctor(settings.doctor))
    if settings.tracing is not None:
        yield from _at(("tracing",), _tracing(settings.tracing))
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


def _doctor(rules: DoctorRules) -> Iterator[Rule]:
    for index, name in enumerate(rules.skip):
        if not _CHECK.fullmatch(name):
            yield ("skip", index), f"{name!r} is no check, nor how ids of checks begin", "see docs/doctor.md"


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
        yield from _at(("scaling",), _scaling(model.scaling))
    yield from _at(("routing",), _routing(model.routing))
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
        yield from _at(path, profile_faults(profile))
        yield from _at(path, adapters(model.name, profile))
    for index, url in enumerate(model.endpoints):
        yield from _at(("endpoints", index), _endpoint(url))
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


def _listener(address: Address) -> Iterator[Rule]:
    if address.port == 0:
        yield (), "port 0 is not an address that others can be told", "choose a port"


def server_faults(config: ServerConfig) -> Iterator[Rule]:
    """Everything wrong with ``server.yaml`` as far as the text alone can tell."""
    listeners = {"router": config.router.listen, "admin": config.admin.listen}
    if config.link is not None:
        listeners["link"] = config.link.listen
        yield from _trust_domain(config.link.trust_domain, ("link", "trust_domain"))
        yield from _at(("link",), _link(config.link))
    if config.admin.tls is not None:
        yield from _trust_domain(config.admin.tls.trust_domain, ("admin", "tls", "trust_domain"))
    taken: dict[Address, str] = {}
    for name, address in listeners.items():
        yield from _at((name, "listen"), _listener(address))
        if address in taken:
            yield (name, "listen"), f"{address} is also {taken[address]}'s", "give each listener an address of its own"
        taken[address] = name
    yield from _at(("router",), _router_listener(config.router))
    if config.store is not None:
        yield from _at(("store",), _database(config.store))


def _database(address: str) -> Iterator[Rule]:
    if not address.startswith(("postgresql://", "postgres://")):
        hint = "postgresql://USER@HOST/DATABASE, or nothing for SQLite in state_dir"
        # No more of it is shown: it may have a password in it.
        yield (), f"{address.partition(':')[0][:20]!r} begins no address of a PostgreSQL database", hint
    elif re.match(r"[a-z]+://[^@?]*:[^?]*@", address) or re.search(r"(?i)[?&](ssl)?password=", address):
        hint = "name a file with it, 0600: postgresql://USER@HOST/DATABASE?passfile=FILE"
        yield (), "a password must not stand here", hint


def _router_listener(router: RouterListener) -> Iterator[Rule]:
    if router.drain_s < 0:
        yield ("drain_s",), f"expected at least 0 seconds, found {router.drain_s:g}", ""
    if router.workers is not None and not 1 <= router.workers <= MOST_WORKERS:
        yield ("workers",), f"expected 1 to {MOST_WORKERS}, found {router.workers}", "leave it out for one a core"
    for index, origin in enumerate(router.cors.origins):
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            hint = "an origin is scheme, host and port, without a path: https://chat.example.org"
            yield ("cors", "origins", index), f"{origin!r} is no origin", hint


def _link(link: LinkListener) -> Iterator[Rule]:
    if link.connections_per_address < 1:
        yield ("connections_per_address",), f"expected at least 1, found {link.connections_per_address}", ""
    for index, node in enumerate(link.nodes or ()):
        if not NODE_ID.fullmatch(node):
            yield ("nodes", index), f"{node!r} is not a node id", "use up to 64 letters, digits and . _ -"
    if link.issuing is None:
        return
    if not 0.1 <= link.issuing.node_hours <= 8760:
        hours = link.issuing.node_hours
        yield ("issuing", "node_hours"), f"expected 0.1 to 8760 hours, found {hours:g}", "24 is usual"
    if not 0 <= link.issuing.renew_expired_days <= 30:
        days = link.issuing.renew_expired_days
        yield ("issuing", "renew_expired_days"), f"expected 0 to 30 days, found {days:g}", "0 switches it off"


def _trust_domain(name: str, path: Path) -> Iterator[Rule]:
    if not _TRUST_DOMAIN.fullmatch(name):
        yield path, f"{name!r} is not a trust domain", "use lower-case letters, digits and . - _"


def agent_faults(config: AgentConfig) -> Iterator[Rule]:
    """Everything wrong with ``agent.yaml`` as far as the text alone can tell."""
    if not NODE_ID.fullmatch(config.id):
        yield ("id",), f"{config.id!r} is not a node id", "use up to 64 letters, digits and . _ -"
    yield from _trust_domain(config.trust_domain, ("trust_domain",))
    if not config.control_planes:
        yield ("control_planes",), "is empty", "name at least one control plane as host:port"
    for index, address in enumerate(config.control_planes):
        yield from _at(("control_planes", index), _listener(address))
    if not config.address or any(c in config.address for c in "/ []\t\n"):
        yield ("address",), f"{config.address!r} is not a host name or address", "without port or brackets"
    if not 1024 <= config.port_first <= config.port_last <= 65535:
        yield (
            ("ports",),
            f"{config.port_first}-{config.port_last} is not a range within 1024-65535",
            "such as 20000-20999",
        )
    for name in ("interval_s", "timeout_s"):
        if getattr(config.discovery, name) <= 0:
            yield ("discovery", name), f"expected more than 0 seconds, found {getattr(config.discovery, name):g}", ""
    yield from _at(("doctor",), _doctor(config.doctor))
    if config.weights.reserve_gib < 0:
        yield ("weights", "reserve_gib"), f"expected at least 0, found {config.weights.reserve_gib:g}", ""
    for rule in config.fabrics:
        yield from _at(("fabrics", rule.label), _fabric(rule))
    for engine in config.engines:
        if not engine.command or not engine.command[0]:
            yield ("engines", engine.kind.value, "command"), "is empty", "name the program that starts this engine"


def _fabric(rule: FabricRule) -> Iterator[Rule]:
    if not NODE_ID.fullmatch(rule.label):
        yield (), "is not a label", "use up to 64 letters, digits and . _ -"
    if not rule.adapters and rule.link_layer is None and not rule.subnets:
        yield (
            (),
            "says nothing about which ports it has",
            "give adapters, link_layer (infiniband or ethernet) or subnets; see llmgw agent inventory",
        )
    for index, name in enumerate(rule.adapters):
        if not _ADAPTER.fullmatch(name):
            yield (
                ("adapters", index),
                f"{name!r} is not an adapter's name",
                "such as mlx5_0, or mlx5_0:1 for one of its ports; patterns would match more than is meant",
            )
        if name in rule.adapters[:index]:
            yield ("adapters", index), f"{name} stands here twice", "remove one"
    for index, text in enumerate(rule.subnets):
        try:
            ipaddress.ip_network(text)
        except ValueError as wrong:
            yield ("subnets", index), f"{text!r} is not a network: {wrong}", "such as 10.30.0.0/16"
