"""How many replicas a model shall have, by its load: pure, with the reason why not more or fewer at this moment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from attrs import evolve, frozen

from llmgw.settings.catalog import Model, Scaling

KV_FULL = 0.9
"""From this share of used KV cache on, with requests waiting, engines have no room for more requests of this length."""

SLACK = 0.8
"""A replica is given up only if the rest would have at most this share of their target: else it came right back."""


@frozen
class EngineLoad:
    """What an engine says that it has to do: requests that run and that wait, and the share of KV cache in use."""

    shard: str
    generation: int
    running: int
    waiting: int
    kv_usage: float | None = None


@frozen
class Demand:
    """What a model has to do now.

    ``running`` requests are at its engines and ``waiting`` ones wait there or at the router; ``kv_usage`` is the share
    of KV cache in use, on the average of its engines, where they say. ``asked`` is when the last request came, in epoch
    seconds.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float | None = None
    asked: float = 0.0

    @property
    def requests(self) -> int:
        """All of them."""
        return self.running + self.waiting


@frozen
class Scale:
    """The ``number`` of replicas that a model shall have, and what might change it next.

    ``want`` is what the load asks for: since ``since`` it was always more, or always less, and at the least so far from
    it as ``mildest``. ``changed`` is when the number became what it is, ``began`` when the model was first given one.
    """

    number: int
    want: int
    since: float
    mildest: int
    changed: float
    reason: str
    began: float = 0.0


def scaled(models: Iterable[Model], scales: Mapping[str, Scale]) -> tuple[Model, ...]:
    """The models with the number of replicas that they have by their demand."""
    return tuple(
        evolve(m, replicas=scales[m.name].number) if m.scaling is not None and m.name in scales else m for m in models
    )


def scale(rules: Scaling, demand: Demand | None, before: Scale | None, now: float) -> tuple[Scale, float | None]:
    """The number from now on, and when time alone may change it. ``demand`` is ``None`` as long as nobody knows it."""
    if before is None:
        number = max(1, rules.min)
        return Scale(number, number, now, number, now, "it starts with this number", now), None
    found, wake = _next(rules, demand, before, now)
    return evolve(found, began=before.began), wake


def _next(rules: Scaling, demand: Demand | None, before: Scale, now: float) -> tuple[Scale, float | None]:
    if not rules.min <= before.number <= rules.max:
        number = min(max(before.number, rules.min), rules.max)
        reason = f"the settings say {rules.min} to {rules.max}"
        return Scale(number, number, now, number, now, reason), None
    if demand is None:
        return evolve(before, want=before.number, since=now, reason="its load is not known yet"), None
    # Nobody can have asked for it before it was there.
    demand = evolve(demand, asked=max(demand.asked, before.began))
    want, why = _wanted(rules, demand, before.number, now)
    if want == before.number:
        idle_at = demand.asked + rules.idle_s
        if before.number == 0 or rules.min > 0 or demand.requests or now >= idle_at:
            return evolve(before, want=want, since=now, mildest=want, reason=why), None
        why = f"{why}; that makes 0 in {idle_at - now:.0f} s if nobody asks (idle_s)"
        return evolve(before, want=want, since=now, mildest=want, reason=why), idle_at
    more = want > before.number
    kept = before.want > before.number if more else before.want < before.number
    mildest = want if not kept else min(before.mildest, want) if more else max(before.mildest, want)
    since = before.since if kept else now
    if before.number == 0:
        return Scale(1, 1, now, 1, now, f"{demand.waiting} waiting, and no replica"), None
    # That nobody asks for it was waited for already.
    hold = 0.0 if want == 0 else rules.up_s if more else rules.down_s
    due = max(since + hold, before.changed + rules.cooldown_s)
    if now >= due:
        were = f"{before.number} {'was' if before.number == 1 else 'were'} too {'few' if more else 'many'}"
        return Scale(mildest, mildest, now, mildest, now, f"{were}: {why}"), None
    cooling = before.changed + rules.cooldown_s >= since + hold
    which = "cooldown_s after the last change" if cooling else "up_s" if more else "down_s"
    reason = f"{why}; that makes {want} in {due - now:.0f} s if it stays so ({which})"
    return Scale(before.number, want, since, mildest, before.changed, reason), due


def _wanted(rules: Scaling, demand: Demand, number: int, now: float) -> tuple[int, str]:
    """What the load asks for when ``number`` are there, and the arithmetic."""
    said = f"{demand.running} running and {demand.waiting} waiting"
    if demand.kv_usage is not None:
        said = f"{said}, {demand.kv_usage:.0%} of KV cache in use"
    said = f"{said}, for {rules.target:g} each"
    least = rules.min
    if rules.min == 0:
        idle = now - demand.asked
        if demand.requests == 0 and idle >= rules.idle_s:
            return 0, f"no request for {idle:.0f} s"
        if number == 0 and demand.waiting == 0:  # what runs yet runs in an engine that is drained
            return 0, "no request waits"
        least = 1
    up = math.ceil(demand.requests / rules.target)
    if demand.waiting > 0 and demand.kv_usage is not None and demand.kv_usage >= KV_FULL:
        up = max(up, number + 1)
    down = math.ceil(demand.requests / (rules.target * SLACK))
    if demand.kv_usage is not None and demand.requests:
        # What long requests hold has to fit into fewer as well: else one more would be asked for at once.
        down = max(down, math.ceil(number * demand.kv_usage / (KV_FULL * SLACK)))
    want = up if up > number else down if down < number and demand.waiting == 0 else number
    bound = min(max(want, least), rules.max)
    if bound != want:
        said = f"{said}; from {least} to {rules.max} are allowed"
    return bound, said
