"""What a node's agent is told by the settings, and what that comes to beside its own ``agent.yaml``. Pure.

``agent.yaml`` < ``agents.default`` < ``agents.nodes.<id>``: mappings are merged key by key, lists and scalars replace,
``null`` takes a key back to its built-in default. What may be written short (``discovery: nvml``, an engine's command
as a list) is the same as written long.

A mapping over a ``null`` takes back what was below and is not said anew. The merged mapping says so with an empty key,
which nobody can write, so that it does not matter in which order the three are merged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from attrs import evolve, frozen

from llmgw.errors import OperatorError
from llmgw.hardware.fabric import FabricRule
from llmgw.settings.catalog import EngineKind
from llmgw.settings.daemon import AgentConfig, Discovery, DoctorRules, EngineInstall, Log, WeightsConfig
from llmgw.settings.daemon_rules import NODE_ID
from llmgw.settings.document import AgentSettings, Settings
from llmgw.settings.faults import ConfigError, Path, dotted, nearest
from llmgw.settings.load_agent import agent_of, read_agent
from llmgw.settings.reading import Reading, known_keys
from llmgw.settings.yaml import Document

FILE_ONLY = frozenset({"id", "control_planes", "address", "tls", "trust_domain", "state_dir"})
"""What an agent needs before it can hear of settings, and where it keeps them: only ``agent.yaml`` says that."""

_RESET = ""
_SECTIONS: Mapping[str, type] = MappingProxyType(
    {"discovery": Discovery, "weights": WeightsConfig, "log": Log, "doctor": DoctorRules}
)
_NAMED: Mapping[str, type] = MappingProxyType({"engines": EngineInstall, "fabrics": FabricRule})

_LARGEST = 128 * 1024
"""Bytes of one part as JSON. Two of them, written as JSON again, must have room in a message."""

_WHOLE: Mapping[str, Any] = MappingProxyType(
    {
        "id": "node",
        "control_planes": ["host:1"],
        "tls": {"certificate": "c", "key": "k", "ca": "a"},
        "state_dir": "/state",
    }
)
"""What stands in for a node's file while the settings are checked alone."""


@frozen
class NodeSettings:
    """The settings of one node as they travel: ``text`` is the canonical JSON of the merged mapping, ``digest`` its
    SHA-256, and ``revision`` that of the document that they are from."""

    revision: int
    digest: str
    text: str


@frozen
class SettingsSaid:
    """What a node said last of its settings: those in force, and those that it refused since, with the reason.

    Digests are empty and revisions 0 for what never was. ``ignored`` is a node whose agent knows no settings.
    """

    revision: int = 0
    digest: str = ""
    refused_digest: str = ""
    refused: str = ""
    ignored: bool = False


NOTHING_SAID = SettingsSaid()
"""What is known of a node that never said anything of its settings."""


class SettingsState(StrEnum):
    """How a node stands to the settings that it is to have."""

    APPLIED = "applied"
    PENDING = "pending"
    REFUSED = "refused"
    IGNORED = "ignored"


@frozen
class SettingsHeld:
    """A node's settings: the revision ``wanted``, the one ``applied`` (0 for none), and why they are not the same."""

    state: SettingsState = SettingsState.PENDING
    wanted: int = 0
    applied: int = 0
    reason: str = ""


NOTHING_HELD = SettingsHeld()
"""How a node stands for which no settings were worked out yet."""


