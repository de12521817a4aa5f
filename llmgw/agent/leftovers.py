"""What an earlier agent left in a launch's folder: an engine that runs, one that ended, or a launch that never was."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from attrs import frozen

from llmgw.agent import attempts, logs, process, records
from llmgw.agent.ending import NOT_STARTED, ended
from llmgw.agent.events import Ended
from llmgw.agent.records import Record
from llmgw.agent.shard import Shard, adopted
from llmgw.discovery.host import boot_id
from llmgw.engines.diagnosis import Diagnosis, diagnose
from llmgw.errors import OperatorError
from llmgw.scheduler.state import Exit, ShardState
from llmgw.telemetry.logging import logger


@frozen
class Left:
    """A launch of an earlier agent: what the shard is by now, whether it ``lives``, and the end of its log if not."""

    record: Record
    shard: Shard
    lives: bool
    log_tail: tuple[str, ...] = ()


def find(folder: Path, kept: Path, now: float) -> Left | None:
    """What was left in this folder, or ``None`` where there is nothing to own. Blocking.

    What was being moved to the logs is moved, to ``kept``; what never came about is dropped; a record that cannot be
    read is left alone. Raises ``OSError`` when what is there cannot be looked at.
    """
    log = logger("shards")
    if not (folder / "record.json").exists():
        # It was being moved to the logs when the last agent died.
        with suppress(OSError):
            attempts.retire(folder, kept)
        return None
    try:
        record = records.read(folder)
    except OperatorError as wrong:
        log.error("a launch record cannot be read; nothing is signalled", error=str(wrong))
        return None
    end = records.end(folder)
    if end is None and _lives(folder, record):
        since = record.since or record.started
        shard = adopted(record.state, record.model, record.profile.limits, now, since, record.rank, doom=record.doom)
        return Left(record, shard, True)
    end = end or records.end(folder)  # it may have ended in between
    if end is None and records.pids(folder) is None:
        log.info("a launch that never came about is dropped", shard=record.shard)
        records.remove(folder)
        return None
    lines = logs.tail(folder, logs.DIAGNOSED_LINES)
    return Left(record, _past(record, end, diagnose(lines), now), False, lines[-logs.TAIL_LINES :])


def _lives(folder: Path, record: Record) -> bool:
    """Whether a shim holds the folder, or the engine itself is still the process that was started."""
    with records.lock(folder) as free:
        if not free:
            return True
        pids = records.pids(folder)
        if pids is None or pids.engine is None or record.boot_id != boot_id():
            return False
        return process.start_time(pids.engine) == pids.engine_start


def _past(record: Record, end: records.End | None, found: Diagnosis | None, now: float) -> Shard:
    """A shard whose engine ended before this agent started."""
    code = end.exit if end is not None else Exit()
    at = now if end is None else end.at
    if record.doom is not None:
        limits = record.profile.limits
        doomed = adopted(ShardState.STOPPING, record.model, limits, now, record.since, record.rank, record.doom)
        return ended(doomed, Ended(code, diagnosis=found), at)
    if record.state in (ShardState.STOPPED, ShardState.STOPPING):
        since = record.since or now
        return Shard(ShardState.STOPPED, since, "stopped before this agent started", "", exit=code, ended_at=since)
    if end is not None:
        unseen = "" if record.state is ShardState.FAILED else " while no agent ran"
        reason = end.error or f"the engine ended without being asked{unseen}: {end.exit}"
    elif record.boot_id == boot_id():
        reason = "the engine ended while neither agent nor shim ran"
    else:
        reason = "the machine was restarted"
    if found is not None:
        reason = f"{found.cause}; {reason}"
    remedy = NOT_STARTED if end is not None and end.error else ""
    return Shard(ShardState.FAILED, at, reason, "", exit=code, diagnosis=found, ended_at=at, remedy=remedy)
