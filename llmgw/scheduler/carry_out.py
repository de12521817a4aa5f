"""What follows from the rows: starts, drains and stops, rows that are over, and the end of what no row wants."""

from __future__ import annotations

from attrs import evolve

from llmgw.scheduler.explain import Decision, DecisionKind, DrainCommand, StartCommand, StopCommand
from llmgw.scheduler.state import Assignment, Goal, NodeState, Replica, ShardState, WaitsFor
from llmgw.scheduler.working import Working
from llmgw.settings.catalog import Limits
from llmgw.settings.sources import hub_source

DRAIN_SETTLE_S = 1.0
"""An idle count means something only after the router had time to take in that nothing new goes there."""


UNSEEN_S = 5.0
"""A start that was sent and never heard of may still be under way for this long: its devices are not free before."""


def carry_out(pass_: Working) -> None:
    """The commands of this pass."""
    _finish_superseded(pass_)
    for row in list(pass_.rows.values()):
        _command(pass_, row)
    _reap(pass_)


def _finish_superseded(pass_: Working) -> None:
    for row in list(pass_.rows.values()):
        if row.superseded_by is None or row.goal is not Goal.RUN:
            continue
        new = pass_.rows.get(row.superseded_by)
        if new is None or new.goal is not Goal.RUN:
            # Its replacement is going away itself: this row counts again.
            pass_.put(evolve(row, superseded_by=None))
        elif pass_.ready(new) and _can_be_told(pass_, row):
            pass_.retire(row, f"{new.id} replaces it and is ready")


def _can_be_told(pass_: Working, row: Replica) -> bool:
    """Whether every node of it is there, or one at least when the others are lost."""
    there = [pass_.connected(s.node) for s in row.shards]
    return any(there) if pass_.lost(row) else all(there)


def _command(pass_: Working, row: Replica) -> None:
    if row.goal is Goal.DRAIN:
        row = _drain(pass_, row)
    if row.goal is Goal.STOP:
        _stop(pass_, row)
        return
    for shard in row.shards:
        report = pass_.state.report(shard, row.generation)
        if row.goal is Goal.RUN:
            waits = report is not None and report.waits_for is WaitsFor.RANKS and _all_here(pass_, row)
            new = report is None and all(pass_.connected(s.node) for s in row.shards)
            if new or (waits and pass_.connected(shard.node)):
                _start(pass_, row, shard, hold=new and _fetches(row))
        elif report is not None and report.state is ShardState.READY and pass_.connected(shard.node):
            pass_.commands.append(DrainCommand(shard.node, shard.shard, row.generation, row.reason))


def _fetches(row: Replica) -> bool:
    """Whether its ranks have weights to fetch: that ends on each node when it will, and they are launched together."""
    return len(row.shards) > 1 and hub_source(row.profile.weights) is not None


def _all_here(pass_: Working, row: Replica) -> bool:
    """Whether no rank has to be waited for: each has its weights, and lives."""
    reports = [pass_.state.report(shard, row.generation) for shard in row.shards]
    return all(r is not None and not r.state.ended and r.waits_for is not WaitsFor.WEIGHTS for r in reports)


def _start(pass_: Working, row: Replica, shard: Assignment, *, hold: bool) -> None:
    """Start a shard once its replica's earlier starts are over; other ranks once rank 0 says where to meet."""
    if pass_.now < row.not_before:
        pass_.wake.append(row.not_before)
        return
    if _earlier_alive(pass_, row):
        return
    meeting = None
    if shard.rank > 0:
        head = pass_.state.report(row.shards[0], row.generation)
        if head is None or head.rendezvous is None or head.state.ended:
            return
        meeting = head.rendezvous
    nodes = (pass_.state.node(s.node) for s in row.shards)
    addresses = tuple(n.address for n in nodes if n is not None) if len(row.shards) > 1 else ()
    pass_.commands.append(StartCommand(row, shard, meeting, addresses, hold))


def _earlier_alive(pass_: Working, row: Replica) -> bool:
    shards = {s.shard for s in row.shards}
    return any(
        r.shard in shards and r.cluster == pass_.state.cluster and r.generation != row.generation and not r.state.ended
        for s in row.shards
        if (node := pass_.state.node(s.node)) is not None
        for r in node.reports
    )


