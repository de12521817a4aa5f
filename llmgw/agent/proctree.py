"""Which processes are one launch's, read from ``/proc``: told by a mark in their environment, their parents or cgroup.

Every engine gets :data:`LAUNCH` in its environment, a random value, and whatever it starts inherits that: also what
left its process group and outlived its parents. A program that overwrites its own environment to show a title (vLLM's
and SGLang's workers, by setproctitle) is told not to by ``SPT_NOENV``. All functions block, for milliseconds.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from attrs import frozen

from llmgw.agent.shim.members import digest

PROC = Path("/proc")
SHARD = "LLMGW_SHARD"
"""``<shard>#<generation>``, for people who look at a process: two agents on one machine can have the same."""

LAUNCH = "LLMGW_LAUNCH"
"""The launch's own random value: what decides whose a process is."""

_LONGEST_COMMAND = 200


@frozen
class Member:
    """A living process. ``start`` is in clock ticks from boot: with the pid it is never used twice within a boot."""

    pid: int
    start: int
    name: str
    command: str = ""

    def __str__(self) -> str:
        """As people know it: the title that it gave itself, or the program's name."""
        title = self.command if "::" in self.command[:40] else self.name
        return f"pid {self.pid} {title[:40]}".rstrip()


@frozen
class Stat:
    """Of ``/proc/<pid>/stat``: the name, the parent, and the start in clock ticks from boot."""

    name: str
    parent: int
    start: int


def must_be_seen(failed: OSError) -> None:
    """Raise ``failed`` if it is for want of files or memory: what cannot be looked at is not known to be gone."""
    if failed.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise failed


def marks(shard: str, generation: int, launch: str) -> dict[str, str]:
    """The variables that tell an engine and all that it starts from everything else."""
    return {SHARD: f"{shard}#{generation}", LAUNCH: launch, "SPT_NOENV": "1"}


def stat(pid: int, proc: Path = PROC) -> Stat | None:
    """What the kernel says of a living process; ``None`` when there is none, or only its corpse."""
    try:
        before, _, after = (proc / str(pid) / "stat").read_bytes().rpartition(b")")
        fields = after.split()
        # Where PID 1 does not reap, a dead process keeps its number as a zombie for ever.
        if fields[0] in (b"Z", b"X"):
            return None
        return Stat(before.partition(b"(")[2].decode(errors="replace"), int(fields[1]), int(fields[19]))
    except OSError as failed:
        must_be_seen(failed)
        return None
    except (ValueError, IndexError):
        return None


def fingerprint(pid: int, proc: Path = PROC) -> str | None:
    """What a process is told by besides its number and start, if it gives itself no title: its command line's digest.

    ``None`` when there is none.
    """
    try:
        return digest((proc / str(pid) / "cmdline").read_bytes())
    except OSError as failed:
        must_be_seen(failed)
        return None


def carries(pid: int, launch: str, proc: Path = PROC) -> bool:
    """Whether this process was started by that launch, as its environment says."""
    if not launch:
        return False
    try:
        return f"{LAUNCH}={launch}".encode() in (proc / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError as failed:
        must_be_seen(failed)
        return False


def members(
    launch: str, *, below: int | None = None, cgroup: Path | None = None, but: Collection[int] = (), proc: Path = PROC
) -> tuple[Member, ...]:
    """Every living process of this launch, by pid.

    Those that carry its mark, ``below`` and everything under it, and those in ``cgroup``; never ``but`` (the shim,
    which carries the mark too) nor ourselves.
    """
    seen = {pid: found for pid in _mine(proc) if (found := stat(pid, proc)) is not None}
    ours = {pid for pid in seen if carries(pid, launch, proc)}
    ours |= set(in_cgroup(cgroup)) | set(_under(below, {pid: found.parent for pid, found in seen.items()}))
    ours -= {os.getpid(), *but}
    return tuple(
        Member(pid, seen[pid].start, seen[pid].name, _command(pid, proc)) for pid in sorted(ours) if pid in seen
    )


def in_cgroup(cgroup: Path | None) -> tuple[int, ...]:
    """The processes of a cgroup; none when it is gone."""
    if cgroup is None:
        return ()
    try:
        return tuple(int(pid) for pid in (cgroup / "cgroup.procs").read_text().split())
    except OSError as failed:
        must_be_seen(failed)
        return ()
    except ValueError:
        return ()


def alive(member: Member, proc: Path = PROC) -> bool:
    """Whether this very process lives."""
    found = stat(member.pid, proc)
    return found is not None and found.start == member.start


def kill(found: Iterable[Member], launch: str, *, cgroup: Path | None = None) -> None:
    """SIGKILL what provably belongs to this launch, by its mark or its cgroup; whatever else is given is left alone.

    Each is looked at again after its pidfd was opened, so that a pid which is somebody else's by now is never hit.
    """
    for member in found:
        try:
            handle = os.pidfd_open(member.pid)
        except OSError as failed:
            must_be_seen(failed)
            continue
        try:
            ours = carries(member.pid, launch) or member.pid in in_cgroup(cgroup)
            if ours and alive(member):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        except OSError as failed:
            must_be_seen(failed)
        finally:
            os.close(handle)


def read_bytes(found: Iterable[Member], proc: Path = PROC) -> int:
    """What these processes, and children of theirs that ended, read from disks so far; the page cache is no disk."""
    total = 0
    for member in found:
        try:
            lines = (proc / str(member.pid) / "io").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
        except (OSError, ValueError, IndexError):
            continue
    return total


def _mine(proc: Path) -> Iterator[int]:
    """Processes of our own user: engines are never another one's, and another's environment cannot be read."""
    try:
        with os.scandir(proc) as entries:
            for entry in entries:
                if entry.name.isdigit():
                    try:
                        if entry.stat().st_uid == os.geteuid():
                            yield int(entry.name)
                    except OSError:
                        continue
    except OSError as failed:
        must_be_seen(failed)


def _under(top: int | None, parents: dict[int, int]) -> Iterator[int]:
    if top is None or top not in parents:
        return
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    waiting = [top]
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += children.pop(pid, [])


def _command(pid: int, proc: Path) -> str:
    try:
        line = (proc / str(pid) / "cmdline").read_bytes()[:4096]
    except OSError:
        return ""
    return line.replace(b"\0", b" ").decode(errors="replace").strip()[:_LONGEST_COMMAND]