def held(wanted: NodeSettings, said: SettingsSaid) -> SettingsHeld:
    """How a node that said this stands to what it is to have: equal settings are one, whatever their revision."""
    if said.digest == wanted.digest:
        return SettingsHeld(SettingsState.APPLIED, wanted.revision, wanted.revision)
    if said.refused_digest == wanted.digest:
        return SettingsHeld(SettingsState.REFUSED, wanted.revision, said.revision, said.refused)
    if said.ignored:
        why = "its agent is of a version that knows no settings; upgrade it"
        return SettingsHeld(SettingsState.IGNORED, wanted.revision, 0, why)
    return SettingsHeld(SettingsState.PENDING, wanted.revision, said.revision)


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid upon ``under``. Both as :func:`written_long` gives them, or merged before."""
    if _RESET in over:
        return dict(over)
    made = dict(under)
    for key, value in over.items():
        if not isinstance(value, Mapping):
            made[key] = value
        elif key not in made:
            made[key] = dict(value)
        elif isinstance(below := made[key], Mapping):
            made[key] = merged(below, value)
        else:
            made[key] = {**value, _RESET: None}
    return made


def written_long(part: Mapping[str, Any]) -> dict[str, Any]:
    """What ``agent.yaml`` or a part of it says, with everything written long."""
    made = dict(part)
    if isinstance(made.get("discovery"), str):
        made["discovery"] = {"source": made["discovery"]}
    if isinstance(engines := made.get("engines"), Mapping):
        made["engines"] = {k: {"command": v} if isinstance(v, list) else v for k, v in engines.items()}
    return made


def without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping as an agent reads it: what is taken back is not there."""
    return {
        key: without_nulls(inner) if isinstance(inner, Mapping) else inner
        for key, inner in value.items()
        if inner is not None
    }


def agent_part(settings: Settings, node: str) -> dict[str, Any]:
    """What the settings tell this node's agent."""
    skip = settings.doctor.skip
    made: dict[str, Any] = {"doctor": {"skip": list(skip)}} if skip else {}
    for part in (settings.agents.default, settings.agents.nodes.get(node, {})):
        made = merged(made, written_long(part))
    return made


