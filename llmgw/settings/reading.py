"""A document on its way to the frozen classes: every fault is collected, each at its place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs
import cattrs
from cattrs.errors import AttributeValidationNote, ForbiddenExtraKeysError, IterableValidationNote

from llmgw.hardware.fabric import FabricRule
from llmgw.settings.catalog import Model
from llmgw.settings.convert import WrongValue, shown, strict_converter
from llmgw.settings.daemon import Address, AgentConfig, EngineInstall
from llmgw.settings.faults import ConfigError, ConfigFault, Path, nearest
from llmgw.settings.yaml import Document

_Kind = TypeVar("_Kind")

MOST_FAULTS = 200

_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\s\[\]:/]+)):([0-9]{1,5})")

# The keys that people write, where they differ from the class's own.
_KEYS: Mapping[type, tuple[frozenset[str], frozenset[str]]] = {
    Model: (frozenset({"name"}), frozenset()),
    EngineInstall: (frozenset({"kind"}), frozenset()),
    AgentConfig: (frozenset({"port_first", "port_last"}), frozenset({"ports"})),
    FabricRule: (frozenset({"label"}), frozenset()),
}


def known_keys(kind: type) -> frozenset[str]:
    """The keys that people may write in a mapping that becomes ``kind``."""
    hidden, more = _KEYS.get(kind, (frozenset(), frozenset()))
    return frozenset(a.name for a in attrs.fields(kind)) - hidden | more


def _address(value: Any, _kind: Any) -> Address:
    if isinstance(value, str) and (match := _ADDRESS.fullmatch(value)) and 0 <= int(match[3]) <= 65535:
        return Address(match[1] or match[2], int(match[3]))
    raise WrongValue("host:port", value)


def _converter() -> cattrs.Converter:
    converter = strict_converter(forbid_unknown=True)
    converter.register_structure_hook(Address, _address)
    return converter


_CONVERTER = _converter()


class Reading:
    """One document being read; faults are collected until the end. ``top`` is where in it the paths begin."""

    def __init__(self, document: Document, top: Path = ()) -> None:
        self.document = document
        self.top = top
        self.faults: list[ConfigFault] = []

    def below(self, path: Path) -> Reading:
        """A reading of a part of the same document, whose faults are noted here too."""
        part = Reading(self.document, (*self.top, *path))
        part.faults = self.faults
        return part

    def fault(self, path: Path, problem: str, hint: str = "") -> None:
        """Note what is wrong with the value at this path. Of very many only the first are told."""
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(self.document.fault((*self.top, *path), problem, hint))
        elif len(self.faults) == MOST_FAULTS:
            self.faults.append(self.document.fault((*self.top, *path), "and more, which are not told"))

    def mapping(self, value: Any, path: Path) -> dict[str, Any]:
        """The value as a mapping of its own, so that it can be changed; a fault and empty if it is none."""
        if isinstance(value, Mapping):
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
                for name in sorted(wrong.extra_fields):
                    self.unknown((*path, name), wrong.cl)
            case WrongValue():
                self.fault(path, f"expected {wrong.expected}, found {wrong.found}")
            case KeyError():
                self.fault(path, "is missing")
            case _:
                self.fault(path, str(wrong) or type(wrong).__name__)

    def unknown(self, path: Path, kind: type) -> None:
        """Note a key that ``kind`` does not have."""
        # Looking for the nearest key costs more than all the rest.
        hint = nearest(str(path[-1]), known_keys(kind)) if len(self.faults) < MOST_FAULTS else ""
        self.fault(path, "unknown key", hint)

    def end(self) -> None:
        """Raise :class:`ConfigError` if anything was wrong."""
        if self.faults:
            raise ConfigError(self.document.file, self.faults)


def _note(error: BaseException) -> AttributeValidationNote | IterableValidationNote | None:
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, AttributeValidationNote | IterableValidationNote):
            return note
    return None
