"""A job's record on disk: ``jobs/<id>/job.json`` in the state folder, written before and after everything that counts.

All functions block.
"""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path

import cattrs
import orjson
from attrs import frozen

from llmgw.agent.process import Known
from llmgw.errors import OperatorError
from llmgw.scheduler.jobs import JobReport, JobSpec
from llmgw.settings.convert import strict_converter
from llmgw.store.files import write_private

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
KEPT = 50
"""So many jobs that have ended are remembered."""


@frozen
class Record:
    """What is to be done, how far it is, and the process that does it, started in the boot ``boot_id``.

    Unless it was ``asked`` for by its id, it is over when no shard waits for it any more.
    """

    spec: JobSpec
    report: JobReport
    child: Known | None = None
    boot_id: str = ""
    asked: bool = True


@cache
def _converter() -> cattrs.Converter:
    return strict_converter(forbid_unknown=False)


def folder_of(jobs: Path, job: str) -> Path:
    """Where a job keeps its files. Raises :class:`OperatorError` for what is no job's id."""
    if not _ID.fullmatch(job):
        raise OperatorError(f"job {job!r}", "is not a job's id", "use up to 64 letters, digits and . _ -")
    return jobs / job


def write(folder: Path, record: Record) -> None:
    """Write a record durably; the folder is made if need be."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(folder / "job.json", orjson.dumps(_converter().unstructure(record)))


def read(folder: Path) -> Record | None:
    """The record, or ``None`` where there is none that can be read."""
    try:
        return _converter().structure(orjson.loads((folder / "job.json").read_bytes()), Record)
    except (OSError, ValueError, cattrs.BaseValidationError):
        return None


def everything(jobs: Path) -> list[Record]:
    """Every record, oldest job first."""
    if not jobs.is_dir():
        return []
    found = (read(p) for p in sorted(jobs.iterdir()) if p.is_dir() and not p.is_symlink())
    return sorted((r for r in found if r is not None), key=lambda r: r.report.started)


def remove(folder: Path) -> None:
    """Drop a job that nobody needs to know of any more."""
    shutil.rmtree(folder, ignore_errors=True)
