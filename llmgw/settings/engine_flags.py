"""Which arguments each version of an engine understands, and what is wrong with those of a profile. Pure.

An engine says so as well, with exit code 2 after seconds or minutes, and on the node only. The tables are of published
versions (:mod:`llmgw.settings.engine_flag_tables`), and so are those of the values that an argument can have
(:mod:`llmgw.settings.engine_choice_tables`); between two of them one counts as known when either has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache

from attrs import frozen

from llmgw.settings.catalog import EngineKind
from llmgw.settings.engine_choice_tables import CHOICES
from llmgw.settings.engine_flag_tables import TABLES, VERSIONS

_NUMBER = re.compile(r"-(?:\d|\.\d)")
_ARITY = "=+*?"
_KNOW_BETTER = "List {} in allow_args if you know that yours takes it"


@frozen
class Span:
    """The versions from ``first`` to ``last`` (positions in the table) that have an argument, and what follows it:
    ``""`` nothing, ``=`` a value, ``+`` one or more, ``*`` any number, ``?`` one or none."""

    first: int
    last: int
    arity: str


@cache
def _spans(kind: EngineKind) -> Mapping[str, tuple[Span, ...]]:
    versions = VERSIONS[kind.value]
    made: dict[str, list[Span]] = {}
    for (first, last), names in TABLES[kind.value].items():
        for name in names.split():
            flag = name.rstrip(_ARITY)
            made.setdefault(flag, []).append(Span(versions.index(first), versions.index(last), name[len(flag) :]))
    return {flag: tuple(sorted(spans, key=lambda s: s.first)) for flag, spans in made.items()}


@cache
def _values(kind: EngineKind) -> Mapping[str, Mapping[str, tuple[tuple[int, int], ...]]]:
    """By argument and value, the spans of versions that offer it; ``*`` where any value will do."""
    versions = VERSIONS[kind.value]
    made: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for (first, last), words in CHOICES[kind.value].items():
        for word in words.split():
            flag, _, values = word.partition("=")
            for value in values.split("|"):
                span = (versions.index(first), versions.index(last))
                made.setdefault(flag, {}).setdefault(value, []).append(span)
    return {flag: {value: tuple(sorted(spans)) for value, spans in some.items()} for flag, some in made.items()}


def choices(kind: EngineKind, flag: str, version: str | None) -> tuple[str, ...] | None:
    """The values that this version, or any where it is not known, offers for an argument; ``None`` where any will do.

    Between two versions of the tables it is those of both.
    """
    places = range(len(VERSIONS[kind.value])) if version is None else _positions(kind, version)
    found = [
        value
        for value, spans in _values(kind).get(flag, {}).items()
        if any(first <= at <= last for first, last in spans for at in places)
    ]
    return None if not found or "*" in found else tuple(sorted(found))


def value_fault(kind: EngineKind, flag: str, value: str, version: str | None) -> tuple[str, str] | None:
    """Problem and remedy of a value that this version, or no version, offers for an argument.

    One that a version beyond the tables may have is let pass.
    """
    offered = choices(kind, flag, version)
    if offered is None or value in offered:
        return None
    spans = _values(kind)[flag].get(value, ())
    which, when = f"no version of {kind.value} up to {newest(kind)} takes", ""
    if version is not None:
        if not spans and version_key(version) > version_key(newest(kind)):
            return None
        which, when = f"{kind.value} {version} does not take", _when(kind, version, spans)
    close = get_close_matches(value, offered, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{which} {value!r} for {flag}{when}", f"{hint}it takes {', '.join(offered)}. {_KNOW_BETTER.format(flag)}"


def _when(kind: EngineKind, version: str, spans: Sequence[tuple[int, int]]) -> str:
    """When it came, or went."""
    versions = VERSIONS[kind.value]
    later = next((first for first, _ in spans if first > _positions(kind, version)[1]), None)
    if later is not None:
        return f": it came by {versions[later]}"
    return f": its last version is {versions[spans[-1][1]]}" if spans else ""


def version_key(version: str) -> tuple[int, ...]:
    """A version to compare by: its numbers, so ``0.5.6.post2`` comes after ``0.5.6``; a local part is left out."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:6])


def newest(kind: EngineKind) -> str:
    """The newest version whose arguments are known."""
    return VERSIONS[kind.value][-1]


