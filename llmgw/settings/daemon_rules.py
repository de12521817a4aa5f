"""The rules on values of the daemons' own files; those of the settings are in :mod:`llmgw.settings.validate`."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from llmgw.hardware.fabric import FabricRule
from llmgw.settings.daemon import (
    MOST_WORKERS,
    Address,
    AgentConfig,
    DoctorRules,
    LinkListener,
    RouterListener,
    ServerConfig,
)
from llmgw.settings.faults import Path, Rule, at

NODE_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
_ADAPTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}(?::[0-9]{1,3})?")
_TRUST_DOMAIN = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,253}[a-z0-9])?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9.\[\]:_-]+")
_CHECK = re.compile(r"[a-z][a-z0-9-]*(?:\.[a-z0-9-]+)*")


def server_faults(config: ServerConfig) -> Iterator[Rule]:
    """Everything wrong with ``server.yaml`` as far as the text alone can tell."""
    listeners = {"router": config.router.listen, "admin": config.admin.listen}
    if config.link is not None:
        listeners["link"] = config.link.listen
        yield from _trust_domain(config.link.trust_domain, ("link", "trust_domain"))
        yield from at(("link",), _link(config.link))
    if config.admin.tls is not None:
        yield from _trust_domain(config.admin.tls.trust_domain, ("admin", "tls", "trust_domain"))
    taken: dict[Address, str] = {}
    for name, address in listeners.items():
        yield from at((name, "listen"), _listener(address))
        if address in taken:
            yield (name, "listen"), f"{address} is also {taken[address]}'s", "give each listener an address of its own"
        taken[address] = name
    yield from at(("router",), _router_listener(config.router))
    if config.store is not None:
        yield from at(("store",), _database(config.store))


def _listener(address: Address) -> Iterator[Rule]:
    if address.port == 0:
        yield (), "port 0 is not an address that others can be told", "choose a port"


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
        yield from at(("control_planes", index), _listener(address))
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
    yield from at(("doctor",), doctor_faults(config.doctor))
    if config.weights.reserve_gib < 0:
        yield ("weights", "reserve_gib"), f"expected at least 0, found {config.weights.reserve_gib:g}", ""
    for rule in config.fabrics:
        yield from at(("fabrics", rule.label), _fabric(rule))
    for engine in config.engines:
        if not engine.command or not engine.command[0]:
            yield ("engines", engine.kind.value, "command"), "is empty", "name the program that starts this engine"


def doctor_faults(rules: DoctorRules) -> Iterator[Rule]:
    """Everything wrong with which checks are left out, in the settings as in ``agent.yaml``."""
    for index, name in enumerate(rules.skip):
        if not _CHECK.fullmatch(name):
            yield ("skip", index), f"{name!r} is no check, nor how ids of checks begin", "see docs/doctor.md"


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
