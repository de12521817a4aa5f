"""What is kept of launches that are over: ``logs/<shard>-g<generation>/`` in the state folder, the newest of them.

All functions but :func:`put_away` block.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson
import trio
from attrs import frozen

from llmgw.agent import records
from llmgw.agent.records import Record
from llmgw.agent.shard import Shard
from llmgw.errors import OperatorError
from llmgw.store.files import write_private

OF_A_SHARD = 5
IN_ALL = 50
"""A log has at most two parts of 16 MiB, so all of them together have at most 1.6 GiB; most are far smaller."""

SUMMARY = "summary.json"
_SHIM_END_LOOKS = 100
_SHIM_END_LOOK_S = 0.05
_KEPT = frozenset({"engine.log", "engine.log.1", "stacks.txt", "exit.json", SUMMARY})


@frozen
class Rules:
    """How many are kept."""

    of_a_shard: int = OF_A_SHARD
    in_all: int = IN_ALL


def summarize(folder: Path, record: Record, shard: Shard) -> None:
    """Write down in a few lines what became of it: no key, no environment. Raises ``OSError``."""
    said = {
        "shard": record.shard,
        "generation": record.generation,
        "model": record.model,
        "profile": record.profile.name,
        "devices": list(record.uuids),
        "started": record.started,
        "ended": shard.since,
        "state": shard.state.value,
        "reason": shard.reason,
        "remedy": shard.diagnosis.remedy if shard.diagnosis is not None else shard.remedy,
        "exit": None if shard.exit is None else str(shard.exit),
    }
    write_private(folder / SUMMARY, orjson.dumps(said, option=orjson.OPT_INDENT_2))


def retire(folder: Path, logs: Path, rules: Rules = Rules()) -> bool:
    """Move an ended launch's folder among the logs, without its record, and drop the oldest there.

    ``False``, and nothing is touched, while its shim lives. Raises ``OSError`` when it cannot be moved. What was cut
    off in the middle is finished when the folder, which has no record then, is retired again.
    """
    with records.lock(folder) as free:
        if not free:
            return False
        # First the record, with the engine's key in it: a shim that is only just starting finds it gone, and does not.
        (folder / "record.json").unlink(missing_ok=True)
        for path in folder.iterdir():
            if path.name in _KEPT or path.name == "lock":
                continue
            if path.is_dir() and not path.is_symlink():  # it is where the engine works, and what that leaves there
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        logs.mkdir(mode=0o700, exist_ok=True)
        place = _free(logs, folder.name)
        folder.rename(place)
        (place / "lock").unlink(missing_ok=True)
    prune(logs, rules)
    return True


async def put_away(folder: Path, record: Record, shard: Shard, logs: Path) -> None:
    """Keep what is worth it of an ended launch, and drop the rest. Cancelled, it is finished when it is done again.

    Raises :class:`OperatorError` when it cannot be moved, or its shim does not end.
    """
    # A shim ends right after it wrote down how its engine ended.
    for _ in range(_SHIM_END_LOOKS):
        try:
            gone = await trio.to_thread.run_sync(_put_away, folder, record, shard, logs)
        except OSError as failed:
            raise OperatorError(str(folder), f"cannot be moved: {failed.strerror}", "") from failed
        if gone:
            return
        await trio.sleep(_SHIM_END_LOOK_S)
    raise OperatorError(str(folder), "its shim has not ended", "look for the process that holds `lock`")


def _put_away(folder: Path, record: Record, shard: Shard, logs: Path) -> bool:
    if (folder / "record.json").exists():
        summarize(folder, record, shard)
    return not folder.exists() or retire(folder, logs)


def _free(logs: Path, name: str) -> Path:
    """A name that nothing has: after a control plane was set up anew its generations start from 1 again."""
    number, place = 1, logs / name
    while place.exists():
        number += 1
        place = logs / f"{name}.{number}"
    return place


def prune(logs: Path, rules: Rules = Rules()) -> None:
    """Drop what is beyond the rules, oldest first."""
    kept = sorted((p for p in logs.iterdir() if p.is_dir() and not p.is_symlink()), key=_age, reverse=True)
    by_shard: dict[str, int] = {}
    count = 0
    for place in kept:
        shard = place.name.rpartition("-g")[0]
        by_shard[shard] = by_shard.get(shard, 0) + 1
        if by_shard[shard] > rules.of_a_shard or count == rules.in_all:
            shutil.rmtree(place, ignore_errors=True)
        else:
            count += 1


def _age(place: Path) -> tuple[int, str]:
    """When its folder was changed last, which is when it was retired."""
    try:
        return place.stat().st_mtime_ns, place.name
    except OSError:
        return 0, place.name