def canonical(kind: EngineKind, argument: str) -> str:
    """The argument's name without its value, as the engine's parser would look it up.

    vLLM takes underscores for dashes, ``--config.key`` for a key of a JSON argument, and ``-O3`` for ``-O 3``.
    """
    flag = argument.partition("=")[0]
    if kind is EngineKind.VLLM:
        if re.fullmatch(r"-O(?:\d|\.\S*)", flag):
            return "-O"
        if flag.startswith("--"):
            flag = flag.partition(".")[0].replace("_", "-")
    return flag


def arity(kind: EngineKind, flag: str, version: str | None) -> str | None:
    """What follows this argument in this version, or in any where the version is not known; ``None`` if it has none."""
    spans = _spans(kind).get(flag, ())
    if version is None:
        return spans[-1].arity if spans else None
    low, high = _positions(kind, version)
    found = [s for s in spans if s.first <= low <= s.last or s.first <= high <= s.last]
    return found[-1].arity if found else None


def surely_has(kind: EngineKind, flag: str, version: str | None) -> bool:
    """Whether this version has the argument beyond doubt: not where it is not known, nor between two that differ."""
    if version is None:
        return False
    spans = _spans(kind).get(flag, ())
    return all(any(s.first <= position <= s.last for s in spans) for position in _positions(kind, version))


def _positions(kind: EngineKind, version: str) -> tuple[int, int]:
    """The tables next below and next above a version; the same one where it is a table's own or beyond the ends."""
    wanted = version_key(version)
    keys = [version_key(v) for v in VERSIONS[kind.value]]
    low = max((i for i, key in enumerate(keys) if key <= wanted), default=0)
    high = min((i for i, key in enumerate(keys) if key >= wanted), default=len(keys) - 1)
    return low, high


def argument_faults(
    kind: EngineKind, arguments: Sequence[str], vouched: Sequence[str], version: str | None
) -> Iterator[tuple[int, str, str]]:
    """Position, problem and remedy of each argument, and each value of one, that this version, or no version, takes.

    ``vouched`` are arguments that the operator knows better. One that a version beyond the tables may have is let pass.
    """
    beyond = version is not None and version_key(version) > version_key(newest(kind))
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        at, position = position, position + 1
        if not _is_flag(argument):
            yield at, f"{argument!r} belongs to no argument", "write an argument and its value as two items, or with ="
            continue
        flag = canonical(kind, argument)
        follows = arity(kind, flag, version)
        if follows is None and (flag in vouched or (beyond and flag not in _spans(kind))):
            follows = "*"
        if follows is None:
            yield at, *_unknown(kind, flag, version)
            follows = "*"
        checked = flag not in vouched
        if "=" in argument or (flag == "-O" and argument != "-O"):
            if checked and (wrong := value_fault(kind, flag, argument.partition("=")[2], version)) is not None:
                yield at, *wrong
            continue
        first = position
        if follows == "=":
            if position >= len(arguments):
                yield at, f"{argument} needs a value", "write it as the next item"
            position += 1
        elif follows == "?":
            position += position < len(arguments) and not _is_flag(arguments[position])
        elif follows:
            while position < len(arguments) and not _is_flag(arguments[position]):
                position += 1
        for value in arguments[first:position] if checked else ():
            if (wrong := value_fault(kind, flag, value, version)) is not None:
                yield at, *wrong


def _is_flag(argument: str) -> bool:
    return argument.startswith("-") and argument != "-" and not _NUMBER.match(argument)


def _unknown(kind: EngineKind, flag: str, version: str | None) -> tuple[str, str]:
    spans = _spans(kind).get(flag, ())
    if spans and version is not None:
        when = _when(kind, version, [(s.first, s.last) for s in spans])
        return f"{kind.value} {version} has no {flag}{when}", "remove it, or use another version of the engine"
    if " " in flag:
        return f"{flag!r} is not an argument", "write the argument and its value as two items"
    which = f"{kind.value} {version}" if version is not None else f"no version of {kind.value} up to {newest(kind)}"
    close = get_close_matches(flag, sorted(_spans(kind)), n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}?" if close else "abbreviations must be written in full"
    has = f"{which} has no {flag}" if version is not None else f"{which} has {flag}"
    return has, f"{hint} List it in allow_args if you know that yours has it"