def _drain(pass_: Working, row: Replica) -> Replica:
    """Move a draining row on to ``STOP`` once nothing is in flight, or its time is over."""
    end = row.since + row.profile.limits.drain_s
    serving = any(
        r is not None and r.state in (ShardState.READY, ShardState.DRAINING)
        for r in (pass_.state.report(s, row.generation) for s in row.shards)
    )
    count = pass_.state.in_flight.get(row.shards[0].shard) if row.shards else 0
    settled = pass_.now >= row.since + DRAIN_SETTLE_S
    if not serving:
        why = "it serves nothing"
    elif settled and count == 0:
        why = "nothing is in flight"
    elif pass_.now >= end:
        why = f"drained for {row.profile.limits.drain_s:.0f} s"
    else:
        pass_.wake.append(end if settled else min(end, row.since + DRAIN_SETTLE_S))
        return row
    stopped = evolve(row, goal=Goal.STOP, since=pass_.now)
    pass_.put(stopped)
    pass_.say(DecisionKind.STOP, row, f"{row.reason}; {why}")
    return stopped


def _stop(pass_: Working, row: Replica) -> None:
    waiting = False
    ends: list[str] = []
    for shard in row.shards:
        node = pass_.state.node(shard.node)
        if node is None:
            continue
        ends += (str(r.exit) for r in node.reports if r.shard == shard.shard and r.state.ended and r.exit)
        if node.state is not NodeState.CONNECTED:
            waiting = True
            continue
        if _on_its_way(pass_, row, shard):
            waiting = True
            pass_.wake.append(row.since + UNSEEN_S)
        for report in node.reports:
            if report.shard == shard.shard and not report.state.ended:
                waiting = True
                grace = row.profile.limits.stop_s
                pass_.commands.append(StopCommand(node.id, report.shard, report.generation, row.reason, grace))
    if waiting:
        return
    how = f": {', '.join(ends)}" if ends else ""
    pass_.say(DecisionKind.FORGET, row, f"its engine has ended{how}")
    if row.other is None:
        pass_.drop(row)
        return
    if row.other == row.profile:
        # Started anew where it was.
        again = evolve(row, other=None, goal=Goal.RUN, superseded_by=None, failures=0, not_before=0.0, since=pass_.now)
        pass_.put(evolve(again, generation=row.generation + 1))
        return
    # It gave its devices up for another profile, and waits for a place of that one.
    back = bool(row.rejected)
    pass_.put(
        evolve(
            row,
            profile=row.other,
            other=None if back else row.profile,
            shards=(),
            goal=Goal.RUN,
            superseded_by=None,
            fabric=None,
            failures=0,
            not_before=0.0,
            since=pass_.now,
        )
    )


def _on_its_way(pass_: Working, row: Replica, shard: Assignment) -> bool:
    """Whether the shard may have been told to start just before the row was stopped, and be heard of any moment."""
    told = row.not_before <= row.since and pass_.now < row.since + UNSEEN_S
    return told and pass_.state.report(shard, row.generation) is None


def _reap(pass_: Working) -> None:
    """Stop what runs in this cluster's name and belongs to no row, or to an earlier start of one."""
    rows = {s.shard: r for r in pass_.rows.values() for s in r.shards}
    for node in pass_.state.nodes:
        if node.state is not NodeState.CONNECTED:
            continue
        extra = [
            report
            for report in node.reports
            if not report.state.ended
            and report.cluster == pass_.state.cluster
            and (
                (row := rows.get(report.shard)) is None
                or (row.generation != report.generation and row.goal is not Goal.STOP)
                or _astray(pass_, row, report.shard, node.id)
            )
        ]
        # The newest first: what has served longest goes last.
        for report in sorted(extra, key=lambda r: (-r.generation, r.shard)):
            row = rows.get(report.shard)
            reason, grace = "no replica wants this shard", Limits().stop_s
            if row is not None and (home := _astray(pass_, row, report.shard, node.id)) is not None:
                reason = f"it runs under another name of its node: {home} is lost, and nothing is sent to it"
            elif row is not None:
                reason = f"an earlier start of this shard still runs; {row.reason}"
                grace = row.profile.limits.stop_s
            pass_.commands.append(StopCommand(node.id, report.shard, report.generation, reason, grace))
            pass_.decisions.append(Decision(DecisionKind.REAP, report.model, report.replica, node.id, reason))


def _astray(pass_: Working, row: Replica, shard: str, node: str) -> str | None:
    """The node that the row has the shard on, if it is another one than this and lost: a node came under a new name."""
    if any(s.node == node for s in row.shards if s.shard == shard) or not pass_.lost(row):
        return None
    for place in row.shards:
        home = pass_.state.node(place.node)
        if place.shard == shard and (home is None or home.state is NodeState.LOST):
            return place.node
    return None
