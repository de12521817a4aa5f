"""From a file's text to its class: shape, types and rules, with every fault at its place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs
import cattrs
from cattrs.errors import AttributeValidationNote, ForbiddenExtraKeysError, IterableValidationNote

from llmgw.hardware.fabric import FabricRule
from llmgw.settings import yaml
from llmgw.settings.catalog import EngineKind, Model, Profile
from llmgw.settings.convert import WrongValue, shown, strict_converter
from llmgw.settings.daemon import (
    Address,
    AdminTls,
    AgentConfig,
    EngineInstall,
    LinkListener,
    RouterTls,
    ServerConfig,
    TlsFiles,
)
from llmgw.settings.document import Settings
from llmgw.settings.faults import ConfigError, ConfigFault, Path, nearest
from llmgw.settings.paths import resolve
from llmgw.settings.validate import agent_faults, server_faults, settings_faults

_Kind = TypeVar("_Kind")

_PORTS = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\s\[\]:/]+)):([0-9]{1,5})")

# The keys that people write, where they differ from the class's own.
_KEYS: Mapping[type, tuple[frozenset[str], frozenset[str]]] = {
    Model: (frozenset({"name"}), frozenset()),
    EngineInstall: (frozenset({"kind"}), frozenset()),
    AgentConfig: (frozenset({"port_first", "port_last"}), frozenset({"ports"})),
    FabricRule: (frozenset({"label"}), frozenset()),
}

_TOP_KEYS = {
    "server": frozenset({"settings", "admin", "link"}),
    "agent": frozenset({"id", "control_planes", "address", "ports", "discovery", "fabrics", "engines", "weights_dir"}),
    "settings": frozenset({"models", "liveness", "nodes", "quotas", "weights"}),
}


def _address(value: Any, _kind: Any) -> Address:
    if isinstance(value, str) and (match := _ADDRESS.fullmatch(value)) and 0 <= int(match[3]) <= 65535:
        return Address(match[1] or match[2], int(match[3]))
    raise WrongValue("host:port", value)


def _converter() -> cattrs.Converter:
    converter = strict_converter(forbid_unknown=True)
    converter.register_structure_hook(Address, _address)
    return converter


_CONVERTER = _converter()


class _Reading:
    """One file being read; faults are collected until the end."""

    def __init__(self, text: str, file: str) -> None:
        self.document = yaml.read(text, file)
        self.faults: list[ConfigFault] = []

    def fault(self, path: Path, problem: str, hint: str = "") -> None:
        self.faults.append(self.document.fault(path, problem, hint))

    def mapping(self, value: Any, path: Path) -> dict[str, Any]:
        """The value as a mapping of its own, so that it can be changed; a fault and empty if it is none."""
        if isinstance(value, dict):
            return dict(value)
        self.fault(path, f"expected a mapping, found {shown(value)}")
        return {}

    def structure(self, value: Any, kind: type[_Kind], path: Path) -> _Kind | None:
        """The value as ``kind``, or ``None`` with its faults noted."""
        try:
            return _CONVERTER.structure(value, kind)
        except Exception as wrong:  # noqa: BLE001 - a validation error of whatever kind, taken apart below
            self._take(wrong, kind, path)
            return None

    def _take(self, wrong: Exception, kind: Any, path: Path) -> None:
        match wrong:
            case cattrs.BaseValidationError():
                for inner in wrong.exceptions:
                    note = _note(inner)
                    step = (
                        ()
                        if note is None
                        else (note.name,)
                        if isinstance(note, AttributeValidationNote)
                        else (note.index,)
                    )
                    self._take(inner, getattr(wrong, "cl", kind), (*path, *step))
            case ForbiddenExtraKeysError():
                hidden, more = _KEYS.get(wrong.cl, (frozenset(), frozenset()))
                known = ({a.name for a in attrs.fields(wrong.cl)} - hidden) | more
                for name in sorted(wrong.extra_fields):
                    self.fault((*path, name), "unknown key", nearest(name, known))
            case WrongValue():
                self.fault(path, f"expected {wrong.expected}, found {wrong.found}")
            case KeyError():
                self.fault(path, "is missing")
            case _:
                self.fault(path, str(wrong) or type(wrong).__name__)

    def end(self) -> None:
        """Raise if anything was wrong."""
        if self.faults:
            raise ConfigError(self.document.file, self.faults)


def _note(error: BaseException) -> AttributeValidationNote | IterableValidationNote | None:
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, AttributeValidationNote | IterableValidationNote):
            return note
    return None


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
    reading = _Reading(text, file)
    value = reading.document.value
    top = {} if value is None else reading.mapping(value, ())
    models = [
        _model(reading, name, body)
        for name, body in reading.mapping(top.pop("models", None) or {}, ("models",)).items()
    ]
    rest = reading.structure(top, Settings, ())
    reading.end()
    assert rest is not None
    settings = attrs.evolve(rest, models=tuple(m for m in models if m is not None))
    for path, problem, hint in settings_faults(settings):
        reading.fault(path, problem, hint)
    reading.end()
    return settings


def _model(reading: _Reading, name: str, value: Any) -> Model | None:
    path: Path = ("models", name)
    body = reading.mapping(value, path)
    if "name" in body:
        reading.fault((*path, "name"), "unknown key", "the name is the key of the mapping")
        del body["name"]
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


def load_server(text: str, file: str, folder: str) -> ServerConfig:
    """``server.yaml``; relative paths in it are below ``folder``. Raises :class:`ConfigError` with every fault."""
    reading = _Reading(text, file)
    config = reading.structure(reading.mapping(reading.document.value, ()), ServerConfig, ())
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
        tls=_tls(link.tls, folder),
        issuing=None if issuing is None else attrs.evolve(issuing, ca=resolve(issuing.ca, folder)),
    )


def _router_tls(files: RouterTls | None, folder: str) -> RouterTls | None:
    return None if files is None else RouterTls(resolve(files.certificate, folder), resolve(files.key, folder))


def _admin_tls(files: AdminTls | None, folder: str) -> AdminTls | None:
    if files is None:
        return None
    ca = None if files.ca is None else resolve(files.ca, folder)
    return attrs.evolve(files, certificate=resolve(files.certificate, folder), key=resolve(files.key, folder), ca=ca)


def _tls(files: TlsFiles, folder: str) -> TlsFiles:
    return TlsFiles(resolve(files.certificate, folder), resolve(files.key, folder), resolve(files.ca, folder))


def load_agent(text: str, file: str, folder: str) -> AgentConfig:
    """``agent.yaml``; relative paths in it are below ``folder``. Raises :class:`ConfigError` with every fault."""
    reading = _Reading(text, file)
    body = reading.mapping(reading.document.value, ())
    for hidden in ("port_first", "port_last"):
        if hidden in body:
            reading.fault((hidden,), "unknown key", "did you mean ports?")
            del body[hidden]
    if "ports" in body:
        ports = body.pop("ports")
        match = _PORTS.fullmatch(ports) if isinstance(ports, str) else None
        if match:
            body["port_first"], body["port_last"] = int(match[1]), int(match[2])
        else:
            reading.fault(("ports",), f"expected first-last, found {shown(ports)}", "such as 20000-20999")
    if isinstance(body.get("discovery"), str):
        body["discovery"] = {"source": body["discovery"]}
    fabrics = [
        _fabric(reading, label, value)
        for label, value in reading.mapping(body.pop("fabrics", None) or {}, ("fabrics",)).items()
    ]
    engines = [
        _engine(reading, name, value)
        for name, value in reading.mapping(body.pop("engines", None) or {}, ("engines",)).items()
    ]
    config = reading.structure(body, AgentConfig, ())
    reading.end()
    assert config is not None
    config = attrs.evolve(
        config,
        state_dir=resolve(config.state_dir, folder),
        weights_dir=resolve(config.weights_dir, folder),
        weights=attrs.evolve(
            config.weights,
            cache=resolve(config.weights.cache, folder) if config.weights.cache else "",
            token_file=resolve(config.weights.token_file, folder) if config.weights.token_file else "",
        ),
        tls=_tls(config.tls, folder),
        discovery=attrs.evolve(config.discovery, root=resolve(config.discovery.root, folder)),
        fabrics=tuple(f for f in fabrics if f is not None),
        engines=tuple(e for e in engines if e is not None),
    )
    for path, problem, hint in agent_faults(config):
        reading.fault(path, problem, hint)
    reading.end()
    return config


def _engine(reading: _Reading, name: str, value: Any) -> EngineInstall | None:
    path: Path = ("engines", name)
    if name not in {kind.value for kind in EngineKind}:
        reading.fault(path, "unknown engine", nearest(name, [kind.value for kind in EngineKind]))
        return None
    body = {"command": value} if isinstance(value, list) else reading.mapping(value, path)
    if "kind" in body:
        reading.fault((*path, "kind"), "unknown key", "the engine is the key of the mapping")
        return None
    return reading.structure({"kind": name, **body}, EngineInstall, path)


def _fabric(reading: _Reading, label: str, value: Any) -> FabricRule | None:
    path: Path = ("fabrics", label)
    body = reading.mapping(value, path)
    if "label" in body:
        reading.fault((*path, "label"), "unknown key", "the label is the key of the mapping")
        return None
    for key in ("adapters", "subnets"):
        if isinstance(body.get(key), str):
            body[key] = [body[key]]
    return reading.structure({"label": label, **body}, FabricRule, path)
