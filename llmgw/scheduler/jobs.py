"""Jobs: long work for a model on a node, told step by step. What a job is and how it moves; pure.

Times are seconds since the epoch, sizes are bytes. A job ends once, as ``done``, ``failed`` or ``cancelled``, and what
it ended as is kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar

from attrs import evolve, field, frozen

from llmgw.errors import OperatorError
from llmgw.settings.bounds import declared
from llmgw.settings.catalog import EngineKind

_NOTHING: Mapping[str, str] = MappingProxyType({})
_LEAST_SPAN_S = 1.0
MOST_ATTEMPTS = 20
"""A job whose agent died is taken up again by the next one, but not for ever."""


class JobKind(StrEnum):
    """What is done."""

    FETCH = "fetch"
    INSTALL = "install"


class JobState(StrEnum):
    """Where a job is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether nothing more comes of it."""
        return self not in (JobState.QUEUED, JobState.RUNNING)


@frozen
class Fetch:
    """Weights to fetch: ``weights`` as a profile names them (``hf:org/name@revision``).

    ``mirror`` is the address that is asked instead of the hub's own. With ``offline`` nothing is asked: what is in the
    cache must do. ``update`` asks again what a branch points to.
    """

    weights: str
    mirror: str = ""
    offline: bool = False
    update: bool = False


_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_VERSIONS = r"\s*(?:[=<>~!]=|[<>]|===)\s*[A-Za-z0-9.*+!_-]+"
_PACKAGE = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[A-Za-z0-9._, -]+\])?(?:{_VERSIONS}(?:\s*,{_VERSIONS})*)?")
"""A package by its name: pip fetches what is named by an address even where it may ask no index."""


@frozen
class Install:
    """An engine to install: ``name`` and ``version`` say which one; the same pair is never installed twice over itself.

    ``lock`` is the text of a pip requirements file with hashes, or empty where ``wheels``, a folder on the node, has
    all packages and ``packages`` says which are wanted. ``command`` starts the engine, relative to the environment, and
    is the engine's usual one where it is empty.
    """

    SCHEMA_RULES: ClassVar = {
        "anyOf": [
            {"properties": {"lock": {"minLength": 1}, "wheels": {"maxLength": 0}}, "required": ["lock"]},
            {"properties": {"wheels": {"minLength": 1}, "lock": {"maxLength": 0}}, "required": ["wheels"]},
        ]
    }
    engine: EngineKind
    name: str = declared(pattern=f"^{_WORD.pattern}$")
    version: str = declared(pattern=f"^{_WORD.pattern}$")
    lock: str = field(default="", repr=False)
    wheels: str = ""
    packages: tuple[str, ...] = declared((), items={"type": "string", "pattern": f"^{_PACKAGE.pattern}$"})
    command: tuple[str, ...] = ()
    python: str = ""

    @property
    def label(self) -> str:
        """The name of its folder."""
        return f"{self.name}-{self.version}"


def check_install(install: Install) -> None:
    """Raise :class:`OperatorError` unless this can be an engine to install.

    Asked by the control plane before it sends a job, and by the node before it begins one.
    """
    if not _WORD.fullmatch(install.name) or not _WORD.fullmatch(install.version):
        hint = "use letters, digits and . _ + -"
        raise OperatorError(f"install {install.label!r}", "is no name and version", hint)
    if bool(install.lock) == bool(install.wheels):
        raise OperatorError(f"install {install.label}", "needs a lock file or a folder of wheels, and not both")
    for word in install.packages:
        if not _PACKAGE.fullmatch(word):
            hint = "write its name, with extras and versions if need be: vllm[audio]==0.12.0"
            raise OperatorError(f"install {install.label}", f"{word!r} is not a package", hint)
    for word in install.command[:1]:
        if word.startswith(("-", "/")) or ".." in word:
            raise OperatorError(f"install {install.label}", f"{word!r} is not a program of it")


@frozen
class JobSpec:
    """What a job shall do; one of the two."""

    id: str
    fetch: Fetch | None = None
    install: Install | None = None

    @property
    def kind(self) -> JobKind:
        """Which of the two."""
        return JobKind.FETCH if self.fetch is not None else JobKind.INSTALL

    @property
    def subject(self) -> str:
        """What it is about, in a word or two; jobs of one subject are never done at the same time."""
        if self.fetch is not None:
            return self.fetch.weights
        return "" if self.install is None else f"{self.install.engine.value} {self.install.label}"


@frozen
class Installed:
    """An engine that a node has: installed by a job, or named in its ``agent.yaml`` (then without a ``name``).

    ``says`` is what it answered when it was asked for its version; ``current`` is the one that shards start with.
    """

    engine: EngineKind
    name: str
    version: str
    path: str
    says: str = ""
    current: bool = True


@frozen
class Step:
    """One step of a job, and when it began."""

    name: str
    since: float


@frozen
class JobReport:
    """What a node says of one job.

    ``steps`` are those that were begun, the last one the present; ``moved`` is
    when it last got on: a step, or bytes. ``ends_at`` is when it will probably be done, by the
    bytes so far. ``result`` is what came of it: for weights ``path`` and ``commit``, for an engine ``path`` and what
    it says its version is. ``attempt`` counts from 1; an agent that starts again takes up what its predecessor did.
    """

    id: str
    kind: JobKind
    subject: str
    state: JobState
    started: float
    since: float
    reason: str = ""
    remedy: str = ""
    steps: tuple[Step, ...] = ()
    done_bytes: int = 0
    total_bytes: int | None = None
    ends_at: float | None = None
    moved: float = 0.0
    attempt: int = 1
    result: Mapping[str, str] = field(default=_NOTHING, hash=False)
    base_at: float | None = field(default=None, eq=False)
    base_bytes: int = field(default=0, eq=False)


def queued(spec: JobSpec, now: float) -> JobReport:
    """A job that waits for its turn."""
    return JobReport(spec.id, spec.kind, spec.subject, JobState.QUEUED, now, now, "waits for its turn", moved=now)


def running(job: JobReport, now: float) -> JobReport:
    """It is its turn."""
    return evolve(job, state=JobState.RUNNING, since=now, reason="started", moved=now)


def stepped(job: JobReport, name: str, now: float) -> JobReport:
    """A step begins; the same one again changes nothing."""
    if job.steps and job.steps[-1].name == name:
        return job
    return evolve(job, steps=(*job.steps, Step(name, now)), reason=name, moved=now, ends_at=None, base_at=None)


def progressed(job: JobReport, done: int, total: int | None, now: float) -> JobReport:
    """So many bytes are there. What was there when the counting began says nothing of how fast the rest comes."""
    base_at, base_bytes = job.base_at, job.base_bytes
    if base_at is None or done < base_bytes:
        base_at, base_bytes = now, done
    span, gained = now - base_at, done - base_bytes
    ends_at = None
    if total is not None and gained > 0 and span >= _LEAST_SPAN_S:
        ends_at = now + (total - done) * span / gained if done < total else now
    moved = now if done > job.done_bytes else job.moved
    return evolve(
        job, done_bytes=done, total_bytes=total, ends_at=ends_at, moved=moved, base_at=base_at, base_bytes=base_bytes
    )


def done(job: JobReport, result: Mapping[str, str], now: float) -> JobReport:
    """It is done, and this came of it."""
    return _end(job, JobState.DONE, "done", "", now, result)


def failed(job: JobReport, reason: str, remedy: str, now: float) -> JobReport:
    """It cannot be done."""
    return _end(job, JobState.FAILED, reason, remedy, now)


def cancelled(job: JobReport, reason: str, now: float) -> JobReport:
    """Somebody wanted it no more."""
    return _end(job, JobState.CANCELLED, reason, "", now)


def taken_up(job: JobReport, now: float) -> JobReport:
    """The agent that did it is gone: it is done again from what it left, unless that happened too often."""
    if job.state.ended:
        return job
    if job.attempt >= MOST_ATTEMPTS:
        return failed(job, f"interrupted {job.attempt} times", "look why the agent ends, then start the job anew", now)
    return evolve(
        job, state=JobState.QUEUED, since=now, moved=now, attempt=job.attempt + 1, steps=(), ends_at=None, base_at=None,
        reason="taken up again after the agent was started anew",
    )  # fmt: skip


def _end(
    job: JobReport, state: JobState, reason: str, remedy: str, now: float, result: Mapping[str, str] = _NOTHING
) -> JobReport:
    if job.state.ended:
        return job
    return evolve(job, state=state, since=now, reason=reason, remedy=remedy, ends_at=None, result=result)


def size(count: int) -> str:
    """Bytes for people."""
    if count >= 1024**3:
        return f"{count / 1024**3:.1f} GiB"
    return f"{count / 1024**2:.1f} MiB" if count >= 1024**2 else f"{count} bytes"


def way(job: JobReport, now: float) -> str:
    """How far it is, for people: what is done, the bytes, and how long the rest will take."""
    said = job.reason
    if job.total_bytes is not None and not job.state.ended:
        said += f", {size(job.done_bytes)} of {size(job.total_bytes)}"
        if job.ends_at is not None:
            left = max(0.0, job.ends_at - now)
            said += f", about {left / 60:.0f} min left" if left >= 90 else f", about {left:.0f} s left"
    return said
