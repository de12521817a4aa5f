"""One reconcile pass: what is wanted against what is there, and everything that follows. Pure and total.

The words: a row **counts** when it shall run and its node is not lost; it is **gone** when its node is lost. Silence
alone moves nothing; a lost node's rows are replaced elsewhere, and the replaced row is *superseded*: it serves on, if
it still does, until its replacement is ready. A row that could not be replaced before its node came back simply counts
again, with the engine that it has.
"""

from __future__ import annotations

from attrs import evolve

from llmgw.scheduler.carry_out import carry_out
from llmgw.scheduler.explain import Decision, DecisionKind, Outcome
from llmgw.scheduler.follow import follow
from llmgw.scheduler.scale import Scale, scale, scaled
from llmgw.scheduler.state import ClusterState
from llmgw.scheduler.wanted import want
from llmgw.scheduler.working import Working


def decide(state: ClusterState, now: float) -> Outcome:
    """Decide one pass. Never raises, whatever the state; deterministic; on its own result it changes nothing more."""
    scales, wakes, scaling = _scale(state, now)
    nodes = tuple(sorted(state.nodes, key=lambda n: n.id))
    state = evolve(state, models=scaled(state.models, scales), nodes=nodes)
    pass_ = Working(state, now)
    pass_.wake += wakes
    pass_.decisions += scaling
    follow(pass_)
    want(pass_)
    carry_out(pass_)
    known = {m.name: at for at, m in enumerate(state.models)}
    return Outcome(
        replicas=tuple(sorted(pass_.rows.values(), key=lambda r: r.id)),
        next_serial=pass_.serial,
        commands=tuple(pass_.commands),
        decisions=tuple(pass_.decisions),
        unplaced=tuple(sorted(pass_.unplaced, key=lambda u: known[u.model])),
        wake_at=min(pass_.wake, default=None),
        brake=pass_.brake,
        scales=scales,
        over=pass_.over(),
    )


def _scale(state: ClusterState, now: float) -> tuple[dict[str, Scale], list[float], list[Decision]]:
    """How many replicas each model has by its load, when that may change by itself, and what changed."""
    scales: dict[str, Scale] = {}
    wakes: list[float] = []
    decisions: list[Decision] = []
    for model in state.models:
        if model.scaling is None:
            continue
        before = state.scales.get(model.name)
        found, wake = scale(model.scaling, state.demands.get(model.name), before, now)
        scales[model.name] = found
        if wake is not None:
            wakes.append(wake)
        if before is not None and found.number != before.number:
            many = f"{found.number} replica{'' if found.number == 1 else 's'}"
            reason = f"{many} instead of {before.number}: {found.reason}"
            decisions.append(Decision(DecisionKind.SCALE, model.name, "", "", reason))
    return scales, wakes, decisions
