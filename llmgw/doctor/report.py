"""Verdicts as lines for people, most serious first; and the catalogue as documentation. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from attrs import evolve, frozen

from llmgw.doctor.facts import Facts
from llmgw.doctor.network import plans
from llmgw.doctor.peer_facts import Way
from llmgw.doctor.verdict import Check, Severity, Verdict


@frozen
class Line:
    """One line; ``severity`` is how it is coloured on a terminal."""

    text: str
    severity: Severity | None = None


def lines(facts: Facts, verdicts: Sequence[Verdict], *, unknown: bool = False) -> Iterator[Line]:
    """The report. With ``unknown`` also what could not be told, and what something else explains.

    Of what programs and files said nothing reaches a terminal but what can be printed.
    """
    for line in _lines(facts, verdicts, unknown=unknown):
        yield line if line.text.isprintable() else evolve(line, text=_printable(line.text))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _lines(facts: Facts, verdicts: Sequence[Verdict], *, unknown: bool) -> Iterator[Line]:
    if facts.simulated:
        yield Line(f"SIMULATED MACHINE: {facts.simulated}")
    yield Line(_machine(facts))
    for verdict in verdicts:
        if verdict.severity is Severity.OK or (
            not unknown and (verdict.hidden_by or verdict.severity is Severity.UNKNOWN)
        ):
            continue
        because = f" (because of {verdict.hidden_by})" if verdict.hidden_by else ""
        head = f"{verdict.severity.value:<8}{verdict.id}"
        if verdict.severity in (Severity.INFO, Severity.UNKNOWN):
            yield Line(f"{head}: {verdict.text}{because}", verdict.severity)
            continue
        yield Line(f"{head}{because}", verdict.severity)
        yield Line(f"        {verdict.text}")
        yield Line(f"        do: {verdict.remedy}")
        yield Line(f"        see {verdict.link}")
    yield from _network(facts)
    yield from _path(facts)
    yield Line(_summary(facts, verdicts))


def _machine(facts: Facts) -> str:
    kinds = Counter(card.reading.name for card in facts.cards)
    gpus = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    unread = {missing.fact for missing in facts.unread}
    if not gpus and "pci_gpus" in unread:
        gpus = "whether there is an NVIDIA GPU could not be told"
    elif not gpus:
        gpus = f"{len(facts.pci_gpus)} NVIDIA GPUs that could not be read" if facts.pci_gpus else "no NVIDIA GPU"
    driver = f", driver {facts.driver.version}" if facts.driver.version else ""
    active = sum(any(p.state == "active" for p in a.ports) for a in facts.adapters)
    adapters = f"{len(facts.adapters)} RDMA adapters, {active} active" if facts.adapters else "no RDMA adapter"
    if "adapters" in unread:
        adapters = "RDMA adapters could not be read"
    return f"{facts.host.hostname or 'a machine that does not say its name'}: {gpus}{driver}; {adapters}"


def _network(facts: Facts) -> Iterator[Line]:
    for plan in plans(facts):
        yield Line(f"A rank on fabric {plan.fabric} gets:")
        for variable in plan.variables:
            yield Line(f"        {variable.name}={variable.value}")
        for variable in plan.overridden:
            yield Line(f"        {variable.name}={variable.value} (from {variable.source})")
        taken, over = ", ".join(plan.ports) or "TCP", ", ".join(plan.interfaces) or "no interface"
        yield Line(f"        NCCL then takes {taken}; ranks meet over {over}")


def _path(facts: Facts) -> Iterator[Line]:
    path = facts.peer_path
    if not path.address:
        return

    def way(said: Way) -> str:
        free = sum(not p.trouble for p in said.ports)
        return f"{free} of {len(said.ports)} ports open, packets up to {said.largest or '?'} of {said.mtu} bytes"

    yield Line(f"The path to {facts.peer.name or facts.peer.host} ({facts.peer.address}):")
    yield Line(f"        there: {way(path.there)}; back: {way(path.back)}")
    yield Line(f"        round trip {path.rtt_ms:g} ms, its clock is {path.ahead_s:+.3f} s from this one's")


def _summary(facts: Facts, verdicts: Sequence[Verdict]) -> str:
    shown = Counter(v.severity for v in verdicts if not v.hidden_by)
    hidden = sum(bool(v.hidden_by) for v in verdicts)
    said = f"{shown[Severity.FAIL]} failed, {shown[Severity.WARN]} warnings, {shown[Severity.OK]} fine"
    if shown[Severity.UNKNOWN]:
        more = sum(1 for v in verdicts if v.severity is Severity.UNKNOWN and not v.hidden_by and v.remedy)
        said += f", {shown[Severity.UNKNOWN]} could not be told" + (f" ({more} of them root can)" if more else "")
    if hidden:
        said += f", {hidden} follow from something above"
    return said + (" (--unknown lists them)" if hidden or shown[Severity.UNKNOWN] else "")


def exit_code(verdicts: Sequence[Verdict], *, strict: bool) -> int:
    """0 nothing failed, 1 something did, 3 something warns and ``strict`` asks for that."""
    severities = {v.severity for v in verdicts if not v.hidden_by}
    if Severity.FAIL in severities:
        return 1
    return 3 if strict and Severity.WARN in severities else 0


def explained(check: Check) -> Iterator[str]:
    """What one check is about."""
    yield f"{check.id} ({check.severity.value})"
    yield f"  {check.means}"
    yield f"  do: {check.remedy}"
    yield f"  reads: {', '.join(check.reads)}"
    if check.because:
        yield f"  silent while one of these speaks: {', '.join(check.because)}"


def manual(checks: Sequence[Check]) -> str:
    """The catalogue for docs/doctor.md, one entry for each check."""
    made = []
    for check in checks:
        entry = f"### {check.id}\n\n**{check.severity.value}**. {check.means}\n\n{check.remedy}\n\n"
        entry += f"Reads `{'`, `'.join(check.reads)}`."
        if check.because:
            entry += f" Silent while one of these speaks: {', '.join(f'`{b}`' for b in check.because)}."
        made.append(entry)
    return "\n\n".join(made) + "\n"
