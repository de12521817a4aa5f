"""From a file's text to its class: shape, types and rules, with every fault at its place.

``agent.yaml`` is in :mod:`llmgw.settings.load_agent`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import cattrs

from llmgw.settings import yaml
from llmgw.settings.agent_part import read_agents
from llmgw.settings.catalog import Model, Profile, Scaling
from llmgw.settings.convert import WrongValue, shown, strict_converter
from llmgw.settings.daemon import AdminTls, LinkListener, RouterTls, ServerConfig
from llmgw.settings.daemon_rules import server_faults
from llmgw.settings.document import Settings
from llmgw.settings.faults import ConfigError, Path
from llmgw.settings.paths import resolve, tls_below
from llmgw.settings.reading import Reading
from llmgw.settings.validate import settings_faults

_CONVERTER = strict_converter()

_TOP_KEYS = {
    "server": frozenset({"settings", "admin", "link"}),
    "agent": frozenset({"id", "control_planes", "address", "ports", "discovery", "fabrics", "engines", "weights_dir"}),
    "settings": frozenset(
        {"models", "liveness", "nodes", "quotas", "weights", "scaling", "keys", "tracing", "agents", "doctor"}
    ),
}


def kind_of(text: str, file: str) -> str:
    """``server``, ``agent`` or ``settings``, told by the keys at the top. Raises :class:`ConfigError`."""
    document = yaml.read(text, file)
    keys = set(document.value) if isinstance(document.value, dict) else set()
    scores = {kind: len(keys & known) for kind, known in _TOP_KEYS.items()}
    best = max(scores, key=lambda kind: scores[kind])
    if not scores[best]:
        fault = document.fault((), "neither server.yaml, agent.yaml nor a settings document", "say which with --kind")
        raise ConfigError(file, [fault])
    return best


def load_settings(text: str, file: str = "settings.yaml") -> Settings:
    """The settings document. Raises :class:`ConfigError` with every fault."""
    reading = Reading(yaml.read(text, file))
    value = reading.document.value
    top = {} if value is None else reading.mapping(value, ())
    scaling = top.get("scaling")
    usual = scaling if isinstance(scaling, dict) else {}
    models = [
        _model(reading, name, body, usual)
        for name, body in reading.mapping(top.pop("models", None) or {}, ("models",)).items()
    ]
    agents = read_agents(reading, top.pop("agents", None))
    rest = reading.structure(top, Settings, ())
    reading.end()
    assert rest is not None
    settings = attrs.evolve(rest, models=tuple(m for m in models if m is not None), agents=agents)
    for path, problem, hint in settings_faults(settings):
        reading.fault(path, problem, hint)
    reading.end()
    return settings


def _model(reading: Reading, name: str, value: Any, scaling: Mapping[str, Any]) -> Model | None:
    path: Path = ("models", name)
    body = reading.mapping(value, path)
    if "name" in body:
        reading.fault((*path, "name"), "unknown key", "the name is the key of the mapping")
        del body["name"]
    if isinstance(body.get("scaling"), dict):
        # What is wrong with a default is said once, where it stands.
        usual = {key: value for key, value in scaling.items() if _is_scaling(key, value)}
        body["scaling"] = {**usual, **body["scaling"]}
    written = body.pop("profiles", None) or []
    if not isinstance(written, list):
        reading.fault((*path, "profiles"), f"expected a list, found {shown(written)}")
        written = []
    profiles = []
    for index, profile in enumerate(written):
        place = (*path, "profiles", index)
        fields = reading.mapping(profile, place)
        if isinstance(fields.get("device_class"), str):
            fields["device_class"] = [fields["device_class"]]
        if fields:
            profiles.append(reading.structure(fields, Profile, place))
    model = reading.structure({"name": name, **body}, Model, path)
    return None if model is None else attrs.evolve(model, profiles=tuple(p for p in profiles if p is not None))


def _is_scaling(key: str, value: Any) -> bool:
    try:
        _CONVERTER.structure({key: value}, Scaling)
    except (cattrs.BaseValidationError, WrongValue):
        return False
    return True


def load_server(text: str, file: str, folder: str) -> ServerConfig:
    """``server.yaml``; relative paths in it are below ``folder``. Raises :class:`ConfigError` with every fault."""
    reading = Reading(yaml.read(text, file))
    body = reading.mapping(reading.document.value, ())
    if isinstance(router := body.get("router"), dict) and "tracing" in router:
        reading.fault(("router", "tracing"), "belongs in the settings", "write it there as tracing, beside models")
        body["router"] = {key: value for key, value in router.items() if key != "tracing"}
    config = reading.structure(body, ServerConfig, ())
    reading.end()
    assert config is not None
    config = attrs.evolve(
        config,
        state_dir=resolve(config.state_dir, folder),
        settings=resolve(config.settings, folder),
        admin=attrs.evolve(config.admin, tls=_admin_tls(config.admin.tls, folder)),
        router=attrs.evolve(config.router, tls=_router_tls(config.router.tls, folder)),
        link=None if config.link is None else _link(config.link, folder),
    )
    for path, problem, hint in server_faults(config):
        reading.fault(path, problem, hint)
    reading.end()
    return config


def _link(link: LinkListener, folder: str) -> LinkListener:
    issuing = link.issuing
    return attrs.evolve(
        link,
        tls=tls_below(link.tls, folder),
        issuing=None if issuing is None else attrs.evolve(issuing, ca=resolve(issuing.ca, folder)),
    )


def _router_tls(files: RouterTls | None, folder: str) -> RouterTls | None:
    return None if files is None else RouterTls(resolve(files.certificate, folder), resolve(files.key, folder))


def _admin_tls(files: AdminTls | None, folder: str) -> AdminTls | None:
    if files is None:
        return None
    ca = None if files.ca is None else resolve(files.ca, folder)
    return attrs.evolve(files, certificate=resolve(files.certificate, folder), key=resolve(files.key, folder), ca=ca)
