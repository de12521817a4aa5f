"""Launch records: what was started on this node, written down before it is started.

A shard's folder is ``shards/<shard>-g<generation>`` in the state folder. ``record.json`` is the agent's, fsynced
before the shim is started; every other file in it is the shim's (see :mod:`llmgw.agent.shim`).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import cattrs
import orjson
from attrs import field, frozen

from llmgw.agent.process import Grip, Known, start_time
from llmgw.agent.proctree import must_be_seen
from llmgw.agent.shard import Doom
from llmgw.discovery.host import boot_id
from llmgw.durable import content
from llmgw.errors import OperatorError
from llmgw.scheduler.state import Exit, ShardReport, ShardState
from llmgw.settings.catalog import Profile
from llmgw.settings.convert import strict_converter
from llmgw.settings.daemon import Address
from llmgw.store.files import write_private

_FOLDER = re.compile(r"(?P<shard>[A-Za-z0-9_.-]{1,160})-g(?P<generation>[0-9]{1,9})")


@frozen
class Record:
    """One launch: who asked for it, what was started, and how to ask it how it is.

    ``rendezvous`` is where the ranks of a replica over several nodes meet; the port is rank 0's to give. ``boot_id`` is
    the boot in which it was started; ``state`` the last one that was written down, so that an adopted engine that was
    ready is not taken out of service while it is asked again. ``launch`` is the random value that marks all of its
    processes, ``cgroup`` the one that was made for it, if any. ``doom`` says why an engine is ``stopping`` that nobody
    asked to stop: a successor must not take its end for one that was asked for.
    """

    cluster: str
    replica: str
    shard: str
    generation: int
    rank: int
    model: str
    profile: Profile
    profile_digest: str
    devices: tuple[int, ...]
    argv: tuple[str, ...]
    host: str
    port: int
    ready_name: str
    health_path: str
    models_path: str
    probe_timeout_s: float
    boot_id: str
    started: float
    api_key: str | None = field(default=None, repr=False)
    state: ShardState = ShardState.STARTING
    since: float = 0.0
    uuids: tuple[str, ...] = ()
    rendezvous: Address | None = None
    launch: str = ""
    cgroup: str = ""
    doom: Doom | None = None

    @property
    def endpoint(self) -> str:
        """Base URL of the engine's API."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def report(self, state: ShardState, reason: str, then: str, since: float) -> ShardReport:
        """What goes up of this launch whatever became of it; who knows more adds it."""
        return ShardReport(
            shard=self.shard,
            replica=self.replica,
            generation=self.generation,
            model=self.model,
            rank=self.rank,
            cluster=self.cluster,
            profile_digest=self.profile_digest,
            devices=self.devices,
            uuids=self.uuids,
            state=state,
            reason=reason,
            next=then,
            since=since,
            rendezvous=self.rendezvous,
        )

    @property
    def cgroup_path(self) -> Path | None:
        """Its cgroup, if it was given one."""
        return Path(self.cgroup) if self.cgroup else None


@frozen
class Pids:
    """``shim.json``: the two processes, with the clock ticks from boot to their starts, and which boot that was.

    ``fingerprint`` is that of the shim's command line. The engine's own is good for nothing: it gives itself titles.
    """

    shim: int
    shim_start: int | None
    engine: int | None
    engine_start: int | None
    boot: str = ""
    fingerprint: str = ""

    @property
    def here(self) -> bool:
        """Whether they are of this boot: after another one their numbers may be anybody's. Older shims do not say."""
        return self.boot in ("", boot_id())

    def grip(self) -> Grip | None:
        """A hold on the shim, or on the engine when only that is left."""
        if not self.here:
            return None
        shim = None if self.shim_start is None else Known(self.shim, self.shim_start, self.fingerprint)
        engine = None
        if self.engine is not None and self.engine_start is not None:
            engine = Known(self.engine, self.engine_start)
        return Grip.take(shim, engine)


@frozen
class End:
    """``exit.json``: how it ended, and what could not be killed."""

    exit: Exit
    at: float
    error: str = ""
    left: tuple[int, ...] = ()


@cache
def _converter() -> cattrs.Converter:
    return strict_converter(forbid_unknown=False)


def folder_of(shards: Path, shard: str, generation: int) -> Path:
    """Where a launch keeps its files. Raises :class:`OperatorError` for a name that is no shard's."""
    name = f"{shard}-g{generation}"
    if not _FOLDER.fullmatch(name) or shard.startswith("."):
        raise OperatorError(f"shard {shard!r}", "is not a shard's name", "")
    return shards / name


def write(folder: Path, record: Record) -> None:
    """Write a record durably; the folder is made if need be. Blocking."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(folder / "record.json", orjson.dumps(_converter().unstructure(record)))


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write what an engine is to find in its folder, for its owner alone. Blocking."""
    for name, text in files.items():
        write_private(folder / name, text.encode())


def read(folder: Path) -> Record:
    """Read a record. Raises :class:`OperatorError` naming the file when it is not one. Blocking."""
    path = folder / "record.json"
    try:
        return _converter().structure(orjson.loads(content(path)), Record)
    except (OSError, ValueError, cattrs.BaseValidationError) as wrong:
        raise OperatorError(
            str(path), f"is not a launch record ({type(wrong).__name__})", "look at it and remove its folder"
        ) from wrong


def pids(folder: Path) -> Pids | None:
    """What the shim said of itself and its engine, or ``None`` when it never did. Blocking."""
    try:
        return _converter().structure(orjson.loads(content(folder / "shim.json")), Pids)
    except OSError as failed:
        must_be_seen(failed)
        return None
    except (ValueError, cattrs.BaseValidationError):
        return None


def end(folder: Path) -> End | None:
    """How the engine ended, or ``None`` while it runs or when nobody saw it. Blocking."""
    try:
        said = orjson.loads(content(folder / "exit.json"))
        return End(
            exit=_converter().structure({"code": said["code"], "signal": said["signal"]}, Exit),
            at=float(said["at"]),
            error=str(said.get("error", "")),
            left=tuple(int(pid) for pid in said.get("left", ())),
        )
    except OSError as failed:
        must_be_seen(failed)
        return None
    except (ValueError, KeyError, TypeError, cattrs.BaseValidationError):
        return None


def folders(shards: Path) -> tuple[Path, ...]:
    """Every launch's folder, oldest name first. Blocking."""
    try:
        found = [p for p in shards.iterdir() if _FOLDER.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]
    except FileNotFoundError:
        return ()
    return tuple(sorted(found))


@contextmanager
def lock(folder: Path) -> Iterator[bool]:
    """Try to take the folder's lock, which its shim holds for as long as it lives; yields whether it was free."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        else:
            free = True
        yield free
    finally:
        os.close(handle)


def is_held(folder: Path) -> bool:
    """Whether a shim lives in this folder. Blocking."""
    try:
        with lock(folder) as free:
            return not free
    except FileNotFoundError:
        return False


def engine_lives(folder: Path) -> bool:
    """Whether the engine that the shim wrote down is there, with or without its shim. Blocking."""
    said = pids(folder)
    if said is None or not said.here or said.engine is None or said.engine_start is None:
        return False
    return start_time(said.engine) == said.engine_start


def remove(folder: Path) -> bool:
    """Drop a launch whose shim is gone; ``False``, and nothing is touched, while it lives. Blocking."""
    with lock(folder) as free:
        if not free:
            return False
        # First the record: a shim that is only just starting finds it gone, and does not.
        (folder / "record.json").unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    return True
