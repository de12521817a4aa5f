"""Refusals as lines: why something has no place, or has this one and no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmgw.cli.terminal import ago

_EACH = 4


def explain_lines(model: dict[str, Any]) -> Iterator[str]:
    """Why a model has no place: a line for the whole, then one for each candidate and reason."""
    unplaced = model["unplaced"]
    if unplaced is None:
        return
    yield f"{model['name']}: {unplaced['running']} of {unplaced['wanted']} placed. {unplaced['reason']}"
    for candidate in unplaced["candidates"]:
        for refusal in candidate["refusals"]:
            yield refusal_line(candidate, refusal)


def refusal_line(candidate: dict[str, Any], refusal: dict[str, Any]) -> str:
    """One reason against one candidate, and what to do about it."""
    remedy = f" -> {refusal['remedy']}" if refusal["remedy"] else ""
    where = f"{candidate['node']}, profile {candidate['profile']}"
    return f"  {where}: {refusal['reason']} [{refusal['filter']}]{remedy}"


def short_lines(candidates: list[dict[str, Any]]) -> Iterator[str]:
    """A few candidates for each filter that turned them down, and how many more there are."""
    by_filter: dict[str, list[dict[str, Any]]] = {}
    for candidate in candidates:
        by_filter.setdefault(candidate["refusals"][0]["filter"], []).append(candidate)
    for name, some in by_filter.items():
        for candidate in some[:_EACH]:
            for refusal in candidate["refusals"][:_EACH]:
                yield refusal_line(candidate, refusal)
        if len(some) > _EACH:
            yield f"  … and {len(some) - _EACH} more by {name}, see --json"


def scaling_line(scaling: dict[str, Any], now: float) -> str:
    """The number of replicas that the load makes, and what might change it next."""
    changed = f", for {ago(scaling['changed'], now)}" if scaling["changed"] is not None else ""
    return f"scaling {scaling['min']} to {scaling['max']}, now {scaling['number']}{changed}: {scaling['reason']}"
