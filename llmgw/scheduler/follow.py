"""What the rows' own reports say: where their devices are by now, what failed, and what follows from that."""

from __future__ import annotations

from attrs import evolve

from llmgw.scheduler.explain import DecisionKind
from llmgw.scheduler.state import Assignment, Goal, Replica, ShardReport, ShardState, placed_on
from llmgw.scheduler.working import Working
from llmgw.settings.digest import profile_digest

BACKOFF_FIRST_S = 5.0
BACKOFF_LONGEST_S = 300.0
FINAL_S = 1800.0
"""What the engine says can never run is tried again after this time: somebody may have put it right on the node."""

CRASH_LOOP = 8
"""So many failures in a row are a crash loop: tried as seldom as what cannot run."""

STEADY_S = 600.0
"""A replica that was ready for this long has its failures forgiven."""

ROLLBACK_AFTER = 3
"""An edited profile that failed so often before it was ever ready is taken back."""


def follow(pass_: Working) -> None:
    """Every row, by what its nodes say."""
    for row in list(pass_.rows.values()):
        _renumber(pass_, row)
        _follow(pass_, pass_.rows[row.id])


def _renumber(pass_: Working, row: Replica) -> None:
    """Follow a row's devices to the numbers that they have by now."""
    for shard in row.shards:
        node = pass_.state.node(shard.node)
        if node is not None and placed_on(node.inventory, shard.devices, shard.uuids) != shard.devices:
            break
    else:
        return
    shards = tuple(
        shard if node is None else evolve(shard, devices=placed_on(node.inventory, shard.devices, shard.uuids))
        for shard in row.shards
        for node in (pass_.state.node(shard.node),)
    )
    pass_.put(evolve(row, shards=shards))


def _follow(pass_: Working, row: Replica) -> None:
    if row.goal is not Goal.RUN:
        return
    reports = [(s, r) for s in row.shards if (r := pass_.state.report(s, row.generation)) is not None]
    ended = min(((s, r) for s, r in reports if r.state.ended), key=_blame, default=None)
    if ended is None and any(r.state is ShardState.DRAINING for _, r in reports):
        # Told to by a control plane whose word was lost: it takes no requests, and cannot be told to again.
        reason = "its engine was drained, and it is wanted"
        pass_.put(evolve(row, generation=row.generation + 1, reason=reason, since=pass_.now))
        pass_.say(DecisionKind.RESTART, row, reason)
        return
    if ended is None and not row.failures and row.other is None:
        return
    if pass_.lost(row):
        if ended is not None and len(row.shards) > 1:
            # Whatever still runs on the lost node, it is half an engine: what is left of it makes room.
            reason = f"node {pass_.lost_node(row)} is lost and {ended[0].shard} ended: {ended[1].reason}"
            pass_.evict(row, reason)
    elif ended is not None:
        _failed(pass_, row, *ended)
    elif pass_.ready(row) and all(pass_.now - r.since >= STEADY_S for _, r in reports):
        pass_.put(evolve(row, failures=0, other=None))


def _blame(part: tuple[Assignment, ShardReport]) -> tuple[bool, bool, float, int]:
    """Of several ranks that ended, the first one is whose end ended the others: those were stopped, or lost it."""
    shard, report = part
    at = report.since if report.ended is None else report.ended
    return report.state is ShardState.STOPPED, report.lost_peer, at, shard.rank


def _failed(pass_: Working, row: Replica, shard: Assignment, report: ShardReport) -> None:
    """One shard ended, so the replica did: all of them start again, or it goes where its devices are whole."""
    which = f"rank {shard.rank} on {shard.node}: " if len(row.shards) > 1 else ""
    for part in row.shards:
        trouble = _trouble(pass_, row, part)
        if trouble is not None:
            reason = f"it failed ({which}{report.reason}) and {trouble}; placed anew"
            pass_.evict(row, reason, part.node)
            return
    failures = row.failures + 1
    wait = min(BACKOFF_FIRST_S * 2 ** min(failures - 1, 16), BACKOFF_LONGEST_S)
    looping = failures >= CRASH_LOOP
    if report.final or looping:
        wait = FINAL_S
    reason = f"failed {failures} time{'s' if failures > 1 else ''} in a row, last: {which}{report.reason}"
    if report.remedy:
        reason = f"{reason}; {report.remedy}"
    row = evolve(
        row,
        generation=row.generation + 1,
        failures=failures,
        not_before=pass_.now + wait,
        reason=reason,
        since=pass_.now,
    )
    pass_.put(row)
    if (report.final or failures >= ROLLBACK_AFTER) and _roll_back(pass_, row):
        return
    verdict = "cannot run like this; " if report.final else "crash loop; " if looping else ""
    again = f"{verdict}started again in {wait:.0f} s (failure {failures})"
    remedy = f"{report.remedy}; " if report.remedy else ""
    pass_.say(DecisionKind.RESTART, row, f"{which}{report.reason}; {remedy}{again}", shard.node)


def _roll_back(pass_: Working, row: Replica) -> bool:
    """Go back to what is there besides this row, or to the profile that it had before, if either is so."""
    digest = profile_digest(row.model, row.profile)
    said = f"the edited profile {row.profile.name} does not come up and is taken back until it is edited again"
    old = next((r for r in pass_.of_model(row.model) if r.superseded_by == row.id and r.goal is Goal.RUN), None)
    if old is not None and pass_.lost(old):
        return False  # it was replaced because its node is lost, which is as it was
    if old is not None and pass_.drained(old) is not None and _as_in_catalog(pass_, old):
        return False  # the same: its node is drained, and it serves on meanwhile
    if old is not None and (order := pass_.order(old)) is not None and _as_in_catalog(pass_, old):
        pass_.put(evolve(old, superseded_by=None))
        pass_.given_up.add(old.id)
        why = f"{order}; what was to replace it does not come up, and {old.id} stays: {row.reason}"
        pass_.retire(row, why, DecisionKind.ROLLBACK)
        return True
    if old is not None:
        edited = old.profile != row.profile
        pass_.put(evolve(old, superseded_by=None, rejected=digest if edited else old.rejected))
        why = said if edited else f"{old.id}, which it replaces, is back before it came up"
        pass_.retire(row, f"{why}; {old.id} stays: {row.reason}", DecisionKind.ROLLBACK)
        return True
    if row.other is None:
        return False
    # Stopped, and then placed with what it had before; see carry_out.
    pass_.put(evolve(row, rejected=digest, failures=0))
    pass_.retire(row, f"{said}: {row.reason}", DecisionKind.ROLLBACK, other=row.other)
    return True


def _as_in_catalog(pass_: Working, row: Replica) -> bool:
    """Whether the row has a profile as the catalog has it: then it is replaced for another reason than an edit."""
    model = pass_.models.get(row.model)
    return model is not None and model.profile(row.profile.name) == row.profile


def _trouble(pass_: Working, row: Replica, part: Assignment) -> str | None:
    """Why a shard cannot run any more where it is, or ``None``."""
    node = pass_.state.node(part.node)
    if node is None:
        return f"node {part.node} is gone"
    if row.profile.engine not in node.engines:
        return f"{part.node} has no engine {row.profile.engine.value} any more"
    for position, number in enumerate(part.devices):
        device = node.inventory.device(number)
        if device is not None and part.uuids and device.uuid != part.uuids[position]:
            device = None
        if device is None:
            return f"device {number} is not there any more"
        if device.faults:
            return f"{device.label} {device.faults[0].reason}"
    return None
