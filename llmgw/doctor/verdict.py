"""The one mechanism of all checks: a table of them in, a verdict on each out, causes hiding what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum

from attrs import field, frozen

from llmgw.doctor.facts import Facts


class Severity(StrEnum):
    """How a check ends, most serious first. ``unknown``: a fact that it needs could not be read."""

    FAIL = "fail"
    WARN = "warn"
    INFO = "info"
    UNKNOWN = "unknown"
    OK = "ok"


@frozen
class Finding:
    """What a check found. ``remedy`` and ``severity`` replace the check's own where this case differs."""

    text: str
    remedy: str = ""
    severity: Severity | None = None


def _always(_facts: Facts) -> bool:
    return True


@frozen
class Check:
    """One thing that can be wrong.

    ``reads`` names the facts without which it cannot tell, ``find`` judges them, ``because`` names checks that, when
    they found something, explain whatever this one finds or cannot read. Where ``applies`` says no, it is ok.
    ``means`` says when it speaks up and why that matters, for ``--explain`` and the documentation.
    """

    id: str
    severity: Severity
    reads: tuple[str, ...]
    find: Callable[[Facts], Finding | None]
    remedy: str
    means: str
    because: tuple[str, ...] = ()
    applies: Callable[[Facts], bool] = field(default=_always)
    gate: tuple[str, ...] = ()


@frozen
class Verdict:
    """How one check ended. ``hidden_by`` is the check that explains it; ``link`` leads into the documentation."""

    id: str
    severity: Severity
    text: str
    remedy: str
    reads: tuple[str, ...]
    hidden_by: str
    link: str


def judge(facts: Facts, checks: Sequence[Check]) -> tuple[Verdict, ...]:
    """A verdict on every check, most serious first, then in the order of the table."""
    found = {check.id: _one(facts, check) for check in checks}
    causes = {check.id: check.because for check in checks}
    speaking = {name for name, verdict in found.items() if verdict[0] not in (Severity.OK, Severity.UNKNOWN)}
    order = list(Severity)
    made = [
        Verdict(
            c.id,
            *found[c.id],
            c.reads,
            _hidden(c.id, found[c.id][0], causes, speaking),
            f"docs/doctor.md#{anchor(c.id)}",
        )
        for c in checks
    ]
    return tuple(sorted(made, key=lambda v: order.index(v.severity)))


def anchor(check: str) -> str:
    """Where a check is in the documentation: headings lose their dots there."""
    return check.replace(".", "")


def chosen(checks: Sequence[Check], only: Iterable[str], skip: Iterable[str]) -> tuple[Check, ...]:
    """The checks whose id is, or begins with the dotted parts of, one of ``only`` and none of ``skip``."""
    only, skip = tuple(only), tuple(skip)
    return tuple(c for c in checks if (not only or _named(c.id, only)) and not _named(c.id, skip))


def _named(check: str, names: Iterable[str]) -> bool:
    return any(check == name or check.startswith(f"{name}.") for name in names)


def _one(facts: Facts, check: Check) -> tuple[Severity, str, str]:
    applies = check.applies(facts)
    for unread in facts.unread:
        if unread.fact in check.gate or (applies and unread.fact in check.reads):
            return Severity.UNKNOWN, f"{unread.fact}: {unread.why}", "run it as root" if unread.root else ""
    finding = check.find(facts) if applies else None
    if finding is None:
        return Severity.OK, "", ""
    return finding.severity or check.severity, finding.text, finding.remedy or check.remedy


def _hidden(check: str, severity: Severity, causes: Mapping[str, tuple[str, ...]], speaking: set[str]) -> str:
    """The first cause of it that found something, however far away; nothing for what is ok."""
    if severity is Severity.OK:
        return ""
    seen, left = {check}, list(causes[check])
    while left:
        cause = left.pop(0)
        if cause in speaking:
            return cause
        if cause not in seen:
            seen.add(cause)
            left += causes.get(cause, ())
    return ""
