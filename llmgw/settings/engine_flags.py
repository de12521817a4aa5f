"""Which arguments each version of an engine understands, and what is wrong with those of a profile. Pure.

An engine says so as well, with exit code 2 after seconds or minutes, and on the node only. The tables are of published
versions (:mod:`llmgw.settings.engine_flag_tables`); between two of them an argument counts as known when either has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache

from attrs import frozen

from llmgw.settings.catalog import EngineKind
from llmgw.settings.engine_flag_tables import TABLES, VERSIONS

_NUMBER = re.compile(r"-(?:\d|\.\d)")
_ARITY = "=+*?"


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
    """Position, problem and remedy of each argument that this version, or no version, understands.

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
        if "=" in argument or (flag == "-O" and argument != "-O"):
            continue
        if follows == "=":
            if position >= len(arguments):
                yield at, f"{argument} needs a value", "write it as the next item"
            position += 1
        elif follows == "?":
            position += position < len(arguments) and not _is_flag(arguments[position])
        elif follows:
            while position < len(arguments) and not _is_flag(arguments[position]):
                position += 1


def _is_flag(argument: str) -> bool:
    return argument.startswith("-") and argument != "-" and not _NUMBER.match(argument)


def _unknown(kind: EngineKind, flag: str, version: str | None) -> tuple[str, str]:
    spans = _spans(kind).get(flag, ())
    versions = VERSIONS[kind.value]
    if spans and version is not None:
        high = _positions(kind, version)[1]
        later = next((s for s in spans if s.first > high), None)
        when = (
            f"it came by {versions[later.first]}"
            if later is not None
            else f"its last version is {versions[spans[-1].last]}"
        )
        return f"{kind.value} {version} has no {flag}: {when}", "remove it, or use another version of the engine"
    if " " in flag:
        return f"{flag!r} is not an argument", "write the argument and its value as two items"
    which = f"{kind.value} {version}" if version is not None else f"no version of {kind.value} up to {newest(kind)}"
    close = get_close_matches(flag, sorted(_spans(kind)), n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}?" if close else "abbreviations must be written in full"
    has = f"{which} has no {flag}" if version is not None else f"{which} has {flag}"
    return has, f"{hint} List it in allow_args if you know that yours has it"
