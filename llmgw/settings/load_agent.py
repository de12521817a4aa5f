"""``agent.yaml``: from its text to :class:`AgentConfig`, with every fault at its place."""

from __future__ import annotations

import re
from typing import Any

import attrs

from llmgw.hardware.fabric import FabricRule
from llmgw.settings import yaml
from llmgw.settings.catalog import EngineKind
from llmgw.settings.convert import shown
from llmgw.settings.daemon import AgentConfig, EngineInstall
from llmgw.settings.daemon_rules import agent_faults
from llmgw.settings.faults import Path, nearest
from llmgw.settings.paths import resolve, tls_below
from llmgw.settings.reading import Reading

_PORTS = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")


def load_agent(text: str, file: str, folder: str) -> AgentConfig:
    """``agent.yaml``; relative paths in it are below ``folder``. Raises :class:`ConfigError` with every fault."""
    return agent_of(yaml.read(text, file), folder)


def agent_of(document: yaml.Document, folder: str) -> AgentConfig:
    """As :func:`load_agent`, of a document that was read already."""
    reading = Reading(document)
    config = read_agent(reading, document.value, folder)
    reading.end()
    assert config is not None
    return config


def read_agent(reading: Reading, value: Any, folder: str) -> AgentConfig | None:
    """What ``agent.yaml`` says, or ``None`` with its faults noted."""
    before = len(reading.faults)
    body = reading.mapping(value, ())
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
    if config is None or len(reading.faults) > before:
        return None
    config = attrs.evolve(
        config,
        state_dir=resolve(config.state_dir, folder),
        weights_dir=resolve(config.weights_dir, folder),
        weights=attrs.evolve(
            config.weights,
            cache=resolve(config.weights.cache, folder) if config.weights.cache else "",
            token_file=resolve(config.weights.token_file, folder) if config.weights.token_file else "",
        ),
        tls=tls_below(config.tls, folder),
        discovery=attrs.evolve(config.discovery, root=resolve(config.discovery.root, folder)),
        fabrics=tuple(f for f in fabrics if f is not None),
        engines=tuple(e for e in engines if e is not None),
    )
    for path, problem, hint in agent_faults(config):
        reading.fault(path, problem, hint)
    return config if len(reading.faults) == before else None


def _engine(reading: Reading, name: str, value: Any) -> EngineInstall | None:
    path: Path = ("engines", name)
    if name not in {kind.value for kind in EngineKind}:
        reading.fault(path, "unknown engine", nearest(name, [kind.value for kind in EngineKind]))
        return None
    body = {"command": value} if isinstance(value, list) else reading.mapping(value, path)
    if "kind" in body:
        reading.fault((*path, "kind"), "unknown key", "the engine is the key of the mapping")
        return None
    return reading.structure({"kind": name, **body}, EngineInstall, path)


def _fabric(reading: Reading, label: str, value: Any) -> FabricRule | None:
    path: Path = ("fabrics", label)
    body = reading.mapping(value, path)
    if "label" in body:
        reading.fault((*path, "label"), "unknown key", "the label is the key of the mapping")
        return None
    for key in ("adapters", "subnets"):
        if isinstance(body.get(key), str):
            body[key] = [body[key]]
    return reading.structure({"label": label, **body}, FabricRule, path)