def node_settings(settings: Settings, node: str, revision: int) -> NodeSettings:
    """The same as it travels; equal for equal mappings, whatever the order of their keys."""
    text = json.dumps(agent_part(settings, node), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return NodeSettings(revision, digest_of(text), text)


def digest_of(text: str) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def part_of(settings: NodeSettings | None) -> dict[str, Any]:
    """The mapping that travelled; empty without one. Raises :class:`OperatorError` for what is none."""
    if settings is None:
        return {}
    thing = f"settings of revision {settings.revision}"
    if digest_of(settings.text) != settings.digest:
        raise OperatorError(thing, "are not what their digest says", "the control plane sends them again")
    try:
        part = json.loads(settings.text)
    except (ValueError, RecursionError) as wrong:
        raise OperatorError(thing, f"are no JSON ({type(wrong).__name__})", "upgrade the control plane") from wrong
    if not isinstance(part, dict):
        raise OperatorError(thing, "are no mapping", "upgrade the control plane")
    if refused := sorted(FILE_ONLY & part.keys()):
        raise OperatorError(thing, f"say {', '.join(refused)}, which only agent.yaml may", "upgrade the control plane")
    return part


def beside(document: Document, folder: str, settings: NodeSettings | None) -> AgentConfig:
    """What the file and the settings come to together; relative paths in both are below the file's ``folder``.

    Raises :class:`OperatorError` for settings that are none, and :class:`ConfigError`, which is one, with every fault.
    """
    part = part_of(settings)
    own = document.value if isinstance(document.value, dict) else {}
    try:
        value = without_nulls(merged(written_long(own), part)) if part else document.value
    except RecursionError as wrong:
        raise OperatorError("the settings", "are nested too deep") from wrong
    return agent_of(evolve(document, value=value), folder)


def in_words(wrong: OperatorError) -> str:
    """Why settings are refused, in one line: places in a file would not be theirs."""
    if not isinstance(wrong, ConfigError):
        return str(wrong)
    return "; ".join(
        f"{f.path + ': ' if f.path else ''}{f.problem}" + (f" ({f.hint})" if f.hint else "") for f in wrong.faults
    )


def set_by_both(document: Document, settings: NodeSettings | None) -> tuple[str, ...]:
    """The keys that the file and the settings both say something of: the settings win."""
    own = document.value if isinstance(document.value, dict) else {}
    return tuple(sorted(dotted(path) for path in _both(written_long(own), part_of(settings), ())))


def _both(own: Mapping[str, Any], part: Mapping[str, Any], path: Path) -> Iterator[Path]:
    if _RESET in part:
        yield path
        return
    for key in own.keys() & part.keys():
        below, above = own[key], part[key]
        if isinstance(below, Mapping) and isinstance(above, Mapping):
            yield from _both(below, above, (*path, key))
        else:
            yield (*path, key)


def read_agents(reading: Reading, value: Any) -> AgentSettings:
    """The section ``agents`` of the settings, its faults noted with what the same keys of ``agent.yaml`` would have."""
    body = {} if value is None else reading.mapping(value, ("agents",))
    default = _part(reading, body.pop("default", None), ("agents", "default"))
    nodes: dict[str, Mapping[str, Any]] = {}
    for node, part in reading.mapping(body.pop("nodes", None) or {}, ("agents", "nodes")).items():
        path: Path = ("agents", "nodes", node)
        if not NODE_ID.fullmatch(node):
            reading.fault(path, "is not a node id", "use the id in the node's certificate")
        nodes[node] = _part(reading, part, path)
    for name in body:
        reading.unknown(("agents", name), AgentSettings)
    return AgentSettings(default, MappingProxyType(nodes))


def _part(reading: Reading, value: Any, path: Path) -> Mapping[str, Any]:
    """A part of what ``agent.yaml`` can say: checked as that file is, what is not in it taken to be right."""
    part = reading.below(path)
    body = {} if value is None else part.mapping(value, ())
    for name in sorted(FILE_ONLY & body.keys()):
        part.fault((name,), "belongs into agent.yaml on the node", "the agent needs it before it hears of settings")
    known = {key: inner for key, inner in body.items() if key not in FILE_ONLY}
    if (size := len(json.dumps(known))) > _LARGEST:
        part.fault((), f"is {size} bytes long, at most {_LARGEST} are sent to an agent", "shorten it")
    _taken_back(part, known)
    read_agent(part, {**_WHOLE, **_completed(without_nulls(written_long(known)))}, "/")
    return MappingProxyType(known)


def _taken_back(reading: Reading, body: Mapping[str, Any]) -> None:
    """Note the keys that are taken back and that there are not: a null has no value that could be wrong."""
    for key, value in body.items():
        if value is None and key not in known_keys(AgentConfig):
            reading.unknown((key,), AgentConfig)
        if not isinstance(value, Mapping):
            continue
        if (section := _SECTIONS.get(key)) is not None:
            _nulls(reading, value, (key,), section)
        elif (named := _NAMED.get(key)) is not None:
            for name, inner in value.items():
                if inner is None and key == "engines" and name not in set(EngineKind):
                    reading.fault((key, name), "unknown engine", nearest(name, list(EngineKind)))
                elif inner is None and not NODE_ID.fullmatch(name):
                    reading.fault((key, name), "is not a label", "use up to 64 letters, digits and . _ -")
                elif isinstance(inner, Mapping):
                    _nulls(reading, inner, (key, name), named)


def _nulls(reading: Reading, value: Mapping[str, Any], path: Path, kind: type) -> None:
    for key, inner in value.items():
        if inner is None and key not in known_keys(kind):
            reading.unknown((*path, key), kind)


def _completed(part: dict[str, Any]) -> dict[str, Any]:
    """The part with what its engines and fabrics need and the file may say."""
    if isinstance(engines := part.get("engines"), Mapping):
        part["engines"] = {k: {"command": ["x"], **v} if isinstance(v, Mapping) else v for k, v in engines.items()}
    if isinstance(fabrics := part.get("fabrics"), Mapping):
        rules = {"adapters", "link_layer", "subnets"}
        part["fabrics"] = {
            k: {**v, "adapters": ["mlx5_0"]} if isinstance(v, Mapping) and not rules & v.keys() else v
            for k, v in fabrics.items()
        }
    return part
